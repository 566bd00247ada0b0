"""Text completions, tokenize and detokenize, models."""

import json
from typing import Any

import llguidance
import openai
import pytest
from served import Served

from headrace.api.errors import model_not_found
from headrace.api.schema import decode
from headrace.api.schema_completion import COMPLETION_DECODER
from headrace.api.structured import requested_grammar
from headrace.engine.sampling.grammar import _to_llguidance as compile_grammar


def create(server: Served, **fields: Any) -> Any:
    return server.client().completions.create(**{"model": "parrot", **fields})


def test_prompt_forms_give_the_same_text(server: Served) -> None:
    ids = server.tokenizer.encode("[[hello]]")
    for prompt in ("[[hello]]", ["[[hello]]"], ids, [ids]):
        answer = create(server, prompt=prompt)
        assert [c.text for c in answer.choices] == ["hello"]
        assert answer.usage.prompt_tokens == len(ids)


def test_batched_prompts_and_n(server: Served) -> None:
    answer = create(server, prompt=["[[one]]", "[[two]]", "[[three]]"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == list(
        enumerate(["one", "one", "two", "two", "three", "three"])
    )
    streamed = [""] * 6
    finish: list[Any] = [None] * 6
    options = {"include_usage": True}
    for chunk in create(server, prompt=["[[one]]", "[[two]]", "[[three]]"], n=2, stream=True, stream_options=options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert streamed == [c.text for c in answer.choices]
    assert finish == ["stop"] * 6
    assert chunk.choices == []
    assert chunk.usage == answer.usage


def test_default_is_16_tokens(server: Served) -> None:
    answer = create(server, prompt="abc")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_logprobs_is_prompt_logprobs(server: Served, stream: bool, max_tokens: int) -> None:
    prompt = "[[hello]]é"
    answer = create(server, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    text = "".join(c.text for c in choices)
    tokens, logprobs, offsets, tops = [], [], [], []
    for choice in choices:
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            logprobs += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
            tops += choice.logprobs.top_logprobs
    assert text == prompt + ("hello" if max_tokens else "")
    ids = server.tokenizer.encode(prompt)
    assert len(tokens) == len(ids) + max_tokens
    assert tokens[:9] == list("[[hello]]")
    assert tokens[9:11] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs[0] is None
    assert logprobs[1:] == [-0.25] * (len(tokens) - 1)
    assert offsets[:10] == list(range(10))
    assert all(len(top) in (2, 3) for top in tops[1:])
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert answer.usage.completion_tokens == max_tokens
        assert answer.usage.prompt_tokens == len(ids)


def test_vllm_prompt_logprobs_and_token_ids(server: Served) -> None:
    answer = create(server, prompt="[[ab]]", extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    extra = answer.choices[0].model_extra
    ids = server.tokenizer.encode("[[ab]]")
    assert extra["prompt_token_ids"] == ids
    assert extra["token_ids"][:2] == server.tokenizer.encode("ab")
    assert extra["prompt_logprobs"][0] is None
    assert extra["prompt_logprobs"][1][str(ids[1])]["rank"] == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "bad_words": ["b"]}, "bad_words"),
        ({"prompt": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "logits_processors": ["x"]}, "logits_processors"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "a", "length_penalty": 0.5}, "length_penalty"),
        ({"prompt": "a", "early_stopping": True}, "early_stopping"),
        ({"prompt": "a", "thinking_token_budget": 0}, "thinking_token_budget"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 4096}, "prompt"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "seed": 10**25}, "seed"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "a", "stop": ["x"] * 40}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "service_tier": "gold"}, "service_tier"),
        ({"prompt": "a", "priority": 10**12}, "priority"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({}, "prompt"),
    ],
)
def test_bad_fields_are_named(server: Served, fields: dict[str, Any], param: str) -> None:
    with server.http() as http:
        response = http.post("/v1/completions", json={"model": "parrot", **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_values_that_ask_for_nothing_are_accepted(server: Served) -> None:
    neutral = {"bad_words": [], "logits_processors": [], "length_penalty": 1, "early_stopping": False}
    nothing = {"allowed_token_ids": None, "truncate_prompt_tokens": None}
    assert create(server, prompt="[[x]]", extra_body=neutral | nothing).choices[0].text == "x"


def test_a_misspelled_constraint_is_told_the_nearest_one(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"did you mean regex\?"):
        create(server, prompt="a", extra_body={"structured_outputs": {"regexp": "a"}})


def test_an_unknown_field_is_logged_once_and_ignored(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert create(server, prompt="[[x]]", extra_body={"tempreature": 1}).choices[0].text == "x"
    fields = [vars(record).get("field") for record in caplog.records if "not known" in record.message]
    assert fields == ["tempreature"]


@pytest.mark.parametrize("kind", [{"json": {"properties": {"a": {"const": 1}}}}, {"json_object": True}])
@pytest.mark.parametrize("compact", [False, True])
def test_white_space_in_json_can_be_refused(kind: dict[str, Any], compact: bool) -> None:
    body = {"prompt": "a", "structured_outputs": {**kind, "disable_any_whitespace": compact}}
    spec = requested_grammar(decode(COMPLETION_DECODER, json.dumps(body).encode()))
    assert spec is not None
    tokens = llguidance.LLTokenizer("byte")
    for text, allowed in (('{"a":1}', True), ('{"a": 1}', not compact)):
        matcher = llguidance.LLMatcher(tokens, compile_grammar(spec))
        assert (matcher.try_consume_tokens(tokens.tokenize_str(text)) == len(text)) is allowed


def test_unknown_model(server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        create(server, model="gpt-9", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert create(server, model="default", prompt="[[x]]").choices[0].text == "x"


def test_an_alias_that_is_the_name_is_not_said_twice() -> None:
    assert str(model_not_found("x", "parrot")).endswith("has `parrot` (alias `default`)")
    assert str(model_not_found("x", "default")).endswith("has `default`")


def test_models(server: Served) -> None:
    models = server.client().models.list().data
    assert [m.id for m in models] == ["parrot", "default"]
    assert (models[0].model_extra or {})["max_model_len"] == 4096
    assert server.client().models.retrieve("default").id == "default"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("org/other")


def test_tokenize_and_back(server: Served) -> None:
    with server.http() as http:
        answer = http.post("/tokenize", json={"model": "parrot", "prompt": "añ", "return_token_strs": True}).json()
        assert answer["count"] == 3
        assert answer["max_model_len"] == 4096
        assert answer["tokens"] == server.tokenizer.encode("añ")
        assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xb1"]
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "añ"}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
        expected = server.tokenizer.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
        assert chat["tokens"] == expected
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"
