"""Emits what is done with a unit that was read: proof, claim and copy, in one function of LLVM code."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from headrace.store.native.fields import CLAIMED, FIELDS, LATE

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _I8.as_pointer()


def emit(module: ir.Module) -> None:
    """Adds `claim` and `settle`.

    `int64 claim(int64 *flag)`: whether the caller is the first to claim; for all threads.

    `int64 settle(int64 *job)`: proves the records, claims the unit and copies them, in this order. Answers, also in the
    job, the number of the first record that is wrong, or `LATE` when somebody else has claimed the unit, or `CLAIMED`.
    """
    claim = ir.Function(module, ir.FunctionType(_I64, [_I64.as_pointer()]), "claim")
    b = ir.IRBuilder(claim.append_basic_block("enter"))
    swapped = b.cmpxchg(claim.args[0], _I64(0), _I64(1), "seq_cst", "seq_cst")
    b.ret(b.zext(b.extract_value(swapped, 1), _I64))

    settle = ir.Function(module, ir.FunctionType(_I64, [_I64.as_pointer()]), "settle")
    names = ("enter", "prove", "right", "mine", "copy", "end")
    block = {name: settle.append_basic_block(name) for name in names}
    b = ir.IRBuilder(block["enter"])

    def field(name: str) -> Any:
        return b.load(b.gep(settle.args[0], [_I64(FIELDS.index(name))]))

    flag = b.inttoptr(field("flag"), _I64.as_pointer())
    count = field("count")
    free = b.icmp_signed("==", b.load_atomic(flag, "seq_cst", 8), _I64(0))
    b.cbranch(free, block["prove"], block["end"])

    b.position_at_end(block["prove"])
    sums = b.inttoptr(field("sums"), _I64.as_pointer())
    wrong = b.call(module.get_global("first_wrong"), [field("records"), field("size"), count, sums])
    b.cbranch(b.icmp_signed("==", wrong, count), block["right"], block["end"])

    b.position_at_end(block["right"])
    first = b.icmp_signed("!=", b.call(claim, [flag]), _I64(0))
    b.cbranch(first, block["mine"], block["end"])

    b.position_at_end(block["mine"])
    address = field("copy")
    argument = b.inttoptr(field("argument"), _POINTER)
    b.cbranch(b.icmp_signed("!=", address, _I64(0)), block["copy"], block["end"])

    b.position_at_end(block["copy"])
    kind = ir.FunctionType(ir.VoidType(), [_POINTER])
    b.call(b.inttoptr(address, kind.as_pointer()), [argument])
    b.branch(block["end"])

    b.position_at_end(block["end"])
    answer = b.phi(_I64)
    answer.add_incoming(_I64(LATE), block["enter"])
    answer.add_incoming(wrong, block["prove"])
    answer.add_incoming(_I64(LATE), block["right"])
    answer.add_incoming(_I64(CLAIMED), block["mine"])
    answer.add_incoming(_I64(CLAIMED), block["copy"])
    b.store(answer, b.gep(settle.args[0], [_I64(FIELDS.index("answer"))]))
    b.ret(answer)


def emit_copy_rows(module: ir.Module) -> None:
    """Adds `void copy_rows(void *argument)`.

    The argument is six int64: address of the first source row, bytes from row to row, the same of the target, bytes to
    copy of each row, and the number of rows, at least 1.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER]), "copy_rows")
    enter, row, end = (function.append_basic_block(name) for name in ("enter", "row", "end"))
    b = ir.IRBuilder(enter)
    fields = b.bitcast(function.args[0], _I64.as_pointer())
    source, source_step, target, target_step, nbytes, count = (b.load(b.gep(fields, [_I64(n)])) for n in range(6))
    b.branch(row)
    b.position_at_end(row)
    number = b.phi(_I64)
    number.add_incoming(_I64(0), enter)
    memcpy = module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, _I64])
    into = b.inttoptr(b.add(target, b.mul(number, target_step)), _POINTER)
    b.call(
        memcpy,
        [into, b.inttoptr(b.add(source, b.mul(number, source_step)), _POINTER), nbytes, ir.Constant(ir.IntType(1), 0)],
    )
    following = b.add(number, _I64(1))
    number.add_incoming(following, row)
    b.cbranch(b.icmp_signed("<", following, count), row, end)
    b.position_at_end(end)
    b.ret_void()
