"""Emits opening, reading and closing a file as one function of LLVM code."""

import errno
import os
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


def emit(module: ir.Module) -> None:
    """Adds `int64 read_file(char *path, int flags, int64 offset, int64 into, int64 nbytes, int forget, int64 *job)`.

    It opens a file, fills memory from an offset of it, takes what was read out of the page cache if `forget` is not 0,
    and closes it. When all was read and there is a job, it is settled (see `unit`). Returns the bytes read, fewer than
    `nbytes` only where the file ends, or minus an error number.
    """
    kind = ir.FunctionType(_I64, [_POINTER, _I32, _I64, _I64, _I64, _I32, _I64.as_pointer()])
    function = ir.Function(module, kind, "read_file")
    path, flags, offset, into, nbytes, forget, job = function.args
    names = (
        "enter",
        "open",
        "opened",
        "not_open",
        "read",
        "got",
        "not_read",
        "some",
        "all",
        "forget",
        "close",
        "settle",
        "end",
    )
    block = {name: function.append_basic_block(name) for name in names}
    b = ir.IRBuilder(block["enter"])
    c = _Libc(module, b)
    b.branch(block["open"])
    b.position_at_end(block["open"])

    fd = c.call("open", _I32, [path, flags], variadic=True)
    b.cbranch(b.icmp_signed(">=", fd, _I32(0)), block["opened"], block["not_open"])
    b.position_at_end(block["not_open"])
    not_open = c.errno()
    b.cbranch(b.icmp_signed("==", not_open, _I32(errno.EINTR)), block["open"], block["end"])
    b.position_at_end(block["opened"])
    b.branch(block["read"])

    b.position_at_end(block["read"])
    done = b.phi(_I64)
    done.add_incoming(_I64(0), block["opened"])
    target = b.inttoptr(b.add(into, done), _POINTER)
    got = c.call("pread", _I64, [fd, target, b.sub(nbytes, done), b.add(offset, done)])
    b.cbranch(b.icmp_signed(">=", got, _I64(0)), block["got"], block["not_read"])
    b.position_at_end(block["not_read"])
    not_read = c.errno()
    failed = b.sub(_I64(0), b.sext(not_read, _I64))
    b.cbranch(b.icmp_signed("==", not_read, _I32(errno.EINTR)), block["read"], block["close"])
    done.add_incoming(done, block["not_read"])
    b.position_at_end(block["got"])
    total = b.add(done, got)
    b.cbranch(b.icmp_signed("==", got, _I64(0)), block["all"], block["some"])
    b.position_at_end(block["some"])
    b.cbranch(b.icmp_signed("<", total, nbytes), block["read"], block["all"])
    done.add_incoming(total, block["some"])

    b.position_at_end(block["all"])
    b.cbranch(b.icmp_signed("!=", forget, _I32(0)), block["forget"], block["close"])
    b.position_at_end(block["forget"])
    c.call("posix_fadvise", _I32, [fd, offset, nbytes, _I32(os.POSIX_FADV_DONTNEED)])
    b.branch(block["close"])

    b.position_at_end(block["close"])
    result = b.phi(_I64)
    result.add_incoming(failed, block["not_read"])
    result.add_incoming(total, block["all"])
    result.add_incoming(total, block["forget"])
    c.call("close", _I32, [fd])
    whole = b.and_(b.icmp_signed("==", result, nbytes), b.icmp_signed("!=", b.ptrtoint(job, _I64), _I64(0)))
    b.cbranch(whole, block["settle"], block["end"])
    b.position_at_end(block["settle"])
    b.call(module.get_global("settle"), [job])
    b.branch(block["end"])
    b.position_at_end(block["end"])
    answer = b.phi(_I64)
    answer.add_incoming(_minus(not_open, block["not_open"]), block["not_open"])
    answer.add_incoming(result, block["close"])
    answer.add_incoming(result, block["settle"])
    b.ret(answer)


def _minus(number: Any, block: Any) -> Any:
    """The negative of a 32-bit number, made before the end of a block that is complete."""
    b = ir.IRBuilder(block)
    b.position_before(block.terminator)
    return b.sub(_I64(0), b.sext(number, _I64))


class _Libc:
    """Calls of the C library."""

    def __init__(self, module: ir.Module, builder: Any) -> None:
        self._module = module
        self._b = builder

    def call(self, name: str, result: Any, arguments: list[Any], variadic: bool = False) -> Any:
        """Call a function."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments], var_arg=variadic)
        return self._b.call(ir.Function(self._module, kind, name), arguments)

    def errno(self) -> Any:
        """The number of the last error."""
        name = "__errno_location"
        found = self._module.globals.get(name) or ir.Function(
            self._module, ir.FunctionType(_I32.as_pointer(), []), name
        )
        return self._b.load(self._b.call(found, []))
