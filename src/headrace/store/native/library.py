"""The store's own machine code: what reading threads do without the interpreter lock, in as few calls as possible.

A call of a function that gives the interpreter lock up has to win it back. With several reading threads on few cores
that is what a unit's way costs, more than its bytes: opening, reading, closing a file and one sum for each record are
a dozen such calls, where this needs one (`docs/decisions/0016`). The code is compiled for this processor when a process
first needs it, in some 50 ms.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.store.native.fields import FIELDS


class _Library(NamedTuple):
    claim: Callable[[int], int]
    settle: Callable[[Any], int]
    read_file: Callable[[bytes, int, int, int, int, int, Any], int]
    copy_rows: int
    engine: Any  # owns the code


class NativeCopy(NamedTuple):
    """A C function `void (void *)` that copies records somewhere, and its argument.

    Attributes:
        function: its address.
        argument: its argument.
        keep: whatever must stay alive until it has returned.
    """

    function: int
    argument: int
    keep: object


class Job(ctypes.Structure):
    """What is to be done with a unit once it was read: proof, claim, copy. Used by one thread.

    Args:
        records: writable, where the unit is read to.
        flag: address of an int64 by which the unit is claimed, see `claim`.
        copy: copies the records; None: somebody does it afterwards.
    """

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]

    def __init__(self, records: memoryview, flag: int, copy: NativeCopy | None) -> None:
        super().__init__(records=_address(records), flag=flag)
        if copy is not None:
            self.copy, self.argument = copy.function, copy.argument
        self._nbytes = len(records)
        self._keep = copy, records

    def expect(self, sums: Sequence[int]) -> None:
        """Set xxh3_64 of each record."""
        self._sums = (ctypes.c_uint64 * len(sums))(*sums)
        self.count, self.sums = len(sums), ctypes.addressof(self._sums)
        self.size = self._nbytes // len(sums)

    def settle(self) -> int:
        """Do it now, and say how it went: see `answer`."""
        return _library().settle(ctypes.byref(self))


def claim(flag: int) -> bool:
    """True for the first who claims; flags begin with 0."""
    return bool(_library().claim(flag))


def copy_rows(source: memoryview, target: memoryview, nbytes: int, rows: int) -> NativeCopy:
    """A copy of the first bytes of each row to the first bytes of rows elsewhere.

    Args:
        source: writable, `rows` rows one behind the other.
        target: the same.
        nbytes: bytes of each row to copy.
        rows: how many, at least 1.
    """
    argument = (ctypes.c_int64 * 6)(
        _address(source), len(source) // rows, _address(target), len(target) // rows, nbytes, rows
    )
    return NativeCopy(_library().copy_rows, ctypes.addressof(argument), (argument, source, target))


_made: _Library | None = None
_making = threading.Lock()


def read_file(
    path: str, flags: int, offset: int, into: memoryview, forget: bool = False, job: Job | None = None
) -> int:
    """Open a file, fill memory from an offset of it, and close it.

    Args:
        path: of the file.
        flags: for `open`.
        offset: where to begin.
        into: the memory.
        forget: take what was read out of the page cache again.
        job: settled once everything was read.

    Returns:
        Bytes read; fewer than asked for where the file ends.

    Raises:
        OSError: it cannot be opened or read.
    """
    then = None if job is None else ctypes.byref(job)
    done = _library().read_file(os.fsencode(path), flags, offset, _address(into), into.nbytes, forget, then)
    if done < 0:
        raise OSError(-done, os.strerror(-done), path)
    return done


def _address(memory: memoryview) -> int:
    """Where writable memory lies. As numpy says it costs ten times as much."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def prepare() -> None:
    """Compile the code now, if it is not, rather than in the first call that needs it."""
    _library()


def _library() -> _Library:
    global _made
    if _made is None:
        with _making:  # reading threads begin together; what one makes must outlive the others' calls
            if _made is None:
                _made = _make()
    return _made


def _make() -> _Library:
    # Imported here: a command that reads nothing need not wait for LLVM.
    from llvmlite import binding, ir  # type: ignore[import-untyped]

    from headrace.store.native import file_read, unit, xxh3

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module("store")
    module.triple = binding.get_default_triple()
    xxh3.emit(module)
    unit.emit(module)
    unit.emit_copy_rows(module)
    file_read.emit(module)
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), target)
    engine.finalize_object()
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    return _Library(
        ctypes.PYFUNCTYPE(i64, pointer)(engine.get_function_address("claim")),  # as quick as giving the lock up
        ctypes.CFUNCTYPE(i64, pointer)(engine.get_function_address("settle")),
        ctypes.CFUNCTYPE(i64, ctypes.c_char_p, i32, i64, i64, i64, i32, pointer)(
            engine.get_function_address("read_file")
        ),
        engine.get_function_address("copy_rows"),
        engine,
    )
