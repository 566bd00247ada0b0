"""Chat completions through the official client, streamed and not."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from served import THINKING, Served, serve_parrot


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"[[{text}]]"}]


def contents(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_answer_streamed_and_whole_are_the_same(server: Served) -> None:
    text = "Grüße \U0001f469‍\U0001f467! 日本語 <|im_end"
    whole = server.client().chat.completions.create(model="parrot", messages=say(text), logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.message.content == text
    assert choice.finish_reason == "stop"
    assert whole.system_fingerprint == "fp_ffffffffffff"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(text.encode()) + 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    details = whole.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == whole.usage.prompt_tokens // 16 * 16
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert bytes(b for e in entries for b in e.bytes or []).decode() == text
    assert all(e.logprob == e.top_logprobs[0].logprob == -0.25 and len(e.top_logprobs) == 2 for e in entries)

    stream = server.client().chat.completions.create(
        model="default", messages=say(text), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert contents(chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert {c.id for c in chunks} == {chunks[0].id}


def test_no_stream_event_breaks_a_character(server: Served) -> None:
    text = "é☃\U0001f600" * 5
    for chunk in server.client().chat.completions.create(model="parrot", messages=say(text), stream=True):
        delta = chunk.choices[0].delta.content or ""
        assert "�" not in delta
        assert all(character in text for character in delta)


@pytest.mark.parametrize("stop", ["END", ["no", "END"]])
def test_stop_strings_never_show(server: Served, stop: Any) -> None:
    messages = say("one two E EN END three")
    whole = server.client().chat.completions.create(model="parrot", messages=messages, stop=stop)
    chunks = list(server.client().chat.completions.create(model="parrot", messages=messages, stop=stop, stream=True))
    assert whole.choices[0].message.content == contents(chunks) == "one two E EN "
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra is not None
    assert whole.choices[0].model_extra["stop_reason"] == "END"


def test_several_choices(server: Served) -> None:
    whole = server.client().chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=9, seed=5
    )
    texts = [c.message.content for c in whole.choices]
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert {c.finish_reason for c in whole.choices} == {"length"}
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in server.client().chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=9, seed=5, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_continuous_usage(server: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.client().chat.completions.create(
            model="parrot", messages=say("abc"), stream=True, stream_options=options
        )
    )
    counts = [c.usage.completion_tokens for c in chunks if c.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_parameters_reach_the_engine(server: Served) -> None:
    server.client().chat.completions.create(
        model="parrot",
        messages=say("x"),
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=3,
        logit_bias={"5": -1},
        service_tier="flex",
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "priority": -2,
            "cache_salt": "me",
            "an_unknown_field": {"is": ["ignored"]},
        },
    )
    request = server.engine.seen[-1]
    params = request.params
    assert (request.service, request.priority, request.cache_salt) == ("offline", -2, "me")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 4, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.seed, params.logit_bias, params.min_tokens, params.stop_token_ids) == (3, {5: -1.0}, 2, (9,))
    assert params.ignore_eos


def test_content_parts_and_roles(server: Served) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    server.client().chat.completions.create(model="parrot", messages=messages, max_tokens=1)
    assert server.tokenizer.decode(server.engine.seen[-1].prompt) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continue_final_message(server: Served) -> None:
    messages: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]
    server.client().chat.completions.create(
        model="parrot", messages=messages, max_tokens=1, extra_body={"continue_final_message": True}
    )
    assert server.tokenizer.decode(server.engine.seen[-1].prompt).endswith("assistant\nThe answer is")


def test_reasoning_is_apart() -> None:
    with serve_parrot(template=THINKING) as served:
        client = served.client()
        text = "let me think\n</think>\n\nForty-two."
        whole = client.chat.completions.create(model="parrot", messages=say(text))
        extra = whole.choices[0].message.model_extra or {}
        assert extra["reasoning_content"] == "let me think"
        assert whole.choices[0].message.content == "Forty-two."
        reasoning = answer = ""
        for chunk in client.chat.completions.create(model="parrot", messages=say(text), stream=True):
            delta = chunk.choices[0].delta
            reasoning += (delta.model_extra or {}).get("reasoning_content", "")
            answer += delta.content or ""
        assert (reasoning, answer) == ("let me think", "Forty-two.")

        closed: Any = {"chat_template_kwargs": {"closed": True}}
        plain = client.chat.completions.create(model="parrot", messages=say("a</think>b"), extra_body=closed)
        assert plain.choices[0].message.content == "a</think>b"
        hidden: Any = {"include_reasoning": False}
        without = client.chat.completions.create(model="parrot", messages=say(text), extra_body=hidden)
        assert "reasoning_content" not in (without.choices[0].message.model_extra or {})
        # A constraint binds from the first token, so the thought that the template opens is closed first.
        client.chat.completions.create(model="parrot", messages=say("{}"), response_format={"type": "json_object"})
        assert served.tokenizer.decode(served.engine.seen[-1].prompt).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema",
        ),
        ({"guided_json": {"type": "integer"}}, "json_schema"),
        ({"guided_json": '{"type": "integer"}'}, "json_schema"),
        ({"guided_regex": "[0-9]+"}, "regex"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_structured_output_reaches_the_engine(server: Served, fields: dict[str, Any], kind: str | None) -> None:
    server.client().chat.completions.create(model="parrot", messages=say("x"), extra_body=fields)
    grammar = server.engine.seen[-1].params.grammar
    assert (grammar.kind if grammar else None) == kind


def test_context_length_error_has_the_numbers(server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        server.client().chat.completions.create(model="parrot", messages=say("x" * 5000), max_tokens=10)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "messages"
    assert "4096 tokens" in str(error.value)
    assert "10 in the completion" in str(error.value)
