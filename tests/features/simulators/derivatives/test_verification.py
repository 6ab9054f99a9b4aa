"""Verification of derivatives by central differences in each call."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed, NotSupported
from dragoman.core.spec import ModelSpec
from dragoman.core.vectors import Vector, VectorFunction
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.derivatives.derived import split_by_scale
from dragoman_simulators.derivatives.verification import confirm_directional, confirm_gradient
from dragoman_simulators.simulator_model import vector_model
from features.simulators.derivatives.derivative_models import ONE, build, build_unevaluated

Function = Callable[..., Any]


def gradient(function: VectorFunction, x: Any, sens: Any = ONE, **config: Any) -> Vector:
    return np.asarray(function.gradient(0, 0, [np.array(x, np.float64)], np.array(sens, np.float64), config))


# --- NumPy code that is not analytic and converts the tracking arrays -------------------------------------


def huber(x: Any) -> Any:
    r = np.array([x[0] * t + x[1] - y for t, y in zip((0.1, 0.2, 0.3), (0.5, 0.6, 0.4), strict=True)])
    return np.where(np.abs(r) < 0.5, 0.5 * r**2, 0.5 * (np.abs(r) - 0.25)).sum()


def branch(x: Any) -> Any:
    r = np.array([x[0], x[1]])
    return abs(r[0]) * r[1] if np.abs(r[0]) > 1 else r[0] * r[1]


def segments(x: Any) -> Any:
    x = np.asarray(x)
    return np.where(x > 0, x**2, 3 * np.abs(x))


def lengths(x: Any) -> Any:
    return np.array([1e8 * x[0] * x[1], np.linalg.norm(np.array([x[0], x[1]]))])


def hidden(x: Any) -> Any:
    return 1e8 * x[0] * x[1] + np.abs(np.array([x[2]]))[0]


def half_hidden(x: Any) -> Any:
    return 1e8 * x[0] * x[1] + x[2] + np.asarray(x).real[2]


@pytest.mark.parametrize(
    ("function", "x", "sens", "message"),
    [
        (huber, [3, 4], [1], "element 1 of the gradient is 0 where central differences give 1.5"),
        (branch, [-2, 0.6], [1], "is 0 where central differences give -0.6,"),
        (segments, [-2, -3], [1, 1], "is 0 where central differences give -3,"),
        (lengths, [3, 4], [0, 1], "is 0 where central differences give 0."),
        (hidden, [1, 2, 3], [1], "element 2 of the gradient is 0 where central differences give 1"),
        (half_hidden, [1, 2, 3], [1], "element 2 of the gradient is 1 where central differences give "),
        (lambda x: np.abs(np.array([x[0]]))[0], [1e-15, 0], [1], "is 0 where central differences give 1,"),
        (lambda x: np.array([x[0], 0])[0] ** 120 + x[1], [-1.01, 1], [1], "where central differences give -392.125"),
        (lambda x: x[0] + 1e-3 * np.asarray(x).real[0] ** 2, [2, 1], [1], "is 1 where central differences give 1.004"),
        (
            lambda x: x[0] + 1e-5 * np.asarray(x).real[0] ** 2,
            [2, 1],
            [1],
            "is 1 where central differences give 1.0000",
        ),
    ],
)
def test_a_wrong_derivative_is_an_error(function: Function, x: Any, sens: Any, message: str) -> None:
    checked = build_unevaluated(function, [len(x)], len(sens))
    with pytest.raises(
        ModelFailed, match=r"Gradient of .* by complex step is not confirmed by central differences"
    ) as e:
        gradient(checked, x, sens)
    assert message in str(e.value)
    assert "provide gradient= or jacobian=, write the function in JAX" in str(e.value)
    assert "derivatives='finite differences', or set verify='never'" in str(e.value)
    unchecked = gradient(build_unevaluated(function, [len(x)], len(sens), verify="never"), x, sens)
    assert np.isfinite(unchecked).all()


def test_the_action_of_a_jacobian_is_confirmed_for_each_output() -> None:
    function, x = build_unevaluated(lengths, [2], 2), np.array([3.0, 4.0])
    with pytest.raises(ModelFailed, match=r"ApplyJacobian .* element 1 of the derivative is 0 where .* give 1\.4"):
        function.apply_jacobian(0, 0, [x], np.ones(2), {})


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: np.abs(np.array([x[0], x[1]]) - 1).sum(), [1, 2]),
        (lambda x: np.abs(np.array([x[0]]))[0] + x[1], [0, 2]),
        (lambda x: np.abs(np.array([x[0]]))[0] + x[1], [1e-15, 2]),
    ],
)
def test_a_kink_is_an_error(function: Function, x: Any) -> None:
    with pytest.raises(ModelFailed, match="the function has a kink at or next to this point, which shows in"):
        gradient(build_unevaluated(function, [2]), x)


def test_noise_and_jumps_are_errors() -> None:
    rng = np.random.default_rng(1)

    def noisy(x: Any) -> Any:
        return x.sum() + 1e-2 * rng.random()

    def jump(x: Any) -> Any:
        return x[0] ** 2 + (1.0 if np.asarray(x).real[0] >= 1 else 0.0)

    for function, x in ((noisy, [1, 2]), (noisy, [0, 0]), (jump, [1, 2])):
        with pytest.raises(ModelFailed, match=r"do not settle on a number for .*: the function is noisy"):
            gradient(build_unevaluated(function, [2]), x)


# --- correct derivatives ----------------------------------------------------------------------------------


def test_exact_derivatives_of_powers_and_small_values() -> None:
    assert gradient(build(lambda x: x[0] ** 120 + x[1], inputs=[2]), [-1.01, 1]) == pytest.approx(
        [-120 * 1.01**119, 1], rel=1e-13
    )
    bell = build(lambda x: np.exp(-(x @ x) / 2), inputs=[2])
    value = np.exp(-(36.5**2 + 1) / 2)
    assert gradient(bell, [36.5, 1]) == pytest.approx([-36.5 * value, -value], rel=1e-12, abs=0)


def wave(x: Any) -> Any:
    return np.sin(x[1] / 0.01) * np.log(x[0])


@pytest.mark.parametrize("derivatives", ["finite differences", "complex step"])
def test_each_component_has_its_own_step(derivatives: str) -> None:
    function = build(wave, at=[[2.1e11, 0.01]], derivatives=derivatives)
    x = np.array([2.1e11, 0.012])
    expected = [np.sin(1.2) / x[0], 100 * np.cos(1.2) * np.log(x[0])]
    assert gradient(function, x) == pytest.approx(expected, rel=1e-8, abs=0)
    assert expected == pytest.approx([4.4382813e-12, 944.68], rel=1e-6)
    vec = np.array([1e11, 1.0])  # the first component moves half of its size, the second eighty times its own
    assert np.asarray(function.apply_jacobian(0, 0, [x], vec, {})) == pytest.approx([np.dot(expected, vec)], rel=1e-8)
    second = function.apply_hessian(0, 0, 0, [x], ONE, np.array([0.0, 1.0]), {})
    mixed = [100 * np.cos(1.2) / x[0], -1e4 * np.sin(1.2) * np.log(x[0])]
    assert np.asarray(second) == pytest.approx(mixed, rel=1e-5, abs=0)


def test_differences_of_a_component_that_is_a_rounding_error_of_zero() -> None:
    function = build(lambda x: np.exp(x[0]) + x[1], inputs=[2], derivatives="finite differences")
    assert gradient(function, [1e-17, 1.0]) == pytest.approx([1, 1], rel=1e-8)


def smooth(seed: int) -> tuple[Function, Vector, int]:
    """Return a smooth random function, a point with some zeros, and the number of outputs."""
    rng = np.random.default_rng(seed)
    n, m, kind = (int(rng.integers(1, k)) for k in (12, 6, 5))
    sizes = 10.0 ** rng.uniform(-6, 6, n)
    x = sizes * rng.normal(size=n) * (rng.random(n) > 0.08)
    layers = [rng.normal(size=(n, n)) / np.sqrt(n) for _ in range(rng.integers(0, 4))]
    out, power = rng.normal(size=(m, n)) * 10.0 ** rng.uniform(-4, 4, (m, 1)), int(rng.integers(1, 6))
    shift, more = 10.0 ** rng.uniform(-3, 3, m), rng.normal(size=(m, n)) * rng.integers(0, 2)

    def function(x: Any) -> Any:
        z = x / sizes
        for layer in layers:
            z = np.sin(layer @ z + 0.3)
        y, square = out @ z + more @ (x / sizes) ** power, ((x / sizes) ** 2).sum()
        return shift + [y, y * np.exp(-square / 2), y + np.log(1 + square), y + np.sin(30 * x[0] / sizes[0])][kind - 1]

    return function, x, m


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_correct_derivatives_of_smooth_functions_are_confirmed(seed: int) -> None:
    function, x, m = smooth(seed)
    steps = 1e-25 * np.where(x != 0, np.abs(x), 1.0)
    jacobian = np.stack([np.imag(function(x + 1j * h * e)) / h for h, e in zip(steps, np.eye(len(x)), strict=True)], 1)
    rng, here, calls = np.random.default_rng((seed, 1)), np.asarray(function(x)), 0

    def values(at: Vector) -> Vector:
        nonlocal calls
        calls += 1
        return np.asarray(function(at))

    sens = np.eye(m)[rng.integers(m)]
    confirm_gradient(values, x, here, sens, sens @ jacobian)
    vec = rng.normal(size=len(x)) * np.where(x != 0, np.abs(x), 1.0)
    for part in split_by_scale(x, vec):
        if (np.count_nonzero(part) == 1) or x[part != 0].any():
            confirm_directional(values, x, here, part, jacobian @ part)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 10), error=st.sampled_from([-1.0, -0.1, 0.1, 1e30]))
def test_one_wrong_element_of_a_gradient_is_an_error(seed: int, index: int, error: float) -> None:
    function, x, m = smooth(seed)
    index %= len(x)
    steps = 1e-25 * np.where(x != 0, np.abs(x), 1.0)
    slopes = np.array([np.imag(function(x + 1j * h * e))[0] / h for h, e in zip(steps, np.eye(len(x)), strict=True)])
    here = np.asarray(function(x))
    if abs(slopes[index] * x[index]) < 1e-5 * max(abs(here[0]), np.abs(slopes * x).max()):
        return  # below the documented bound
    slopes[index] *= 1 + error
    with pytest.raises(Exception, match="differences"):
        confirm_gradient(lambda at: np.asarray(function(at)), x, here, np.eye(m)[0], slopes)


# --- values that are not finite, and functions that fail --------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("derivatives", ["complex step", "finite differences", "jax", "torch"])
@pytest.mark.parametrize("name", ["log", "sqrt", "arcsin", "power"])
def test_outside_the_domain_there_is_no_derivative(derivatives: str, name: str) -> None:
    lib: Any = {"jax": jnp, "torch": torch}.get(derivatives, np)

    def function(x: Any) -> Any:
        inner = x[0] ** 0.5 if name == "power" else getattr(lib, name)(x[0])
        return -x[0] + 2 * inner - x[1] ** 2 / 2

    vector_function = build(function, inputs=[2], derivatives=derivatives)
    assert_no_derivative(
        vector_function, [-1.5, 0.2], InvalidOutput, r"output 0: element 0 is .* so it has no derivative there"
    )


def assert_no_derivative(function: VectorFunction, x: list[float], error: type[Exception], message: str) -> None:
    point, vec = [np.array(x)], np.ones(2)
    with pytest.raises(error, match=message):
        function.gradient(0, 0, point, ONE, {})
    with pytest.raises(error, match=message):
        function.apply_jacobian(0, 0, point, vec, {})
    with pytest.raises(error, match=message):
        function.apply_hessian(0, 0, 0, point, ONE, vec, {})


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("derivatives", ["auto", "complex step", "finite differences", "jax", "torch"])
def test_a_derivative_at_a_point_that_is_not_finite_is_an_input_error(derivatives: str) -> None:
    lib: Any = {"jax": jnp, "torch": torch}.get(derivatives, np)
    function = build(lambda x: lib.exp(-x[0] * x[0]) + x[1], inputs=[2], derivatives=derivatives)
    for number in (np.inf, np.nan):
        message = rf"^input\[0\]\[0\]: expected a finite number, got {number}$"
        assert_no_derivative(function, [number, 2], InvalidInput, message)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("derivatives", ["complex step", "finite differences"])
def test_a_log_density_of_minus_infinity_has_no_gradient(derivatives: str) -> None:
    function = build(lambda x: np.log(np.exp(-(x @ x) / 2)), inputs=[2], derivatives=derivatives)
    with pytest.raises(InvalidOutput, match="element 0 is -inf at this point"):
        gradient(function, [40, 1])


def test_a_function_that_fails_at_the_point_fails_as_evaluate_does() -> None:
    def picky(x: Any) -> Any:
        if np.asarray(x).real[0] > 5:
            raise ValueError("five at most")
        return x**2

    with pytest.raises(ValueError, match="five at most"):
        gradient(build(picky, inputs=[1]), [6])


# --- PyTorch and JAX --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leak", [lambda x: x[0].item(), lambda x: x.tolist()[0], lambda x: float(x.detach().numpy()[0])]
)
@pytest.mark.parametrize("verb", ["gradient", "apply_jacobian", "apply_hessian"])
def test_tensors_converted_to_numbers_are_an_error(leak: Function, verb: str) -> None:
    function = build(lambda x: leak(x) * x[1] ** 2, inputs=[2], outputs=[1], derivatives="torch")
    x, vec = [np.array([2.0, 3.0])], np.array([1.0, 0.5])
    arguments = {"gradient": (ONE,), "apply_jacobian": (vec,), "apply_hessian": (ONE, vec)}[verb]
    where = (0, 0, 0) if verb == "apply_hessian" else (0, 0)
    with pytest.raises(Exception, match=r"by torch is not confirmed|[Cc]annot|no storage|item"):
        getattr(function, verb)(*where, x, *arguments, {})


def test_a_hessian_action_with_a_wrong_gradient_is_an_error() -> None:
    function = build(lambda x: x[0].detach() + x[1] ** 2, inputs=[2], outputs=[1], derivatives="torch")
    with pytest.raises(ModelFailed, match=r"Gradient of .* by torch is not confirmed .* is 0 where .* give 1,"):
        function.apply_hessian(0, 0, 0, [np.array([2.0, 3.0])], ONE, np.ones(2), {})


def test_jax_arrays_converted_to_numbers_are_an_error() -> None:
    function = build(lambda x: x[0].item() * x[1] ** 2, inputs=[2], outputs=[1], derivatives="jax")
    with pytest.raises(ModelFailed, match=r"by jax is not confirmed .* element 0 .* is 0 where .* give 9,"):
        gradient(function, [2, 3])
    assert gradient(build(lambda x: x[0] * x[1] ** 2, inputs=[2], derivatives="jax"), [2, 3]).tolist() == [9.0, 12.0]


@pytest.mark.parametrize("verb", ["apply_jacobian", "apply_hessian"])
def test_the_first_action_of_jax_arrays_converted_to_numbers_is_an_error(verb: str) -> None:
    def leaking(x: Any) -> Any:
        return x[0].item() ** 2 * x[1] ** 2

    function = build(leaking, inputs=[2], outputs=[1], derivatives="jax", evaluate_at_load=False)
    x = [np.array([2.0, 3.0])]
    with pytest.raises(ModelFailed, match=r"by jax is not confirmed .* is 0 where .* give 36,"):
        if verb == "apply_jacobian":
            function.apply_jacobian(0, 0, x, np.array([1.0, 0.0]), {})
        else:
            function.apply_hessian(0, 0, 0, x, ONE, np.ones(2), {})


# --- settings and costs -----------------------------------------------------------------------------------


class Counted:
    """A function that counts its evaluations."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return np.stack([(x**2).sum() * y[0], y[0] ** 3, x[0]])


