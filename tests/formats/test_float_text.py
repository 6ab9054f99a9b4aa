"""Compiled kernels parse and format the same numbers as orjson and Python."""

import importlib.util
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.errors import DragomanError
from dragoman.formats import json_numbers, json_text, umbridge
from dragoman.formats.json_text import format_numbers, json_chunks
from dragoman.formats.policy import Policy
from dragoman.native import float_text
from dragoman.native.float_text import FloatText, start_loading
from dragoman.native.powers_of_ten import FORMAT_POWERS, LEAST, MOST, PARSE_POWERS


def is_supported() -> bool:
    return importlib.util.find_spec("numba") is not None and float_text.has_wide_vectors()


LOADED = start_loading().result()
# Not "LOADED is None": where kernels should be available, their absence is a failure.
pytestmark = pytest.mark.skipif(not is_supported(), reason="needs numba and AVX-512")

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BITS: dict[Any, Any] = {SINGLE: np.dtype(np.uint32), DOUBLE: np.dtype(np.uint64)}
DTYPES = st.sampled_from([SINGLE, DOUBLE])
many = settings(max_examples=300, deadline=None)


def compiled() -> FloatText:
    assert LOADED is not None
    return LOADED


def test_kernels_are_available() -> None:
    assert float_text.float_text(DOUBLE) is compiled()


def format_array(values: np.ndarray[Any, Any]) -> bytes:
    return b"".join(compiled().format(values))


def parse_text(text: str, dtype: Any = DOUBLE, max_count: int = 100) -> list[float] | None:
    numbers = np.empty(max_count, dtype)
    count = compiled().parse(text.encode(), numbers)
    return None if count < 0 else numbers[:count].tolist()


def boundary_numbers(dtype: Any) -> np.ndarray[Any, Any]:
    """Return numbers at which digits change: powers of two and ten, their neighbours, integers, ends of the range."""
    kind = np.finfo(dtype)
    with np.errstate(over="ignore", under="ignore"):
        groups: list[Any] = [2.0 ** np.arange(-1074, 1024), 10.0 ** np.arange(-323, 309), [kind.max, kind.tiny]]
        groups += [np.arange(2000), np.arange(1, 1000) / 1000, 9007199254740992 + np.arange(-9, 9)]
        groups += [[kind.smallest_subnormal]]
        values = np.concatenate(groups).astype(dtype)
        values = values[np.isfinite(values)]
        around = [np.nextafter(values, dtype.type(end)) for end in (-np.inf, np.inf)]
    values = np.concatenate([values, *around])
    return np.concatenate([values, -values])


# --- formatting ----------------------------------------------------------------------------------------------------


def check_formatted(values: np.ndarray[Any, Any]) -> None:
    """The text is orjson's, byte for byte, and parses to the same bits."""
    text = format_array(values)
    assert text == orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    finite = np.isfinite(values)
    again = np.array([0.0 if v is None else v for v in json.loads(text)], values.dtype)
    bits = BITS[values.dtype]
    assert (again.view(bits) == np.where(finite, values, values.dtype.type(0)).view(bits)).all()


@given(DTYPES, st.data())
@many
def test_any_bits_are_formatted_as_orjson_does(dtype: Any, data: st.DataObject) -> None:
    largest = (1 << 8 * dtype.itemsize) - 1
    bits = data.draw(st.lists(st.integers(0, largest), min_size=1, max_size=40))
    check_formatted(np.array(bits, BITS[dtype]).view(dtype))


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_numbers_at_which_digits_change(dtype: Any) -> None:
    check_formatted(boundary_numbers(dtype))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, float_text.CHUNK_NUMBERS - 1, float_text.CHUNK_NUMBERS + 1])
def test_arrays_of_every_length(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    assert json.loads(format_array(values)) == values.tolist()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, b"0.0"), (-0.0, b"-0.0"), (1.0, b"1.0"), (-2.5, b"-2.5"), (1234.5, b"1234.5"),
        (1e15, b"1000000000000000.0"), (0.001, b"0.001"), (1e-5, b"0.00001"), (math.nan, b"null"), (-math.inf, b"null"),
    ],
)  # fmt: skip
def test_forms_of_numbers(value: float, text: bytes) -> None:
    for dtype in (np.float32, np.float64):
        if abs(value) < 1e12 or dtype is np.float64 or value != value:
            assert format_array(np.array([value], dtype)) == b"[" + text + b"]"


def test_large_and_small_numbers_have_an_exponent() -> None:
    values = np.array([1e300, 1.5e-300, -1e-7, 2.5e16, 5e-324])
    texts = format_array(values).decode()[1:-1].split(",")
    assert [float(text) for text in texts] == values.tolist()
    assert all("e" in text for text in texts)


# --- parsing -----------------------------------------------------------------------------------------------------

