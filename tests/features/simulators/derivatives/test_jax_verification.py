"""Compiled JAX: modes where the usual one is missing, samples that are verified, values that contradict Evaluate."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import VectorFunction
from dragoman_simulators.derivatives import jax as jax_derivatives
from features.simulators.derivatives.derivative_models import ONE, build, error_message

X, UNIT = np.array([0.7, 1.2]), np.array([1.0, 0.0])


def newton(start: float) -> Any:
    def root(x: Any) -> Any:
        """Return x1 u for u³ + u = x0, by Newton's method."""

        def is_open(u: Any) -> Any:
            return jnp.abs(u**3 + u - x[0]) > 1e-12

        return x[1] * jax.lax.while_loop(is_open, lambda u: u - (u**3 + u - x[0]) / (3 * u**2 + 1), jnp.array(start))

    return root


def derivatives(function: VectorFunction, x: Any) -> list[Any]:
    return [
        np.asarray(function.gradient(0, 0, [x], ONE, {})),
        np.asarray(function.apply_jacobian(0, 0, [x], UNIT, {})),
        np.asarray(function.apply_hessian(0, 0, 0, [x], ONE, UNIT, {})),
    ]


def test_a_loop_without_reverse_mode_has_all_derivatives() -> None:
    function = build(newton(0.5), inputs={"x": 2})
    u = 0.5
    for _ in range(50):
        u -= (u**3 + u - 0.7) / (3 * u**2 + 1)
    slope, second = 1 / (3 * u**2 + 1), -6 * u / (3 * u**2 + 1) ** 3
    gradient, action, hessian = derivatives(function, X)
    assert gradient == pytest.approx([1.2 * slope, u], rel=1e-8)
    assert action == pytest.approx([1.2 * slope], rel=1e-8)
    assert hessian == pytest.approx([1.2 * second, slope], rel=1e-6)
    assert function.notes()["jax"] == {
        "gradient": "forward, one product for each element",
        "apply_hessian": "forward over forward, one product for each element",
    }


def test_a_function_without_forward_mode_has_all_derivatives() -> None:
    cube: Any = jax.custom_vjp(lambda x: jnp.power(x, 3))
    cube.defvjp(lambda x: (cube(x), x), lambda x, s: (3 * x**2 * s,))
    function = build(lambda x: cube(x[:1]) * x[1], inputs={"x": 2})
    gradient, action, hessian = derivatives(function, X)
    assert gradient == pytest.approx([3 * 0.49 * 1.2, 0.343])
    assert action == pytest.approx([3 * 0.49 * 1.2])
    assert hessian == pytest.approx([6 * 0.7 * 1.2, 3 * 0.49])
    assert function.notes()["jax"]["apply_jacobian"] == "reverse over reverse"


def test_a_lost_derivative_at_the_nominal_point_is_found() -> None:
    """The loop has no step there, so its result does not depend on the input."""
    function, nominal = build(newton(1.0), inputs={"x": 2}), np.array([2.0, 1.0])
    for act in (
        lambda: function.gradient(0, 0, [nominal], ONE, {}),
        lambda: function.apply_jacobian(0, 0, [nominal], UNIT, {}),
        lambda: function.apply_hessian(0, 0, 0, [nominal], ONE, UNIT, {}),
    ):
        assert "is not confirmed by central differences" in error_message(act, ModelFailed)
    assert function.gradient(0, 0, [np.array([2.1, 1.0])], ONE, {}) == pytest.approx([0.24101762, 1.02454448])


def test_a_counter_of_the_module_is_found() -> None:
    """Each compiled program has frozen another value."""
    calls = [0]

    def counting(x: Any) -> Any:
        calls[0] += 1
        return x[:1] ** 2 * calls[0] + x[1:]

    function = build(counting, inputs={"x": 2}, outputs=[1], evaluate_at_load=False, derivatives="jax")
    function.evaluate([X], {})
    with pytest.raises(ModelFailed, match="Gradient of 'counting' by jax is not confirmed"):
        function.gradient(0, 0, [X], ONE, {})


def test_a_value_that_contradicts_evaluate_is_found_between_samples() -> None:
    """The derivative of the callback is right for the first state only."""
    state = {"factor": 1.0}

    def scale(x: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(state["factor"] * a), jax.ShapeDtypeStruct((1,), x.dtype), x)

    scaled: Any = jax.custom_jvp(scale)
    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0]))
    function = build(lambda x: scaled(x[:1] * x[1:]), inputs={"x": 2}, at=[[0.5, 0.5]])
    function.evaluate([X], {})
    assert function.gradient(0, 0, [X], ONE, {}) == pytest.approx([1.2, 0.7])
    state["factor"] = 2.0
    with pytest.raises(ModelFailed, match=r"is 1\.2.* where central differences give 2\.4"):
        function.gradient(0, 0, [X], ONE, {})