@pytest.mark.parametrize(
    ("options", "evaluations"),
    [
        ({}, 25),
        ({"derivatives": "complex step"}, 25),
        ({"derivatives": "finite differences"}, 17),
        ({"derivatives": None}, 1),
        ({"derivatives": None, "outputs": [3]}, 0),
        ({"derivatives": "complex step", "outputs": [3], "evaluate_at_load": False}, 0),
        ({"derivatives": "finite differences", "outputs": [3], "evaluate_at_load": False}, 0),
    ],
)
def test_evaluations_at_load_are_as_documented(options: Mapping[str, Any], evaluations: int) -> None:
    counted = Counted()
    function = build(lambda x, y: counted(x, y), inputs=[5, 1], **options)
    function.output_sizes({})
    assert set(function.notes()) <= {"finite differences", "evaluate_at_load"}
    assert counted.calls == evaluations
    if options.get("derivatives", "auto"):
        at = [np.arange(1.0, 6.0), np.array([2.0])]
        slopes = np.asarray(function.gradient(0, 0, at, np.array([1.0, 0, 0]), {}))
        assert slopes == pytest.approx(4 * at[0], rel=1e-8)


def test_verification_takes_three_evaluations_and_two_more_for_constant_outputs() -> None:
    counted = Counted()
    for verify, extra in (("always", 3), ("never", 1)):
        function = build(lambda x, y: counted(x, y), inputs=[5, 1], verify=verify)
        counted.calls = 0
        at = [np.arange(1.0, 6.0), np.array([2.0])]
        function.gradient(0, 0, at, np.array([1.0, 0, 0]), {})
        assert counted.calls == 5 + extra
        counted.calls = 0
        function.apply_jacobian(0, 0, at, np.ones(5), {})
        assert counted.calls == 1 + extra + (2 if verify == "always" else 0)


