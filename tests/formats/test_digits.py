"""Machine code reads and prints the same numbers as the libraries that it stands in for."""

import importlib.util
import json
import logging
import math
import subprocess
import sys
from concurrent.futures import Future
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.errors import DragomanError
from dragoman.formats import json_data, pieces, simd, umbridge
from dragoman.formats.digits import machine
from dragoman.formats.digits.machine import Digits, _made, digits
from dragoman.formats.digits.powers import LEAST, MOST, ROUNDED_UP, powers
from dragoman.formats.policy import Policy


def supported() -> bool:
    if importlib.util.find_spec("llvmlite") is None:
        return False
    from dragoman.native.code import cpu_features

    return "avx2" in cpu_features()


MADE = _made().result()
# Not "MADE is None": where machine code should be available, its absence is a failure.
pytestmark = pytest.mark.skipif(not supported(), reason="needs llvmlite and AVX2")

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BITS: dict[Any, Any] = {SINGLE: np.dtype(np.uint32), DOUBLE: np.dtype(np.uint64)}
DTYPES = st.sampled_from([SINGLE, DOUBLE])
many = settings(max_examples=300, deadline=None)


def made() -> Digits:
    assert MADE is not None
    return MADE


def test_machine_code_is_available() -> None:
    assert isinstance(digits(DOUBLE), Digits)


def read(text: str, dtype: Any = DOUBLE, most: int = 100) -> list[float] | None:
    found = np.empty(most, dtype)
    count = made().read(text.encode(), found)
    return None if count < 0 else found[:count].tolist()


def hard(dtype: Any) -> np.ndarray[Any, Any]:
    """Numbers at which digits change: powers of two and ten and their neighbours, integers, and both ends of all."""
    kind = np.finfo(dtype)
    with np.errstate(over="ignore", under="ignore"):
        found: list[Any] = [2.0 ** np.arange(-1074, 1024), 10.0 ** np.arange(-323, 309), [kind.max, kind.tiny]]
        found += [np.arange(2000), np.arange(1, 1000) / 1000, 9007199254740992 + np.arange(-9, 9)]
        found += [[kind.smallest_subnormal]]
        values = np.concatenate(found).astype(dtype)
        values = values[np.isfinite(values)]
        around = [np.nextafter(values, dtype.type(end)) for end in (-np.inf, np.inf)]
    values = np.concatenate([values, *around])
    return np.concatenate([values, -values])


# --- printing ----------------------------------------------------------------------------------------------------


def check_printed(values: np.ndarray[Any, Any]) -> None:
    """It reads back as the same bits, and has as many digits as orjson's, which are the fewest."""
    text = made().printed(values)
    found = json.loads(text)
    finite = np.isfinite(values)
    assert [v is None for v in found] == (~finite).tolist()
    again = np.array([0.0 if v is None else v for v in found], values.dtype)
    bits = BITS[values.dtype]
    assert (again.view(bits) == np.where(finite, values, values.dtype.type(0)).view(bits)).all()
    expected = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    for one, other in zip(text[1:-1].split(b","), expected[1:-1].split(b","), strict=True):
        assert _digits(one) == _digits(other)


def _digits(text: bytes) -> bytes:
    """Those that count, wherever the point is."""
    return text.lower().partition(b"e")[0].replace(b".", b"").strip(b"-0")


@given(DTYPES, st.data())
@many
def test_any_bits_are_printed_as_the_number_that_they_are(dtype: Any, data: st.DataObject) -> None:
    most = (1 << 8 * dtype.itemsize) - 1
    bits = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=40))
    check_printed(np.array(bits, BITS[dtype]).view(dtype))


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_numbers_at_which_digits_change(dtype: Any) -> None:
    check_printed(hard(dtype))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, machine._AT_ONCE - 1, machine._AT_ONCE + 1])
