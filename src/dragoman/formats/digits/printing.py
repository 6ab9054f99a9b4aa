"""Machine code that prints floats in the fewest digits that tell them apart, eight at a time.

The digits are found by Schubfach (R. Giulietti, "The Schubfach way to render doubles", 2020): the decimals of a length
that lie between the middles to a float's neighbours, by products with a power of ten that are rounded to odd. What is
the same for all floats is computed in eight lanes; their texts, which differ in length, are then put one after another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from dragoman.formats.digits.floats import Float
from dragoman.formats.digits.powers import ENTRY_BYTES, EXACT, EXACT_HALF, LEAST, ROUNDED_UP
from dragoman.native.code import INT32, INT64, INT64_VECTOR, POINTER, Code, Value, Variable

AT_ONCE = INT64_VECTOR.count
# The most that a number takes, with the comma behind it; so much more is written to behind the last one.
MOST_BYTES, MORE_BYTES = 26, 32

_HALF = (1 << 32) - 1
_ZEROS = 0x3030303030303030  # "0" in each byte
_TENTH, _TENTH_HALF = 0xCCCCCCCCCCCCCCCD, 0xCCCCCCCD  # 2^67 / 10 and 2^35 / 10, rounded up


def write_printer(module: ir.Module, kind: Float) -> None:
    """The function `print_fp32` or `print_fp64`: numbers, how many, memory for their text, `powers`, `small_powers`.

    The text is that of an array without its brackets, with a comma behind each; it gives its length. What is no number
    is `null`. The numbers are read in eights, MOST_BYTES each and MORE_BYTES are written to.
    """
    code = Code(module, f"print_{kind.name}", [POINTER, INT64, POINTER, POINTER, POINTER], returns_int=True)
    numbers, count, text, powers, tens = code.arguments
    at = Variable(code, code.integer(0))
    places = {name: code.allocate(INT64_VECTOR) for name in _Printed.__slots__}
    with code.loop(code.integer(0), count, AT_ONCE) as first:
        found = _printed(code, kind, _loaded(numbers, first * kind.bytes, kind), powers, tens)
        for name, place in places.items():
            place.store(getattr(found, name))
        left = count - first
        stop = (left < AT_ONCE).select(left, code.integer(AT_ONCE))
        with code.loop(code.integer(0), stop) as lane:
            _put(code, kind, text, at, {name: place.load(INT64, lane * 8) for name, place in places.items()})
    code.return_value(at.get())


def _loaded(numbers: Value, offset: Value, kind: Float) -> Value:
    """The bits of eight numbers, in lanes of 64."""
    if kind.double:
        return numbers.load(INT64_VECTOR, offset)
    return numbers.load(ir.VectorType(INT32, AT_ONCE), offset).zero_extend(INT64_VECTOR)


# --- digits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Printed:
    """A number's text, in lanes: at `start` its `first` digit, then 16 bytes in which the point stands, then the `last`
    digit; `length` of it count. `plain` where it is written so, and not with an exponent, or as a word."""

    plain: Value
    sign: Value
    size: Value
    start: Value
    length: Value
    first: Value
    upper: Value
    lower: Value
    last: Value
    digits: Value
    point: Value
    upper_digits: Value
    lower_digits: Value


def _printed(code: Code, kind: Float, bits: Value, powers: Value, tens: Value) -> _Printed:
    sign, size = bits >> (kind.mantissa + kind.exponent), bits & ((1 << (kind.mantissa + kind.exponent)) - 1)
    digits, exponent = _shortest(code, kind, size, powers)
    shown = ((code.lanes8(64) - _leading(digits)) * 1233) >> 12  # log10, or one more
    count = shown + _gathered(tens, shown << 3).unsigned_less_equal(digits).to_int()
    point = exponent + count  # behind so many digits
    first, upper, lower = _apart(kind, digits * _gathered(tens, (code.lanes8(kind.digits) - count) << 3))
    count = code.lanes8(9) - (_leading(upper) >> 3)
    if kind.double:
        count = lower.equal(0).select(count, code.lanes8(17) - (_leading(lower) >> 3))
    small = point < 1
    start = small.select(code.lanes8(2) - point, 0)
    length = small.select(start + count, (count < point + 1).select(point + 2, count + 1))
    before, behind = _with_point(upper | _ZEROS, lower | _ZEROS, small.select(17, point))
    finite = size.unsigned_less(((1 << kind.exponent) - 1) << kind.mantissa) & code.lanes8(0).unsigned_less(size)
    plain = finite & (code.lanes8(kind.least) < point) & (point < kind.most + 1)
    return _Printed(
        plain.to_int(), sign, size, start, length, first + 48, before, behind, (lower >> 56) + 48, count, point, upper,
        lower,
    )  # fmt: skip


def _shortest(code: Code, kind: Float, size: Value, powers: Value) -> tuple[Value, Value]:
    """The decimal digits of positive floats, and the exponent of ten of the last one. The names are the paper's."""
    fraction, exponent = size & ((1 << kind.mantissa) - 1), size >> kind.mantissa
    tiny = exponent.equal(0)
    c = tiny.select(fraction, fraction | (1 << kind.mantissa))
    q = tiny.select(code.lanes8(1 - kind.bias), exponent - kind.bias)
    closer = fraction.equal(0) & code.lanes8(1).unsigned_less(exponent)  # to the neighbour below, at a power of two
    k = (q * 1262611 - closer.select(code.lanes8(524031), 0)).shift_right(22)
    e = code.lanes8(0) - k
    h = q + (e * 1741647).shift_right(19) + 1
    entry = (e - LEAST) * ENTRY_BYTES
    g = _gathered(powers, entry)  # rounded up, where it is not exact
    if kind.double:
        g_low = _gathered(powers, entry + 8) + (e - ROUNDED_UP).unsigned_less_equal(EXACT - ROUNDED_UP).select(
            code.lanes8(0), 1
        )
        below, middle, above = _double_products(code, (g, g_low), c << 2, h, closer)
    else:
        g = g + e.unsigned_less_equal(EXACT_HALF).select(code.lanes8(0), 1)
        wide = (c << 2) - closer.select(code.lanes8(1), 2)
        below, middle, above = (_odd_product(g, each << h) for each in (wide, c << 2, (c << 2) + 2))
    odd = c & 1
    return _chosen(kind, below + odd, middle, above - odd, k)


