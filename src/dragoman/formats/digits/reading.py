"""Machine code that reads the decimal numbers of a JSON array into floats, each rounded once to the nearest double.

Up to nineteen digits are one integer. Its product with a power of ten, of which 128 bits are known, has the bits of the
nearest double (D. Lemire, "Number parsing at a gigabyte per second", 2021; N. Mushtak and D. Lemire, "Fast number
parsing without fallback", 2023). What is longer, no normal double, or no number at all is left to other parsers.
"""

from llvmlite import ir

from dragoman.formats.digits.floats import Float
from dragoman.formats.digits.powers import ENTRY_BYTES, LEAST
from dragoman.native.code import FLOAT, INT32, INT64, POINTER, Code, Value, Variable

FAILED = -1
# What has to follow a text: the array's end, and as much as is looked at beyond.
END = b"]" + bytes(15)

_BYTE = ir.IntType(8)
_ZEROS = 0x3030303030303030  # "0" in each byte
_MOST_DIGITS = 19
_MOST_POWER = 308
_FAR = 10_000  # an exponent beyond is none of a double


def write_reader(module: ir.Module, kind: Float) -> None:
    """The function `read_fp32` or `read_fp64`: a text, memory for so many numbers, how many, `powers`, `small_powers`.

    The text is that of an array behind its opening bracket, with END behind it. It gives how many numbers there are;
    FAILED where there are more, none, or anything that is not plainly a normal number of the kind, or zero.
    """
    code = Code(module, f"read_{kind.name}", [POINTER, POINTER, INT64, POINTER, POINTER], returns_int=True)
    text, numbers, most, powers, tens = code.arguments
    reading = _Reading(code, text, tens)
    count = Variable(code, code.integer(0))
    with code.while_loop(lambda: code.boolean(True)):
        reading.pass_space()
        reading.demand(count.get() < most)
        sign, digits, exponent = reading.number()
        bits = _rounded(reading, digits, exponent, powers) | (sign.zero_extend(INT64) << 63)
        _store(reading, kind, numbers, count.get(), bits)
        count.set(count.get() + 1)
        reading.pass_space()
        mark = reading.byte()
        reading.at.set(reading.at.get() + 1)
        with code.if_true(mark.equal(ord("]"))):
            code.return_value(count.get())
        reading.demand(mark.equal(ord(",")))
    code.return_value(code.integer(FAILED))


class _Reading:
    """A place in the text, and what is written to go on from it."""

    def __init__(self, code: Code, text: Value, tens: Value) -> None:
        self.code, self.at = code, Variable(code, code.integer(0))
        self._text, self._tens = text, tens
        self._digits = Variable(code, code.integer(0))

    def demand(self, condition: Value) -> None:
        """Give up where this does not hold."""
        with self.code.if_true(condition ^ self.code.boolean(True)):
            self.code.return_value(self.code.integer(FAILED))

    def byte(self, offset: int = 0) -> Value:
        return self._text.load(_BYTE, self.at.get() + offset).zero_extend(INT64)

    def pass_space(self) -> None:
        with self.code.while_loop(lambda: self.byte().unsigned_less_equal(ord(" "))):
            byte = self.byte()
            self.demand(byte.equal(ord(" ")) | byte.equal(10) | byte.equal(13) | byte.equal(9))
            self._move(1)

    def number(self) -> tuple[Value, Value, Value]:
        """Whether there is a minus, the digits as one integer, and the power of ten that they are multiplied by."""
        code = self.code
        sign = self.byte().equal(ord("-"))
        self._move(sign.zero_extend(INT64))
        start, exponent = self.at.get(), Variable(code, code.integer(0))
        self._integer()
        shown = Variable(code, self.at.get() - start)
        with code.if_true(self.byte().equal(ord("."))):
            self._move(1)
            behind = self.at.get()
            self._run()
            exponent.set(behind - self.at.get())
            self.demand(exponent.get() < 0)
            shown.set(shown.get() - exponent.get())
        zero = self._digits.get().equal(0) & (shown.get() < 2)
        self.demand((sign & zero) ^ code.boolean(True))  # -0 is an integer to other parsers, and has no sign
        with code.if_true(code.integer(_MOST_DIGITS) < shown.get()):
            self.demand(shown.get() - self._zeros(start) < _MOST_DIGITS + 1)
        with code.if_true((self.byte() | 32).equal(ord("e"))):
            exponent.set(exponent.get() + self._power())
        return sign, self._digits.get(), exponent.get()

    def _integer(self) -> None:
        """The digits up to the point; most numbers have one. More do not begin with 0."""
        first = self.byte() - ord("0")
        self.demand(first.unsigned_less(10))

        def several() -> None:
            self.demand(code.integer(0).unsigned_less(first))
            self._digits.set(code.integer(0))
            self._run()

        def one() -> None:
            self._digits.set(first)
            self._move(1)

        code = self.code
        code.if_else((self.byte(1) - ord("0")).unsigned_less(10), several, one)

    def _run(self) -> None:
        """Take in digits, eight at a time, as long as there are any."""
        code, digits = self.code, self._digits
        eight = Variable(code, self._eight())
        with code.while_loop(lambda: _strange(eight.get()).equal(0)):
            digits.set(digits.get() * 10**8 + _value(eight.get()))
            self._move(8)
            eight.set(self._eight())
        count = code.call_external("llvm.cttz.i64", INT64, _strange(eight.get()), code.boolean(True)) >> 3
        # Those that are none are moved out of it, and zeros stand before the others.
        moved = (eight.get() << ((code.integer(7) - count) << 3)) << 8
        digits.set(digits.get() * self._tens.load(INT64, count << 3) + _value(moved))
        self._move(count)

    def _zeros(self, start: Value) -> Value:
        """How many zeros stand before the first other digit."""
        code = self.code
        place, found = Variable(code, start), Variable(code, code.integer(0))

        def byte() -> Value:
            return self._text.load(_BYTE, place.get()).zero_extend(INT64)

        with code.while_loop(lambda: byte().equal(ord("0")) | byte().equal(ord("."))):
            found.set(found.get() + byte().equal(ord("0")).zero_extend(INT64))
            place.set(place.get() + 1)
        return found.get()

    def _power(self) -> Value:
        """The exponent that is written behind an `e`."""
        code = self.code
        self._move(1)
        negative = self.byte().equal(ord("-"))
        self._move((negative | self.byte().equal(ord("+"))).zero_extend(INT64))
        start, found = self.at.get(), Variable(code, code.integer(0))
        with code.while_loop(lambda: (self.byte() - ord("0")).unsigned_less(10)):
            found.set(found.get() * 10 + self.byte() - ord("0"))
            self.demand(found.get() < _FAR)
            self._move(1)
        self.demand(start < self.at.get())
        return negative.select(code.integer(0) - found.get(), found.get())

    def _eight(self) -> Value:
        return self._text.load(INT64, self.at.get()) ^ _ZEROS

    def _move(self, count: "Value | int") -> None:
        self.at.set(self.at.get() + count)