def test_as_many_numbers_as_there_are(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    assert json.loads(made().printed(values)) == values.tolist()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, b"0.0"), (-0.0, b"-0.0"), (1.0, b"1.0"), (-2.5, b"-2.5"), (1234.5, b"1234.5"),
        (1e15, b"1000000000000000.0"), (0.001, b"0.001"), (1e-5, b"0.00001"), (math.nan, b"null"), (-math.inf, b"null"),
    ],
)  # fmt: skip
def test_numbers_look_as_they_do_elsewhere(value: float, text: bytes) -> None:
    for dtype in (np.float32, np.float64):
        if abs(value) < 1e12 or dtype is np.float64 or value != value:
            assert made().printed(np.array([value], dtype)) == b"[" + text + b"]"


def test_large_and_small_numbers_have_an_exponent() -> None:
    values = np.array([1e300, 1.5e-300, -1e-7, 2.5e16, 5e-324])
    found = made().printed(values).decode()[1:-1].split(",")
    assert [float(text) for text in found] == values.tolist()
    assert all("e" in text for text in found)


# --- reading -----------------------------------------------------------------------------------------------------

DECIMALS = st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,22})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@given(st.lists(DECIMALS, min_size=1, max_size=20), st.sampled_from([",", ", ", " ,\n", "\t,\r"]))
@many
def test_decimals_are_read_as_python_reads_them_or_not_at_all(given: list[str], comma: str) -> None:
    found = read(comma.join(given))
    if found is not None:
        expected = [float(text) for text in given]
        assert np.array(found).tobytes() == np.array(expected).tobytes()


@given(st.integers(1, 10**19 - 1), st.integers(-300, 280))
@many
def test_any_digits_of_a_normal_number_are_read(digits: int, exponent: int) -> None:
    assert read(f"{digits}e{exponent}") == [float(f"{digits}e{exponent}")]


@given(st.floats(min_value=2.3e-308, allow_infinity=False), st.booleans())
@many
def test_the_middle_of_two_doubles_and_what_is_next_to_it(value: float, above: bool) -> None:
    """The exact decimals of a middle have hundreds of digits; what is read of them is cut off, so they are refused, or
    few, and then right."""
    other = math.nextafter(value, math.inf if above else 0.0)
    if 1.0 <= value < 2.0**62 and other != value:
        twice = int(value * 4) + int(other * 4) if value < 2.0**60 else 0
        text = f"{twice // 8}.{(twice % 8) * 125:03d}"
        found = read(text)
        assert found is None or found == [float(text)]


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_hard_numbers_come_back(dtype: Any) -> None:
    values = hard(dtype)
    values = values[np.isfinite(values) & ((np.abs(values) >= 2.3e-308) | (values == 0))]
    found = np.empty_like(values)
    assert made().read(made().printed(values)[1:-1], found) == values.size
    assert found.tobytes() == values.tobytes()


def test_float32_is_the_double_rounded() -> None:
    for text in ("16777217", "16777217.0000001", "1.00000017881393432617187499", "3.4028235677973366e38", "0.1"):
        with np.errstate(over="ignore"):
            expected = np.float32(float(text))
        assert read(text, SINGLE) == ([float(expected)] if np.isfinite(expected) and len(text) < 21 else None)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "1,", ",1", "1,,2", "1 2", "01", "-01", "1.", ".5", "-", "+1", "1e", "1e+", "e5", "0x10", "1_0",
        "null", "NaN", "Infinity", "true", '"1"', "[1]", "1]", "{}", "1.5.5", "--1", "1\x0b", "\x0b1", "1\x00",
        "1e99999999999999999999", "1e400", "1e-320", "-0", "12345678901234567890", "0.12345678901234567890",
    ],
)  # fmt: skip
def test_what_is_not_plainly_numbers_is_left_to_others(text: str) -> None:
    found = np.zeros(4)
    count = made().read(text.encode(), found)
    assert count < 0 or (text == "1]" and count == 1)


def test_more_numbers_than_there_is_room_for() -> None:
    assert read("1,2,3", most=3) == [1.0, 2.0, 3.0]
    assert read("1,2,3", most=2) is None


# --- the tables, and what stands around --------------------------------------------------------------------------


