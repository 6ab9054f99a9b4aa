"""What the nodes that come with the house share: sizes that follow from their neighbours, and how options are read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Ability, Config, Vector
from dragoman.graphs.sizes import Fitting, Size


class BuiltIn(Fitting):
    """A node that comes with the house. `affine`: its second derivatives are zero."""

    affine: bool = False
    vectorised = True
    known_inputs: tuple[Size, ...] = (None,)
    known_outputs: tuple[Size, ...] = (None,)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [-1 if n is None else n for n in self.known_inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [-1 if n is None else n for n in self.known_outputs]

    def fit(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        return inputs, outputs

    def sources(self) -> Mapping[Ability, str]:
        return dict.fromkeys(super().sources(), "built in")


class SameSize(BuiltIn):
    """A node all of whose inputs and outputs are as long as each other."""

    def __init__(self, size: Size, inputs: int = 1) -> None:
        self.known_inputs = (size,) * inputs
        self.known_outputs = (size,)

    def fit(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        known = {n for n in (*inputs, *outputs) if n is not None}
        if len(known) > 1:
            raise InvalidInput(f"expected vectors of one size, got {' and '.join(map(str, sorted(known)))}")
        size = next(iter(known), None)
        return [size] * len(inputs), [size] * len(outputs)


def numbers(value: Any, what: str, *, most_axes: int = 1) -> Vector:
    """Finite numbers as an array of float64. Raises InvalidInput naming `what`."""
    try:
        found = np.array(value, np.float64)
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"{what}: expected numbers, got {_short(value)}") from fault
    if found.ndim > most_axes:
        raise InvalidInput(f"{what}: expected at most {most_axes} axes, got shape {list(found.shape)}")
    if not np.isfinite(found).all():
        raise InvalidInput(f"{what}: expected finite numbers, got NaN or infinity")
    found.flags.writeable = False
    return found


def whole(value: Any, what: str, least: int = 1) -> int:
    """A whole number. Raises InvalidInput naming `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{what}: expected a whole number from {least}, got {_short(value)}")
    return value


def known_size(dim: Size) -> Size:
    """The option `dim`, a size or None."""
    return None if dim is None else whole(dim, "dim")


def wholes(values: Any, what: str, least: int = 0) -> tuple[int, ...]:
    """A list of whole numbers that is not empty."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes) or not (found := [*values]):
        raise InvalidInput(f"{what}: expected a list of whole numbers, got {_short(values)}")
    return tuple(whole(int(v) if isinstance(v, np.integer) else v, what, least) for v in found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
