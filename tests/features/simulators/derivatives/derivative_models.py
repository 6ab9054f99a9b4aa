"""Build functions of vectors for the tests of derivatives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.errors import DragomanError
from dragoman.core.vectors import VectorFunction
from dragoman_simulators.derivatives.decorator import build_vector_function

# The decorator without its overloads: tests pass arguments of wrong types too.
vector_function: Any = dragoman.vector_function

X = np.array([0.3, 0.7])
ONE = np.ones(1)


def build(function: Callable[..., Any], **options: Any) -> VectorFunction:
    """Return the function with its derivatives, built as for a model that is loaded."""
    return build_vector_function(vector_function(**options)(function))


def build_unevaluated(
    function: Callable[..., Any], sizes: list[int], outputs: int = 1, **options: Any
) -> VectorFunction:
    """Return the function with the complex step, which is not checked while loading."""
    return build(
        function, inputs=sizes, outputs=[outputs], derivatives="complex step", evaluate_at_load=False, **options
    )


def error_message(act: Callable[[], Any], error: type[DragomanError]) -> str:
    with pytest.raises(error) as caught:
        act()
    return caught.value.message
