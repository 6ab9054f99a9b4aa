"""The exponential function, for vectors of 16."""

from llvmlite import ir

from dragoman.native.code import Value
from dragoman.native.kinds import BITS, LANES, VECTOR


def power(exponent: Value) -> Value:
    """e to the power of each lane, to 2 units in the last place: 2^n by the exponent's bits, the rest, within
    log(2) / 2, by its series (Cody and Waite 1980). Below -87 it is e^-87, 1.6e-38, above 88 e^88."""
    code = exponent.code
    low, high = code.vector(-87.0), code.vector(88.0)
    bounded = high.least(low.most(exponent))
    # Added to 1.5 * 2^23 a number is rounded, and its integer stands in the lowest bits.
    shifted = bounded.times_plus(code.vector(1.4426950408889634), code.vector(12582912.0))
    whole = shifted - code.vector(12582912.0)
    rest = whole.times_plus(code.vector(-0.693359375), bounded)
    rest = whole.times_plus(code.vector(2.12194440e-4), rest)
    found = code.vector(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        found = found.times_plus(rest, code.vector(1 / divisor))
    build = code.build
    bits = build.add(build.bitcast(shifted.value, BITS), ir.Constant(BITS, [127] * LANES))
    return found * Value(code, build.bitcast(build.shl(bits, ir.Constant(BITS, [23] * LANES)), VECTOR))