@pytest.mark.parametrize(
    ("verify", "expected"), [("always", 3 * [False]), ("sampled", 31 * [True] + 3 * [False]), ("never", 40 * [True])]
)
def test_the_option_verify_decides_which_calls_are_verified(verify: str, expected: list[bool]) -> None:
    """After one that failed, all are."""

    def kink(x: Any) -> Any:
        return jnp.abs(x[:1] - 1) + x[1:] ** 2

    function = build(kink, inputs={"x": 2}, outputs=[1], verify=verify, evaluate_at_load=False, derivatives="jax")
    function.gradient(0, 0, [np.array([1.5, 2.0])], ONE, {})
    assert [_is_accepted(function, np.array([1.0, 2.0])) for _ in expected] == expected


def test_after_a_call_that_failed_every_derivative_of_its_config_is_verified() -> None:
    function = build(lambda x, *, scale=1.0: scale * jnp.maximum(x[:1], 1.0) * x[1:], inputs={"x": 2}, at=[[1.5, 2.0]])
    kink = np.array([1.0, 2.0])
    calls: list[Callable[[Any], Any]] = [
        lambda config: function.apply_jacobian(0, 0, [kink], UNIT, config),
        lambda config: function.apply_hessian(0, 0, 0, [kink], ONE, np.ones(2), config),
    ]
    other = {"scale": 2.0}
    for call in calls:  # the first call of a config is verified
        assert "is not confirmed" in error_message(partial(call, other), ModelFailed)
    assert np.asarray(calls[0]({})) == pytest.approx([1.0])  # between samples
    for _ in range(32):
        if not _is_accepted(function, kink):
            break
    for call in calls:
        assert "is not confirmed" in error_message(partial(call, {}), ModelFailed)


def _is_accepted(function: VectorFunction, x: Any) -> bool:
    try:
        function.gradient(0, 0, [x], ONE, {})
    except ModelFailed:
        return False
    return True


def test_a_callback_to_float64_loads() -> None:
    def simulator(x: Any) -> Any:
        return jax.pure_callback(
            lambda a: np.array([a[0] ** 2 * a[1]]), jax.ShapeDtypeStruct((1,), jnp.dtype("float64")), x
        )

    function = build(simulator, inputs={"x": 2})
    assert np.asarray(function.evaluate([X], {})).tolist() == [[0.7**2 * 1.2]]
    rows = np.stack([X, 2 * X])  # as a server evaluates, also a single point: vmap does not have the callback
    assert np.asarray(function.evaluate([rows], {})).reshape(-1) == pytest.approx([0.7**2 * 1.2, 8 * 0.7**2 * 1.2])
    assert function.sources() == {"evaluate": "author"}
    reason = function.missing()["gradient"]
    assert "jax fails: ValueError: Pure callbacks do not support JVP" in reason
    assert reason.endswith("; provide gradient=, or use derivatives='finite differences'")


def test_only_derivatives_that_work_are_offered() -> None:
    for leak in (lambda x: jnp.array([float(x[0]) ** 2 * x[1]]), lambda x: jnp.array([np.asarray(x)[0] * x[1]])):
        function = build(leak, inputs={"x": 2})
        assert function.sources() == {"evaluate": "author"}
        assert set(function.missing()) == {"gradient", "apply_jacobian", "apply_hessian"}


def test_a_derivative_that_is_nan_names_the_cause() -> None:
    function = build(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(), inputs={"x": 2}, at=[[1.0, 1.0]])
    message = error_message(lambda: function.gradient(0, 0, [np.array([0.0, 1.0])], ONE, {}), InvalidOutput)
    assert message.startswith("Gradient of '<lambda>' by jax: element 0 is nan where the function is finite; ")
    assert "the branch of `where` that is not selected" in message


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set when a compilation that still runs is logged, as any one is that takes 10 ms."""
    event, logger = threading.Event(), logging.getLogger("dragoman.derivatives")

    class Announcement(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("compiling: "):
                event.set()

    monkeypatch.setattr(jax_derivatives, "_SLOW_COMPILATION_S", 0.01)
    handler = Announcement()
    logger.addHandler(handler)
    yield event
    logger.removeHandler(handler)


def test_compilations_that_take_long_are_logged_while_they_run(
    announced: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(x: Any) -> Any:
        """Return x0² x1; called once for each program, while JAX compiles it."""
        assert announced.wait(60)
        announced.clear()
        return x[0] ** 2 * x[1]

    caplog.set_level("INFO", "dragoman.derivatives")
    function = build(slow, inputs=[2], outputs=[1], derivatives="jax", verify="never", evaluate_at_load=False)
    calls: dict[str, Callable[[], object]] = {
        "Evaluate": lambda: function.evaluate([X], {}),
        "gradient": lambda: function.gradient(0, 0, [X], ONE, {}),
        "apply_jacobian": lambda: function.apply_jacobian(0, 0, [X], UNIT, {}),
        "apply_hessian": lambda: function.apply_hessian(0, 0, 0, [X], ONE, UNIT, {}),
    }
    for program, call in calls.items():
        call()
        assert f"compiling: function=slow program={program}\n" in caplog.text
        assert f"compiled: function=slow program={program} seconds=" in caplog.text
