"""Chat templates, rendered as Transformers' `apply_chat_template` renders them, without importing Transformers.

Templates come with models and are not trusted: they run in Jinja's immutable sandbox and see plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
from jinja2.parser import Parser

from headrace.core.errors import InvalidRequest, ModelError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAIL = "\ue000headrace-end-of-final-message\ue001 "  # the space tells whether the template trims messages


class ChatTemplate:
    """One compiled template.

    Raises:
        ModelError: the template does not parse.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: with `role` and `content`, as in OpenAI's API; keys whose value is None count as absent.
            tools: JSON schemas of the tools.
            documents: for templates that take some.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: leave the last message open, so that the model goes on with it.
            variables: anything else the template reads (special tokens, `enable_thinking`, ...).

        Raises:
            InvalidRequest: the template refuses the messages or cannot cope with them.
        """
        if not messages:
            raise InvalidRequest("messages must hold at least one message", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set the latter to false",
                "continue_final_message",
            )
        chat = [_message(message) for message in messages]
        if continue_final_message:
            _mark_end(chat[-1])
        try:
            text = self._template.render(
                **_plain(dict(variables or {})),
                messages=chat,
                tools=_plain(tools),
                documents=_plain(documents),
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error.message}", "messages") from error
        except RecursionError as error:
            raise InvalidRequest("the chat template refuses these messages: nested too deeply", "messages") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template cannot take these messages: {type(error).__name__}: {error}", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscored attributes, which could reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace must not have the attribute {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **attributes: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*args, **attributes).items():
        made[name] = value
    return made


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _namespace
    return environment


_ENVIRONMENT = _environment()


def _plain(value: Any) -> Any:
    """JSON types only, so that a template reaches no method of ours."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {key: item for key, item in _plain(message).items() if item is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    # Templates read a turn's reasoning under one of two names.
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any]) -> None:
    """Put a mark after the message's text, so that its place in the prompt can be found."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAIL
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _TAIL
            return
    raise InvalidRequest("continue_final_message needs a last message with text", "continue_final_message")


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_TAIL.rstrip())
    if position < 0:
        raise InvalidRequest(
            "the chat template drops or changes the last message, so it cannot be continued", "continue_final_message"
        )
    # Where the template trimmed the mark's space, it would have trimmed the message's own as well.
    return text[:position] if text.startswith(_TAIL, position) else text[:position].rstrip()
