"""Structured output: random logits are forced into the grammar, bad and hostile grammars are refused in time."""

import json
import re
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_world import EOS, VOCAB, generate, row, save_tokenizer

from headrace.core.errors import InvalidRequest
from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.engine.sampling import Sampler, check_grammar

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["x", "y", "état"]}, "maxItems": 4},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = save_tokenizer(folder)
    return Sampler(VOCAB, [EOS], str(folder), 2), tokenizer, str(folder)


def text_of(tokenizer, output):
    assert output[-1] == EOS
    return tokenizer.decode(output[:-1])


@pytest.mark.parametrize("seed", range(8))
def test_random_logits_make_valid_json(world, seed):
    sampler, tokenizer, folder = world
    spec = GrammarSpec("json_schema", PERSON)
    check_grammar(spec, folder)
    params = SamplingParams(grammar=spec, temperature=seed / 4)
    person = json.loads(text_of(tokenizer, generate(sampler, params, seed=seed, limit=2000)[0]))
    assert set(person) == {"name", "age", "tags", "ok"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"x", "y", "état"}
    assert isinstance(person["ok"], bool)


def test_regex_choice_lark_and_json_object(world):
    sampler, tokenizer, folder = world
    choices = ["yes", "no", 'a/b\\c "d"', "(x|y)*", "zwei\nZeilen", "état 水"]
    seen = set()
    for seed in range(30):
        params = SamplingParams(grammar=GrammarSpec("choice", json.dumps(choices)))
        seen.add(text_of(tokenizer, generate(sampler, params, seed=seed)[0]))
    assert seen <= set(choices)
    assert len(seen) > 2
    pattern = r"[A-C]{2}-\d{3,4}(é|/)"
    params = SamplingParams(grammar=GrammarSpec("regex", pattern))
    assert re.fullmatch(pattern, text_of(tokenizer, generate(sampler, params)[0]))
    lark = GrammarSpec("lark", 'start: "say " WORD+\nWORD: /[ab]/')
    check_grammar(lark, folder)
    params = SamplingParams(grammar=lark, logit_bias={EOS: 8.0})
    assert re.fullmatch("say [ab]+", text_of(tokenizer, generate(sampler, params)[0]))
    params = SamplingParams(grammar=GrammarSpec("json_object"), logit_bias={tokenizer.vocab["}"]: 12.0})
    assert isinstance(json.loads(text_of(tokenizer, generate(sampler, params)[0])), dict)


@pytest.mark.parametrize(("pattern", "bias"), [("ab", -100.0), ("aba*", 100.0)])
def test_a_finished_text_is_followed_by_the_end_alone(world, pattern, bias):
    sampler, tokenizer, _ = world
    params = SamplingParams(grammar=GrammarSpec("regex", pattern), logit_bias={EOS: bias})
    params = msgspec.structs.replace(params, min_tokens=50 if bias < 0 else 0)
    output, state = generate(sampler, params)
    assert text_of(tokenizer, output) == "ab"  # neither bias nor min_tokens keeps it from ending
    for _ in range(3):  # a sequence that ignores EOS goes on with it
        result = sampler.sample(torch.randn(1, VOCAB), [row(params, state, output=output)])
        assert result.errors == {}
        assert result.tokens[0] == EOS
        output.append(EOS)
    output.append(tokenizer.vocab["a"])
    result = sampler.sample(torch.randn(1, VOCAB), [row(params, state, output=output)])
    assert "does not fit" in result.errors[0]


def test_min_tokens_keeps_an_optional_end_away(world):
    sampler, tokenizer, _ = world
    params = SamplingParams(grammar=GrammarSpec("regex", "a*"), logit_bias={EOS: 100.0}, min_tokens=6)
    output, _ = generate(sampler, params)
    assert len(output) == 7
    assert set(text_of(tokenizer, output)) == {"a"}


@pytest.mark.parametrize("kept", [0, 1, 5, 20])
def test_a_resumed_sequence_goes_on_alike(world, kept):
    sampler, _, folder = world
    params = SamplingParams(grammar=GrammarSpec("json_schema", PERSON), frequency_penalty=0.5)
    whole, state = generate(sampler, params, seed=3, limit=2000)
    elsewhere = Sampler(VOCAB, [EOS], folder, 1)
    fresh = elsewhere.open(params, [1])
    fresh.resume(whole[:kept])
    assert generate(elsewhere, params, seed=3, limit=2000, output=whole[:kept], state=fresh)[0] == whole
    # the same state, taken back
    assert generate(sampler, params, seed=3, limit=2000, output=whole[:kept], state=state)[0] == whole


def test_grammar_rows_and_free_rows_in_one_batch(world):
    sampler, tokenizer, _ = world
    free = SamplingParams(temperature=0)
    regexes = [SamplingParams(temperature=0, grammar=GrammarSpec("regex", letter)) for letter in "abc"]
    params = [free, regexes[0], free, regexes[1], regexes[2]]
    logits = torch.randn(5, VOCAB)
    expected = logits.argmax(-1)
    rows = [row(p, sampler.open(p, [1])) for p in params]
    # this sequence was resumed with a token that its grammar does not allow
    rows[3] = row(params[3], sampler.open(params[3], [1]), output=[tokenizer.vocab["z"]], position=9)
    result = sampler.sample(logits, rows)
    assert list(result.errors) == [3]
    assert "position 9" in result.errors[3]
    assert "\n" not in result.errors[3]
    assert result.tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert [tokenizer.decode([result.tokens[r]]) for r in (1, 4)] == ["a", "c"]


