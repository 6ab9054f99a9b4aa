"""Decimal text of float arrays: shortest round-trip formatting and exact parsing, compiled by Numba.

Formatting is Schubfach (R. Giulietti, "The Schubfach way to render doubles", 2020), parsing is Eisel-Lemire (D. Lemire,
"Number parsing at a gigabyte per second", 2021). `dragoman.native.float_text` loads this module; see
docs/why/float-text.md before you change it. The rules that keep it correct and fast:

- Both operands of an arithmetic operator are uint64, or both are int64. Numba follows NumPy: uint64 + int64 is float64.
- An index is uint64; a signed one gets code for negative indices.
- Tables are global arrays, which Numba compiles in as constants. LLVM uses no vectors if they could overlap the output.
- All functions stay in this file: Numba's cache does not notice changes in other modules.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint8, uint64
from numba.extending import intrinsic

from dragoman.native.powers_of_ten import FORMAT_POWERS, LEAST, PARSE_POWERS

MAX_BYTES = 26  # of one number with its comma
SPARE_BYTES = 32  # written, but not used, behind the last number
END = b"]" + bytes(15)  # must follow a text that is parsed, so that 8 bytes can be loaded anywhere in it

_U64, _U128 = ir.IntType(64), ir.IntType(128)


@intrinsic
def _wide_vectors(typing: Any) -> Any:
    """Let LLVM use vectors of 512 bits in the calling function; for Intel's processors it prefers 256 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # its own `add` knows fewer attributes
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _multiply_high(typing: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the product of two uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.mul(*(builder.zext(each, _U128) for each in args))
        return builder.trunc(builder.lshr(wide, ir.Constant(_U128, 64)), _U64)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def _leading_zeros(typing: Any, a: Any) -> Any:
    """Return the number of leading zero bits of a uint64; 64 for zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def _trailing_zeros(typing: Any, a: Any) -> Any:
    """Return the number of trailing zero bits of a uint64; 64 for zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


def _address(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    start = context.make_array(array)(context, builder, data).data
    return builder.bitcast(builder.gep(start, [index]), _U64.as_pointer())


@intrinsic
def _load8(typing: Any, text: Any, at: Any) -> Any:
    """Return 8 bytes of a uint8 array from index `at` as a little-endian uint64. Does not check bounds."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *args), align=1)

    return types.uint64(text, types.uint64), build


@intrinsic
def _store8(typing: Any, text: Any, at: Any, value: Any) -> Any:
    """Write a uint64 as 8 little-endian bytes into a uint8 array at index `at`. Does not check bounds."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(text, types.uint64, types.uint64), build


# --- formatting ------------------------------------------------------------------------------------------------------

_TENS = np.array([10**e for e in range(20)], np.uint64)
_ZEROS = uint64(0x3030303030303030)  # the characters "00000000"
_OFFSET = int64(-LEAST)
_NULL, _ZERO = uint64(0x2C6C6C756E), uint64(0x2C302E30)  # the characters "null," and "0.0,"
_1E8 = uint64(10**8)
_LOW_HALF, _LOW_BITS = uint64(0xFFFFFFFF), uint64(0x1FF)
_BLOCK = 64  # numbers whose digits are found together


@njit(inline="always")
def _vector_multiply_high(a: Any, b: Any) -> Any:
    """As `_multiply_high`, by halves of 32 bits, since vectors of 128-bit integers do not exist."""
    a0, a1 = a & _LOW_HALF, a >> uint64(32)
    b0, b1 = b & _LOW_HALF, b >> uint64(32)
    c01, c10 = a0 * b1, a1 * b0
    middle = ((a0 * b0) >> uint64(32)) + (c01 & _LOW_HALF) + (c10 & _LOW_HALF)
    return a1 * b1 + (c01 >> uint64(32)) + (c10 >> uint64(32)) + (middle >> uint64(32))


@njit(inline="always")
def _round_to_odd(high: Any, low: Any, factor: Any, double: Any) -> Any:
    """The upper 64 bits of the product of a power and a factor; the last bit is set if any bit below is.

    For float32 the factor is below 2**32, and the upper half of the power is enough.
    """
    if not double:
        power = high + uint64(low != uint64(0))
        product = (power >> uint64(32)) * factor + (((power & _LOW_HALF) * factor) >> uint64(32))
        return (product >> uint64(32)) | uint64((product & _LOW_HALF) > uint64(1))
    carry = _vector_multiply_high(low, factor)
    lower = high * factor
    middle = lower + carry
    upper = _vector_multiply_high(high, factor) + uint64(middle < carry)
    return upper | uint64(middle > uint64(1))


@njit(inline="always")
def _shortest(fraction: Any, exponent: Any, hidden_bit: Any, bias: Any, double: Any) -> Any:
    """Digits and power of ten of the shortest decimal that rounds to this float. The names are those of the paper."""
    subnormal = exponent == int64(0)
    c = fraction if subnormal else fraction | hidden_bit
    q = int64(1) - bias if subnormal else exponent - bias
    closer = uint64((fraction == uint64(0)) & (exponent > int64(1)))
    k = (q * int64(1262611) - int64(closer) * int64(524031)) >> int64(22)
    h = uint64(q + ((-k * int64(1741647)) >> int64(19)) + int64(1))
    row = uint64(max(_OFFSET - k, int64(0)))
    high, low = FORMAT_POWERS[row, uint64(0)], FORMAT_POWERS[row, uint64(1)]
    c4 = c << uint64(2)
    lower = _round_to_odd(high, low, (c4 - uint64(2) + closer) << h, double)
    middle = _round_to_odd(high, low, c4 << h, double)
    upper = _round_to_odd(high, low, (c4 + uint64(2)) << h, double)
    odd = c & uint64(1)
    lower, upper = lower + odd, upper - odd
    s = middle >> uint64(2)
    tenth = _vector_multiply_high(s, uint64(0xCCCCCCCCCCCCCCCD)) >> uint64(3)
    short = tenth * uint64(40)
    down, up = lower <= short, short + uint64(40) <= upper
    shorter = (down != up) & (s > uint64(9))
    near = s << uint64(2)
    below, above = lower <= near, near + uint64(4) <= upper
    half = near + uint64(2)
    round_up = (middle > half) | ((middle == half) & ((s & uint64(1)) == uint64(1)))
    digits = s + uint64(above if below != above else round_up)
    return (tenth + uint64(up) if shorter else digits), k + int64(shorter)


@njit(inline="always")
def _eight_digits(number: Any) -> Any:
    """A number below 10**8 as eight bytes 0 to 9, the first digit in the lowest byte."""
    fours = number + ((number * uint64(109951163)) >> uint64(40)) * uint64((1 << 32) - 10000)
    twos = fours + (((fours * uint64(5243)) >> uint64(19)) & uint64(0x7F0000007F)) * uint64((1 << 16) - 100)
    x = twos + (((twos * uint64(103)) >> uint64(10)) & uint64(0x000F000F000F000F)) * uint64((1 << 8) - 10)
    x = ((x & uint64(0x00FF00FF00FF00FF)) << uint64(8)) | ((x >> uint64(8)) & uint64(0x00FF00FF00FF00FF))
    x = ((x & uint64(0x0000FFFF0000FFFF)) << uint64(16)) | ((x >> uint64(16)) & uint64(0x0000FFFF0000FFFF))
    return (x << uint64(32)) | (x >> uint64(32))


@njit(inline="always")
def _characters(digits: Any, power: Any) -> Any:
    """The first of 17 digits, the other 16 as characters, the number of significant digits, and the position of the
    decimal point."""
    digit_count = ((uint64(64) - _leading_zeros(digits)) * uint64(1233)) >> uint64(12)
    digit_count += uint64(_TENS[digit_count] <= digits)
    digits *= _TENS[uint64(17) - digit_count]
    upper = _vector_multiply_high(digits, uint64(0xABCC77118461CEFD)) >> uint64(26)  # divided by 10**8
    lower = _eight_digits(digits - upper * _1E8)
    first = (upper * uint64(-(-(1 << 57) // 10**8))) >> uint64(57)
    middle = _eight_digits(upper - first * _1E8)
    count = uint64(9) - (_leading_zeros(middle) >> uint64(3))
    count = count if lower == uint64(0) else uint64(17) - (_leading_zeros(lower) >> uint64(3))
    return first, middle | _ZEROS, lower | _ZEROS, count, power + int64(digit_count)


@njit(inline="always")
def _write_plain(text: Any, at: Any, head: Any, middle: Any, lower: Any, count: Any, point: Any) -> Any:
    """Write a number with the point behind its first digit or later (12.3, 120.0); return the index behind it."""
    p = uint64(point)
    text[at] = head
    _store8(text, at + uint64(1), middle)
    _store8(text, at + uint64(9), lower)
    # The digits behind the point move by one byte. They are taken from the words, not from memory just written.
    bits = (p - uint64(1)) << uint64(3)
    if bits < uint64(64):
        _store8(text, at + p + uint64(1), (middle >> bits) | ((lower << uint64(1)) << (uint64(63) - bits)))
        _store8(text, at + p + uint64(9), lower >> bits)
    else:
        _store8(text, at + p + uint64(1), lower >> (bits - uint64(64)))
    text[at + p] = uint8(46)
    return at + (count + uint64(1) if count > p else p + uint64(2))


@njit(inline="always")
def _write_scientific(text: Any, at: Any, head: Any, middle: Any, lower: Any, count: Any, scale: Any) -> Any:
    """Write a number with an exponent; return the index behind it."""
    text[at] = head
    text[at + uint64(1)] = uint8(46)
    _store8(text, at + uint64(2), middle)
    _store8(text, at + uint64(10), lower)
    at += uint64(1) if count == uint64(1) else count + uint64(1)
    text[at] = uint8(101)
    text[at + uint64(1)] = uint8(45 if scale < int64(0) else 43)
    at += uint64(2)
    size = uint64(abs(scale))
    if size > uint64(99):
        text[at] = uint8(size // uint64(100) + uint64(48))
        at += uint64(1)
    if size > uint64(9):
        text[at] = uint8(size // uint64(10) % uint64(10) + uint64(48))
        at += uint64(1)
    text[at] = uint8(size % uint64(10) + uint64(48))
    return at + uint64(1)


@njit(inline="always")
def _write(
    text: Any, at: Any, first: Any, middle: Any, lower: Any, count: Any, point: Any, least: Any, most: Any
) -> Any:
    """Write one positive finite number; return the index behind it."""
    head = uint8(first + uint64(48))
    if least < point <= int64(0):  # 0.00123
        _store8(text, at, uint64(0x3030303030302E30))
        at += uint64(int64(2) - point)
        text[at] = head
        _store8(text, at + uint64(1), middle)
        _store8(text, at + uint64(9), lower)
        return at + count
    if int64(0) < point <= most:
        return _write_plain(text, at, head, middle, lower, count, point)
    return _write_scientific(text, at, head, middle, lower, count, point - int64(1))


def _formatter(mantissa_bits: int, exponent_bits: int, least_point: int, most_point: int) -> Any:
    """The formatter of one IEEE 754 format. Numbers with the point outside of a range get an exponent."""
    double = mantissa_bits > 32
    hidden_bit = uint64(1 << mantissa_bits)
    fraction_mask = uint64((1 << mantissa_bits) - 1)
    size_mask = uint64((1 << (mantissa_bits + exponent_bits)) - 1)
    sign_shift, fraction_shift = uint64(mantissa_bits + exponent_bits), uint64(mantissa_bits)
    infinity = uint64(((1 << exponent_bits) - 1) << mantissa_bits)
    bias = int64((1 << (exponent_bits - 1)) - 1 + mantissa_bits)
    least, most = int64(least_point), int64(most_point)

    @njit(nogil=True, error_model="numpy", cache=True)
    def format_floats(bits: Any, text: Any) -> Any:
        """Write the numbers of these bits, a comma behind each, NaN and infinities as null; return the length."""
        _wide_vectors()
        at = uint64(0)
        first, middle, lower = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
        count, point = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.int64)
        for start in range(0, len(bits), _BLOCK):
            block = bits[start : start + _BLOCK]
            for i in range(uint64(len(block))):  # without branches: LLVM turns this loop into vector instructions
                size = uint64(block[i]) & size_mask
                digits, power = _shortest(size & fraction_mask, int64(size >> fraction_shift), hidden_bit, bias, double)
                first[i], middle[i], lower[i], count[i], point[i] = _characters(digits, power)
            for i in range(uint64(len(block))):
                size = uint64(block[i]) & size_mask
                if size >= infinity:
                    _store8(text, at, _NULL)
                    at += uint64(5)
                    continue
                text[at] = uint8(45)
                at += uint64(block[i]) >> sign_shift
                if size == uint64(0):
                    _store8(text, at, _ZERO)
                    at += uint64(4)
                    continue
                at = _write(text, at, first[i], middle[i], lower[i], count[i], point[i], least, most)
                text[at] = uint8(44)
                at += uint64(1)
        return at

    return format_floats


format_float64 = _formatter(52, 11, -5, 16)
format_float32 = _formatter(23, 8, -6, 13)

# --- parsing -------------------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def _non_digits(eight: Any) -> Any:
    """The highest bit of each byte that is above 9."""
    return ((eight + uint64(0x7676767676767676)) | eight) & uint64(0x8080808080808080)


@njit(error_model="numpy")
def _value(eight: Any) -> Any:
    """The number of eight digits, a byte each, the first digit in the lowest byte."""
    twos = eight * uint64(10) + (eight >> uint64(8))
    even, odd = twos & uint64(0x000000FF000000FF), (twos >> uint64(16)) & uint64(0x000000FF000000FF)
    return (even * uint64((10**6 << 32) + 100) + odd * uint64((10**4 << 32) + 1)) >> uint64(32)


@njit(error_model="numpy")
def _digits(text: Any, at: Any, value: Any) -> Any:
    """Append the digits from `at` on to a value; return it and the index behind them."""
    eight = _load8(text, at) ^ _ZEROS
    stops = _non_digits(eight)
    while stops == uint64(0):
        value = value * uint64(10**8) + _value(eight)
        at += uint64(8)
        eight = _load8(text, at) ^ _ZEROS
        stops = _non_digits(eight)
    count = _trailing_zeros(stops) >> uint64(3)
    eight = (eight << ((uint64(7) - count) << uint64(3))) << uint64(8)
    return value * _TENS[count] + _value(eight), at + count


@njit(inline="always")
def _integer_part(text: Any, at: Any) -> Any:
    """The digits before the point and the index behind them. One digit, the common case, takes a sixth less time."""
    digit = uint64(text[at]) - uint64(48)
    if text[at + uint64(1)] == 46 and digit < uint64(10):
        return digit, at + uint64(1)
    return _digits(text, at, uint64(0))


@njit(error_model="numpy")
def _skip_space(text: Any, at: Any) -> Any:
    while text[at] == 32 or text[at] == 10 or text[at] == 13 or text[at] == 9:
        at += uint64(1)
    return at


@njit(error_model="numpy")
def _zeros_before(text: Any, at: Any) -> Any:
    """The number of zeros before the first other digit."""
    zeros = int64(0)
    while text[at] == 48 or text[at] == 46:
        zeros += int64(text[at] == 48)
        at += uint64(1)
    return zeros


@njit(error_model="numpy")
def _exponent(text: Any, at: Any) -> Any:
    """The exponent behind an e, and the index behind it; 0 as index if there is none, or one beyond any float."""
    down = text[at] == 45
    at += uint64(down or text[at] == 43)
    first, scale = at, int64(0)
    while uint64(text[at]) - uint64(48) < uint64(10):
        scale = min(scale * int64(10) + int64(text[at]) - int64(48), int64(10000))
        at += uint64(1)
    return (-scale if down else scale), (uint64(0) if at == first or scale == int64(10000) else at)


@njit(error_model="numpy")
def _double(digits: Any, exponent: Any) -> Any:
    """The bits of the double nearest to digits * 10**exponent, 0 if that is not a normal number. digits > 0."""
    row = uint64(exponent - int64(LEAST))
    leading = _leading_zeros(digits)
    digits <<= leading
    high, low = _multiply_high(digits, PARSE_POWERS[row, uint64(0)]), digits * PARSE_POWERS[row, uint64(0)]
    if (high & _LOW_BITS) == _LOW_BITS:  # the bits below may carry into these
        more = _multiply_high(digits, PARSE_POWERS[row, uint64(1)])
        low += more
        high += uint64(low < more)
    top = high >> uint64(63)
    mantissa = high >> (top + uint64(9))
    exact = ((mantissa << (top + uint64(9))) == high) & (low <= uint64(1))
    if exact and (mantissa & uint64(3)) == uint64(1) and int64(-5) < exponent < int64(24):
        mantissa ^= uint64(1)  # halfway between two doubles: to the even one
    mantissa = (mantissa + (mantissa & uint64(1))) >> uint64(1)
    carry = mantissa >> uint64(53)
    power = ((exponent * int64(217706)) >> int64(16)) + int64(1086) + int64(top) - int64(leading) + int64(carry)
    if not int64(0) < power < int64(2047):
        return uint64(0)
    return ((mantissa >> carry) & uint64((1 << 52) - 1)) | (uint64(power) << uint64(52))


@njit(nogil=True, error_model="numpy", cache=True)
def parse_floats(text: Any, numbers: Any) -> Any:
    """Read the numbers of a JSON array behind its bracket into an array; return their count.

    Return -1, for a general parser to decide, if there are more than fit, or anything but plain numbers: also more than
    19 digits, subnormal numbers, overflow and -0.
    """
    at, count, mark = uint64(0), uint64(0), uint64(44)
    single = numbers.itemsize == 4
    while mark == uint64(44):
        at = _skip_space(text, at)
        if count == uint64(numbers.size):
            return -1
        negative = text[at] == 45
        at += uint64(negative)
        start, power = at, int64(0)
        digits, at = _integer_part(text, at)
        digit_count = int64(at - start)
        if digit_count == int64(0) or (digit_count > int64(1) and text[start] == 48):
            return -1
        if text[at] == 46:
            point = at + uint64(1)
            digits, at = _digits(text, point, digits)
            power = int64(point - at)
            if power == int64(0):
                return -1
            digit_count -= power
        if digits == uint64(0) and negative and power == int64(0):
            return -1  # -0 is an integer, without a sign, to other parsers
        if digit_count > int64(19) and digit_count - _zeros_before(text, start) > int64(19):
            return -1
        if text[at] | 32 == 101:
            scale, at = _exponent(text, at + uint64(1))
            if at == uint64(0):
                return -1
            power += scale
        bits = uint64(0)
        if digits != uint64(0):
            bits = _double(digits, power) if int64(-343) < power < int64(309) else uint64(0)
            if bits == uint64(0):
                return -1
        numbers[count] = np.uint64(bits | (uint64(negative) << uint64(63))).view(np.float64)
        if single and not abs(numbers[count]) < np.inf:
            return -1
        count += uint64(1)
        at = _skip_space(text, at)
        mark = uint64(text[at])
        at += uint64(1)
    return int64(count) if mark == uint64(93) else int64(-1)


def fill_cache() -> None:
    """Compile every kernel into Numba's cache."""
    text = np.empty(MAX_BYTES + SPARE_BYTES, np.uint8)
    format_float64(np.zeros(1, np.uint64), text)
    format_float32(np.zeros(1, np.uint32), text)
    for dtype in (np.float64, np.float32):
        parse_floats(np.frombuffer(b"0.5" + END, np.uint8), np.empty(1, dtype))
