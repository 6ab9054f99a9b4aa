"""Steps of central differences: evaluated points, scales, and ignored values."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, as_vector
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.derivatives.derived import component_scales, max_step, raised_scales, split_by_scale
from dragoman_simulators.derivatives.verification import NotConfirmedError, confirm_directional, confirm_gradient
from features.simulators.derivatives.derivative_models import ONE, build, build_unevaluated

# --- scales -----------------------------------------------------------------------------------------------


def test_scales_of_components() -> None:
    x = np.array([2.0, -3e4, 0.0, 1e-9])
    assert component_scales(x).tolist() == [2.0, 3e4, 30.0, 1e-9]
    assert raised_scales(x).tolist() == [30.0, 3e4, 30.0, 30.0]
    assert component_scales(np.zeros(2)).tolist() == [1.0, 1.0]
    assert raised_scales(np.zeros(2)).tolist() == [1e-3, 1e-3]
    assert raised_scales(np.array([0.5, 1e-7])).tolist() == [0.5, 1e-3]
    assert component_scales(np.zeros(0)).tolist() == raised_scales(np.zeros(0)).tolist() == []


def test_the_largest_step_along_a_direction() -> None:
    scales = np.array([2.0, 30.0, 1.0])
    assert max_step(scales, np.array([4.0, -3.0, 0.0])) == 0.5
    assert max_step(scales, np.array([0.1, -3.0, 0.0])) == 10.0
    assert max_step(scales, np.zeros(3)) == 0.0
    assert max_step(np.zeros(0), np.zeros(0)) == 0.0


def test_directions_are_split_by_scale() -> None:
    def split(x: list[float], vec: list[float]) -> list[list[float]]:
        return [part.tolist() for part in split_by_scale(np.array(x), np.array(vec))]

    assert split([1.0, 1e4], [1.0, 1.0]) == [[1.0, 1.0]]
    assert split([1.0, 1.1e4], [1.0, 1.0]) == [[1.0, 0.0], [0.0, 1.0]]
    assert split([1.0, 1e9], [1.0, 1e9]) == [[1.0, 1e9]]
    assert split([1.0, 0.0], [2.0, 3.0]) == [[2.0, 0.0], [0.0, 3.0]]
    assert split([1e-9, 1.0, 1e9], [1.0, 0.0, 1.0]) == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert split([1.0, 2.0], [0.0, 0.0]) == []


# --- evaluated points -------------------------------------------------------------------------------------


def moves_of(confirm: Callable[[Callable[[Vector], Vector]], None], function: Callable[[Vector], Any], x: Any) -> Any:
    """Return the differences between x and all points that `confirm` evaluates, relative to the components of x."""
    points = []

    def values(at: Vector) -> Vector:
        points.append(at)
        return np.atleast_1d(function(at))

    confirm(values)
    scale = np.where(x == 0, 1.0, np.abs(x))
    return np.array([(point - x) / scale for point in points]).reshape(-1, len(x))


def test_one_pair_of_points_confirms_a_gradient() -> None:
    x = np.array([2.0, -30.0, 0.4])

    def function(x: Vector) -> Any:
        return 1e3 + x.sum()

    moves = moves_of(
        lambda values: confirm_gradient(values, x, np.atleast_1d(function(x)), ONE, np.ones(3)), function, x
    )
    # Components move by up to 1e-5 of their magnitudes, with different factors and both signs.
    expected = 1e-5 * np.array([-0.809016994, 0.618033989, -0.927050983])
    assert moves.shape == (2, 3)
    assert moves[0] == pytest.approx(expected, rel=1e-6)
    assert moves[1] == pytest.approx(-expected, rel=1e-6)


def test_zeros_and_weak_components_are_moved_separately() -> None:
    def function(x: Vector) -> Any:
        return 1e6 * x[0] + x[1] + x[2]

    x = np.array([1.0, 1.0, 0.0])
    here, slopes = np.atleast_1d(function(x)), np.array([1e6, 1.0, 1.0])
    moves = moves_of(lambda values: confirm_gradient(values, x, here, ONE, slopes), function, x)
    assert [np.flatnonzero(each).tolist() for each in moves[::2]] == [[0, 1], [1], [2]]
    # its terms are so small beside the value that it moves by more than 1e-5 of a thousandth of the largest component
    assert 1e-6 <= abs(moves[4][2]) <= 5e-5


def test_components_that_may_be_rounding_errors_of_zero_are_moved_by_a_larger_step() -> None:
    def function(x: Vector) -> Any:
        return x[0] + 3 * x[1]

    x = np.array([1.0, 1e-15])
    moves = moves_of(
        lambda values: confirm_gradient(values, x, np.atleast_1d(function(x)), ONE, np.array([1.0, 3.0])), function, x
    )
    assert [np.flatnonzero(each).tolist() for each in moves[::2]] == [[0, 1], [1], [1]]
    assert 0.5e-8 <= abs(moves[4][1]) * 1e-15 <= 1e-8  # 1e-5 of a thousandth
    value = np.atleast_1d(function(x))
    # an error below 1 % is accepted there
    confirm_gradient(lambda x: np.atleast_1d(function(x)), x, value, ONE, np.array([1.0, 3.01]))
    for wrong in (2.9, 0.0, -3.0):
        with pytest.raises(NotConfirmedError, match="element 1 of the gradient is"):
            confirm_gradient(lambda x: np.atleast_1d(function(x)), x, value, ONE, np.array([1.0, wrong]))
    vec = np.array([0.0, 1.0])
    confirm_directional(lambda x: np.atleast_1d(function(x)), x, value, vec, np.array([3.0]))
    with pytest.raises(NotConfirmedError, match=r"the derivative is 2\.9 where central differences give 3"):
        confirm_directional(lambda x: np.atleast_1d(function(x)), x, value, vec, np.array([2.9]))


def test_mixed_differences_of_small_components_take_larger_steps() -> None:
    function = build(
        lambda x, y: 1 + (1 + x[0]) * y[0], inputs=[1, 1], outputs=[1], derivatives="finite differences", at=[[1], [1]]
    )
    result = function.apply_hessian(0, 0, 1, [np.array([1.0]), np.array([1e-9])], ONE, ONE, {})
    assert as_vector(result, 1, "") == pytest.approx([1.0], rel=1e-6)


def test_a_direction_moves_no_component_by_more_than_its_magnitude() -> None:
    x, vec = np.array([2.0, -30.0]), np.array([1.0, 5.0])
    moves = moves_of(
        lambda values: confirm_directional(values, x, x**2, vec, 2 * x * vec), lambda at: at**2, np.array([2.0, -30.0])
    )
    assert moves.shape == (2, 2)
    assert moves[0] == pytest.approx([1e-5, 5 * 1e-5 * 2 / 30], rel=1e-6)


def test_a_steep_function_is_compared_at_its_own_scale() -> None:
    rate = 1e4  # 1e-5 of the point is a tenth of the length on which the function changes

    def function(x: Vector) -> Any:
        return np.exp(rate * (x - 1.0))

    x = np.array([1.0])
    confirm: tuple[Callable[[Callable[[Vector], Vector]], None], ...] = (
        lambda values: confirm_directional(values, x, function(x), ONE, rate * function(x)),
        lambda values: confirm_gradient(values, x, function(x), ONE, rate * function(x)),
    )
    for act in confirm:
        moves = moves_of(act, function, x)
        assert len(moves) == 2
        assert 0.5e-9 <= abs(moves[0][0]) <= 1.0001e-9


# --- functions that fail, and values that are not finite --------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, ArithmeticError, TypeError, LookupError, AssertionError, RuntimeError])
def test_a_function_that_raises_next_to_the_point_has_no_derivative(error: type[Exception]) -> None:
    def function(x: Any) -> Any:
        if x[0] < 1:
            raise error("not below one")
        return x[0] ** 2 + x[1]

    vector_function = build(function, inputs=[2], outputs=[1], derivatives="torch", evaluate_at_load=False)
    point = [np.array([1.0, 2.0])]
    message = "no finite value on both sides of this point"
    with pytest.raises(ModelFailed, match=message):
        vector_function.gradient(0, 0, point, ONE, {})
    with pytest.raises(ModelFailed, match=message):
        vector_function.apply_jacobian(0, 0, point, np.array([1.0, 0.0]), {})
    # Where one step is enough to leave the domain, smaller ones may still be compared.
    near = [np.array([1.000001, 2.0])]
    assert np.asarray(vector_function.gradient(0, 0, near, ONE, {})) == pytest.approx([2.000002, 1.0], rel=1e-12)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_function_that_overflows_on_both_sides_confirms_nothing() -> None:
    def function(x: Any) -> Any:
        return np.sinh(
            1e9 * (np.array(x).real[0] - 1)
        )  # its derivative is lost; values are infinite at the first steps

    vector_function = build_unevaluated(function, [1])
    with pytest.raises(ModelFailed, match="is not confirmed by central differences"):
        vector_function.gradient(0, 0, [ONE], ONE, {})


def first_finite(lib: Any) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        return lib.stack([x[0] ** 2 * x[1], lib.log(x[0])])

    return function


def with_branch(x: Any) -> Any:
    """JAX code that cannot be compiled; the first call fails."""
    return first_finite(jnp)(x) if x[1] > 0 else x


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (first_finite(np), {"at": [[1.0, 2.0]]}),
        (first_finite(np), {"derivatives": "complex step"}),
        (first_finite(np), {"derivatives": "finite differences"}),
        (first_finite(jnp), {"derivatives": "jax"}),
        (with_branch, {"derivatives": "jax"}),
        (first_finite(torch), {"derivatives": "torch"}),
    ],
    ids=["dual numbers", "complex step", "finite differences", "jax", "jax, not compiled", "torch"],
)
@pytest.mark.parametrize("first_call", ["gradient", "apply_hessian", "apply_jacobian"])
def test_an_element_that_is_not_finite_counts_only_where_it_has_a_weight(
    function: Callable[..., Any], options: dict[str, Any], first_call: str
) -> None:
    evaluate = {} if "at" in options else {"evaluate_at_load": False}
    vector_function = build(function, inputs=[2], outputs=[2], **options, **evaluate)
    point, vec = [np.array([-1.0, 2.0])], np.array([1.0, 3.0])

    def gradient() -> None:
        value = vector_function.gradient(0, 0, point, np.array([1.0, 0.0]), {})
        assert np.asarray(value) == pytest.approx([-4.0, 1.0], rel=1e-6)
        with pytest.raises(InvalidOutput, match=r"^output 0: element 1 is nan at this point"):
            vector_function.gradient(0, 0, point, np.array([1.0, 2.0]), {})

    def apply_hessian() -> None:
        value = vector_function.apply_hessian(0, 0, 0, point, np.array([1.0, 0.0]), vec, {})
        assert np.asarray(value) == pytest.approx([-2.0, -2.0], rel=1e-5)
        with pytest.raises(InvalidOutput, match=r"^output 0: element 1 is nan at this point"):
            vector_function.apply_hessian(0, 0, 0, point, np.array([0.0, 1.0]), vec, {})

    def apply_jacobian() -> None:
        with pytest.raises(InvalidOutput, match=r"^output 0: element 1 is nan at this point"):
            vector_function.apply_jacobian(0, 0, point, vec, {})

    calls = {"gradient": gradient, "apply_hessian": apply_hessian, "apply_jacobian": apply_jacobian}
    calls.pop(first_call)()
    for call in calls.values():
        call()


# --- errors name the function -----------------------------------------------------------------------------


class AbsoluteValue(VectorFunction):
    """The derivative is lost, because `np.array` returns an array that does not track operations."""

    derivatives = "complex step"
    evaluate_at_load = False

    def input_sizes(self, config: Config) -> list[int]:
        return [2]

    def output_sizes(self, config: Config) -> list[int]:
        return [1]

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return np.abs(np.array([inputs[0][0]]))


def test_the_error_names_function_method_and_remedies() -> None:
    for function, name in (
        (build_vector_function(AbsoluteValue()), "AbsoluteValue"),
        (build_unevaluated(lambda x: np.abs(np.array([x[0]])), [2]), "<lambda>"),
    ):
        point = [np.array([2.0, 1.0])]
        for verb, act in (
            ("Gradient", lambda f=function, x=point: f.gradient(0, 0, x, ONE, {})),
            ("ApplyJacobian", lambda f=function, x=point: f.apply_jacobian(0, 0, x, x[0], {})),
        ):
            with pytest.raises(ModelFailed) as caught:
                act()  # type: ignore[no-untyped-call]
            message = caught.value.message
            assert message.startswith(
                f"{verb} of '{name}' by complex step is not confirmed by central differences: "
            ), message
            assert " is 0 where central differences give " in message
            assert message.endswith(
                "; provide gradient= or jacobian=, write the function in JAX, use derivatives='finite differences', or "
                "set verify='never' if the derivative is right"
            )
