"""Tensors: conversion of arrays and lists, and rejection of values that the datatype cannot represent."""

import inspect
import math
import pickle
import pydoc
import re
from fractions import Fraction
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

import dragoman
from dragoman.core import errors
from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Infer, Inference, Request, Response
from dragoman.core.datatypes import (
    BF16,
    BOOL,
    BYTES,
    DATATYPES,
    FP32,
    FP64,
    INT64,
    UINT8,
    Datatype,
    datatype,
    datatype_of,
)
from dragoman.core.tensor import NONE, Tensor, numpy_numbers


def _nearest_bf16(number: int | float) -> float:
    """Return the bfloat16 nearest to a finite number, ties to even, by exact fractions; infinity on overflow."""
    exact = abs(Fraction(number))
    exponent = -126
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    unit = Fraction(2) ** (exponent - 7)
    rounded = round(exact / unit) * unit
    return math.copysign(float(rounded) if rounded < 2**128 else math.inf, number)


@st.composite
def _near_bf16_midpoints(draw: st.DrawFn) -> float:
    """Draw numbers a few FP64 steps from the midpoint of two BF16, where rounding twice (through FP32) is wrong."""
    midpoint = math.ldexp(2 * draw(st.integers(128, 255)) + 1, draw(st.integers(-150, 119)))
    offset = draw(st.integers(-3, 3)) * 2.0 ** draw(st.integers(-52, -20))
    return draw(st.sampled_from([1, -1])) * midpoint * (1 + offset)


@given(st.floats(allow_nan=False, allow_infinity=False) | _near_bf16_midpoints() | st.integers(-(2**63), 2**63))
@example(2**62 + 2**54 + 1)  # FP64 would round it to the midpoint of two BF16
def test_bf16_rounds_to_nearest_even(number: float | int) -> None:
    array = np.array([number])
    nearest = _nearest_bf16(number)
    if math.isinf(nearest):
        with pytest.raises(errors.InvalidInput, match="does not fit into BF16"):
            Tensor.of(array, BF16)
        return
    converted = Tensor.of(array, BF16).data
    assert (converted.dtype, float(converted[0])) == (BF16.dtype, nearest)


def test_bf16_keeps_nan_infinity_and_signed_zero() -> None:
    converted = Tensor.of([math.nan, math.inf, -math.inf, -0.0, 1e-300], BF16).data.astype(np.float64)
    np.testing.assert_array_equal(converted, [math.nan, math.inf, -math.inf, -0.0, 0.0])
    assert np.signbit(converted).tolist()[2:] == [True, True, False]
    assert Tensor.of(np.array(1.5), BF16).data.shape == ()


@pytest.mark.parametrize("kind", [BF16, DATATYPES["FP16"], FP32])
@pytest.mark.parametrize("value", [1e300, -1e300, 3.4e38 * 1.01])
def test_finite_numbers_never_become_infinite(kind: Datatype, value: float) -> None:
    with pytest.raises(errors.InvalidInput, match=rf"^{re.escape(str(value))} does not fit into {kind}$"):
        Tensor.of(np.array([1.0, value]), kind)


def test_bf16_converts_as_other_floats_do() -> None:
    half = Tensor.of(np.array([1.5, 256.0], BF16.dtype))
    assert half.datatype is BF16
    assert Tensor.of(half.data, FP32).data.tolist() == [1.5, 256.0]
    assert Tensor.of(half.data[1:], INT64).data.tolist() == [256]
    with pytest.raises(errors.InvalidInput, match=r"1.5 does not fit into INT64"):
        Tensor.of(half.data, INT64)
    single, double = numpy_numbers(half), numpy_numbers(Tensor.of([0.1]))
    assert (single.dtype, single.tolist()) == (np.dtype(np.float32), [1.5, 256.0])
    assert (double.dtype, double.tolist()) == (np.dtype(np.float64), [0.1])


@pytest.mark.parametrize(
    "value",
    [
        ["a\0", "b"],
        [b"a\0\0", b""],
        np.array(["x", "yz"]),
        np.array([b"x"]),
        "text",
        np.array([bytearray(b"a\0"), memoryview(b"b")], object),
    ],
)
def test_text_and_bytes_become_bytes_tensors(value: Any) -> None:
    tensor = Tensor.of(value)
    assert tensor.datatype is BYTES
    flat = np.array(value, dtype=object).reshape(-1)
    assert list(tensor.data.flat) == [e.encode() if isinstance(e, str) else bytes(e) for e in flat]


def test_big_endian_arrays_become_little_endian() -> None:
    tensor = Tensor.of(np.array([1, 2, 3], dtype=">i4"))
    assert tensor.data.dtype == np.dtype("<i4")
    assert tensor.data.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ([1.5], INT64, "1.5 does not fit into INT64"),
        ([300], UINT8, "300 does not fit into UINT8"),
        ([-1], UINT8, "-1 does not fit into UINT8"),
        ([1e300], FP32, "1e.300 does not fit into FP32"),
        ([True], FP32, "BOOL does not convert to FP32"),
        (["x"], FP32, "BYTES does not convert to FP32"),
        ([None], FP64, "^expected FP64, got NoneType$"),
        ([1.0, None], INT64, "^expected INT64, got NoneType$"),
        ([True, None], BOOL, "^expected BOOL, got NoneType$"),
        ([True, 2**70], INT64, "^expected INT64, got bool$"),
        ([2**70], INT64, "^1180591620717411303424 does not fit into INT64$"),
        ([-1, 2**70], UINT8, "^-1 does not fit into UINT8$"),
        ([10**400], FP64, "^an integer of 1329 bits does not fit into FP64$"),
        ([2**1000], FP32, "does not fit into FP32"),
        (np.array([1.5], object), INT64, "^1.5 does not fit into INT64$"),
        (["x", 1], INT64, "BYTES does not convert to INT64"),
        ([np.datetime64("2020-01-01")], None, "datetime64"),
        ([object()], None, "a BYTES tensor has elements of bytes or text, got object"),
    ],
)
def test_values_that_do_not_fit_are_rejected(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message):
        Tensor.of(value, kind)


