"""A model's tokenizer and chat template, from its folder.

Built on `tokenizers` and `jinja2` alone: importing Transformers takes 0.7 s (2 s with torch), these two 0.06 s.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from headrace.core.errors import InvalidRequest, ModelError
from headrace.front.detokenizer import BytesDetokenizer, Detokenizer, WindowDetokenizer, detokenize
from headrace.front.pieces import TokenPieces
from headrace.front.template import ChatTemplate

INLINE_CHARACTERS = 2000
"""Shorter texts are encoded on the caller's thread (about a millisecond), longer ones in a pool."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to tokens and back, special tokens, chat templates.

    Use `load`. Safe to use from several threads.

    Attributes:
        special_tokens: the named special tokens by name, e.g. `bos_token`; templates see them under these names.
        special_ids: ids of all special tokens; left out of texts where asked.
        eos_token_ids: tokens that end a sequence, by generation config, config and tokenizer, in this order.
        folder: where it was loaded from.
        vocab_size: one more than the largest id.
        pieces: the bytes each token stands for.
    """

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        self._fast = fast
        fast.no_padding()
        fast.no_truncation()
        added = fast.get_added_tokens_decoder()
        self.special_tokens: dict[str, str] = {}
        special = {token for token, entry in added.items() if entry.special}
        for name in _NAMED:
            text = _content(settings.get(name))
            token = fast.token_to_id(text) if text else None
            if text and token is not None:
                self.special_tokens[name] = text
                special.add(token)
        self.special_ids = frozenset(special)
        self.vocab_size = max(fast.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.eos_token_ids: list[int] = []
        self.folder: Path | None = None
        self.pieces = TokenPieces(fast)
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}

    @classmethod
    def load(cls, folder: Path, chat_template: Path | None = None) -> "Tokenizer":
        """Read the tokenizer of the model in `folder`; `chat_template` is a file that replaces its template.

        Raises:
            ModelError: the folder has no tokenizer we can read, or the template does not parse.
        """
        settings = _read_json(folder / "tokenizer_config.json")
        templates = _templates(folder, settings)
        if chat_template is not None:
            try:
                templates = {"default": Path(chat_template).read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read the chat template {chat_template}: {error}") from error
        tokenizer = cls(_fast(folder), settings, templates)
        tokenizer.eos_token_ids = _end_tokens(folder, tokenizer)
        tokenizer.folder = folder
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; special tokens in it are recognised.
            add_special_tokens: add what the tokenizer puts around a text (e.g. a begin-of-sequence token).
            limit: refuse texts of more tokens than this.

        Raises:
            InvalidRequest: the text is longer than `limit`, or holds a lone surrogate.
        """
        try:
            # Unlike `encode` the batch call lets other threads run; the fast one leaves offsets out, in half the time.
            encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text is not valid Unicode (it holds a lone surrogate)", "prompt") from error
        if limit is not None and len(encoding) > limit:
            raise too_long(limit, len(encoding), 0)
        return list(encoding.ids)

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, by all cores at once.

        Raises:
            InvalidRequest: a text holds a lone surrogate.
        """
        try:
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate)", "prompt") from error
        return [list(encoding.ids) for encoding in encodings]

    async def encode_async(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """The same without blocking the event loop: long texts go through a thread pool."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens, limit=limit)
        return await asyncio.get_running_loop().run_in_executor(
            _pool(), lambda: self.encode(text, add_special_tokens=add_special_tokens, limit=limit)
        )

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of `tokens`, as the tokenizer's own decoder gives it. Unknown ids count as nothing."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def continuation(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of generated `tokens`: like `decode`, but in the middle of a text (a leading space stays)."""
        return detokenize(self.detokenizer(skip_special_tokens), tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokeniser for one sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if self.pieces.whole:
            return BytesDetokenizer(self.pieces, skipped)
        return WindowDetokenizer(lambda tokens: self.decode(tokens), skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for, possibly part of a character (OpenAI's `logprobs.bytes`)."""
        return self.pieces[token]

    def token_text(self, token: int) -> str:
        """The text of one token; bytes that are no character by themselves read as U+FFFD."""
        return self.pieces[token].decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token spelt `text`, e.g. a special token."""
        token: int | None = self._fast.token_to_id(text)
        return token

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works without a template of the caller's."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """Source of the template that `render_chat` uses without tools."""
        template = self._template(None) if self._templates else None
        return template.source if template else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The text of a conversation; encode it with `add_special_tokens=False`. See `ChatTemplate.render`.

        Args:
            chat_template: source of a template in place of the model's.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages.
        """
        if chat_template is not None:
            try:
                template = ChatTemplate(chat_template)
            except ModelError as error:
                raise InvalidRequest(str(error), "chat_template") from error
        else:
            template = self._template(tools)
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **(variables or {})},
        )

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequest(
            "this model has no chat template; use completions, or start with --chat-template FILE", "messages"
        )


def too_long(limit: int, prompt: int, completion: int) -> InvalidRequest:
    """OpenAI's error for a request that the context cannot hold."""
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the prompt, {completion} in the completion). "
        "Please reduce the length of the prompt or completion.",
        "messages",
        "context_length_exceeded",
    )


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "tokenize")


def _fast(folder: Path) -> FastTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _through_transformers(folder)
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error


def _through_transformers(folder: Path) -> FastTokenizer:
    """For folders with a sentencepiece model or vocabulary and merges only: slow to import, but exact."""
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
        return FastTokenizer.from_str(backend.to_str())
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{folder} has no tokenizer.json and Transformers finds no other tokenizer: {first}"
        ) from error


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the file beside the tokenizer wins over the settings."""
    found: dict[str, str] = {}
    given = settings.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found |= {entry["name"]: entry["template"] for entry in given}
    if (folder / "chat_template.json").is_file():
        found["default"] = _read_json(folder / "chat_template.json")["chat_template"]
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    extra = folder / "additional_chat_templates"
    return found | {path.stem: path.read_text(encoding="utf-8") for path in sorted(extra.glob("*.jinja"))}


def _end_tokens(folder: Path, tokenizer: Tokenizer) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    token = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
    return [] if token is None else [token]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _content(value: Any) -> str | None:
    """A special token's text: given as such, or as an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
