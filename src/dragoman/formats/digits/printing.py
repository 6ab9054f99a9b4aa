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
from dragoman.native.code import EIGHT, INT, POINTER, WORD, Code, Value, Variable

AT_ONCE = EIGHT.count
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
    code = Code(module, f"print_{kind.name}", [POINTER, INT, POINTER, POINTER, POINTER], gives=True)
    numbers, count, text, powers, tens = code.arguments
    at = Variable(code, code.integer(0))
    places = {name: code.room(EIGHT) for name in _Printed.__slots__}
    with code.loop(code.integer(0), count, AT_ONCE) as first:
        found = _printed(code, kind, _loaded(numbers, first * kind.bytes, kind), powers, tens)
        for name, place in places.items():
            place.put(getattr(found, name))
        left = count - first
        stop = (left < AT_ONCE).chosen(left, code.integer(AT_ONCE))
        with code.loop(code.integer(0), stop) as lane:
            _put(code, kind, text, at, {name: place.piece(INT, lane * 8) for name, place in places.items()})
    code.leave(at.get())


def _loaded(numbers: Value, offset: Value, kind: Float) -> Value:
    """The bits of eight numbers, in lanes of 64."""
    if kind.double:
        return numbers.piece(EIGHT, offset)
    return numbers.piece(ir.VectorType(WORD, AT_ONCE), offset).extended(EIGHT)


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
    shown = ((code.eight(64) - _leading(digits)) * 1233) >> 12  # log10, or one more
    count = shown + _gathered(tens, shown << 3).up_to(digits).counted()
    point = exponent + count  # behind so many digits
    first, upper, lower = _apart(kind, digits * _gathered(tens, (code.eight(kind.digits) - count) << 3))
    count = code.eight(9) - (_leading(upper) >> 3)
    if kind.double:
        count = lower.equals(0).chosen(count, code.eight(17) - (_leading(lower) >> 3))
    small = point < 1
    start = small.chosen(code.eight(2) - point, 0)
    length = small.chosen(start + count, (count < point + 1).chosen(point + 2, count + 1))
    before, behind = _with_point(upper | _ZEROS, lower | _ZEROS, small.chosen(17, point))
    finite = size.below(((1 << kind.exponent) - 1) << kind.mantissa) & code.eight(0).below(size)
    plain = finite & (code.eight(kind.least) < point) & (point < kind.most + 1)
    return _Printed(
        plain.counted(), sign, size, start, length, first + 48, before, behind, (lower >> 56) + 48, count, point, upper,
        lower,
    )  # fmt: skip


def _shortest(code: Code, kind: Float, size: Value, powers: Value) -> tuple[Value, Value]:
    """The decimal digits of positive floats, and the exponent of ten of the last one. The names are the paper's."""
    fraction, exponent = size & ((1 << kind.mantissa) - 1), size >> kind.mantissa
    tiny = exponent.equals(0)
    c = tiny.chosen(fraction, fraction | (1 << kind.mantissa))
    q = tiny.chosen(code.eight(1 - kind.bias), exponent - kind.bias)
    closer = fraction.equals(0) & code.eight(1).below(exponent)  # to the neighbour below, at a power of two
    k = (q * 1262611 - closer.chosen(code.eight(524031), 0)).halved(22)
    e = code.eight(0) - k
    h = q + (e * 1741647).halved(19) + 1
    entry = (e - LEAST) * ENTRY_BYTES
    g = _gathered(powers, entry)  # rounded up, where it is not exact
    if kind.double:
        g_low = _gathered(powers, entry + 8) + (e - ROUNDED_UP).up_to(EXACT - ROUNDED_UP).chosen(code.eight(0), 1)
        below, middle, above = _double_products(code, (g, g_low), c << 2, h, closer)
    else:
        g = g + e.up_to(EXACT_HALF).chosen(code.eight(0), 1)
        wide = (c << 2) - closer.chosen(code.eight(1), 2)
        below, middle, above = (_odd_product(g, each << h) for each in (wide, c << 2, (c << 2) + 2))
    odd = c & 1
    return _chosen(kind, below + odd, middle, above - odd, k)


