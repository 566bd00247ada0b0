"""Tool calls through the official client: parsed, streamed, forced, and told to templates that know none."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from served import CHATML, THINKING, Served, serve_parrot

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln ☃"}}\n</tool_call>'


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"[[{text}]]"}]


@pytest.mark.parametrize("text", [CALL, f"Let me look.\n{CALL}\n{CALL}"])
def test_tool_calls(server: Served, text: str) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="parrot", messages=say(text), tools=[WEATHER, CLOCK])
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == ("Let me look." if text.startswith("Let") else None)
    calls: Any = message.tool_calls
    assert len(calls) == text.count("<tool_call>")
    assert {c.function.name for c in calls} == {"get_weather"}
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Köln ☃"}] * len(calls)
    assert len({c.id for c in calls}) == len(calls)

    streamed: dict[int, dict[str, str]] = {}
    pieces = 0
    for chunk in client.chat.completions.create(model="parrot", messages=say(text), tools=[WEATHER], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            known = streamed.setdefault(call.index, {"name": call.function.name or "", "arguments": ""})
            known["arguments"] += call.function.arguments or ""
            pieces += bool(call.function.arguments)
        assert "<tool" not in (chunk.choices[0].delta.content or "")
    assert chunk.choices[0].finish_reason == "tool_calls"
    assert [c["name"] for c in streamed.values()] == ["get_weather"] * len(calls)
    assert [c["arguments"] for c in streamed.values()] == [c.function.arguments for c in calls]
    assert pieces > 3 * len(calls)


@pytest.mark.parametrize(
    ("choice", "parallel", "allowed", "refused"),
    [
        ("required", True, [CALL, f"{CALL}\n{CALL}", CALL.replace("get_weather", "clock")], ["no call"]),
        ("required", False, [CALL], [f"{CALL}\n{CALL}"]),
        ({"type": "function", "function": {"name": "get_weather"}}, True, [CALL], [f"{CALL}\n{CALL}"]),
    ],
)
def test_forced_calls_carry_a_grammar(
    server: Served, choice: Any, parallel: bool, allowed: list[str], refused: list[str]
) -> None:
    answer = server.client().chat.completions.create(
        model="parrot", messages=say(CALL), tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=parallel
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = server.engine.seen[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    compiled = LLMatcher.grammar_from_lark(grammar.text)

    def accepts(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), compiled)
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    for text in allowed:
        text = text.replace('{"city": "Köln ☃"}', "{}") if "clock" in text else text
        assert accepts(text), text
    for text in [*refused, CALL.replace('"city"', '"town"'), CALL.replace("get_weather", "nothing")]:
        assert not accepts(text), text


def test_tools_are_told_in_text_where_the_template_knows_none(server: Served) -> None:
    messages: Any = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    server.client().chat.completions.create(model="parrot", messages=messages, tools=[WEATHER], max_tokens=1)
    prompt = server.tokenizer.decode(server.engine.seen[-1].prompt)
    assert prompt.startswith("<|im_start|>system\nBe nice.\n\n")
    assert '"name": "get_weather"' in prompt
    assert '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>" in prompt


def test_tool_choice_none_keeps_the_text(server: Served) -> None:
    answer = server.client().chat.completions.create(
        model="parrot", messages=say(CALL), tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "browser"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
          "tool_choice": "required"}, None),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused(server: Served, fields: dict[str, Any], param: str | None) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": say("x"), **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param or param is None


def test_tools_beside_a_schema_allow_either(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    server.client().chat.completions.create(
        model="parrot", messages=say('{"a":1}'), tools=[WEATHER], response_format=shape
    )
    grammar = server.engine.seen[-1].params.grammar
    assert grammar is not None
    for text, allowed in ((CALL, True), ('{"a":1}', True), ('{"a":2}', False), ("prose", False)):
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.text))
        data = text.encode()
        assert (matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()) == allowed


def test_a_template_that_knows_tools_prints_them_itself() -> None:
    with serve_parrot(template="{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML) as served:
        served.client().chat.completions.create(model="parrot", messages=say("x"), tools=[WEATHER], max_tokens=1)
        prompt = served.tokenizer.decode(served.engine.seen[-1].prompt)
        assert json.loads(prompt[: prompt.index("<|im_start|>")]) == [WEATHER]
        assert "system" not in prompt


def test_thoughts_come_before_calls() -> None:
    with serve_parrot(template=THINKING) as served:
        text = f"which city?</think>I look.{CALL}"
        asked: Any = {"model": "parrot", "messages": say(text), "tools": [WEATHER]}
        message = served.client().chat.completions.create(**asked).choices[0].message
        calls: Any = message.tool_calls
        assert (message.model_extra or {})["reasoning_content"] == "which city?"
        assert message.content == "I look."
        assert json.loads(calls[0].function.arguments) == {"city": "Köln ☃"}
        order = []
        for chunk in served.client().chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta
            kinds = {"thought": (delta.model_extra or {}).get("reasoning_content"), "text": delta.content}
            kinds["call"] = "yes" if delta.tool_calls else None
            order += [kind for kind, there in kinds.items() if there and order[-1:] != [kind]]
        assert order == ["thought", "text", "call"]