def test_options_required_by_evaluate_at_load_false() -> None:
    with pytest.raises(ModelFailed, match="evaluate_at_load=False, got 'auto'"):
        build(lambda x: x, inputs=[1], outputs=[1], evaluate_at_load=False)
    with pytest.raises(ModelFailed, match=r"evaluate_at_load=False requires outputs=\[...\]"):
        build(lambda x: x, inputs=[1], derivatives=None, evaluate_at_load=False)


@pytest.mark.parametrize("derivatives", ["complex step", "finite differences"])
def test_derivatives_that_take_too_many_evaluations_are_not_offered(derivatives: str) -> None:
    options: dict[str, Any] = {"outputs": [1], "derivatives": derivatives, "evaluate_at_load": False}
    cost = 1 if derivatives == "complex step" else 4
    for limits, size in (({"max_evaluations": 5 * cost - 1}, 5), ({}, 10**6)):
        function = build(lambda x: (x**2).sum(), inputs=[size], **limits, **options)
        assert set(function.sources()) == {"evaluate", "apply_jacobian"}
        limit = limits.get("max_evaluations", 10_000)
        for reason in function.missing().values():
            assert re.search(rf" takes \d+ evaluations of the function; expected at most {limit} ", reason)
        assert f"takes {cost * size} evaluations" in function.missing()["gradient"]
    within = build(lambda x: (x**2).sum(), inputs=[5], max_evaluations=5 * cost, **options)
    assert gradient(within, np.ones(5)) == pytest.approx([2.0] * 5)
    pushed = build(lambda x: x, inputs=[5], apply_jacobian=lambda x, vec: vec, derivatives="jax", max_evaluations=3)
    assert pushed.sources()["gradient"] == "jax"


