"""Reads a batch file for planning, as `batch run` reads it: only what a plan needs, in memory bounded by the tokens.

Lines are those of `offline.jobs.lines`. What a body means is asked of the code that runs it, which is handed in, since
`offline` must not import `api`; only plain lines of token ids are understood here (`plain_lines`).
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import ConfigError, HeadraceError
from headrace.offline.jobs.endpoint import Asked
from headrace.offline.jobs.errors import WrongFile, WrongLine
from headrace.offline.jobs.lines import CHAT, COMPLETIONS, URLS, RawLine, check_file, parse_line, read_lines
from headrace.offline.kin import kin
from headrace.offline.model_limits import ModelLimits
from headrace.offline.plain_lines import Tokens, plain_line
from headrace.offline.planning.requests import JobRequests

#: Lines, or bytes of them, that are understood together, so that their texts are tokenised by all cores.
_TOGETHER, _TOGETHER_BYTES = 2048, 16 << 20
#: Errors that are kept; the others are counted.
MOST_ERRORS = 100
_MOST = (1 << 31) - 1
_NONE: Tokens = np.zeros(0, np.int32)


class Bodies(Protocol):
    """Knows what a body means; many are asked about at once."""

    @property
    def tokenize_s(self) -> float:
        """Seconds spent on tokenising so far."""
        ...

    async def prepare(self, url: str, body: bytes) -> Asked:
        """See `offline.jobs.endpoint.Endpoint.prepare`."""
        ...


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is not planned, as OpenAI's error object has it.

    Attributes:
        line: its number, 1 for the first of the file.
        custom_id: as far as it could be read.
        code, message, param: what is wrong.
    """

    line: int
    custom_id: str | None
    code: str | None
    message: str
    param: str | None


@dataclass
class PlanInput:
    """A batch file as columns.

    Attributes:
        requests: of all good lines, in the file's order; several prompts of a line are one, one behind the other.
        ids: their `custom_id`.
        begins, ends: int64 [n], bytes of each request's line in the file, its line break included.
        wrong: how many lines are not planned.
        errors: of the first `MOST_ERRORS` of them.
        names: of the groups, by number.
        read_s, tokenize_s: seconds spent on reading and on tokenising.
    """

    requests: JobRequests
    ids: list[str]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    wrong: int = 0
    errors: list[LineError] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    read_s: float = 0.0
    tokenize_s: float = 0.0


def read_plan_input(
    path: Path,
    bodies: Callable[[], Bodies] | None = None,
    advance: Callable[[int], None] = lambda size: None,
    limits: ModelLimits | None = None,
) -> PlanInput:
    """Read a batch file (OpenAI's format; prompts may be token ids).

    Args:
        path: of the file.
        bodies: called when the first line comes that is not plain; None: there is none.
        advance: told how many bytes have been read since the last call.
        limits: what is planned for takes; None: anything.

    Raises:
        WrongFile: it cannot be a file of requests, or none of its lines can be planned.
        ConfigError: it cannot be read.
    """
    begun = time.perf_counter()
    check_file(path)
    with asyncio.Runner() as runner:
        reader = _Reader(runner, bodies or _nobody, limits or ModelLimits())
        try:
            with path.open("rb") as file:
                for line in read_lines(file.fileno()):
                    reader.line(line)
                    advance(line.end - line.offset)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        result = reader.finish()
    if not result.ids:
        first = f"; line {result.errors[0].line}: {result.errors[0].message}" if result.errors else ""
        raise WrongFile(f"{path} has no request that can be planned{first}")
    result.read_s = time.perf_counter() - begun - result.tokenize_s
    return result


@dataclass(slots=True)
class _Waiting:
    """A line, and what is known of it: what it asks for, what is wrong with it, or the body that will tell."""

    number: int
    begin: int
    end: int
    id: str | None = None
    url: str = ""
    body: bytes = b""
    tokens: Tokens = field(default_factory=lambda: _NONE)
    most: int = 0
    kin: bytes = b""
    error: HeadraceError | None = None


