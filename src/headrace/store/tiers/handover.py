"""Hand-over: a part in shared memory that one reader reads layer by layer while it is being written (DESIGN 4).

Beside the part's temporary file lies a page of control words, mapped by both sides: a state, then one word for each
layer, which is 0 until the layer's record is complete and its checksum from then on. A word is stored after the bytes
it speaks for; should a reader see them in another order, the checksum does not match and the read fails.
"""

import contextlib
import fcntl
import mmap
import os
from hashlib import blake2b
from types import TracebackType

from headrace.store.header import MAX_LAYERS, record_sum
from headrace.store.layout import HEADER_BYTES
from headrace.store.part import PartId
from headrace.store.tiers.files import read_fully
from headrace.store.tiers.folder import TierFolder
from headrace.store.tiers.os_errors import tier_error
from headrace.store.tiers.temporary import CONTROL_SUFFIX, SUFFIX, lock, remove_abandoned
from headrace.store.tiers.tier import PartMissing, TierError
from headrace.store.tiers.writer import FilePartWriter

_OPEN, _SEALED, _ABORTED = 0, 1, 2
_STATE, _RECORD_BYTES, _WORDS_AT = 0, 1, 2
_CONTROL_BYTES = 4096


class HandoverWriter(FilePartWriter):
    """Writes a part whose layers can be read as they come. `put_layer` each, `put` the header, `seal`."""

    def __init__(self, tier: str, folder: TierFolder, part: PartId, nbytes: int, record_bytes: int, token: str) -> None:
        layers = len(part.range.layers)
        if layers > MAX_LAYERS or nbytes != HEADER_BYTES + layers * record_bytes:
            raise TierError(f"tier {tier}: {nbytes} bytes are not {layers} layers of {record_bytes} and a header")
        self.record_bytes = record_bytes
        name = _name(part, token)
        self._control_path = folder.temporary(name + CONTROL_SUFFIX)
        self._words: memoryview | None = None
        try:
            super().__init__(tier, folder, part, nbytes, direct=False, forget=False, name=name)
        except TierError as error:
            # A writer that died may have left the name behind.
            if not isinstance(error.__cause__, FileExistsError) or not remove_abandoned(folder):
                raise
            super().__init__(tier, folder, part, nbytes, direct=False, forget=False, name=name)
        try:
            self._words = _make_control(self._control_path)
        except OSError as error:
            self.abort()
            raise tier_error(tier, f"beginning the hand-over of {part.name}", error) from error
        self._words[_RECORD_BYTES] = record_bytes

    def put_layer(self, layer: int, record: memoryview) -> int:
        """Write the record of a model layer and tell the reader.

        Returns:
            The record's checksum, for the header.

        Raises:
            TierFull: no room.
            TierError: the write failed, or it is not a record of this part.
        """
        if layer not in self.part.range.layers or len(record) != self.record_bytes:
            raise TierError(
                f"tier {self._tier}: {len(record)} bytes are no record of layer {layer} of {self.part.name}"
            )
        index = layer - self.part.range.first_layer
        self.put(HEADER_BYTES + index * self.record_bytes, record)
        total = record_sum(record)
        with self._lock:
            if self._words is not None:
                self._words[_WORDS_AT + index] = _word(total)
        return total

    def _publish(self) -> None:
        super()._publish()
        self._end(_SEALED)

    def _remove(self) -> None:
        super()._remove()
        self._end(_ABORTED)

    def _end(self, state: int) -> None:
        if self._words is not None:
            self._words[_STATE] = state
            self._words = None
        # Should it stay, the next scan removes it.
        with contextlib.suppress(OSError):
            os.unlink(self._control_path)


class HandoverReader:
    """The one reader of a hand-over. A context manager that closes; layers can be read after the seal, too.

    `ready` answers at once and does not wait: whoever writes says by a message that there is something new.
    """

    def __init__(self, tier: str, folder: TierFolder, part: PartId, token: str) -> None:
        self._tier = tier
        self._part = part
        name = _name(part, token)
        with contextlib.ExitStack() as undo:
            try:
                control = _open(folder.temporary(name + CONTROL_SUFFIX), undo)
                if not lock(control):
                    raise TierError(f"tier {tier}: the hand-over of {part.name} has a reader already")
                self._data = _open(folder.temporary(name + SUFFIX), undo)
                # The map keeps a descriptor of its own, and with it the lock.
                mapping = undo.enter_context(mmap.mmap(control, _CONTROL_BYTES))
                self._words = memoryview(mapping).cast("Q")
                undo.callback(self._words.release)
            except FileNotFoundError as error:
                raise PartMissing(f"tier {tier}: no hand-over of {part.name} is open under this token") from error
            except OSError as error:
                raise tier_error(tier, f"joining the hand-over of {part.name}", error) from error
            self._open_files = undo.pop_all()

    @property
    def sealed(self) -> bool:
        """True once the part is complete and published."""
        return bool(self._words[_STATE] == _SEALED)

    def ready(self, layer: int) -> bool:
        """True once the record of a model layer can be read.

        Raises:
            TierError: it never will be: the writer gave up or died.
        """
        if self._words[self._index(layer)]:
            return True
        if self._words[_STATE] == _ABORTED or not self._writer_lives():
            raise TierError(f"tier {self._tier}: the hand-over of {self._part.name} was given up")
        return bool(self._words[self._index(layer)])

    def read(self, layer: int, into: memoryview) -> None:
        """Copy the record of a model layer that is ready, and verify it.

        Raises:
            TierError: it is not ready, cannot be read, or does not match its checksum.
        """
        record_bytes = self._words[_RECORD_BYTES]
        wanted = self._words[self._index(layer)]
        if not wanted or len(into) != record_bytes:
            raise TierError(
                f"tier {self._tier}: layer {layer} of {self._part.name} has no {len(into)} bytes to read yet"
            )
        try:
            read_fully(self._data, HEADER_BYTES + (layer - self._part.range.first_layer) * record_bytes, into)
        except EOFError as error:
            raise TierError(f"tier {self._tier}: {self._part.name} is cut short: {error}") from error
        except OSError as error:
            raise tier_error(self._tier, f"reading {self._part.name}", error) from error
        if _word(record_sum(into)) != wanted:
            raise TierError(f"tier {self._tier}: layer {layer} of {self._part.name} does not match its checksum")

    def close(self) -> None:
        """Leave the hand-over; another reader may join. Idempotent."""
        self._open_files.close()

    def __enter__(self) -> "HandoverReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _index(self, layer: int) -> int:
        if layer not in self._part.range.layers:
            raise TierError(f"tier {self._tier}: layer {layer} is not in {self._part.name}")
        return _WORDS_AT + layer - self._part.range.first_layer

    def _writer_lives(self) -> bool:
        try:
            fcntl.flock(self._data, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # it holds its lock
        fcntl.flock(self._data, fcntl.LOCK_UN)
        # It seals before it lets go.
        return self.sealed


def _name(part: PartId, token: str) -> str:
    digest = blake2b(f"{part.name} {token}".encode("utf-8", "surrogatepass"), digest_size=16, person=b"headrace-hand")
    return f"handover-{digest.hexdigest()}"


def _word(total: int) -> int:
    return total or 1  # 0 says: not ready


def _make_control(path: str) -> memoryview:
    # A dead writer's page may still be mapped by its reader, so it is not cut but left to it.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _CONTROL_BYTES)
        return memoryview(mmap.mmap(fd, _CONTROL_BYTES)).cast("Q")
    finally:
        os.close(fd)


def _open(path: str, undo: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    undo.callback(os.close, fd)
    return fd
