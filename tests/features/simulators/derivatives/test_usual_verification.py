"""The usual case of the verification, decided by few operations, has the results of the general rules."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.vectors import Vector
from dragoman_simulators.derivatives.derived import split_by_scale
from dragoman_simulators.derivatives.verification import NotConfirmedError, confirm_directional, confirm_gradient

# Noise that is known in advance, however small, selects the general rules.
GENERAL = 1e-300
ERRORS = (0.0, 1e-9, 9e-7, 1.1e-6, 1e-5, 5e-3, -1.0)


def smooth(x: Any, rows: Vector) -> Any:
    return np.sin(rows @ x) + 2.0


def single(x: Any, rows: Vector) -> Any:
    return (rows.astype(np.float32) @ np.asarray(x, np.float32) + np.float32(0.1)).astype(np.float64)


def printed(x: Any, rows: Vector) -> Any:
    return np.array([float(f"{value:.7g}") for value in smooth(x, rows)])


def kinked(x: Any, rows: Vector) -> Any:
    return np.abs(rows @ x - np.round(rows @ x, 4)) + rows @ x


def on_a_grid(x: Any, rows: Vector) -> Any:
    return smooth(np.round(x, 5), rows)


def steep(x: Any, rows: Vector) -> Any:
    return np.exp(50 * np.sin(rows @ x))


def shifted(x: Any, rows: Vector) -> Any:
    return 1e9 + smooth(x, rows)


def partly_constant(x: Any, rows: Vector) -> Any:
    return np.where(np.arange(len(rows)) % 2, 3.0, smooth(x, rows))


def not_finite_beside(x: Any, rows: Vector) -> Any:
    return np.where(x[0] > np.round(x[0], 3) + 5e-6, np.inf, smooth(x, rows))


def failing_beside(x: Any, rows: Vector) -> Any:
    if x[0] > np.round(x[0], 3) + 5e-6:
        raise ValueError("outside the domain")
    return smooth(x, rows)


FUNCTIONS: Mapping[str, Callable[[Any, Vector], Any]] = {
    each.__name__: each
    for each in (
        *(smooth, single, printed, kinked, on_a_grid, steep, shifted, partly_constant),
        *(not_finite_beside, failing_beside),
    )
}


class Recorded:
    """A function and the points at which it was evaluated."""

    def __init__(self, function: Callable[[Any, Vector], Any], rows: Vector) -> None:
        self._function, self._rows = function, rows
        self.points: list[bytes] = []

    def __call__(self, x: Vector) -> Vector:
        self.points.append(x.tobytes())
        return np.asarray(self._function(x, self._rows), np.float64)


def outcome(confirm: Callable[..., None], values: Recorded, *arguments: Any) -> str:
    try:
        confirm(values, *arguments)
    except NotConfirmedError as error:
        return str(error)
    return "confirmed"


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    seed=st.integers(0, 2**32 - 1),
    error=st.sampled_from(ERRORS),
    zeros=st.sampled_from([0.0, 0.0, 0.0, 0.3]),
)
def test_the_usual_case_has_the_results_of_the_general_rules(name: str, seed: int, error: float, zeros: float) -> None:
    rng, function = np.random.default_rng(seed), FUNCTIONS[name]
    n, m = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    rows = rng.normal(size=(m, n)) * 10 ** rng.uniform(-3, 3, size=n) ** rng.integers(0, 2)
    x = np.where(rng.random(n) < zeros, 0.0, np.round(rng.normal(size=n) * 10 ** rng.uniform(-2, 2), 3))
    sens = rng.normal(size=m) * (rng.random(m) > 0.2)
    with np.errstate(all="ignore"):
        steps = 1e-6 * np.where(x != 0, np.abs(x), 1.0)
        jacobian = np.stack(
            [(smooth(x + e, rows) - smooth(x - e, rows)) / (2 * s) for s, e in zip(steps, np.diag(steps), strict=True)],
            axis=1,
        )
        if name in ("smooth", "shifted"):
            jacobian = np.cos(rows @ x)[:, None] * rows
        elif name in ("kinked", "single"):
            jacobian = rows + 0.0
        elif name == "steep":
            jacobian = (50 * np.cos(rows @ x) * np.exp(50 * np.sin(rows @ x)))[:, None] * rows
        value = Recorded(function, rows)(x)
    jacobian[rng.integers(m), rng.integers(n)] *= 1 + error
    vec = rng.normal(size=n) * np.where(x != 0, np.abs(x), 1.0)
    cases: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(confirm_gradient, (sens, sens @ jacobian))]
    cases += [(confirm_directional, (part, jacobian @ part)) for part in split_by_scale(x, vec)]
    for confirm, arguments in cases:
        usual, general = Recorded(function, rows), Recorded(function, rows)
        expected = outcome(confirm, general, x, value, *arguments, GENERAL)
        assert outcome(confirm, usual, x, value, *arguments) == expected
        assert usual.points == general.points


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_two_evaluations_decide_the_usual_case(shift: float) -> None:
    """Whatever the size of the function's value is, within seven orders of magnitude of the derivative's terms."""
    rows, x, sens = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([0.7, 1.2]), np.array([0.4, -0.9])
    values = Recorded(lambda x, rows: smooth(x, rows) + shift, rows)
    jacobian, value = np.cos(rows @ x)[:, None] * rows, values(x)
    confirm_gradient(values, x, value, sens, sens @ jacobian)
    confirm_directional(values, x, value, np.ones(2), jacobian @ np.ones(2))
    assert len(values.points) == 1 + 2 + 2


def test_a_kink_with_the_claimed_mean_slope_is_an_error() -> None:
    x, one = np.array([1.0]), np.array([1.0])

    def kink(x: Vector) -> Vector:
        return np.abs(x - 1) + 3 * x

    for confirm in (confirm_gradient, confirm_directional):
        with pytest.raises(NotConfirmedError, match="the function has a kink at or next to this point"):
            confirm(kink, x, kink(x), one, np.array([3.0]))


def test_variation_below_the_known_noise_is_not_a_slope() -> None:
    x, one = np.array([1.0]), np.array([1.0])

    def rippled(x: Vector) -> Vector:
        return x + 1e-2 * np.sin(1e2 * x)

    slope = 1 + np.cos(1e2 * x)
    for confirm in (confirm_gradient, confirm_directional):
        confirm(rippled, x, rippled(x), one, slope)
        with pytest.raises(NotConfirmedError, match="differences"):
            confirm(rippled, x, rippled(x), one, slope, noise=1e-2)


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_an_infinite_derivative_of_a_finite_function_is_an_error(infinite: float) -> None:
    x, one = np.array([1.0]), np.array([1.0])
    with pytest.raises(NotConfirmedError, match=r"element 0 of the gradient is -?inf where the function is finite"):
        confirm_gradient(lambda x: x, x, x, one, np.array([infinite]))
    with pytest.raises(NotConfirmedError, match=r"element 0 of the derivative is -?inf where the function is finite"):
        confirm_directional(lambda x: x, x, x, one, np.array([infinite]))