def _chosen(kind: Float, lower: Value, middle: Value, upper: Value, k: Value) -> tuple[Value, Value]:
    """Of the decimals between two bounds the one with fewer digits, else the closest."""
    s = middle >> 2
    tenth = _product(s, middle.code.lanes8(_TENTH))[0] >> 3 if kind.double else (s * _TENTH_HALF) >> 35
    short = (tenth << 5) + (tenth << 3)
    down, up = lower.unsigned_less_equal(short), (short + 40).unsigned_less_equal(upper)
    shorter = (down ^ up) & middle.code.lanes8(9).unsigned_less(s)
    near = s << 2
    below, above = lower.unsigned_less_equal(near), (near + 4).unsigned_less_equal(upper)
    half = near + 2
    rounded = half.unsigned_less(middle) | (middle.equal(half) & (s & 1).equal(1))
    found = (below ^ above).select(s + above.to_int(), s + rounded.to_int())
    return shorter.select(tenth + up.to_int(), found), k + shorter.to_int()


def _odd_product(g: Value, factor: Value) -> Value:
    """The upper bits of the product with a factor of 32 bits, the last one set where anything is behind it."""
    upper = (g >> 32) * factor + (((g & _HALF) * factor) >> 32)
    return (upper >> 32) | g.code.lanes8(1).unsigned_less(upper & _HALF).to_int()


