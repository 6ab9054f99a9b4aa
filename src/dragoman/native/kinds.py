"""The kinds of numbers that machine code computes with."""

from llvmlite import ir

LANES = 16
INT, WORD, BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
FLOAT, POINTER, NOTHING = ir.FloatType(), ir.PointerType(), ir.VoidType()


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types to check
    """LLVM's `bfloat`, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VECTOR = ir.VectorType(FLOAT, LANES)
BITS = ir.VectorType(WORD, LANES)  # of a vector
HALVES, PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)
EIGHT = ir.VectorType(INT, 8)
