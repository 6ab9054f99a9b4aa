"""Tensors: what becomes one, and what is refused rather than changed."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dragoman.core import errors
from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import (
    BF16,
    BOOL,
    BYTES,
    DATATYPES,
    FP32,
    FP64,
    INT64,
    UINT8,
    bf16_to_fp32,
    datatype,
    datatype_of,
    fp32_to_bf16,
)
from dragoman.core.tensor import NONE, Tensor


@given(hnp.arrays(np.uint16, st.integers(0, 50)))
def test_bf16_survives_the_way_through_fp32(bits: Any) -> None:
    back = fp32_to_bf16(bf16_to_fp32(bits))
    nan = np.isnan(bf16_to_fp32(bits))
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(bf16_to_fp32(back[nan])).all()


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_bf16_is_the_nearest(numbers: Any) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        near = bf16_to_fp32(fp32_to_bf16(numbers)).astype(np.float64)
        bits = fp32_to_bf16(numbers).astype(np.int64)
        error = np.abs(near - numbers)
        for step in (-1, 1):
            other = bf16_to_fp32(np.clip(bits + step, 0, 0xFFFF).astype(np.uint16)).astype(np.float64)
            comparable = np.isfinite(other) & np.isfinite(near) & (np.sign(other) == np.sign(near))
            assert (error[comparable] <= np.abs(other - numbers)[comparable]).all()


@pytest.mark.parametrize("value", [["a\0", "b"], [b"a\0\0", b""], np.array(["x", "yz"]), np.array([b"x"]), "text"])
def test_text_and_bytes_become_bytes(value: Any) -> None:
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
        ([object()], None, "a BYTES tensor holds bytes or text, got object"),
    ],
)
def test_no_number_changes_silently(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message):
        Tensor.of(value, kind)


INTEGERS = [d for d in DATATYPES.values() if d.kind in ("int", "uint")]


@given(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.data())
def test_integers_convert_exactly_or_not_at_all(source: Any, wanted: Any, data: st.DataObject) -> None:
    bounds = np.iinfo(source.dtype)
    edges = st.sampled_from([bounds.min, bounds.max, 0, 1])
    array = np.array([data.draw(edges | st.integers(bounds.min, bounds.max))], source.dtype)
    try:
        converted = Tensor.of(array, wanted)
    except errors.InvalidInput:
        limits = np.iinfo(wanted.dtype)
        assert not limits.min <= int(array[0]) <= limits.max
    else:
        assert int(converted.data[0]) == int(array[0])


def test_conversions_that_lose_nothing_are_made() -> None:
    assert Tensor.of([1, 2], FP64).data.tolist() == [1.0, 2.0]
    assert Tensor.of([2**70, 0.5], FP64).data.tolist() == [2.0**70, 0.5]
    assert Tensor.of(np.array([[1, 2.0]], object), INT64).data.tolist() == [[1, 2]]
    assert Tensor.of(np.array([True], object), BOOL).data.tolist() == [True]
    assert Tensor.of(np.array([1.0, 2.0]), INT64).data.tolist() == [1, 2]
    assert bf16_to_fp32(Tensor.of([1.0, 0.5], BF16).data).tolist() == [1.0, 0.5]


@pytest.mark.parametrize("name", list(DATATYPES))
def test_datatypes_are_one_object_a_name(name: str) -> None:
    kind = datatype(name)
    assert pickle.loads(pickle.dumps(kind)) is kind
    if kind is not BF16:
        assert datatype_of(kind.dtype) is kind
    with pytest.raises(errors.InvalidInput, match="is not known; expected one of"):
        datatype(name.lower())


def test_calls_and_answers_cross_processes() -> None:
    call = pickle.loads(pickle.dumps(Infer({"x": Tensor.of([1.0])}, ("y",), {"a": 1})))
    assert (call.outputs, call.parameters, call.inputs["x"].data.tolist()) == (("y",), {"a": 1}, [1.0])
    answer = pickle.loads(pickle.dumps(Inference({"y": Tensor.of([1.0])})))
    assert answer.parameters is NONE
    assert answer.outputs["y"].parameters is NONE


def test_errors_cross_processes() -> None:
    for kind in (errors.InvalidInput, errors.Overloaded, errors.WorkerLost):
        back = pickle.loads(pickle.dumps(kind("why")))
        assert type(back) is kind
        assert back.message == "why"