DECIMALS = st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,22})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@given(st.lists(DECIMALS, min_size=1, max_size=20), st.sampled_from([",", ", ", " ,\n", "\t,\r"]))
@many
def test_decimals_are_parsed_as_by_python_or_rejected(texts: list[str], comma: str) -> None:
    numbers = parse_text(comma.join(texts))
    if numbers is not None:
        expected = [float(text) for text in texts]
        assert np.array(numbers).tobytes() == np.array(expected).tobytes()


@given(st.integers(1, 10**19 - 1), st.integers(-300, 280))
@many
def test_any_digits_of_a_normal_number_are_parsed(digits: int, exponent: int) -> None:
    assert parse_text(f"{digits}e{exponent}") == [float(f"{digits}e{exponent}")]


@given(st.floats(min_value=2.3e-308, allow_infinity=False), st.booleans())
@many
def test_decimals_halfway_between_doubles(value: float, above: bool) -> None:
    """Most have hundreds of digits and are rejected; those with few digits are rounded correctly."""
    other = math.nextafter(value, math.inf if above else 0.0)
    if 1.0 <= value < 2.0**62 and other != value:
        twice = int(value * 4) + int(other * 4) if value < 2.0**60 else 0
        text = f"{twice // 8}.{(twice % 8) * 125:03d}"
        numbers = parse_text(text)
        assert numbers is None or numbers == [float(text)]


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_boundary_numbers_roundtrip(dtype: Any) -> None:
    values = boundary_numbers(dtype)
    values = values[np.isfinite(values) & ((np.abs(values) >= 2.3e-308) | (values == 0))]
    numbers = np.empty_like(values)
    assert compiled().parse(format_array(values)[1:-1], numbers) == values.size
    assert numbers.tobytes() == values.tobytes()


def test_float32_is_rounded_from_the_double() -> None:
    for text in ("16777217", "16777217.0000001", "1.00000017881393432617187499", "3.4028235677973366e38", "0.1"):
        with np.errstate(over="ignore"):
            expected = np.float32(float(text))
        assert parse_text(text, SINGLE) == ([float(expected)] if np.isfinite(expected) and len(text) < 21 else None)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "1,", ",1", "1,,2", "1 2", "01", "-01", "1.", ".5", "-", "+1", "1e", "1e+", "e5", "0x10", "1_0",
        "null", "NaN", "Infinity", "true", '"1"', "[1]", "1]", "{}", "1.5.5", "--1", "1\x0b", "\x0b1", "1\x00",
        "1e99999999999999999999", "1e400", "1e-320", "-0", "12345678901234567890", "0.12345678901234567890",
        ".", "..", "/.5", ":.5",
    ],
)  # fmt: skip
def test_anything_but_plain_numbers_is_rejected(text: str) -> None:
    numbers = np.zeros(4)
    count = compiled().parse(text.encode(), numbers)
    assert count < 0 or (text == "1]" and count == 1)


def test_more_numbers_than_the_array_has_elements() -> None:
    assert parse_text("1,2,3", max_count=3) == [1.0, 2.0, 3.0]
    assert parse_text("1,2,3", max_count=2) is None


# --- tables and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "first_up", "last_up"), [(FORMAT_POWERS, LEAST, MOST), (PARSE_POWERS, -27, -1)])
def test_powers_are_rounded_to_their_last_bit(table: Any, first_up: int, last_up: int) -> None:
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
        assert number == exact + (first_up <= exponent <= last_up and rest > 0)


def test_only_float32_and_float64() -> None:
    assert float_text.float_text(DOUBLE) is float_text.float_text(SINGLE) is compiled()
    assert float_text.float_text(np.dtype(np.float16)) is None
    assert float_text.float_text(np.dtype(np.int64)) is None


def test_libraries_are_used_until_the_kernels_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    waiting: Any = Future()
    with mock.patch.object(float_text, "start_loading", return_value=waiting):
        assert float_text.float_text(DOUBLE) is None
        with caplog.at_level(logging.WARNING):
            float_text.load_kernels(waiting, mock.Mock(side_effect=RuntimeError("wrong results")))
        assert "compiled kernels for numbers cannot be loaded" in caplog.text
        assert float_text.float_text(DOUBLE) is None


@pytest.mark.parametrize("wrong", ["parse", "format"])
def test_kernels_that_give_wrong_results_are_not_used(wrong: str) -> None:
    results = {"parse": lambda *_: 0, "format": lambda *_: [b"[1.0]"]}
    with mock.patch.object(FloatText, wrong, results[wrong]), pytest.raises(RuntimeError, match="wrong results"):
        FloatText()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import no_such_module"])
def test_libraries_are_used_if_the_kernels_cannot_be_compiled(code: str, tmp_path: Path) -> None:
    with mock.patch.multiple(float_text, COMPILE_CODE=code, cache_marker=lambda: tmp_path / "absent"):
        assert start_loading.__wrapped__().result() is None