@pytest.mark.parametrize("derivatives", ["complex step", "finite differences"])
def test_sizes_of_a_config_that_take_too_many_evaluations_are_an_error(derivatives: str) -> None:
    options: dict[str, Any] = {"outputs": [1], "derivatives": derivatives, "evaluate_at_load": False}
    function = build(lambda x: (x**2).sum(), inputs=lambda config: [config.get("n", 1)], max_evaluations=8, **options)
    x, config = np.ones(9), {"n": 9}
    assert gradient(function, np.ones(1)) == pytest.approx([2.0])
    with pytest.raises(NotSupported, match="evaluations of the function; expected at most 8"):
        function.gradient(0, 0, [x], ONE, config)
    with pytest.raises(NotSupported, match="evaluations of the function; expected at most 8"):
        function.apply_hessian(0, 0, 0, [x], ONE, x, config)
    needed = build(lambda x: (x**2).sum(), inputs=lambda config: [config["n"]], max_evaluations=8, **options)
    assert set(needed.sources()) == {"evaluate", "gradient", "apply_jacobian", "apply_hessian"}


def test_products_with_too_many_unit_vectors_are_not_offered() -> None:
    options: dict[str, Any] = {"inputs": [3], "outputs": [3], "linear": True}
    x, vec = [np.ones(3)], np.array([1.0, 2.0, 3.0])

    def pushed(limit: int) -> VectorFunction:
        return build(lambda x: 2 * x, apply_jacobian=lambda x, vec: 2 * vec, max_evaluations=limit, **options)

    def pulled(limit: int) -> VectorFunction:
        given = {**options, "linear": False, "derivatives": "finite differences", "gradient": lambda x, sens: 2 * sens}
        return build(lambda x: 2 * x, max_evaluations=limit, **given)

    assert list(pushed(3).gradient(0, 0, x, vec, {})) == [2.0, 4.0, 6.0]
    assert list(pulled(3).apply_jacobian(0, 0, x, vec, {})) == [2.0, 4.0, 6.0]
    assert "takes 3 evaluations of the function; expected at most 2" in pushed(2).missing()["gradient"]
    # Of the product with a written gradient there is another way: five evaluations, whatever the size is.
    assert pulled(2).sources()["apply_jacobian"] == "finite differences"