def _chosen(kind: Float, lower: Value, middle: Value, upper: Value, k: Value) -> tuple[Value, Value]:
    """Of the decimals between two bounds the one with fewer digits, else the closest."""
    s = middle >> 2
    tenth = _product(s, middle.code.eight(_TENTH))[0] >> 3 if kind.double else (s * _TENTH_HALF) >> 35
    short = (tenth << 5) + (tenth << 3)
    down, up = lower.up_to(short), (short + 40).up_to(upper)
    shorter = (down ^ up) & middle.code.eight(9).below(s)
    near = s << 2
    below, above = lower.up_to(near), (near + 4).up_to(upper)
    half = near + 2
    rounded = half.below(middle) | (middle.equals(half) & (s & 1).equals(1))
    found = (below ^ above).chosen(s + above.counted(), s + rounded.counted())
    return shorter.chosen(tenth + up.counted(), found), k + shorter.counted()


def _odd_product(g: Value, factor: Value) -> Value:
    """The upper bits of the product with a factor of 32 bits, the last one set where anything is behind it."""
    upper = (g >> 32) * factor + (((g & _HALF) * factor) >> 32)
    return (upper >> 32) | g.code.eight(1).below(upper & _HALF).counted()


def _double_products(
    code: Code, power: tuple[Value, Value], c: Value, h: Value, closer: Value
) -> tuple[Value, Value, Value]:
    """As `_odd_product`, of 128 bits, for a number and the middles to its neighbours: that of the number, less and
    more what lies between."""
    upper, lower = power
    carried, low = _product(lower, c << h)
    high, middle = _product(upper, c << h)
    middle = middle + carried
    product = (high + middle.below(carried).counted(), middle, low)

    def between(shift: Value) -> tuple[Value, Value, Value]:
        rest = code.eight(64) - shift
        return upper >> rest, (upper << shift) | (lower >> rest), lower << shift

    above, below = between(h + 1), between(h)
    chosen = tuple(closer.chosen(near, far) for near, far in zip(below, above, strict=True))
    return _odd(_less(product, chosen)), _odd(product), _odd(_more(product, above))


def _more(number: tuple[Value, ...], added: tuple[Value, ...]) -> tuple[Value, ...]:
    low = number[2] + added[2]
    middle = number[1] + added[1]
    carried = middle + low.below(number[2]).counted()
    high = number[0] + added[0] + middle.below(number[1]).counted() + carried.below(middle).counted()
    return high, carried, low


def _less(number: tuple[Value, ...], taken: tuple[Value, ...]) -> tuple[Value, ...]:
    borrowed = number[2].below(taken[2]).counted()
    middle = number[1] - taken[1]
    high = number[0] - taken[0] - number[1].below(taken[1]).counted() - middle.below(borrowed).counted()
    return high, middle - borrowed, number[2] - taken[2]