def _double_products(
    code: Code, power: tuple[Value, Value], c: Value, h: Value, closer: Value
) -> tuple[Value, Value, Value]:
    """As `_odd_product`, of 128 bits, for a number and the middles to its neighbours: that of the number, less and
    more what lies between."""
    upper, lower = power
    carried, low = _product(lower, c << h)
    high, middle = _product(upper, c << h)
    middle = middle + carried
    product = (high + middle.unsigned_less(carried).to_int(), middle, low)

    def between(shift: Value) -> tuple[Value, Value, Value]:
        rest = code.lanes8(64) - shift
        return upper >> rest, (upper << shift) | (lower >> rest), lower << shift

    above, below = between(h + 1), between(h)
    chosen = tuple(closer.select(near, far) for near, far in zip(below, above, strict=True))
    return _odd(_less(product, chosen)), _odd(product), _odd(_more(product, above))


def _more(number: tuple[Value, ...], added: tuple[Value, ...]) -> tuple[Value, ...]:
    low = number[2] + added[2]
    middle = number[1] + added[1]
    carried = middle + low.unsigned_less(number[2]).to_int()
    high = number[0] + added[0] + middle.unsigned_less(number[1]).to_int() + carried.unsigned_less(middle).to_int()
    return high, carried, low


def _less(number: tuple[Value, ...], taken: tuple[Value, ...]) -> tuple[Value, ...]:
    borrowed = number[2].unsigned_less(taken[2]).to_int()
    middle = number[1] - taken[1]
    high = number[0] - taken[0] - number[1].unsigned_less(taken[1]).to_int() - middle.unsigned_less(borrowed).to_int()
    return high, middle - borrowed, number[2] - taken[2]


def _odd(number: tuple[Value, ...]) -> Value:
    return number[0] | number[0].code.lanes8(1).unsigned_less(number[1]).to_int()


def _product(one: Value, other: Value) -> tuple[Value, Value]:
    """The upper and the lower 64 bits."""
    (low, high), (other_low, other_high) = ((each & _HALF, each >> 32) for each in (one, other))
    least, cross, second, most = low * other_low, low * other_high, high * other_low, high * other_high
    middle = (least >> 32) + (cross & _HALF) + (second & _HALF)
    return most + (cross >> 32) + (second >> 32) + (middle >> 32), (middle << 32) | (least & _HALF)


# --- text --------------------------------------------------------------------------------------------------------


