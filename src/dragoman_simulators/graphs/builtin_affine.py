"""Built-in affine nodes: their Jacobian is constant, their Hessian zero."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Ability, Config, Vector, Vectors
from dragoman_simulators.graphs.sizes import FlexibleFunction, Size


class BuiltInNode(FlexibleFunction):
    """A built-in node. `affine`: its second derivatives are zero."""

    affine: bool = False
    vectorised = True
    known_inputs: tuple[Size, ...] = (None,)
    known_outputs: tuple[Size, ...] = (None,)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [-1 if n is None else n for n in self.known_inputs]

    def accepts(self, name: str) -> bool:
        return False

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


def parse_integers(values: Any, name: str) -> tuple[int, ...]:
    """Return a non-empty list of integers. Raises InvalidInput naming the option."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes) or not (result := [*values]):
        raise InvalidInput(f"{name}: expected a list of integers, got {_short(values)}")
    return tuple(parse_integer(int(v) if isinstance(v, np.integer) else v, name, 0) for v in result)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."


class _Affine(BuiltInNode):
    """An affine node."""

    affine = True

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        return np.zeros(len(inputs[input1]))


class Scale(SameSize, _Affine):
    """y = factor x + shift, element by element; `factor` and `shift` are numbers or vectors."""

    def __init__(self, factor: Any = 1.0, shift: Any = 0.0, dim: Size = None) -> None:
        self._factor = parse_numbers(factor, "factor")
        self._shift = parse_numbers(shift, "shift")
        sizes = {v.size for v in (self._factor, self._shift) if v.ndim} | (
            {parse_integer(dim, "dim")} if dim is not None else set()
        )
        if len(sizes) > 1:
            raise InvalidInput(f"factor, shift and dim: expected one size, got {' and '.join(map(str, sorted(sizes)))}")
        super().__init__(next(iter(sizes), None))

    def evaluate(self, inputs: Vectors, config: Config) -> Vector:
        return self._factor * inputs[0] + self._shift

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        return self._factor * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        return self._factor * vec


class Identity(Scale):
    """y = x."""

    def __init__(self, dim: Size = None) -> None:
        super().__init__(dim=dim)

    def evaluate(self, inputs: Vectors, config: Config) -> Vector:
        return inputs[0]


class Linear(_Affine):
    """y = matrix x + shift; the matrix is [outputs, inputs]."""

    def __init__(self, matrix: Any, shift: Any = 0.0) -> None:
        self._matrix = parse_numbers(matrix, "matrix", max_axes=2)
        self._shift = parse_numbers(shift, "shift")
        if self._matrix.ndim != 2:
            raise InvalidInput(f"matrix: expected two axes, got shape {list(self._matrix.shape)}")
        self.known_outputs, self.known_inputs = (self._matrix.shape[0],), (self._matrix.shape[1],)
        if self._shift.ndim and self._shift.size != self._matrix.shape[0]:
            raise InvalidInput(f"shift: expected {self._matrix.shape[0]} numbers, one per row, got {self._shift.size}")

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return inputs[0] @ self._matrix.T + self._shift

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return sens @ self._matrix

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._matrix @ vec


class Sum(SameSize, _Affine):
    """y = x_0 + x_1 + ..., each times its weight if `weights` are given."""

    def __init__(self, n: int = 2, weights: Any = None, dim: Size = None) -> None:
        count = parse_integer(n, "n") if weights is None else len(parse_numbers(weights, "weights").reshape(-1))
        if weights is not None and n not in (2, count):
            raise InvalidInput(f"weights: expected {n} numbers, one per input, got {count}")
        self._weights = np.ones(count) if weights is None else parse_numbers(weights, "weights").reshape(-1)
        super().__init__(parse_size(dim), count)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return sum(w * x for w, x in zip(self._weights, inputs, strict=True))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._weights[input] * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._weights[input] * vec


class Concatenate(_Affine):
    """y = (x_0, x_1, ...)."""

    def __init__(self, n: int = 2, sizes: Any = None) -> None:
        self.known_inputs = (None,) * parse_integer(n, "n") if sizes is None else parse_integers(sizes, "sizes")

    def fit_sizes(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        total, known = outputs[0], sum(n for n in inputs if n is not None)
        if None not in inputs:
            if total not in (None, known):
                raise InvalidInput(f"output 0: expected a vector of {total}, got {known} from its inputs")
            return inputs, [known]
        if total is None or inputs.count(None) > 1:
            return inputs, outputs
        if total < known:
            raise InvalidInput(f"output 0: expected a vector of {total}, got {known} from some of its inputs")
        return [total - known if n is None else n for n in inputs], outputs

    def evaluate(self, inputs: Vectors, config: Config) -> Vector:
        return np.concatenate([*inputs], axis=-1)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        return sens[_slice([len(x) for x in inputs], input)]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        sizes = [len(x) for x in inputs]
        return _embed(vec, _slice(sizes, input), sum(sizes))


class Split(_Affine):
    """y_0, y_1, ... = consecutive slices of x, of the given sizes."""

    def __init__(self, sizes: Any) -> None:
        self._sizes = parse_integers(sizes, "sizes")
        self.known_inputs, self.known_outputs = (sum(self._sizes),), self._sizes

    def evaluate(self, inputs: Vectors, config: Config) -> list[Vector]:
        return [inputs[0][..., _slice(self._sizes, o)] for o in range(len(self._sizes))]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        return _embed(sens, _slice(self._sizes, output), len(inputs[0]))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        return vec[_slice(self._sizes, output)]


class Select(_Affine):
    """y = x[indices]; an index may occur several times."""

    def __init__(self, indices: Any, dim: Size = None) -> None:
        self._indices = np.array(parse_integers(indices, "indices"))
        self.known_inputs, self.known_outputs = (parse_size(dim),), (len(self._indices),)

    def fit_sizes(self, inputs: Sequence[Size], outputs: Sequence[Size]) -> tuple[Sequence[Size], Sequence[Size]]:
        if inputs[0] is not None and inputs[0] <= self._indices.max():
            raise InvalidInput(f"indices: expected indices below {inputs[0]}, got {self._indices.max()}")
        return inputs, outputs

    def evaluate(self, inputs: Vectors, config: Config) -> Vector:
        return inputs[0][..., self._indices]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        result = np.zeros(len(inputs[0]))
        np.add.at(result, self._indices, sens)
        return result

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return vec[self._indices]


class Constant(_Affine):
    """y = value; no input."""

    known_inputs = ()

    def __init__(self, value: Any) -> None:
        self._value = parse_numbers(value, "value").reshape(-1)
        self.known_outputs = (self._value.size,)

    def evaluate(self, inputs: Vectors, config: Config) -> Vector:
        return self._value

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        raise AssertionError("a constant has no input")

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        raise AssertionError("a constant has no input")


def _slice(sizes: Sequence[int], index: int) -> slice:
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


def _embed(values: Vector, where: slice, size: int) -> Vector:
    """Return zeros with the values in a slice."""
    result = np.zeros(size)
    result[where] = values
    return result