def _odd(number: tuple[Value, ...]) -> Value:
    return number[0] | number[0].code.eight(1).below(number[1]).counted()


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
    upper, lower = digits, code.eight(0)
    if kind.double:  # by 10^8: by 2^8, and by 5^8 as a product with 2^82 / 5^8
        upper = _product(digits >> 8, code.eight(-(-(1 << 82) // 5**8)))[0] >> 18
        lower = _bytes(digits - upper * 10**8)
    first = ((upper >> 8) * -(-(1 << 42) // 5**8)) >> 42
    return first, _bytes(upper - first * 10**8), lower


def _bytes(eight: Value) -> Value:
    """The eight digits of a number as bytes: it is halved into four and four, two and two, and one and one, in place,
    each time by a product and a shift in place of a division."""
    eight = eight + ((eight * 109951163) >> 40) * ((1 << 32) - 10000)
    fours = eight.seen_as(ir.VectorType(WORD, 2 * AT_ONCE))
    fours = fours + ((fours * 5243) >> 19) * ((1 << 16) - 100)
    twos = fours.seen_as(ir.VectorType(ir.IntType(16), 4 * AT_ONCE))
    twos = twos + ((twos * 103) >> 10) * ((1 << 8) - 10)
    return eight.code.call(f"llvm.bswap.v{AT_ONCE}i64", EIGHT, twos.seen_as(EIGHT))


def _with_point(upper: Value, lower: Value, place: Value) -> tuple[Value, Value]:
    """16 characters behind a first one, of which a point stands behind `place`, counted with that one; 17: nowhere."""
    code = upper.code
    bits = (place - 1) << 3
    within, bound = bits.below(64), bits.below(128)
    one, point = code.eight(1) << (bits & 63), code.eight(ord(".")) << (bits & 63)
    kept_upper = within.chosen(one - 1, -1)
    kept_lower = within.chosen(code.eight(0), bound.chosen(one - 1, -1))
    moved_upper, moved_lower = upper & (kept_upper ^ -1), lower & (kept_lower ^ -1)
    before = (upper & kept_upper) | (moved_upper << 8) | within.chosen(point, 0)
    behind = (lower & kept_lower) | (moved_lower << 8) | (moved_upper >> 56)
    return before, behind | (bound & (within ^ code.all_true())).chosen(point, 0)


def _put(code: Code, kind: Float, text: Value, at: Variable, number: Mapping[str, Value]) -> None:
    """Write one number and a comma at the end of the text."""
    begin = text + at.get()
    begin.put_text(b"-")
    where = begin + number["sign"]

    def plain() -> None:
        where.put_text(b"0.000000")
        _put_digits(where + number["start"], number["first"], number["upper"], number["lower"])
        (where + number["start"]).put_byte(number["last"], 17)
        where.put_text(b",", number["length"])
        at.set(at.get() + number["sign"] + number["length"] + 1)

    def strange() -> None:
        size = number["size"]
        code.either(size.equals(0), lambda: zero(), lambda: code.either(size.below(none), scientific, word))

    def zero() -> None:
        where.put_text(b"0.0,")
        at.set(at.get() + number["sign"] + 4)

    def word() -> None:
        begin.put_text(b"null,")
        at.set(at.get() + 5)

    def scientific() -> None:
        at.set(at.get() + number["sign"] + _put_scientific(code, where, number))

    none = ((1 << kind.exponent) - 1) << kind.mantissa
    code.either(number["plain"].equals(1), plain, strange)


def _put_digits(where: Value, first: Value, upper: Value, lower: Value) -> None:
    where.put_byte(first)
    where.put(upper, 1)
    where.put(lower, 9)


def _put_scientific(code: Code, where: Value, number: Mapping[str, Value]) -> Value:
    """Write a number with an exponent, which may be of three digits, and a comma; gives the length."""
    _put_digits(where + 1, number["first"], number["upper_digits"] | _ZEROS, number["lower_digits"] | _ZEROS)
    where.put_byte(number["first"])
    where.put_text(b".", 1)
    end = number["digits"].equals(1).chosen(code.integer(1), number["digits"] + 1)
    power = number["point"] - 1
    negative = power < 0
    power = negative.chosen(code.integer(0) - power, power)
    where.put_text(b"e", end)
    where.put_byte(negative.chosen(code.integer(ord("-")), ord("+")), end + 1)
    end = end + 2
    hundreds, rest = power // 100, power % 100
    for digit, shown in ((hundreds, code.integer(99) < power), (rest // 10, code.integer(9) < power)):
        where.put_byte(digit + 48, end)
        end = end + shown.extended(INT)
    where.put_byte(rest % 10 + 48, end)
    where.put_text(b",", end + 1)
    return end + 2


# --- lanes -------------------------------------------------------------------------------------------------------


def _leading(number: Value) -> Value:
    """How many zeros each lane begins with, 64 if it is zero."""
    return number.code.call(f"llvm.ctlz.v{AT_ONCE}i64", EIGHT, number, number.code.holds(False))


def _gathered(where: Value, offsets: Value) -> Value:
    """The integers so many bytes behind an address, for each lane."""
    code, build = where.code, where.code.build
    base = build.ptrtoint(where.value, INT)
    none = ir.Constant(EIGHT, ir.Undefined)
    everywhere = build.shuffle_vector(
        build.insert_element(none, base, ir.Constant(WORD, 0)), none, ir.Constant(ir.VectorType(WORD, AT_ONCE), None)
    )
    pointers: Any = build.inttoptr(build.add(everywhere, offsets.value), ir.VectorType(POINTER, AT_ONCE))
    name = f"llvm.masked.gather.v{AT_ONCE}i64.v{AT_ONCE}p0"
    aligned = Value(code, ir.Constant(WORD, 8))
    return code.call(name, EIGHT, Value(code, pointers), aligned, code.all_true(), code.eight(0))
