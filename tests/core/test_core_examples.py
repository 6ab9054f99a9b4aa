"""Example requests: shapes of free axes in order, values, limits."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from dragoman.core.datatypes import BF16, BOOL, BYTES, FP32, FP64, INT64, UINT8
from dragoman.core.examples import MAX_ELEMENTS, SIZES, example_inputs
from dragoman.core.signature import Signature, TensorSpec


def shapes(*specs: TensorSpec, is_file: bool = False) -> list[Any]:
    """Return the shapes of all examples of ones; of one input alone, without its name."""
    found = []
    for inputs in example_inputs(Signature(specs, outputs_are_hints=is_file)):
        if all(tensor.datatype is BYTES or tensor.data.all() for tensor in inputs.values()):
            each = [tensor.shape for tensor in inputs.values()]
            found.append(each[0] if len(each) == 1 else tuple(each))
    return found


def test_free_axes_have_common_sizes() -> None:
    assert SIZES == (1, 2, 8, 32, 64, 224, 256, 512, 640)
    assert shapes(TensorSpec("x", FP32, (2, 3))) == [(2, 3)]
    assert shapes(TensorSpec("x", FP32, ())) == [()]
    assert shapes(TensorSpec("x", FP32, (-1,))) == [(n,) for n in SIZES]
    assert shapes(TensorSpec("x", FP32, (-1, 4))) == [(n, 4) for n in SIZES]
    assert shapes(TensorSpec("x", FP32, (4, -1))) == [(4, n) for n in SIZES]
    assert shapes(TensorSpec("x", FP32, (-1, 3, -1, -1))) == [(1, 3, n, n) for n in SIZES]


def test_one_input_has_a_size_beside_a_state() -> None:
    audio, state = TensorSpec("audio", FP32, (-1, -1)), TensorSpec("state", FP32, (2, -1, 128))
    found = shapes(audio, state, TensorSpec("rate", INT64, ()))
    assert found[:9] == [((1, n), (2, n, 128), ()) for n in SIZES]
    assert found[9:17] == [((1, n), (2, 1, 128), ()) for n in SIZES[1:]]
    assert found[17:] == [((1, 1), (2, n, 128), ()) for n in SIZES[1:]]


def test_only_required_inputs_have_a_value() -> None:
    specs = (TensorSpec("x", FP32, (1,)), TensorSpec("mask", BOOL, (1,), optional=True))
    assert list(next(example_inputs(Signature(specs)))) == ["x"]
    assert list(example_inputs(Signature(specs[1:]))) == []
    assert list(example_inputs(Signature())) == []


@pytest.mark.parametrize(
    ("datatype", "values"),
    [(FP32, [1.0]), (BF16, [1.0]), (FP64, [1.0]), (BOOL, [True]), (BYTES, [b"text"]), (INT64, [1, 0]), (UINT8, [1, 0])],
)
def test_values_are_ones_and_of_integers_then_zeros(datatype: Any, values: list[Any]) -> None:
    found = [each["x"] for each in example_inputs(Signature((TensorSpec("x", datatype, (2,)),)))]
    assert [tensor.data.tolist() for tensor in found] == [[value] * 2 for value in values]
    assert {tensor.datatype for tensor in found} == {datatype}
    assert {tensor.data.dtype for tensor in found} == {datatype.dtype}


def test_large_examples_are_not_made() -> None:
    assert shapes(TensorSpec("x", UINT8, (MAX_ELEMENTS,))) == [(MAX_ELEMENTS,)]
    assert shapes(TensorSpec("x", UINT8, (MAX_ELEMENTS + 1,))) == []
    assert shapes(TensorSpec("x", FP32, (-1, -1, -1, -1)))[-1] == (1, 64, 64, 64)


def test_unknown_ranks_are_tried_as_tables_pictures_and_vectors() -> None:
    x = TensorSpec("x", FP64)
    assert shapes(x)[:9] == [(1, n) for n in SIZES]
    assert shapes(x)[9:18] == [(1, 3, n, n) for n in SIZES]
    assert shapes(x)[18:] == [(n,) for n in SIZES]
    assert shapes(x, TensorSpec("y", FP64, (7,)))[:2] == [((1, 1), (7,)), ((1, 2), (7,))]


def test_unknown_datatypes_are_guessed_for_files_only() -> None:
    x = TensorSpec("x")
    assert shapes(x) == []
    assert shapes(x, is_file=True)[:2] == [(1, 1), (1, 2)]
    (inputs,) = islice(example_inputs(Signature((x,), outputs_are_hints=True)), 1)
    assert inputs["x"].datatype is FP32
    assert inputs["x"].data.dtype == np.float32
