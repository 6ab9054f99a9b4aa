"""Lists of JSON documents become the same arrays whether they are converted at once or in pieces."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.protocols import json_arrays


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 1 << 63],
        [1, 2, 3, (1 << 53) + 1, 2.5],
        [True, False, True, True, 2],
        [0.5, 1.5, 2.5, 3.5, 4.5],
        [[1, 2], [3, 4], [5, 6]],
        ["a", "bc", "d", "e", "f"],
    ],
)
def test_lists_in_pieces_are_arrays_of_the_same_dtype(values: list[Any]) -> None:
    def parse() -> Any:
        return json_arrays.parse_tensor(values, TensorSpec("x"), "x")

    whole = parse()
    with mock.patch.object(json_arrays, "_PIECE", 2):
        parsed = parse()
    assert (parsed.datatype, parsed.data.dtype, parsed.data.tolist()) == (
        whole.datatype,
        whole.data.dtype,
        whole.data.tolist(),
    )


def test_ragged_lists_in_pieces_are_rejected() -> None:
    with mock.patch.object(json_arrays, "_PIECE", 2), pytest.raises(InvalidInput, match="input 'x': "):
        json_arrays.parse_tensor([[1], [2], [3, 4], [5, 6]], TensorSpec("x"), "x")
    assert np.array_equal(json_arrays._array([[1]]), [[1]])
