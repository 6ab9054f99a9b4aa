"""Functions with noise, printed digits, single precision and large constants: finite differences and verification."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import VectorFunction, as_vector
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.derivatives.differences import PointFunction, measure
from features.simulators.derivatives.derivative_models import ONE, build, build_unevaluated, error_message

UNIT = np.array([1.0, 0.0])


def differences(function: Any, size: int = 2, **options: Any) -> VectorFunction:
    return build(function, inputs=[size], derivatives="finite differences", **options)


def gradient(function: VectorFunction, x: list[float]) -> np.ndarray:
    return as_vector(function.gradient(0, 0, [np.array(x)], ONE, {}), len(x), "")


def printed(digits: int) -> Any:
    return lambda x: float(f"%.{digits}g" % (np.sin(x[0]) * np.exp(x[1]) + 2))


@pytest.mark.parametrize("digits", [4, 6, 8, 12])
def test_printed_digits(digits: int) -> None:
    """Steps at which the printed value does not change are not used."""
    function, x = differences(printed(digits)), np.array([0.7, 0.4])
    right = [np.cos(0.7) * np.exp(0.4), np.sin(0.7) * np.exp(0.4)]
    result: Any = function.gradient(0, 0, [x], ONE, {})
    assert result.value == pytest.approx(right, rel=0.05)
    assert (np.abs(result.value - right) <= 4 * result.error).all()
    assert as_vector(function.apply_jacobian(0, 0, [x], UNIT, {}), 1, "") == pytest.approx(right[:1], rel=0.05)


def test_printed_digits_where_the_slope_is_small() -> None:
    function, x = differences(printed(6)), np.array([1.57, 1.0])
    result: Any = function.gradient(0, 0, [x], ONE, {})
    assert result.value[0] != 0
    assert np.abs(result.value - [np.cos(1.57) * np.e, np.sin(1.57) * np.e]) == pytest.approx([0, 0], abs=2e-3)
    message = error_message(lambda: function.apply_jacobian(0, 0, [x], UNIT, {}), ModelFailed)
    assert "element 0 is 0.00214" in message
    assert "with an estimated error of 0.002: the function is too noisy at this point" in message


def test_random_noise_is_estimated_or_declared() -> None:
    rng = np.random.default_rng(5)

    def noisy(x: Any) -> Any:
        return x[0] ** 2 * x[1] + 1e-3 * rng.normal()

    cases: tuple[Any, Any] = ({}, {"noise": 1e-3})
    for options in cases:
        results: list[Any] = [
            differences(noisy, at=[[0.7, 1.2]], **options).gradient(0, 0, [np.array([0.7, 1.2])], ONE, {})
            for _ in range(8)
        ]
        errors = np.abs([each.value - [1.68, 0.49] for each in results])
        estimates = np.array([each.error for each in results])
        assert errors.max() < 0.2
        assert (errors <= 5 * estimates).all()

    def noisier(x: Any) -> Any:
        return x[0] ** 2 * x[1] + 0.05 * rng.normal()

    function = differences(noisier, evaluate_at_load=False, outputs=[1])
    with pytest.raises(
        ModelFailed, match=r"ApplyHessian of 'noisier' by finite differences: element \d is .* too noisy"
    ):
        function.apply_hessian(0, 0, 0, [np.array([0.7, 1.2])], ONE, UNIT, {})


def test_a_step_of_the_user() -> None:
    steps: list[float] = []

    def function(x: Any) -> Any:
        steps.append(abs(float(x[0]) / 2 - 1))
        return x[0] ** 2

    differences(function, 1, step=0.25, evaluate_at_load=False, outputs=[1]).gradient(0, 0, [np.array([2.0])], ONE, {})
    assert max(steps) == pytest.approx(0.25)
    assert len(steps) == 5


def test_a_class_declares_its_noise() -> None:
    from dragoman.core.vectors import VectorFunction as Base

    class Printed(Base):
        derivatives = "finite differences"
        noise = 1e-3

        def input_sizes(self, config: Any) -> list[int]:
            return [1]

        output_sizes = input_sizes

        def evaluate(self, inputs: Any, config: Any) -> Any:
            return np.round(np.exp(inputs[0]), 3)

    assert gradient(build_vector_function(Printed()), [1.0]) == pytest.approx([np.e], rel=0.02)


def test_an_element_that_never_changes_has_the_slope_zero() -> None:
    function = PointFunction(lambda x: np.array([x[0] ** 2, 3.0]), np.array([2.0]), np.array([4.0, 3.0]))
    found = measure(function, np.array([2.0]), lambda slope, error, curvature: error <= 1e-6 * np.abs(slope))
    assert found.slope == pytest.approx([8, 0])


# --- verification ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [2.0, 1e3, 1e4, 1e5, 1e6, 2.1e11])
def test_a_steep_function_of_a_zero_input(slope: float) -> None:
    """The scale of a zero is a guess; the function may vary by e to the hundreds over it."""
    function = build_unevaluated(lambda x: np.exp(30 * float(np.asarray(x)[0].real)) * x[1], [2])
    with pytest.raises(ModelFailed, match="not confirmed by central differences"):
        function.gradient(0, 0, [np.array([0.0, slope])], ONE, {})


@pytest.mark.parametrize("x", [[-0.31, -2.2], [0.7, 1.2], [2.5, 1e4]])
@pytest.mark.parametrize("grid", [np.float32, np.float16, lambda x: np.round(x, 4)])
def test_inputs_that_are_rounded_to_a_grid(x: list[float], grid: Any) -> None:
    function = build_unevaluated(lambda x: np.exp(grid(np.asarray(x)[0].real)) * x[1], [2])
    act: Any
    for act in (
        lambda: function.gradient(0, 0, [np.array(x)], ONE, {}),
        lambda: function.apply_jacobian(0, 0, [np.array(x)], UNIT, {}),
    ):
        with pytest.raises(ModelFailed, match="not confirmed by central differences"):
            act()


@pytest.mark.parametrize("constant", [1e2, 1e6, 1e8])
@pytest.mark.parametrize("first", [0.7, 3.0])
def test_small_terms_beside_a_large_constant(constant: float, first: float) -> None:
    function = build_unevaluated(lambda x: constant + 1e-4 * float(np.asarray(x)[0].real) ** 2 + 1e-4 * x[1], [2])
    with pytest.raises(ModelFailed, match="not confirmed by central differences"):
        function.gradient(0, 0, [np.array([first, 1.2])], ONE, {})


@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.GELU, torch.nn.SiLU])
def test_networks_in_single_precision_are_confirmed(activation: Any) -> None:
    derivatives_of: Any = torch.autograd.functional
    torch.manual_seed(3)
    network: Any = torch.nn.Sequential(torch.nn.Linear(2, 16), activation(), torch.nn.Linear(16, 2))
    evaluations = [0]

    def single(x: Any) -> Any:
        evaluations[0] += 1
        return network(x.float())

    function = build(single, inputs={"x": 2})
    evaluations[0] = 0
    double: Any = torch.nn.Sequential(*(type(each)(*_sizes(each)) for each in network)).double()
    double.load_state_dict(network.state_dict())
    rng = np.random.default_rng(2)
    for _ in range(6):
        x, sens, vec = rng.normal(size=2), rng.normal(size=2), rng.normal(size=2)
        at = torch.tensor(x)
        jacobian: Any = derivatives_of.jacobian(double, at)
        hessian: Any = derivatives_of.hessian(lambda z, s=sens: double(z) @ torch.tensor(s), at)
        cases = (
            (function.gradient(0, 0, [x], sens, {}), sens @ jacobian.numpy()),
            (function.apply_jacobian(0, 0, [x], vec, {}), jacobian.numpy() @ vec),
            (function.apply_hessian(0, 0, 0, [x], sens, vec, {}), hessian.numpy() @ vec),
        )
        for result, right in cases:
            np.testing.assert_allclose(np.asarray(result), right, rtol=1e-4, atol=1e-5)
    # The precision is recognised: steps of double precision would fail first.
    assert evaluations[0] <= 18 * 8


def _sizes(layer: Any) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else ()


def test_a_wrong_derivative_in_single_precision_is_an_error() -> None:
    def leaks(x: Any) -> Any:
        x = x.float()
        return torch.tanh(x[:1].detach()) * x[1:]

    function = build(leaks, inputs={"x": 2}, evaluate_at_load=False, outputs=[1], derivatives="torch")
    with pytest.raises(ModelFailed, match="compute in double precision"):
        function.gradient(0, 0, [np.array([0.7, 1.2])], ONE, {})


def test_a_refusal_takes_a_bounded_number_of_evaluations() -> None:
    calls = [0]

    def kinks(x: Any) -> Any:
        calls[0] += 1
        return torch.abs(x[0] - 1) + torch.abs(x[1] - 1) + x[2] ** 2

    function = build(kinks, inputs=[3], derivatives="torch", evaluate_at_load=False, outputs=[1])
    with pytest.raises(ModelFailed, match="kink"):
        function.gradient(0, 0, [np.array([1.0, 1.0, 2.0])], ONE, {})
    assert calls[0] <= 12


# --- what is negligible --------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("call", ["gradient", "apply_jacobian"])
def test_a_kink_is_refused_however_large_the_value_is(constant: float, call: str) -> None:
    function = differences(lambda x: constant + 2.4 * max(float(x[0]) - 0.7, 0.0) + x[1])
    vector = ONE if call == "gradient" else UNIT
    message = error_message(lambda: getattr(function, call)(0, 0, [np.array([0.7, 1.2])], vector, {}), ModelFailed)
    assert re.search(r"element 0 is 1\.2 with an estimated error of 0\.6: .* or has a kink", message)
    beside = getattr(function, call)(0, 0, [np.array([0.8, 1.2])], vector, {})
    assert as_vector(beside, 2 if call == "gradient" else 1, "")[0] == pytest.approx(2.4, rel=1e-3)


@pytest.mark.parametrize("constant", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("source", ["finite differences", "complex step"])
def test_a_kink_of_the_gradient_is_refused_however_large_the_gradient_is(constant: float, source: str) -> None:
    def value(x: Any) -> Any:
        above = (x[0] - 0.7 + np.sqrt((x[0] - 0.7) ** 2)) / 2  # the larger one of x[0] - 0.7 and 0
        return constant * x[0] + 1.2 * above**2 + x[1] ** 2

    def slope(x: Any, sens: Any) -> Any:
        return sens[0] * np.array([constant + 2.4 * max(float(x[0]) - 0.7, 0.0), 2 * x[1]])

    options: dict[str, Any] = {"gradient": slope} if source == "finite differences" else {}
    function = build(value, inputs=[2], outputs=[1], derivatives=source, evaluate_at_load=False, **options)

    def hessian(x: float) -> Any:
        return function.apply_hessian(0, 0, 0, [np.array([x, 1.2])], ONE, UNIT, {})

    assert re.search(
        r"element 0 is 1\.2 with an estimated error of 0\.6", error_message(lambda: hessian(0.7), ModelFailed)
    )
    assert as_vector(hessian(0.8), 2, "") == pytest.approx([2.4, 0.0], rel=1e-4, abs=1e-4)


def test_noise_below_a_ten_thousandth_of_the_value_does_not_hide_that_an_output_does_not_change() -> None:
    rng = np.random.default_rng(3)
    function = differences(lambda x: np.array([x[0], x[1]]) ** 2 * (1 + 1e-7 * rng.normal(size=2)))
    result = as_vector(function.apply_jacobian(0, 0, [np.array([0.7, 1.2])], UNIT, {}), 2, "")
    assert result == pytest.approx([1.4, 0.0], abs=1e-4)


def test_differences_are_those_of_the_solver_not_of_its_equation() -> None:
    """As docs/scientific.md says: the solution of the equation has the second element 1.4e-11."""
    solve_ivp = pytest.importorskip("scipy.integrate").solve_ivp

    def solution(rtol: float) -> Any:
        return lambda x: solve_ivp(
            lambda t, y: [-x[0] * y[0] + np.sin(3 * t)], (0, 5), [x[1]], rtol=rtol, atol=rtol / 1000
        ).y[0, -1:]

    loose = gradient(differences(solution(1e-3), at=[[5.0, 2.0]]), [5.0, 2.0])
    for step in (1e-6, 1e-4):
        above, below = (solution(1e-3)([5.0, 2.0 + s])[0] for s in (step, -step))
        assert loose[1] == pytest.approx((above - below) / (2 * step), rel=0.01)
    assert abs(loose[1]) > 1e-6
    assert abs(gradient(differences(solution(1e-10), at=[[5.0, 2.0]]), [5.0, 2.0])[1]) < 1e-10