def test_fast_functions_take_two_more_evaluations() -> None:
    calls = 0

    def fast(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return np.sin(3e3 * x)

    x, one = np.array([0.7]), np.ones(1)
    here, slope = fast(x), 3e3 * np.cos(3e3 * x)
    calls = 0
    confirm_directional(fast, x, here, one, slope)
    assert calls == 2
    confirm_gradient(fast, x, here, one, slope)
    assert calls == 4


# --- derivatives written by the author, and configs -------------------------------------------------------


def test_a_jacobian_that_depends_on_the_point_has_a_hessian_too() -> None:
    function = build(lambda x: [x[0] * x[1]], inputs=[2], jacobian=lambda x: np.array([[x[1], x[0]]]))
    assert function.sources()["apply_hessian"] == "complex step of gradient (author)"
    assert gradient(function, [2, 3]).tolist() == [3.0, 2.0]
    assert np.asarray(function.apply_hessian(0, 0, 0, [np.array([2.0, 3.0])], ONE, np.array([1.0, 5.0]), {})) == (
        pytest.approx([5, 1], rel=1e-14)
    )
    rounded = build(lambda x: [x[0] * x[1]], inputs=[2], jacobian=lambda x: [[float(x[1]), float(x[0])]])
    assert "apply_hessian" not in rounded.sources()


def test_lists_and_hessians_may_depend_on_the_point() -> None:
    listed = build(lambda x: [x[0] * x[1]], inputs=[2], gradient=lambda x: [x[1], x[0]])
    assert gradient(listed, [2, 3]).tolist() == [3.0, 2.0]

    def curvature(x: Any) -> Any:
        return np.array([[2 * x[1], 2 * x[0]], [2 * x[0], 0 * x[0]]])

    for options in ({}, {"jacobian": lambda x: np.array([[2 * x[0] * x[1], x[0] ** 2]])}):
        function = build(lambda x: [x[0] ** 2 * x[1]], inputs=[2], hessian=curvature, **options)
        assert gradient(function, [2, 3]) == pytest.approx([12, 4], rel=1e-14)
        at = [np.array([2.0, 3.0])]
        assert np.asarray(function.apply_hessian(0, 0, 0, at, ONE, np.array([1.0, 5.0]), {})).tolist() == [26.0, 4.0]


def test_a_wrong_hessian_of_a_written_gradient_is_an_error() -> None:
    def slope(x: Any) -> Any:
        r = np.array([x[0], x[1]])
        return np.where(np.abs(r) > 1, np.abs(r) ** 3, r**2)

    function = build(lambda x: x.sum(), inputs=[2], outputs=[1], gradient=slope)
    point, vec = [np.array([-2.0, 0.5])], np.ones(2)
    with pytest.raises(ModelFailed, match=r"ApplyHessian .* is 0 where central differences give -12"):
        function.apply_hessian(0, 0, 0, point, ONE, vec, {})


def test_verification_of_a_hessian_by_a_framework_can_be_disabled() -> None:
    def detached(x: Any) -> Any:
        return x * x.detach()  # half of its derivative is lost

    options: dict[str, Any] = {"inputs": [2], "outputs": [1], "gradient": detached, "derivatives": "torch"}
    point, vec = [np.array([-2.0, 0.5])], np.ones(2)
    with pytest.raises(ModelFailed, match=r"ApplyHessian .* by torch of gradient .* is -2 where .* give -4"):
        build(lambda x: (x**3).sum() / 3, **options).apply_hessian(0, 0, 0, point, ONE, vec, {})
    unverified = build(lambda x: (x**3).sum() / 3, **options, verify="never")
    assert np.asarray(unverified.apply_hessian(0, 0, 0, point, ONE, vec, {})).tolist() == [-2.0, 0.5]


def test_unexpected_entries_of_the_config_are_rejected() -> None:
    def whole(x: Any, **config: Any) -> Any:
        return x * config.get("a", 1)

    assert build(whole, inputs=[1], derivatives=None).evaluate([np.array([2.0])], {"a": 3, "b": 4}).tolist() == [6.0]
    with pytest.raises(InvalidInput, match="config: unexpected entry 'x': expected entries of 'whole': none"):
        build(whole, inputs=[1], derivatives=None).evaluate([np.array([2.0])], {"x": 3})
    plain = build(lambda x: x, inputs=[1], derivatives=None)
    with pytest.raises(InvalidInput, match="config: unexpected entry 'a': expected entries of '<lambda>': none"):
        plain.evaluate([np.array([2.0])], {"a": 3})
    sized = build(lambda x: x, inputs=lambda config: [config.get("n", 1)], derivatives=None)
    assert sized.evaluate([np.array([2.0, 3.0])], {"n": 2}).tolist() == [2.0, 3.0]
    optional = build(lambda x, *, a=1.0: a * x, inputs=lambda config: [config.get("n", 1)], derivatives=None)
    with pytest.raises(InvalidInput, match="config: unexpected entry 'n': expected entries of '<lambda>': a"):
        optional.evaluate([np.array([2.0, 3.0])], {"n": 2})

    def scaled(x: Any, *, a: float = 1.0) -> Any:
        return (a * x).sum()

    blind = build(scaled, inputs=[1], gradient=lambda x: np.ones(1))  # as if the gradient did not depend on `a`
    with pytest.raises(InvalidInput, match="unexpected entry 'a'"):
        gradient(blind, [1], a=2.0)


@pytest.mark.parametrize(
    ("n", "reason"), [(1.5, r"got \[1.5\]"), (-1, r"got \[-1\]"), ("x", r"got \['x'\]"), (True, r"got \[True\]")]
)
def test_invalid_sizes_from_a_config(n: Any, reason: str) -> None:
    function = build(lambda x: x, inputs=lambda c: [c.get("n", 1)], outputs=lambda c: [c.get("n", 1)], derivatives=None)
    for sizes in (function.input_sizes, function.output_sizes):
        with pytest.raises(
            InvalidInput, match=f"config: expected sizes of .* that are non-negative integers, {reason}"
        ):
            sizes({"n": n})
    keyed = build(lambda x: x, inputs=lambda c: [c["n"] if c else 1], outputs=[1], derivatives=None)
    with pytest.raises(InvalidInput, match="config: cannot compute the sizes of inputs from it: KeyError: 'n'"):
        keyed.input_sizes({"m": 1})


def lost_above_one(x: Any) -> Any:
    return x[0] + max(0.0, np.asarray(x).real[0] - 1)


@pytest.mark.parametrize(
    ("verify", "expected"),
    [(None, 3 * [False]), ("always", 3 * [False]), ("sampled", 31 * [True] + 2 * [False]), ("never", 40 * [True])],
)
def test_a_lost_derivative_is_found_in_the_calls_that_are_verified(verify: Any, expected: list[bool]) -> None:
    """The first call is right. After a verified one that is wrong, all are verified."""
    function = build_unevaluated(lost_above_one, [1], verify=verify)
    assert gradient(function, [0.5]).tolist() == [1.0]
    for is_accepted in expected:
        with (
            nullcontext() if is_accepted else pytest.raises(ModelFailed, match="is 1 where central differences give 2")
        ):
            assert gradient(function, [2.0]).tolist() == [1.0]


@pytest.mark.parametrize("wrong", ["sometimes", True, False, 3, ""])
def test_a_wrong_value_of_verify_is_refused_by_its_name(wrong: Any) -> None:
    expected = rf"verify: expected 'always', 'sampled', 'never', got {wrong!r}$"
    with pytest.raises(ModelFailed, match=rf"^{expected}"):
        dragoman.vector_function(inputs=[1], verify=wrong)

    class Doubled(dragoman.VectorFunction):
        derivatives, verify = "complex step", wrong

        def input_sizes(self, config: Mapping[str, Any]) -> list[int]:
            return [1]

        output_sizes = input_sizes

        def evaluate(self, inputs: Any, config: Mapping[str, Any]) -> Any:
            return 2 * inputs[0]

    with pytest.raises(ModelFailed, match=rf"^function 'Doubled': {expected}"):
        build_vector_function(Doubled())
    Doubled.verify = None
    with pytest.raises(ModelFailed, match=rf"^function 'Doubled': {expected}"):
        build_vector_function(Doubled(), wrong)


def test_the_operator_decides_what_is_verified() -> None:
    """The parameter of a dragoman.toml takes precedence over the function's own option."""
    marked = dragoman.vector_function(
        inputs=[1], outputs=[1], derivatives="complex step", evaluate_at_load=False, verify="never"
    )(lost_above_one)
    assert gradient(build_vector_function(marked), [2.0]).tolist() == [1.0]
    with pytest.raises(ModelFailed, match="is 1 where central differences give 2"):
        gradient(vector_model(marked, ModelSpec(name="m", parameters={"verify": "always"})).function, [2.0])
    with pytest.raises(ModelFailed, match=r"verify: expected 'always', 'sampled', 'never', got 'no'"):
        vector_model(marked, ModelSpec(name="m", parameters={"verify": "no"}))


def test_options_as_attributes_of_a_class() -> None:
    class AbsoluteValue(dragoman.VectorFunction):
        derivatives = "complex step"
        verify, evaluate_at_load, max_evaluations = "never", False, 3
        size, calls = 3, 0

        def input_sizes(self, config: Mapping[str, Any]) -> list[int]:
            return [self.size]

        def output_sizes(self, config: Mapping[str, Any]) -> list[int]:
            return [1]

        def evaluate(self, inputs: Any, config: Mapping[str, Any]) -> Any:
            type(self).calls += 1
            return np.abs(np.array([inputs[0][0]]))  # the derivative is lost

    function = build_vector_function(AbsoluteValue())
    assert AbsoluteValue.calls == 0
    assert gradient(function, -np.ones(3)).tolist() == [0.0, 0.0, 0.0]
    AbsoluteValue.size = 4
    with pytest.raises(NotSupported, match="expected at most 3"):
        gradient(function, np.ones(4))


def test_the_length_of_a_hessian_action_follows_the_config() -> None:
    function = build(
        lambda x: (x**3).sum(),
        inputs=lambda c: [c.get("n", 2)],
        outputs=[1],
        apply_hessian=lambda x, sens, vec: 6 * x * vec,
    )
    x = np.arange(1.0, 5.0)
    assert np.asarray(function.apply_hessian(0, 0, 0, [x], ONE, np.ones(4), {"n": 4})).tolist() == [
        6.0,
        12.0,
        18.0,
        24.0,
    ]


# --- optima and points where a value or a slope is zero: correct derivatives are confirmed ----------------

TIMES = np.linspace(0.1, 3, 20)
NOISY = 2.0 * np.exp(-0.7 * TIMES) + 0.05 * np.sin(37 * TIMES)


def rosenbrock(x: Any) -> Any:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def shifted(x: Any) -> Any:
    return rosenbrock(x) + 1


def misfit(x: Any) -> Any:
    return np.sum((x[0] * np.exp(-x[1] * TIMES) - NOISY) ** 2)


def lennard_jones(x: Any) -> Any:
    return 4 * (1 / x[0] ** 12 - 1 / x[0] ** 6)


OPTIMA: tuple[tuple[Function, list[float]], ...] = (
    (rosenbrock, [1.0, 1.0]),
    (shifted, [1.0, 1.0]),
    (lambda x: (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2, [3.0, 2.0]),
    (lennard_jones, [2 ** (1 / 6)]),
    (lambda x: (x[0] ** 2 - 1) ** 2, [1.0]),
    (misfit, [2.0, 0.7]),
)


@pytest.mark.parametrize("method", ["complex step", "torch"])
@pytest.mark.parametrize(("function", "optimum"), OPTIMA)
def test_correct_derivatives_at_and_near_an_optimum_are_confirmed(
    function: Function, optimum: list[float], method: str
) -> None:
    if method == "torch" and function is misfit:
        pytest.skip("written for NumPy")
    derivative = build(function, inputs=[len(optimum)], outputs=[1], derivatives=method, evaluate_at_load=False)
    rng = np.random.default_rng(0)
    for distance in (0.0, *10.0 ** np.arange(-15, -4)):
        x = np.array(optimum) * (1 + distance * rng.normal(size=len(optimum)))
        actual = gradient(derivative, x)
        step = 1e-30  # the complex step by hand
        expected = [function(x + 1j * step * unit).imag / step for unit in np.eye(len(x))]
        np.testing.assert_allclose(actual, np.ravel(expected), rtol=1e-9, atol=1e-9)


def test_an_optimizer_reaches_its_optimum() -> None:
    from scipy.optimize import minimize

    for function in (rosenbrock, shifted, misfit):
        derivative = build_unevaluated(function, [2])
        optimum = minimize(function, [-0.5, 0.8], jac=lambda x, f=derivative: gradient(f, x), method="BFGS", tol=1e-10)
        assert np.abs(gradient(derivative, optimum.x)).max() < 1e-5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[0] ** 3, 0.0),
        (lambda x: np.sin(2 * np.pi * 50 * x[0]), 100 * np.pi),
        (lambda x: np.tanh(1000 * x[0]), 1000.0),
        (lambda x: np.exp(x[0]) - 1 - x[0], 0.0),
        (lambda x: 1e-12 * (np.exp(x[0] / 0.0025) - 1), 4e-10),
    ],
)
def test_correct_derivatives_at_zero_are_confirmed(function: Function, expected: float) -> None:
    np.testing.assert_allclose(gradient(build_unevaluated(function, [1]), [0.0]), [expected], rtol=1e-12, atol=1e-15)


def test_a_function_undefined_on_one_side_has_no_derivative() -> None:
    edge = build_unevaluated(lambda x: x[0] * np.exp(-x[1]) + x[1] ** 1.5, [2])
    with pytest.raises(ModelFailed, match="no finite value on both sides"):
        gradient(edge, [0.0, 0.0])


def test_an_infinite_element_without_weight_is_ignored() -> None:
    def partly(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.array([x[0] ** 2, 1 / x[1]])

    function = build(partly, inputs=[2], outputs=[2], derivatives="finite differences", evaluate_at_load=False)
    np.testing.assert_allclose(gradient(function, [3.0, 0.0], [1.0, 0.0]), [6.0, 0.0], rtol=1e-6)


def test_compiled_code_that_fails_for_complex_numbers_has_no_complex_step() -> None:
    def compiled(x: Any) -> Any:
        if np.iscomplexobj(x):
            raise SystemError("returned a result with an exception set")
        return x[0] ** 2

    function = build(compiled, inputs=[1], outputs=[1])
    with pytest.raises(NotImplementedError):
        gradient(function, [3.0])