def test_a_serving_process_loads_kernels_from_the_cache_and_does_not_compile() -> None:
    from dragoman.native import float_kernels as kernels

    values = np.zeros(1000)
    assert compiled().parse(format_array(values)[1:-1], np.empty_like(values)) == 1000
    for kernel in (kernels.format_float32, kernels.format_float64, kernels.parse_floats):
        assert not kernel.stats.cache_misses


def test_only_one_of_several_processes_compiles(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from dragoman.native import float_text\n"
        "folder, own, other = Path(sys.argv[1]), *sys.argv[2:]\n"
        "float_text.cache_marker = lambda: folder / 'cache' / 'kernels.ready'\n"
        "def compile_kernels():\n"
        "    with open(folder / 'log', 'a') as log: log.write('compiled ')\n"
        "    time.sleep(0.2)\n"
        "(folder / own).touch()\n"
        "while not (folder / other).exists(): time.sleep(0.01)\n"
        "float_text.fill_cache(compile_kernels)\n"
        "assert float_text.cache_marker().exists()\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *names]) for names in (("a", "b"), ("b", "a"))]
    assert [process.wait(60) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "compiled "


def test_an_interpreter_may_end_while_kernels_are_compiled_or_loaded() -> None:
    for wait_s in (0, 1):
        code = (
            "import time, numpy as np\n"
            "from dragoman.native.float_text import float_text\n"
            f"float_text(np.dtype(np.float64)); time.sleep({wait_s})\n"
        )
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_libraries_are_used_if_no_thread_can_be_started() -> None:
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        assert start_loading.__wrapped__().result() is None


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_formatting_is_compiled_to_vector_instructions(dtype: Any) -> None:
    """LLVM vectorizes only while the rules in `float_kernels` are followed; otherwise orjson is faster."""
    values = np.random.default_rng(0).standard_normal(100_000).astype(dtype)

    def cpu_s(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(15):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
        return min(times)

    ours = cpu_s(lambda: compiled().format(values))
    assert ours < cpu_s(lambda: orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


# --- use in requests and responses ---------------------------------------------------------------------------------

ELEMENTS = st.sampled_from(
    [
        "1",
        "-2.5",
        "0.1",
        "1e5",
        "1e400",
        "1e-320",
        "null",
        "true",
        "[1]",
        '"x"',
        "",
        "-0",
        "12345678901234567890",
        "NaN",
    ]
)
VECTORS = st.lists(
    st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False).map(repr), ELEMENTS), max_size=6), max_size=3
)


@given(
    VECTORS,
    st.sampled_from(
        ["", ',"config":{"a":[1,2]}', ',"sens":[1,2]', ',"vec":[1,null]', ',"input":[]', ',"outWrt":0', ',"sens":[[1]]']
    ),
)
@many
def test_all_parsers_return_the_same_umbridge_request(vectors: list[list[str]], more: str) -> None:
    text = f'{{"name":"m","input":[{",".join("[" + ",".join(vector) + "]" for vector in vectors)}]{more}}}'.encode()

    def outcome(min_long: int, kernels: Any) -> Any:
        with mock.patch.object(umbridge, "LONG", min_long), mock.patch.object(json_numbers, "float_text", kernels):
            try:
                request = umbridge.parse_umbridge_request(text, Policy())
            except DragomanError as error:
                return error.message
            if isinstance(request, umbridge.InvalidUmBridgeRequest):
                return request.error.message
            sens, vec = (getattr(request, key) for key in umbridge.VECTORS)
            vectors = [np.asarray(v).tobytes() for v in request.input or ()]
            return request.config, request.outWrt, vectors, *(np.asarray(v).tolist() for v in (sens, vec))

    assert outcome(2, float_text.float_text) == outcome(2, lambda dtype: None) == outcome(1 << 60, None)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("count", [511, 512, 5000, 50_000])
def test_long_arrays_are_the_same_text_with_kernels_and_without(dtype: Any, count: int) -> None:
    values = np.random.default_rng(0).standard_normal(count).astype(dtype)
    expected = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    for kernels in (float_text.float_text, lambda dtype: None):
        for at_once in (False, True):
            with mock.patch.object(json_text, "float_text", kernels):
                assert b"".join(json_chunks(format_numbers(values, at_once))) == expected


def test_keys_written_with_escapes_are_recognized() -> None:
    numbers = json.dumps([float(value) for value in range(1000)])
    for text in (
        f'{{"name":"m","\\u0069nput":[[]],"config":{{"input":[{numbers}]}}}}',
        f'{{"name":"m","input":[{numbers}],"\\u0069nput":[[]]}}',
    ):
        request = umbridge.parse_umbridge_request(text.encode(), Policy())
        assert isinstance(request, umbridge.UmBridgeRequest)
        assert isinstance(request.input, list)
        assert [vector.tolist() for vector in request.input] == [[]]
        assert request.config == json.loads(text).get("config")
