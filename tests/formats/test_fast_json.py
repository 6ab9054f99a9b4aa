"""JSON is the same with orjson and without it."""

import dataclasses
import datetime
import enum
import json
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dragoman.formats import fast_json, json_msgspec


class Text(str):
    pass


class Whole(int):
    pass


class Float(float):
    pass


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    _hidden: int = 0


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.builds(Text, st.text())
    | st.builds(Whole, st.integers(0, 9))
    | st.builds(Float, st.floats(0, 1))
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 9).map(np.int16)
    | st.sampled_from([np.float64(0.1), np.bool_(True), Colour.RED, Point(0.5), {1}, object(), uuid.UUID(int=7)])
    | st.sampled_from([datetime.date(2026, 11, 27), fast_json.JSONDecodeError])
    | st.sampled_from([2**64, 2**64 - 1, -(2**63), -(2**63) - 1])
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.uint64, np.bool_, np.complex64]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
KEYS = st.text() | st.builds(Text, st.text()) | st.integers(0, 9) | st.none() | st.booleans()
VALUES = st.recursive(
    SCALARS | ARRAYS | ARRAYS.map(np.transpose),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


def outcome(call: Any, *arguments: Any, **options: Any) -> Any:
    """The parsed result with the kinds of its numbers, or the class of the error."""
    try:
        return repr(json.loads(call(*arguments, **options)))
    except (TypeError, ValueError) as error:
        return TypeError if isinstance(error, TypeError | UnicodeEncodeError) else ValueError


@given(VALUES, st.booleans())
def test_values_are_written_alike(value: Any, any_keys: bool) -> None:
    expected = outcome(fast_json.dumps, value, any_keys=any_keys)
    assert outcome(json_msgspec.dumps, value, any_keys=any_keys) == expected


@given(st.lists(st.binary() | st.sampled_from([object(), np.array("text"), {1}]) | VALUES))
def test_what_json_does_not_have_is_replaced_alike(value: Any) -> None:
    def name(each: Any) -> Any:
        return [type(each).__name__]

    assert outcome(json_msgspec.dumps, value, name) == outcome(fast_json.dumps, value, name)


def parsed(module: Any, text: Any) -> Any:
    try:
        return repr(module.loads(text))
    except module.JSONDecodeError:
        return ValueError


@given(VALUES.map(lambda value: json.dumps(value, default=str, skipkeys=True).encode()), st.data())
def test_texts_are_read_alike(text: bytes, data: st.DataObject) -> None:
    assert parsed(json_msgspec, text) == parsed(fast_json, text)
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.binary(max_size=2)) + text[at + data.draw(st.integers(0, 2)) :]
    assert parsed(json_msgspec, changed) == parsed(fast_json, changed)


@pytest.mark.parametrize(
    "text",
    [
        b"18446744073709551616",
        b'{"a": [-9223372036854775809, 9223372036854775808]}',
        b"1" * 400,
        b"1e400",
        b"[" * 2000 + b"]" * 2000,
        b"[" * 1025 + b"]" * 1025,
        b'{"a":' * 1024 + b"[1, {}]" + b"}" * 1024,
        b"[" * 300 + b"]" * 300,
        b'"\\ud800"',
        b"\xef\xbb\xbf1",
        memoryview(b"[1]"),
        bytearray(b"[1.5]"),
        '"text"',
        '"\ud800"',
    ],
    ids=str.split(
        "above-64-bits nested-beyond digits infinity deep deeper objects nested surrogate mark view bytearray text "
        "surrogate-text"
    ),
)
def test_edges_are_read_alike(text: Any) -> None:
    assert parsed(json_msgspec, text) == parsed(fast_json, text)


def test_errors_are_value_errors() -> None:
    assert issubclass(json_msgspec.JSONDecodeError, ValueError)
    assert issubclass(fast_json.JSONDecodeError, ValueError)


def test_fragments_are_written_alike() -> None:
    assert json_msgspec.dumps([json_msgspec.Fragment(b"1e999")]) == b"[1e999]"
    assert fast_json.dumps([fast_json.Fragment(b"1e999")]) == b"[1e999]"