BAD = {
    "regex": ["((", "(?=a)b", "a{2,1}", "[z-a]", "(" * 50_000, "\ud800"],
    "choice": ["", "[]", "[1]", '["a", ""]', '{"a": 1}', '"a"', "[" * 100_000, '["\\ud800"]'],
    "lark": ["", "start", 'start: "a', "begin: /a/", "start: " + "(" * 3000 + '"a"' + ")" * 3000],
    "json_schema": [
        "", "nonsense", "[1,", "3", "null", "[]", "false", '{"type": "strin"}', '{"type": 3}', '{"minLength": "x"}',
        '{"$ref": "#/nowhere"}', '{"$ref": "http://localhost/x.json"}', '{"enum": []}',
        '{"type": "string", "minLength": 5, "maxLength": 2}', '{"type": "string", "pattern": "(("}',
        '{"a": ' * 400 + "1" + "}" * 400, "[" * 60_000, '{"type": "string", "pattern": "(?=x)"}',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(k, t) for k, texts in BAD.items() for t in texts], ids=lambda t: t[:20])
def test_bad_grammars_are_refused_in_one_line(world, kind, text):
    sampler, _, folder = world
    spec = GrammarSpec(kind, text)
    message = refusal(spec, folder)
    assert message is not None
    assert kind in message
    with pytest.raises(InvalidRequest):
        sampler.open(SamplingParams(grammar=spec), [1])


def refusal(spec, folder):
    """The one-line message with which the front refuses a grammar, or None."""
    try:
        check_grammar(spec, folder)
    except InvalidRequest as error:
        message = str(error)
    else:
        return None
    assert len(message) < 400
    assert len(message.splitlines()) == 1
    return message


def nested(levels):
    return '{"type": "object", "required": ["a"], "properties": {"a": ' * levels + "{}" + "}}" * levels


HOSTILE = [
    ("regex", "(a*)*b"),
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "(.*a.*b.*c.*){20}"),
    ("regex", ".*a.{300}"),
    ("regex", "(x+x+)+y"),
    ("regex", "(" + "|".join("x" * i for i in range(480)) + ")"),
    ("regex", "a" * 200_000),
    ("json_schema", nested(30)),
    ("json_schema", nested(1000)),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"type": "array", "minItems": 1000000, "items": {"type": "array", "minItems": 100000}}'),
    ("json_schema", '{"type": "string", "minLength": 100000000}'),
    ("json_schema", json.dumps({"enum": [f"x{i}" for i in range(10_000)]})),
    ("json_schema", json.dumps({"allOf": [{"anyOf": [{"required": [i + j]} for j in "abcdef"]} for i in "abcdefgh"]})),
    ("lark", "start: start"),
    ("lark", 'start: start start | "a" | ""'),
    ("lark", "start: " + " | ".join(f'"{i}" start' for i in range(5000)) + ' | "a"'),
    ("choice", json.dumps(["y" * i for i in range(1, 400)])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=lambda t: t[:20])
def test_hostile_grammars_are_refused_or_served_in_bounded_time(world, kind, text):
    sampler, _, folder = world
    spec = GrammarSpec(kind, text)
    began = time.thread_time()
    if refusal(spec, folder) is None:
        state = sampler.open(SamplingParams(grammar=spec), [1])
        output = []
        for _ in range(8):
            result = sampler.sample(torch.randn(1, VOCAB), [row(SamplingParams(), state, output=output)])
            if result.errors:
                break
            output.append(int(result.tokens[0]))
    assert time.thread_time() - began < 3


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["json_schema", "regex", "choice", "lark"]), text=st.text(max_size=60))
def test_garbage_is_refused_or_served(world, kind, text):
    sampler, _, folder = world
    spec = GrammarSpec(kind, text)
    if refusal(spec, folder) is None:
        state = sampler.open(SamplingParams(grammar=spec), [1])
        result = sampler.sample(torch.randn(1, VOCAB), [row(SamplingParams(), state)])
        assert (result.tokens[0] >= 0) == (not result.errors)


def test_a_grammar_that_outgrows_a_limit_ends_its_own_request(world):
    sampler, _, _ = world
    text = "start: " + " | ".join(f'"{i}" start' for i in range(5000)) + ' | "a"'
    params = SamplingParams(temperature=0, grammar=GrammarSpec("lark", text))
    free = SamplingParams(temperature=0)
    state, output, errors = sampler.open(params, [1]), [], {}
    for _ in range(5):
        logits = torch.randn(2, VOCAB)
        result = sampler.sample(logits.clone(), [row(params, state, output=output), row(free, sampler.open(free, [1]))])
        assert result.tokens[1] == logits[1].argmax()
        errors |= result.errors
        output.append(int(result.tokens[0]))
        if errors:
            break
    assert list(errors) == [0]
    assert "max is" in errors[0]


def test_a_tokenizer_that_cannot_be_used_is_a_refusal(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    sampler = Sampler(VOCAB, [EOS], str(tmp_path), 1)
    with pytest.raises(InvalidRequest, match="does not work with the tokenizer"):
        sampler.open(SamplingParams(grammar=GrammarSpec("json_object")), [1])
