"""Powers of ten to 128 bits, for `float_kernels`."""

import numpy as np

LEAST, MOST = -342, 324
_FIRST_ROUNDED_UP = -27


def _power(exponent: int, *, up: bool) -> tuple[int, int]:
    """The first 128 bits of 10**exponent as two integers of 64 bits, rounded up or down."""
    above, below = (10**exponent, 1) if exponent >= 0 else (1, 10**-exponent)
    shift = 127 - (above.bit_length() - below.bit_length())
    if (above << max(shift, 0)) < (below << max(-shift, 0)) << 127:
        shift += 1
    bits, rest = divmod(above << max(shift, 0), below << max(-shift, 0))
    bits += bool(rest) and up
    return bits >> 64, bits & (2**64 - 1)


# Schubfach needs each power rounded up; Eisel-Lemire needs it rounded down, except 10**-27 to 10**-1.
FORMAT_POWERS = np.array([_power(e, up=True) for e in range(LEAST, MOST + 1)], np.uint64)
PARSE_POWERS = np.array([_power(e, up=_FIRST_ROUNDED_UP <= e < 0) for e in range(LEAST, MOST + 1)], np.uint64)