def test_powers_are_within_their_last_bit() -> None:
    table = powers()
    for exponent in range(LEAST, MOST + 1):
        upper, lower = (int(half) for half in table[exponent - LEAST])
        number = (upper << 64) + lower
        assert number.bit_length() == 128
        above, below = (10**exponent, 1) if exponent >= 0 else (1, 10**-exponent)
        shift = 0
        while (above << max(shift, 0)) // (below << max(-shift, 0)) >= 1 << 128:
            shift -= 1
        while (above << max(shift, 0)) // (below << max(-shift, 0)) < 1 << 127:
            shift += 1
        exact, rest = divmod(above << max(shift, 0), below << max(-shift, 0))
        assert number == exact + (ROUNDED_UP <= exponent < 0 and rest > 0)


def test_only_floats_of_one_word_or_two() -> None:
    assert digits(DOUBLE) is made()
    assert digits(np.dtype(np.float16)) is None
    assert digits(np.dtype(np.int64)) is None


def test_until_it_is_compiled_others_do_it(caplog: pytest.LogCaptureFixture) -> None:
    waiting: Any = Future()
    with mock.patch.object(machine, "_made", return_value=waiting):
        assert digits(DOUBLE) is None
        with caplog.at_level(logging.WARNING):
            machine._make(lambda: 1 / 0, waiting)  # type: ignore[arg-type, return-value]
        assert "are read and printed without" in caplog.text
        assert digits(DOUBLE) is None


def test_an_interpreter_that_ends_meanwhile_waits_for_it() -> None:
    # LLVM is taken down at the end: a thread that still compiles would abort the whole process.
    text = (
        "import atexit, numpy as np\n"
        "from dragoman.formats.digits.machine import _made, digits\n"
        "atexit.register(lambda: print(_made().done()))\n"
        "digits(np.dtype(np.float64))\n"
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_without_a_thread_to_compile_it_others_do_it() -> None:
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        assert machine._made.__wrapped__().result() is None


WORDS = st.sampled_from(
    ["1", "-2.5", "0.1", "1e5", "1e400", "1e-320", "null", "true", "[1]", '"x"', "", "-0", "12345678901234567890"]
)
VECTORS = st.lists(
    st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False).map(repr), WORDS), max_size=6), max_size=3
)


@given(VECTORS, st.sampled_from(["", ',"config":{"a":[1,2]}', ',"sens":[1,2]', ',"input":[]', ',"outWrt":0']))
@many
def test_a_question_of_um_bridge_is_the_same_whichever_way_it_is_read(vectors: list[list[str]], more: str) -> None:
    text = f'{{"name":"m","input":[{",".join("[" + ",".join(one) + "]" for one in vectors)}]{more}}}'.encode()

    def told(how: Any) -> Any:
        with (
            mock.patch.object(simd, "LONG", 2),
            mock.patch.object(pieces, "LONG", 2),
            mock.patch.object(umbridge, "digits", how),
            mock.patch.object(pieces, "digits", how),
        ):
            try:
                found = umbridge.parse_umbridge_request(text, Policy())
            except DragomanError as fault:
                return fault.message
            if isinstance(found, umbridge.InvalidUmBridgeRequest):
                return found.fault.message
            return found.config, found.outWrt, [np.asarray(v).tobytes() for v in found.input or ()]

    assert told(digits) == told(lambda dtype: None)


def test_long_arrays_are_printed_by_it() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    with mock.patch.object(json_data, "digits", return_value=None):
        expected = orjson.dumps(json_data.printed(values), option=orjson.OPT_SERIALIZE_NUMPY)
    assert json.loads(orjson.dumps(json_data.printed(values))) == json.loads(expected)


def test_a_key_that_is_written_with_escapes_is_the_one_that_counts() -> None:
    held = json.dumps([float(value) for value in range(1000)])
    for text in (
        f'{{"name":"m","\\u0069nput":[[]],"config":{{"input":[{held}]}}}}',
        f'{{"name":"m","input":[{held}],"\\u0069nput":[[]]}}',
    ):
        found = umbridge.parse_umbridge_request(text.encode(), Policy())
        assert isinstance(found, umbridge.UmBridgeRequest)
        assert isinstance(found.input, list)
        assert [vector.tolist() for vector in found.input] == [[]]
        assert found.config == json.loads(text).get("config")