def _apart(kind: Float, digits: Value) -> tuple[Value, Value, Value]:
    """The first digit, the next eight and, of 17, the last eight, a byte each and the first of them lowest."""
    code = digits.code
    upper, lower = digits, code.lanes8(0)
    if kind.double:  # by 10^8: by 2^8, and by 5^8 as a product with 2^82 / 5^8
        upper = _product(digits >> 8, code.lanes8(-(-(1 << 82) // 5**8)))[0] >> 18
        lower = _bytes(digits - upper * 10**8)
    first = ((upper >> 8) * -(-(1 << 42) // 5**8)) >> 42
    return first, _bytes(upper - first * 10**8), lower


def _bytes(eight: Value) -> Value:
    """The eight digits of a number as bytes: it is halved into four and four, two and two, and one and one, in place,
    each time by a product and a shift in place of a division."""
    eight = eight + ((eight * 109951163) >> 40) * ((1 << 32) - 10000)
    fours = eight.bitcast(ir.VectorType(INT32, 2 * AT_ONCE))
    fours = fours + ((fours * 5243) >> 19) * ((1 << 16) - 100)
    twos = fours.bitcast(ir.VectorType(ir.IntType(16), 4 * AT_ONCE))
    twos = twos + ((twos * 103) >> 10) * ((1 << 8) - 10)
    return eight.code.call_external(f"llvm.bswap.v{AT_ONCE}i64", INT64_VECTOR, twos.bitcast(INT64_VECTOR))


def _with_point(upper: Value, lower: Value, place: Value) -> tuple[Value, Value]:
    """16 characters behind a first one, of which a point stands behind `place`, counted with that one; 17: nowhere."""
    code = upper.code
    bits = (place - 1) << 3
    within, bound = bits.unsigned_less(64), bits.unsigned_less(128)
    one, point = code.lanes8(1) << (bits & 63), code.lanes8(ord(".")) << (bits & 63)
    kept_upper = within.select(one - 1, -1)
    kept_lower = within.select(code.lanes8(0), bound.select(one - 1, -1))
    moved_upper, moved_lower = upper & (kept_upper ^ -1), lower & (kept_lower ^ -1)
    before = (upper & kept_upper) | (moved_upper << 8) | within.select(point, 0)
    behind = (lower & kept_lower) | (moved_lower << 8) | (moved_upper >> 56)
    return before, behind | (bound & (within ^ code.all_lanes_true())).select(point, 0)


def _put(code: Code, kind: Float, text: Value, at: Variable, number: Mapping[str, Value]) -> None:
    """Write one number and a comma at the end of the text."""
    begin = text + at.get()
    begin.store_bytes(b"-")
    where = begin + number["sign"]

    def plain() -> None:
        where.store_bytes(b"0.000000")
        _put_digits(where + number["start"], number["first"], number["upper"], number["lower"])
        (where + number["start"]).store_byte(number["last"], 17)
        where.store_bytes(b",", number["length"])
        at.set(at.get() + number["sign"] + number["length"] + 1)

    def strange() -> None:
        size = number["size"]
        code.if_else(size.equal(0), lambda: zero(), lambda: code.if_else(size.unsigned_less(none), scientific, word))

    def zero() -> None:
        where.store_bytes(b"0.0,")
        at.set(at.get() + number["sign"] + 4)

    def word() -> None:
        begin.store_bytes(b"null,")
        at.set(at.get() + 5)

    def scientific() -> None:
        at.set(at.get() + number["sign"] + _put_scientific(code, where, number))

    none = ((1 << kind.exponent) - 1) << kind.mantissa
    code.if_else(number["plain"].equal(1), plain, strange)


def _put_digits(where: Value, first: Value, upper: Value, lower: Value) -> None:
    where.store_byte(first)
    where.store(upper, 1)
    where.store(lower, 9)


def _put_scientific(code: Code, where: Value, number: Mapping[str, Value]) -> Value:
    """Write a number with an exponent, which may be of three digits, and a comma; gives the length."""
    _put_digits(where + 1, number["first"], number["upper_digits"] | _ZEROS, number["lower_digits"] | _ZEROS)
    where.store_byte(number["first"])
    where.store_bytes(b".", 1)
    end = number["digits"].equal(1).select(code.integer(1), number["digits"] + 1)
    power = number["point"] - 1
    negative = power < 0
    power = negative.select(code.integer(0) - power, power)
    where.store_bytes(b"e", end)
    where.store_byte(negative.select(code.integer(ord("-")), ord("+")), end + 1)
    end = end + 2
    hundreds, rest = power // 100, power % 100
    for digit, shown in ((hundreds, code.integer(99) < power), (rest // 10, code.integer(9) < power)):
        where.store_byte(digit + 48, end)
        end = end + shown.zero_extend(INT64)
    where.store_byte(rest % 10 + 48, end)
    where.store_bytes(b",", end + 1)
    return end + 2


# --- lanes -------------------------------------------------------------------------------------------------------


def _leading(number: Value) -> Value:
    """How many zeros each lane begins with, 64 if it is zero."""
    return number.code.call_external(f"llvm.ctlz.v{AT_ONCE}i64", INT64_VECTOR, number, number.code.boolean(False))


def _gathered(where: Value, offsets: Value) -> Value:
    """The integers so many bytes behind an address, for each lane."""
    code, build = where.code, where.code.build
    base = build.ptrtoint(where.value, INT64)
    none = ir.Constant(INT64_VECTOR, ir.Undefined)
    everywhere = build.shuffle_vector(
        build.insert_element(none, base, ir.Constant(INT32, 0)), none, ir.Constant(ir.VectorType(INT32, AT_ONCE), None)
    )
    pointers: Any = build.inttoptr(build.add(everywhere, offsets.value), ir.VectorType(POINTER, AT_ONCE))
    name = f"llvm.masked.gather.v{AT_ONCE}i64.v{AT_ONCE}p0"
    aligned = Value(code, ir.Constant(INT32, 8))
    return code.call_external(name, INT64_VECTOR, Value(code, pointers), aligned, code.all_lanes_true(), code.lanes8(0))
