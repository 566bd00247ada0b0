"""Structured output: which tokens a grammar allows next, by llguidance.

Grammars come from clients, so every step of their handling is bounded: the text's size, the fuel of the regex compiler,
the items of a parser step, the states of the lexer.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from headrace.core.errors import InvalidRequest
from headrace.core.sampling import GrammarSpec

MAX_GRAMMAR_BYTES = 128 << 10
_MAX_MESSAGE = 300
_KEPT_GRAMMARS = 64
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}  # bounded, or a weak model indents without end

_LIMITS = ("ParserTooComplex", "LexerTooComplex", "InternalError")

Bitmask = npt.NDArray[np.int32]


def check_grammar(spec: GrammarSpec, tokenizer_path: str | None) -> None:
    """Refuse a grammar that cannot be used, before an engine sees it.

    Bounded by `MAX_GRAMMAR_BYTES` and llguidance's limits to a few tenths of a second; the first Lark grammar also
    loads the tokenizer (about half a second).

    Args:
        spec: what the request asks for.
        tokenizer_path: folder with the model's tokenizer; read for Lark grammars only, which may name special tokens.

    Raises:
        InvalidRequest: what is wrong with it, in one line.
    """
    tokenizer = _load_tokenizer(tokenizer_path) if spec.kind == "lark" and tokenizer_path is not None else None
    complaint = llguidance.LLMatcher.validate_grammar(_to_llguidance(spec), tokenizer, limits=_limits())
    if complaint:
        raise _invalid(spec, complaint)


class GrammarCompiler:
    """Makes matchers for one model; keeps the compiled form of recent grammars.

    Args:
        vocab_size: rows of the logits.
        eos_token_ids: allowed where a grammar may end.
        tokenizer_path: folder with the tokenizer; loaded when first needed.
        threads: masks of several rows are computed by this many threads.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], tokenizer_path: str | None, threads: int) -> None:
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._path = tokenizer_path
        self._threads = threads
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._compiled: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, spec: GrammarSpec) -> "Matcher":
        """A matcher at the grammar's start.

        Raises:
            InvalidRequest: the grammar is wrong, or there is no tokenizer to apply it with.
        """
        origin = self._compiled.get(spec)
        if origin is None:
            origin = llguidance.LLMatcher(self._loaded(), _to_llguidance(spec), log_level=0, limits=_limits())
            if origin.is_error():
                raise _invalid(spec, origin.get_error())
            self._compiled[spec] = origin
            if len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(spec)
        return Matcher(origin, frozenset(self._eos))

    def masks(self, matchers: Sequence["Matcher"]) -> Bitmask:
        """One row of bits [ceil(vocabulary / 32)] per matcher: bit t % 32 of word t // 32 allows token t.

        A matcher that cannot go on is left in its error state, with an empty row.
        """
        words = -(-self._loaded().vocab_size // 32)
        masks = np.zeros((len(matchers), words), np.int32)
        pointer = masks.ctypes.data
        if len(matchers) == 1 or self._threads == 1:
            for i, matcher in enumerate(matchers):
                matcher.state.unsafe_compute_mask_ptr(pointer + i * words * 4, words * 4)
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(num_threads=self._threads)
            jobs = [(matcher.state, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, pointer, words * 4, len(matchers))
        return masks

    def _loaded(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            if self._path is None:
                raise InvalidRequest("structured output needs a tokenizer; this engine was started without one")
            self._tokenizer = _load_tokenizer(self._path, self._vocab_size, tuple(self._eos))
        return self._tokenizer


class Matcher:
    """A position in a grammar; follows a sequence's output as that grows or is cut back.

    Args:
        origin: the grammar's start.
        eos: tokens that may follow a complete text, any number of times.
    """

    __slots__ = ("_consumed", "_eos", "_misplaced", "_origin", "state")

    def __init__(self, origin: llguidance.LLMatcher, eos: frozenset[int]) -> None:
        self._origin = origin
        self._eos = eos
        self._restart()

    def _restart(self) -> None:
        self.state: llguidance.LLMatcher = self._origin.deep_copy()
        self._consumed = 0
        self._misplaced: int | None = None

    def follow(self, output: npt.NDArray[np.int32]) -> None:
        """Move to the end of `output`; where that is not possible, `error` says so afterwards."""
        if len(output) < self._consumed:
            self._restart()
        for token in output[self._consumed :].tolist():
            if self._misplaced is None and not self._accepts(token):
                self._misplaced = token
        self._consumed = len(output)

    def _accepts(self, token: int) -> bool:
        if self.state.is_stopped() and not self.state.is_error():
            return token in self._eos
        return bool(self.state.consume_token(token))

    @property
    def error(self) -> str | None:
        """Why no token can follow, or None."""
        if self._misplaced is None and not self.state.is_error():
            return None
        if self._misplaced is not None and self.state.stop_reason() not in _LIMITS:
            return f"token {self._misplaced} of the text so far does not fit"
        return _one_line(self.state.get_error())


def _to_llguidance(spec: GrammarSpec) -> str:
    """The grammar in llguidance's form; only its outline is checked here."""
    if len(spec.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the {spec.kind} grammar has {len(spec.text)} characters; the limit is {MAX_GRAMMAR_BYTES >> 10} KiB"
        )
    compiler = llguidance.LLMatcher
    grammar: str
    try:
        match spec.kind:
            case "json_object":
                grammar = compiler.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)
            case "json_schema":
                grammar = compiler.grammar_from_json_schema(spec.text, defaults=_JSON)
            case "regex":
                grammar = compiler.grammar_from_regex(spec.text)
            case "choice":
                grammar = compiler.grammar_from_regex("|".join(re.escape(choice) for choice in _choices(spec.text)))
            case "lark":
                grammar = compiler.grammar_from_lark(spec.text)
        return grammar
    except (ValueError, UnicodeError) as error:
        raise _invalid(spec, str(error)) from error


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"choice must be a JSON array of strings: {_one_line(str(error))}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequest("choice must be a JSON array of one or more non-empty strings")
    return choices


def _limits() -> llguidance.LLParserLimits:
    # 50,000 lexer states are 50 to 100 MB; the other limits are llguidance's (about 20 ms to compile, 20 ms a step)
    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _invalid(spec: GrammarSpec, complaint: str) -> InvalidRequest:
    return InvalidRequest(f"invalid {spec.kind} grammar: {_one_line(complaint)}")


def _one_line(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


@lru_cache(maxsize=4)
def _load_tokenizer(
    path: str, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] | None = None
) -> llguidance.LLTokenizer:
    file = Path(path) / "tokenizer.json"
    eos = list(eos_token_ids) if eos_token_ids else None
    try:
        if not file.is_file():
            from llguidance.hf import from_tokenizer  # imports transformers
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path)
            size = max(vocab_size or 0, len(tokenizer))
            wrapped: llguidance.LLTokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
            return wrapped
        description = json.loads(file.read_text("utf-8"))
        description["truncation"] = description["padding"] = None
        text = json.dumps(description)
        known = llguidance.LLTokenizer(text, eos_token=eos)
        if vocab_size is None or vocab_size <= known.vocab_size:
            return known
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except (OSError, ValueError, KeyError) as error:
        reason = _one_line(str(error))
        raise InvalidRequest(f"structured output does not work with the tokenizer in {path}: {reason}") from error