class _Reader:
    """Collects lines into columns."""

    def __init__(self, runner: asyncio.Runner, bodies: Callable[[], Bodies], limits: ModelLimits) -> None:
        self._runner, self._make_bodies, self._limits = runner, bodies, limits
        self._bodies: Bodies | None = None
        self._tokens = array("i")
        self._offsets = array("q", [0])
        self._most, self._groups = array("i"), array("i")
        self._begins, self._ends = array("q"), array("q")
        self._ids: list[str] = []
        self._lines: dict[str, int] = {}  # the first with each custom_id
        self._kin: dict[bytes, int] = {}
        self._urls: list[str] = []  # by group
        self._waiting: list[_Waiting] = []
        self._bytes = 0
        self._wrong = 0
        self._errors: list[LineError] = []

    def line(self, line: RawLine) -> None:
        """Take one line."""
        waiting = _Waiting(line.number, line.offset, line.end)
        try:
            self._understand(waiting, line.data)
        except WrongLine as error:
            waiting.id, waiting.error = error.custom_id, error
        self._waiting.append(waiting)
        self._bytes += len(waiting.body) + waiting.tokens.nbytes
        if len(self._waiting) >= _TOGETHER or self._bytes >= _TOGETHER_BYTES:
            self._flush()

    def finish(self) -> PlanInput:
        """The columns of all lines."""
        self._flush()
        requests = JobRequests(
            np.frombuffer(self._tokens, np.int32),
            np.frombuffer(self._offsets, np.int64),
            np.frombuffer(self._most, np.int32),
            np.frombuffer(self._groups, np.int32),
        )
        return PlanInput(
            requests,
            self._ids,
            np.frombuffer(self._begins, np.int64),
            np.frombuffer(self._ends, np.int64),
            self._wrong,
            self._errors,
            self._names(requests),
            tokenize_s=self._bodies.tokenize_s if self._bodies else 0.0,
        )

    def _understand(self, waiting: _Waiting, data: bytes | None) -> None:
        plain = None if data is None else plain_line(data, self._limits)
        if plain is not None:
            self._first(plain.custom_id, waiting.number)
            waiting.id, waiting.url = plain.custom_id, COMPLETIONS
            waiting.tokens, waiting.most = plain.tokens, plain.most
            waiting.kin = kin(COMPLETIONS, plain.most)
            return
        try:
            parsed = parse_line(data, URLS)
        except WrongLine as error:
            if error.custom_id is not None:
                self._first(error.custom_id, waiting.number)
            raise
        self._first(parsed.custom_id, waiting.number)
        waiting.id, waiting.url, waiting.body = parsed.custom_id, parsed.url, parsed.body

    def _first(self, custom_id: str, number: int) -> None:
        """Note a `custom_id`; a wrong line takes it too, as when the file is run."""
        first = self._lines.setdefault(custom_id, number)
        if first != number:
            message = f"line {first} has the same `custom_id`; they must differ"
            raise WrongLine("duplicate_custom_id", message, "custom_id", custom_id)

    def _flush(self) -> None:
        """Have the bodies that wait understood, and enter all lines in their order."""
        asked = [waiting for waiting in self._waiting if waiting.body]
        if asked:
            self._bodies = self._bodies or self._make_bodies()
            self._runner.run(_prepare(self._bodies, asked))
        for waiting in self._waiting:
            self._enter(waiting)
        self._waiting, self._bytes = [], 0

    def _enter(self, waiting: _Waiting) -> None:
        count, room = len(waiting.tokens), self._limits.room
        if waiting.error is None and count >= room:
            message = (
                f"the line's prompts have {count} tokens together, the pool that is planned for holds {room} of one "
                "line: raise --kv-tokens, or split the line"
            )
            waiting.error = WrongLine("too_large_to_plan", message, "prompt")
        if waiting.error is not None or waiting.id is None:
            self._refuse(waiting)
            return
        if waiting.kin not in self._kin:
            self._kin[waiting.kin] = len(self._kin)
            self._urls.append(waiting.url)
        self._tokens.frombytes(waiting.tokens.tobytes())
        self._offsets.append(len(self._tokens))
        self._most.append(min(waiting.most, _MOST))
        self._groups.append(self._kin[waiting.kin])
        self._begins.append(waiting.begin)
        self._ends.append(waiting.end)
        self._ids.append(waiting.id)

    def _refuse(self, waiting: _Waiting) -> None:
        self._wrong += 1
        if len(self._errors) < MOST_ERRORS:
            error = waiting.error
            code, param = getattr(error, "code", None), getattr(error, "param", None)
            self._errors.append(LineError(waiting.number, waiting.id, code, str(error), param))

    def _names(self, requests: JobRequests) -> list[str]:
        """Of the groups: route, largest limit, and for chats, whose system prompts may differ, a digest."""
        largest = np.zeros(len(self._kin), np.int32)
        np.maximum.at(largest, requests.groups, requests.max_tokens)
        return [
            f"chat {digest.hex()[:6]}, up to {limit} tokens" if url == CHAT else f"completion, up to {limit} tokens"
            for digest, url, limit in zip(self._kin, self._urls, largest.tolist())
        ]


def _nobody() -> Bodies:
    raise ConfigError("the file has more than plain token ids, and nobody is there who knows what that means")


async def _prepare(bodies: Bodies, asked: Sequence[_Waiting]) -> None:
    """Ask what bodies mean, all at once."""
    found = await asyncio.gather(*(bodies.prepare(each.url, each.body) for each in asked), return_exceptions=True)
    for waiting, result in zip(asked, found):
        if isinstance(result, HeadraceError):
            waiting.error = result
        elif isinstance(result, BaseException):
            raise result
        else:
            waiting.tokens = np.concatenate([np.asarray(prompt, np.int32) for prompt in result.prompts])
            waiting.most, waiting.kin = result.most, result.kin
