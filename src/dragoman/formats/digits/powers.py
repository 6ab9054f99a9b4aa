"""Powers of ten, of which decimal digits are made, to 128 bits."""

import numpy as np

LEAST, MOST = -342, 324  # exponents of ten that reading and printing doubles take
# A power is exact up to these: 5^55 has 128 bits, 5^27 has 63. Those from 10^-27 on are rounded up, the others down: a
# number that lies in the middle of two doubles is then told by its product (Lemire 2021, 5.2).
EXACT, EXACT_HALF, ROUNDED_UP = 55, 27, -27
ENTRY_BYTES = 16

_Integers = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def powers() -> _Integers:
    """[LEAST to MOST, 2]: the 128 bits that 10^e begins with, as their upper and lower half."""
    return np.array([_halves(exponent) for exponent in range(LEAST, MOST + 1)], np.uint64)


def small_powers() -> _Integers:
    """10^0 to 10^19."""
    return np.array([10**exponent for exponent in range(20)], np.uint64)


def _halves(exponent: int) -> tuple[int, int]:
    above, below = (10**exponent, 1) if exponent >= 0 else (1, 10**-exponent)
    shift = 129 - (above.bit_length() - below.bit_length())  # 129 or 130 bits
    found = (above << shift) // below if shift >= 0 else above >> -shift
    found = (found >> (found.bit_length() - 128)) + (ROUNDED_UP <= exponent < 0)
    return found >> 64, found & ((1 << 64) - 1)
