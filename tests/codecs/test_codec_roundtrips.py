"""Decoding an encoded value returns it with its dtype in every encoding; else encoding raises an error naming it."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pandas.testing import assert_frame_equal
from PIL import Image
from request_encodings import ENCODINGS, EXACT

from dragoman.codecs.base64 import Base64Codec
from dragoman.codecs.codec import InputCodec
from dragoman.codecs.datetime import DatetimeCodec
from dragoman.codecs.image import PillowImageCodec
from dragoman.codecs.json import JsonCodec, PandasJsonCodec
from dragoman.codecs.numpy import NumpyCodec, NumpyRequestCodec
from dragoman.codecs.pandas import PandasCodec
from dragoman.codecs.string import StringCodec, StringRequestCodec
from dragoman.core.errors import InvalidInput
from dragoman.formats.message import InferenceRequest

Encoding = Callable[[InferenceRequest], InferenceRequest]
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
ZONES = st.one_of(
    st.none(), st.just(UTC), st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m)) if m else UTC)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def round_trip(codec: type[InputCodec], value: Any, encoding: Encoding) -> Any:
    sent = encoding(InferenceRequest(inputs=[codec.encode_input("x", value)]))
    assert sent.inputs[0].parameters["content_type"] == codec.content_type
    return codec.decode_input(sent.inputs[0])


def is_same(value: Any, back: Any) -> bool:
    """Return whether values and types are equal, also inside lists and dicts."""
    if type(value) is not type(back):
        return False
    if isinstance(value, list):
        return len(value) == len(back) and all(map(is_same, value, back))
    if isinstance(value, dict):
        return list(value) == list(back) and all(is_same(value[k], back[k]) for k in value)
    return bool(value == back)


@given(st.lists(TEXT, max_size=5))
def test_text(value: list[str]) -> None:
    for encoding in ENCODINGS:
        assert is_same(value, round_trip(StringCodec, value, encoding)), encoding
        request = encoding(StringRequestCodec.encode_request(value, use_bytes=False))
        assert is_same(value, StringRequestCodec.decode_request(request)), encoding


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_bytes(value: list[bytes]) -> None:
    for encoding in ENCODINGS:
        assert is_same(value, round_trip(Base64Codec, value, encoding)), encoding


@given(st.lists(st.datetimes(timezones=ZONES), max_size=5))
def test_datetimes(value: list[datetime]) -> None:
    for encoding in ENCODINGS:
        back = round_trip(DatetimeCodec, value, encoding)
        assert is_same(value, back), encoding
        assert [v.utcoffset() for v in value] == [v.utcoffset() for v in back], encoding


@given(st.lists(JSON, max_size=4))
def test_json(value: list[Any]) -> None:
    for encoding in ENCODINGS:
        assert is_same(value, round_trip(JsonCodec, value, encoding)), encoding
        assert is_same(value, round_trip(PandasJsonCodec, value, encoding)), encoding


@pytest.mark.parametrize("value", [[{1: 2}], [(1, 2)], [float("nan")], [[float("inf")]], [{1, 2}], [b"x"], ["\ud800"]])
def test_values_that_json_would_change_are_rejected(value: list[Any]) -> None:
    with pytest.raises(InvalidInput, match=r"content type 'json': expected JSON values, got .* at element 0"):
        JsonCodec.to_tensor(value)


@pytest.mark.parametrize("codec", [StringCodec, Base64Codec, DatetimeCodec])
def test_a_single_value_is_a_list_of_one(codec: type[InputCodec]) -> None:
    values: dict[type[InputCodec], object] = {StringCodec: "a", Base64Codec: b"a", DatetimeCodec: datetime(2022, 1, 11)}
    value = values[codec]
    tensor = codec.to_tensor(value)
    assert tensor.shape == (1, 1)
    assert codec.to_value(tensor) == [value]
    assert codec.can_encode(value)
    assert codec.can_encode([value])


# --- arrays ----------------------------------------------------------------------------------------------

NUMBERS = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="=")
    | hnp.unsigned_integer_dtypes(endianness="=")
    | hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64))
)
DTYPES = NUMBERS | hnp.integer_dtypes(endianness=">") | hnp.unicode_string_dtypes(max_len=5) | hnp.byte_string_dtypes()


def _finite(dtype: np.dtype[Any]) -> st.SearchStrategy[Any] | None:
    if dtype.kind == "f":
        return st.floats(width=dtype.itemsize * 8, allow_infinity=False)  # type: ignore[arg-type]
    return hnp.from_dtype(dtype, alphabet=st.characters(codec="utf-8")) if dtype.kind == "U" else None


ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=_finite(dtype))
)


@given(ARRAYS)
def test_arrays(value: Any) -> None:
    # JSON cannot carry bytes that are not text: an error, tested elsewhere
    is_text = value.dtype.kind != "S" or all(max(e, default=0) < 128 for e in value.flat)
    expected = value.reshape(-1, 1) if value.ndim == 1 else value
    for encoding in ENCODINGS if is_text else EXACT:
        request = encoding(NumpyRequestCodec.encode_request(value))
        for back in (round_trip(NumpyCodec, value, encoding), NumpyRequestCodec.decode_request(request)):
            assert back.dtype == value.dtype, encoding
            np.testing.assert_array_equal(back, expected, str(encoding))


@given(hnp.arrays(hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64)), st.integers(0, 9)))
def test_floats_keep_every_bit(value: Any) -> None:
    for encoding in EXACT:
        back = round_trip(NumpyCodec, value, encoding)
        np.testing.assert_array_equal(back, value.reshape(-1, 1), str(encoding))
        np.testing.assert_array_equal(np.signbit(back), np.signbit(value.reshape(-1, 1)), str(encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_objects_and_bfloat16(encoding: Encoding) -> None:
    text = np.array([["a", "ü\0"], ["", "c"]], dtype=object)
    back = round_trip(NumpyCodec, text, encoding)
    assert back.dtype == object
    assert back.tolist() == text.tolist()
    some = np.array([b"a", b"b\0"], dtype=object)
    assert round_trip(NumpyCodec, some, encoding).tolist() == [[b"a"], [b"b\0"]]
    brain = np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16)
    back = round_trip(NumpyCodec, brain, encoding)
    assert back.dtype == brain.dtype
    assert (back == brain).all()


@pytest.mark.parametrize(
    "value",
    [
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1 + 2j]),
        np.array(["a", b"b"], dtype=object),
        np.array([1, "a"], dtype=object),
        np.ma.masked_array([1, 2], [True, False]),
        np.array([1.5], dtype=np.longdouble),
    ],
)
def test_unsupported_arrays_are_rejected(value: Any) -> None:
    with pytest.raises(InvalidInput, match="content type 'np'"):
        NumpyCodec.to_tensor(value)


def test_numbers_are_not_copied() -> None:
    value = np.arange(6.0).reshape(2, 3)
    encoded = NumpyCodec.encode_input("x", value)
    assert np.shares_memory(encoded.data, value)
    assert np.shares_memory(NumpyCodec.decode_input(encoded), value)


# --- images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_images_keep_every_pixel(encoding: Encoding, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 4), dtype=np.uint8)
    image = Image.fromarray(pixels.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(pixels).convert(mode)
    (back,) = round_trip(PillowImageCodec, image, encoding)
    assert back.mode == mode
    assert back.size == image.size
    assert back.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "F", "YCbCr", "I"])
def test_image_modes_that_png_does_not_support_are_rejected(mode: str) -> None:
    image = Image.new(mode, (2, 2))
    with pytest.raises(InvalidInput, match=f"PNG does not support mode {mode}"):
        PillowImageCodec.to_tensor(image)
    if mode in ("CMYK", "F", "I"):
        (back,) = PillowImageCodec.to_value(PillowImageCodec.to_tensor(image, format="tiff"))
        assert back.mode == mode


# --- data frames -----------------------------------------------------------------------------------------


def _values(draw: Any, elements: st.SearchStrategy[Any], rows: int) -> list[Any]:
    drawn: list[Any] = draw(st.lists(elements, min_size=rows, max_size=rows))
    return drawn


def _integers(dtype: str) -> st.SearchStrategy[int]:
    found = np.iinfo(dtype.lower())
    return st.integers(int(found.min), int(found.max))


_FLOAT = st.floats(allow_infinity=False, width=32)
_MOMENTS = st.datetimes(datetime(1700, 1, 1), datetime(2250, 1, 1))
_PLAIN = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
Column = Callable[[Any, int], Any]


def _of(elements: st.SearchStrategy[Any], dtype: Any) -> Column:
    return lambda draw, rows: pd.Series(_values(draw, elements, rows), dtype=dtype)


def _datetimes(unit: str, zone: Any) -> Column:
    def make(draw: Any, rows: int) -> Any:
        moments = pd.Series(pd.DatetimeIndex(_values(draw, st.none() | _MOMENTS, rows), dtype=f"M8[{unit}]"))
        return moments.dt.tz_localize(zone, ambiguous="NaT", nonexistent="shift_forward")

    return make


_COLUMNS: dict[str, Column] = {
    **{dtype: _of(_integers(dtype), dtype) for dtype in _PLAIN},
    **{d: _of(st.none() | st.integers(0, 100), d) for d in ("Int8", "Int64", "UInt16", "Float32", "Float64")},
    **{dtype: _of(_FLOAT, dtype) for dtype in ("float32", "float64")},
    "float16": _of(st.integers(-9, 9), "float16"),
    "bool": _of(st.booleans(), "bool"),
    "boolean": _of(st.none() | st.booleans(), "boolean"),
    "str": _of(st.none() | TEXT, "str"),
    "string": _of(st.none() | TEXT, "string"),
    "object str": _of(TEXT, object),
    "object bytes": _of(st.binary(max_size=4), object),
    "object json": _of(JSON, object),
    "object times": _of(st.datetimes(), object),
    "category": _of(st.sampled_from(["a", "b", None]), pd.CategoricalDtype(["c", "b", "a"])),
    "ordered category": _of(st.sampled_from(["a", "b"]), pd.CategoricalDtype(["c", "b", "a"], ordered=True)),
    "category of numbers": _of(st.sampled_from([1.5, 2, None]), pd.CategoricalDtype([2, 1.5])),
    "category of integers": _of(st.sampled_from([1, 2]), pd.CategoricalDtype([2, 1])),
    "timedelta": _of(st.none() | st.integers(-9, 9), "m8[ms]"),
    **{
        f"datetime {unit} {zone}": _datetimes(unit, zone)
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin", timezone(timedelta(hours=-3)))
    },
}


@st.composite
def frames(draw: Any, kind: str) -> Any:
    rows = draw(st.integers(0, 5))
    return pd.DataFrame({"first": range(rows), kind: _COLUMNS[kind](draw, rows), 7: 1.5})


@pytest.mark.parametrize("kind", _COLUMNS)
@settings(max_examples=15)
@given(st.data())
def test_data_frames(kind: str, data: Any) -> None:
    frame = data.draw(frames(kind))
    for encoding in ENCODINGS:
        request = encoding(PandasCodec.encode_request(frame))
        assert all(one.shape == [len(frame), 1] for one in request.inputs), encoding
        assert_frame_equal(PandasCodec.decode_request(request), frame, check_column_type=False)
    response = PandasCodec.encode_response("m", frame)
    assert_frame_equal(PandasCodec.decode_response(response), frame, check_column_type=False)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.period_range("2020", periods=2, freq="M"), r"pandas dtype period\[M\] is not supported"),
        (pd.interval_range(0, 2), "interval"),
        (pd.arrays.SparseArray([0, 1]), "Sparse"),
        ([1 + 2j, 3], "complex128"),
        (pd.array([2**60, None], dtype="Int64"), r"cannot hold integers beyond 2\*\*53"),
        (pd.Categorical(pd.to_datetime(["2020-01-01", "2020-01-02"])), "categories of datetime64"),
        (pd.Series([1, {2}], dtype=object), "got set at row 1"),
        (pd.Series(["a", datetime(2020, 1, 1)], dtype=object), "got datetime at row 1"),
        (pd.Series(["a", "\ud800"], dtype=object), "text that UTF-8 can encode"),
    ],
)
def test_unsupported_columns_are_rejected_by_name(column: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"column 'the one'.*{message}"):
        PandasCodec.encode_request(pd.DataFrame({"a": [1, 2], "the one": column}))


def test_unsupported_frames_are_rejected() -> None:
    frame = pd.DataFrame({"a": [1, 2]})
    for indexed in (frame.set_index("a"), frame.set_index(pd.Index(["x", "y"])), frame.set_index(["a", "a"])):
        with pytest.raises(InvalidInput, match=r"expected an unnamed integer index.*reset_index"):
            PandasCodec.encode_request(indexed)
    assert PandasCodec.encode_request(frame.set_index(pd.Index(["x", "y"])), drop_index=True).inputs[0].name == "a"
    assert PandasCodec.decode_request(PandasCodec.encode_request(frame[frame.a > 1])).a.tolist() == [2]
    with pytest.raises(InvalidInput, match="expected unique column names, got 'a' twice"):
        PandasCodec.encode_request(pd.concat([frame, frame], axis=1))
    with pytest.raises(InvalidInput, match=r"expected text or integers as column labels, got 1.5"):
        PandasCodec.encode_request(pd.DataFrame({1.5: [1]}))
    with pytest.raises(InvalidInput, match="expected columns, got a data frame of 2 rows without any"):
        PandasCodec.encode_request(frame[[]])


def test_columns_are_views_and_copied_on_write() -> None:
    request = PandasCodec.encode_request(pd.DataFrame({"a": np.arange(4.0), "b": np.arange(4)}))
    parts, length = request.to_binary()
    read = InferenceRequest.from_json(b"".join(parts), str(length))
    frame = PandasCodec.decode_request(read)
    for one in read.inputs:
        # Before pandas 3 a write would go through to the request, so columns are copies there.
        assert np.shares_memory(frame[one.name].to_numpy(), one.data) == (pd.__version__ >= "3")
    frame.loc[frame.a > 1, "a"] = 0.0
    frame["b"] += 1
    assert frame.a.tolist() == [0, 1, 0, 0]
    assert read.inputs[0].data.ravel().tolist() == [0, 1, 2, 3]


def test_nan_in_requests_and_responses() -> None:
    for name in ("FP16", "FP32", "FP64"):
        given_ = {"name": "x", "datatype": name, "shape": [2, 2], "data": [1.5, 2.25, None, 4.5]}
        request = InferenceRequest.from_dict({"inputs": [given_]})
        assert math.isnan(NumpyCodec.decode_input(request.inputs[0])[1, 0])
        assert request.to_dict()["inputs"][0]["data"] == [1.5, 2.25, None, 4.5]
        column = InferenceRequest.from_dict({"inputs": [{**given_, "shape": [4]}]})
        assert PandasCodec.decode_request(column).x.isna().tolist() == [False, False, True, False]
        assert b"null" in column.to_json()
