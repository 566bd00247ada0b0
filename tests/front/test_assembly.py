from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level, front

from headrace.core.events import Delta, TokenLogprob
from headrace.core.sampling import SamplingParams
from headrace.front.assembly import PromptContext, SequenceText, append
from headrace.front.output import CompletionOutput
from headrace.front.stop import StopSet

TOKENIZER = front(byte_level())
EOS = 2


def sequence(**fields: object) -> SequenceText:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    stops = StopSet(params.stop) if params.stop else None
    return SequenceText(PromptContext(TOKENIZER, params, 7, frozenset([EOS]), stops), 0)


def run(text: SequenceText, *deltas: Delta) -> CompletionOutput:
    done = CompletionOutput(0)
    for delta in deltas:
        if not text.finished:
            append(done, text.push(delta))
    return done


@given(
    st.text(alphabet="abé \U0001f600", min_size=1, max_size=20),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 4), min_size=1),
    st.integers(0, 6),
)
@settings(max_examples=200)
def test_text_and_tokens_do_not_depend_on_how_the_engine_cuts_them(
    text: str, stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    ids = TOKENIZER.encode(text)
    fields: dict[str, object] = {"stop": tuple(stops), "min_tokens": min_tokens}

    def deltas(sizes: list[int]) -> list[Delta]:
        parts, at, i = [], 0, 0
        while at < len(ids):
            parts.append(ids[at : at + sizes[i % len(sizes)]])
            at, i = at + len(parts[-1]), i + 1
        return [
            Delta(
                "a", part, "length" if j == len(parts) - 1 else None, logprobs=[TokenLogprob(t, 0, 1, []) for t in part]
            )
            for j, part in enumerate(parts)
        ]

    one, other = run(sequence(**fields), *deltas([1])), run(sequence(**fields), *deltas(cuts))
    assert one == other
    assert [entry.token for entry in one.logprobs or []] == one.token_ids
    if one.finish_reason == "length":
        assert one.text == text
    else:
        assert one.stop_reason in stops
        assert text.startswith(one.text)


def test_end_of_sequence_has_no_reason_but_a_stop_token_has() -> None:
    ids = TOKENIZER.encode("ab")
    assert run(sequence(), Delta("a", [*ids, EOS], "stop", EOS)).stop_reason is None
    done = run(sequence(stop_token_ids=(70,)), Delta("a", [*ids, 70], "stop", 70))
    assert (done.text, done.stop_reason, done.token_ids) == ("ab", 70, [*ids, 70])


def test_stop_token_is_in_the_text_only_where_asked() -> None:
    ids, stop = TOKENIZER.encode("ab"), TOKENIZER.encode("x")[0]
    fields = {"stop_token_ids": (stop,), "include_stop_str_in_output": True}
    assert run(sequence(**fields), Delta("a", [*ids, stop], "stop", stop)).text == "abx"
    shown = sequence(include_stop_str_in_output=True, skip_special_tokens=False)
    assert run(shown, Delta("a", [*ids, EOS], "stop", EOS)).text == "ab<|im_end|>"


def test_stop_strings_count_from_min_tokens_on() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "ababab"]
    assert run(sequence(stop=("ab",), min_tokens=3), Delta("a", ids, "length")).text == "abab"
    assert run(sequence(stop=("ab",)), Delta("a", ids, "length")).text == ""


def test_broken_character_at_the_end_is_shown_and_may_complete_a_stop() -> None:
    single = {TOKENIZER.token_bytes(token): token for token in range(TOKENIZER.vocab_size)}
    broken = [single[b"a"], single[b"\xc3"]]
    assert run(sequence(), Delta("a", broken, "length")).text == "a�"
    done = run(sequence(stop=("a�",)), Delta("a", broken, "length"))
    assert (done.text, done.finish_reason, done.stop_reason) == ("", "stop", "a�")


def test_error_and_abort_give_out_what_was_held() -> None:
    ids = TOKENIZER.encode("EN")
    for finish in ("error", "abort"):
        done = run(sequence(stop=("END",)), Delta("a", ids), Delta("a", [], finish, error="why"))
        assert (done.text, done.finish_reason, done.error) == ("EN", finish, "why")


def test_every_delta_carries_the_prompts_numbers() -> None:
    text = sequence()
    first, second = text.push(Delta("a", [70], cached_tokens=4)), text.push(Delta("a", [71], "length"))
    assert (first.prompt_tokens, first.cached_tokens) == (second.prompt_tokens, second.cached_tokens) == (7, 4)
