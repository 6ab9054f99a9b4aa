"""Base classes of built-in nodes, and parsers of their options."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Ability, Config, Vector
from dragoman.graphs.sizes import FlexibleFunction, Size


class BuiltInNode(FlexibleFunction):
    """A built-in node. `affine`: its second derivatives are zero."""

    affine: bool = False
    vectorised = True
    known_inputs: tuple[Size, ...] = (None,)
    known_outputs: tuple[Size, ...] = (None,)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [-1 if n is None else n for n in self.known_inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [-1 if n is None else n for n in self.known_outputs]

    def fit_sizes(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        return inputs, outputs

    def sources(self) -> Mapping[Ability, str]:
        return dict.fromkeys(super().sources(), "built in")


class SameSize(BuiltInNode):
    """A node whose inputs and outputs all have the same size."""

    def __init__(self, size: Size, inputs: int = 1) -> None:
        self.known_inputs = (size,) * inputs
        self.known_outputs = (size,)

    def fit_sizes(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        known = {n for n in (*inputs, *outputs) if n is not None}
        if len(known) > 1:
            raise InvalidInput(f"expected vectors of one size, got {' and '.join(map(str, sorted(known)))}")
        size = next(iter(known), None)
        return [size] * len(inputs), [size] * len(outputs)


def parse_numbers(value: Any, name: str, *, max_axes: int = 1) -> Vector:
    """Return finite numbers as a float64 array. Raises InvalidInput naming the option."""
    try:
        result = np.array(value, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name}: expected numbers, got {_short(value)}") from error
    if result.ndim > max_axes:
        raise InvalidInput(f"{name}: expected at most {max_axes} axes, got shape {list(result.shape)}")
    if not np.isfinite(result).all():
        raise InvalidInput(f"{name}: expected finite numbers, got NaN or infinity")
    result.flags.writeable = False
    return result


def parse_integer(value: Any, name: str, minimum: int = 1) -> int:
    """Return an integer. Raises InvalidInput naming the option."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidInput(f"{name}: expected an integer from {minimum}, got {_short(value)}")
    return value


def parse_size(dim: Size) -> Size:
    """Return the option `dim`, a size or None."""
    return None if dim is None else parse_integer(dim, "dim")


def parse_integers(values: Any, name: str, minimum: int = 0) -> tuple[int, ...]:
    """Return a non-empty list of integers. Raises InvalidInput naming the option."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes) or not (result := [*values]):
        raise InvalidInput(f"{name}: expected a list of integers, got {_short(values)}")
    return tuple(parse_integer(int(v) if isinstance(v, np.integer) else v, name, minimum) for v in result)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
