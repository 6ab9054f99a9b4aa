"""The formats of floats that are read and printed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Float:
    """A format of IEEE 754. `digits`: the most that one needs; they stand with a point alone where that is behind the
    first `most` of them, or at most so many zeros, 1 - `least`, before the first."""

    name: str
    bytes: int
    mantissa: int
    exponent: int
    bias: int
    digits: int
    least: int
    most: int

    @property
    def double(self) -> bool:
        return self.bytes == 8


FP32 = Float("fp32", 4, 23, 8, 150, 9, -6, 13)
FP64 = Float("fp64", 8, 52, 11, 1075, 17, -5, 16)