def _strange(eight: Value) -> Value:
    """The highest bit of each byte that is above 9."""
    return ((eight + 0x7676767676767676) | eight) & 0x8080808080808080


def _value(eight: Value) -> Value:
    """The number of eight digits, a byte each and the first of them lowest: of two, four and eight in place."""
    twos = eight * 10 + (eight >> 8)
    even, odd = twos & 0x000000FF000000FF, (twos >> 16) & 0x000000FF000000FF
    return (even * ((10**6 << 32) + 100) + odd * ((10**4 << 32) + 1)) >> 32


def _rounded(reading: _Reading, digits: Value, exponent: Value, powers: Value) -> Value:
    """The bits of the double that is nearest to some digits times a power of ten; the even one of two."""
    code = reading.code
    found = Variable(code, code.integer(0))
    with code.if_true(digits.equal(0) ^ code.boolean(True)):
        reading.demand((code.integer(LEAST - 1) < exponent) & (exponent < _MOST_POWER + 1))
        entry = (exponent - LEAST) * ENTRY_BYTES
        leading = code.call_external("llvm.ctlz.i64", INT64, digits, code.boolean(True))
        digits = digits << leading
        upper, lower = _product(digits, powers.load(INT64, entry))
        high, low = Variable(code, upper), Variable(code, lower)
        with code.if_true((upper & 0x1FF).equal(0x1FF)):  # what is behind these bits may reach them
            more, _ = _product(digits, powers.load(INT64, entry + 8))
            low.set(lower + more)
            high.set(upper + low.get().unsigned_less(more).zero_extend(INT64))
        upper, lower = high.get(), low.get()
        long = upper >> 63
        mantissa = upper >> (long + 9)
        whole = (mantissa << (long + 9)).equal(upper) & lower.unsigned_less_equal(1)
        # In the middle of two, which happens where 5 to the exponent has few bits.
        middle = whole & (mantissa & 3).equal(1) & (code.integer(-5) < exponent) & (exponent < 24)
        mantissa = middle.select(mantissa ^ 1, mantissa)
        mantissa = (mantissa + (mantissa & 1)) >> 1
        carried = mantissa >> 53
        # 217706 / 2^16 is log2(10), near enough here; 1086 is the bias, and where the product's bits stand.
        power = (exponent * 217706).shift_right(16) + 1086 + long - leading + carried
        reading.demand((code.integer(0) < power) & (power < 2047))
        found.set(((mantissa >> carried) & ((1 << 52) - 1)) | (power << 52))
    return found.get()


def _product(one: Value, other: Value) -> tuple[Value, Value]:
    """The upper and the lower 64 bits."""
    wide = one.zero_extend(ir.IntType(128)) * other.zero_extend(ir.IntType(128))
    return (wide >> 64).truncate(INT64), wide.truncate(INT64)


def _store(reading: _Reading, kind: Float, numbers: Value, place: Value, bits: Value) -> None:
    if kind.double:
        numbers.store(bits, place * 8)
        return
    found = bits.bitcast(ir.DoubleType()).round_to(FLOAT).bitcast(INT32)
    reading.demand((found & 0x7F800000).unsigned_less(0x7F800000))
    numbers.store(found, place * 4)