INTEGERS = [d for d in DATATYPES.values() if d.kind in ("int", "uint")]


@given(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.data())
def test_integers_convert_exactly_or_are_rejected(source: Any, target: Any, data: st.DataObject) -> None:
    bounds = np.iinfo(source.dtype)
    edges = st.sampled_from([bounds.min, bounds.max, 0, 1])
    array = np.array([data.draw(edges | st.integers(bounds.min, bounds.max))], source.dtype)
    try:
        converted = Tensor.of(array, target)
    except errors.InvalidInput:
        limits = np.iinfo(target.dtype)
        assert not limits.min <= int(array[0]) <= limits.max
    else:
        assert int(converted.data[0]) == int(array[0])


def test_lossless_conversions() -> None:
    assert Tensor.of([1, 2], FP64).data.tolist() == [1.0, 2.0]
    assert Tensor.of([2**70, 0.5], FP64).data.tolist() == [2.0**70, 0.5]
    assert Tensor.of(np.array([[1, 2.0]], object), INT64).data.tolist() == [[1, 2]]
    assert Tensor.of(np.array([True], object), BOOL).data.tolist() == [True]
    assert Tensor.of(np.array([1.0, 2.0]), INT64).data.tolist() == [1, 2]
    assert Tensor.of([1.0, 0.5], BF16).data.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("name", list(DATATYPES))
def test_datatypes_are_singletons(name: str) -> None:
    kind = datatype(name)
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert datatype_of(kind.dtype) is kind
    with pytest.raises(errors.InvalidInput, match=r"unknown datatype .*: expected one of"):
        datatype(name.lower())


def test_calls_and_inferences_survive_pickling() -> None:
    call = pickle.loads(pickle.dumps(Infer({"x": Tensor.of([1.0])}, ("y",), {"a": 1})))
    assert (call.outputs, call.parameters, call.inputs["x"].data.tolist()) == (("y",), {"a": 1}, [1.0])
    inference = pickle.loads(pickle.dumps(Inference({"y": Tensor.of([1.0])})))
    assert inference.parameters is NONE
    assert inference.outputs["y"].parameters is NONE


def test_errors_survive_pickling() -> None:
    for kind in (errors.InvalidInput, errors.Overloaded, errors.WorkerLost):
        back = pickle.loads(pickle.dumps(kind("why")))
        assert type(back) is kind
        assert back.message == "why"


def test_bf16_is_pickled_out_of_band() -> None:
    tensor, buffers = Tensor.of([1.5, -2.0], BF16, {"a": 1}), list[pickle.PickleBuffer]()
    stream = pickle.dumps(tensor, 5, buffer_callback=buffers.append)
    assert [bytes(each) for each in buffers] == [b"\xc0\x3f\x00\xc0"]
    back = pickle.loads(stream, buffers=buffers)
    assert (back.datatype, back.data.dtype, back.parameters) == (BF16, BF16.dtype, {"a": 1})
    assert back.data.tolist() == [1.5, -2.0]


def test_tensors_and_calls_are_immutable() -> None:
    array = np.ones(3)
    tensor, text = Tensor.of(array), BytesTensor.of_texts(["a"], (1,))
    for frozen in (tensor, text, Infer({"x": tensor}), Inference({"x": tensor}), Request(Infer({})), Response(None)):
        for name in (*frozen.__struct_fields__, "unknown"):
            with pytest.raises(AttributeError):
                setattr(frozen, name, None)
            with pytest.raises(AttributeError):
                delattr(frozen, name)
    assert tensor.data is array
    assert text.data.tolist() == [b"a"]
    changed = structs.replace(tensor, data=np.zeros(1))
    assert (changed.shape, changed.datatype, tensor.shape) == ((1,), FP64, (3,))
    assert get_type_hints(Tensor)["datatype"] is Datatype


def test_public_types_have_docstrings_and_annotations() -> None:
    assert set(dragoman.__all__) <= set(dir(dragoman))
    for name in dragoman.__all__:
        member = getattr(dragoman, name)
        if isinstance(member, type):
            assert member.__doc__, name
            get_type_hints(member)
            for parameter in inspect.signature(member).parameters.values():
                assert parameter.annotation is not parameter.empty, (name, parameter)
    text = " ".join(pydoc.plain(pydoc.render_doc(dragoman.Infer)).replace("|", " ").split())
    assert "inputs: collections.abc.Mapping[str, dragoman.core.tensor.Tensor], outputs: tuple[str, ...]" in text
    assert get_type_hints(dragoman.Infer)["raw"] == bytes | None
