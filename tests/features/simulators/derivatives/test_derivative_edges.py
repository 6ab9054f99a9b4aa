"""Edge cases: results of wrong sizes, sizes from a config, combined methods."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dragoman
from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import VectorFunction
from dragoman_simulators.derivatives.checks import Tolerance, run_checks
from dragoman_simulators.derivatives.complex_step import NotAnalyticError, as_analytic
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.derivatives.user_function import ConfigCache
from features.simulators.derivatives.derivative_models import ONE, X, build, error_message, vector_function

# --- the complex step ----------------------------------------------------------------------------------------


def test_a_function_may_write_into_its_own_arrays() -> None:
    def f(x: Any) -> Any:
        y = x.copy()
        np.multiply(y, x, out=y)
        y += 3 * x.astype(complex) if np.iscomplexobj(x) else 3 * x
        return y

    function = build(f, inputs=[2], derivatives="complex step")
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [X], X, {}), (2 * X + 3) * X, rtol=1e-12)


def test_operations_that_are_not_analytic_are_rejected() -> None:
    z = as_analytic(np.array([1 + 1j, 2 - 1j]))
    rejected: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: np.cbrt(z), "it uses cbrt, which takes no complex numbers: "),
        (lambda: z.astype(np.float32), "it uses astype(float32)"),
        (lambda: z.real, "it uses real"),
    )
    for act, message in rejected:
        with pytest.raises(NotAnalyticError) as caught:
            act()
        assert str(caught.value).startswith(message)
    single = z.astype(np.complex64, copy=False)
    assert (type(single), single.dtype) == (type(z), np.dtype(np.complex64))


@pytest.mark.parametrize("name", ["cov", "corrcoef", "var", "std", "median", "sort", "max", "interp", "angle"])
def test_functions_that_are_not_analytic_are_rejected(name: str) -> None:
    z = as_analytic(np.array([1 + 1j, 2 - 1j]))
    with pytest.raises(NotAnalyticError, match=f"^it uses np.{name}$"):
        getattr(np, name)(*[z] * (3 if name == "interp" else 1))


# --- results of wrong sizes or types -------------------------------------------------------------------------


def test_a_gradient_may_be_the_jacobian_of_one_output() -> None:
    written = build(lambda x: x @ x, inputs=[2], jacobian=lambda x: 2 * x, derivatives=None)
    np.testing.assert_allclose(written.gradient(0, 0, [X], np.array([3.0]), {}), 6 * X)
    np.testing.assert_allclose(written.apply_jacobian(0, 0, [X], X, {}), [2 * X @ X])


def test_a_complex_hessian_is_an_error() -> None:
    function = build(lambda x: x @ x, inputs=[2], hessian=lambda x: 2j * np.eye(2), derivatives=None)
    message = error_message(lambda: function.apply_hessian(0, 0, 0, [X], ONE, X, {}), InvalidOutput)
    assert message == (
        "hessian: expected real numbers, got ndarray of complex128; return its real part (.real) if the imaginary part "
        "is zero"
    )


def test_outputs_that_change_their_size_are_an_error() -> None:
    sizes = [2]

    def f(x: Any) -> Any:
        return np.ones(sizes[0]) * x.sum()

    function = build(f, inputs=[2], derivatives="complex step")
    sizes[0] = 3
    message = error_message(lambda: function.apply_jacobian(0, 0, [X], X, {}), InvalidOutput)
    assert message == "output 0: expected 2 numbers, got 3"


def test_a_function_wrongly_declared_vectorised_is_an_error() -> None:
    def f(x: Any) -> Any:
        return x**2 + x.sum()

    message = error_message(partial(build, f, inputs=[3], vectorised=True, derivatives=None), ModelFailed)
    start = "'f' is declared vectorised: expected the same numbers as for each point for three rows of points in "
    assert message.startswith(start + "output 0, got a difference of ")


# --- sizes and configs ---------------------------------------------------------------------------------------


def test_sizes_from_a_config_need_no_evaluation() -> None:
    def sizes(config: Any) -> Sequence[int]:
        return [config.get("n", 2)]

    function = build(
        lambda x, config: x[0] * np.ones(config.get("n", 2)),
        inputs=[1],
        outputs=sizes,
        evaluate_at_load=False,
        derivatives="finite differences",
    )
    assert (tuple(function.output_sizes({})), tuple(function.output_sizes({"n": 5}))) == ((2,), (5,))
    np.testing.assert_allclose(function.apply_jacobian(0, 0, [ONE], ONE, {"n": 3}), np.ones(3), rtol=1e-8)


def test_values_for_the_last_32_configs_are_cached() -> None:
    computed: list[int] = []

    def compute(config: Any) -> int:
        computed.append(config["n"])
        return int(config["n"])

    cache = ConfigCache(compute)
    assert [cache({"n": n}) for n in (*range(32), *range(32))] == [*range(32), *range(32)]
    assert computed == [*range(32)]
    cache({"n": 32})
    cache({"n": 1})
    assert computed == [*range(33)]
    cache({"n": 0})
    assert computed == [*range(33), 0]


def test_derivatives_keep_a_function_vectorised() -> None:
    def f(x: Any) -> Any:
        return x**2

    for derivatives in ("complex step", "finite differences", None):
        assert build(f, inputs=[2], vectorised=True, derivatives=derivatives).vectorised
        assert not build(f, inputs=[2], derivatives=derivatives).vectorised


# --- frameworks and gradients of the author ------------------------------------------------------------------


def test_torch_functions_may_return_lists() -> None:
    def f(x: Any) -> Any:
        return [x[0] * x[1], 2.0], [1.0, 4.0], [x.sum()]

    function = build(f, inputs=[2], outputs=[2, 2, 1], derivatives="torch")
    assert [np.asarray(each).tolist() for each in function.evaluate([X], {})] == [[0.21, 2.0], [1.0, 4.0], [1.0]]
    np.testing.assert_allclose(function.gradient(0, 0, [X], np.array([2.0, 3.0]), {}), 2 * X[::-1])
    np.testing.assert_allclose(function.gradient(2, 0, [X], ONE, {}), [1, 1])
    assert np.asarray(function.gradient(1, 0, [X], np.ones(2), {})).tolist() == [0, 0]


@pytest.mark.parametrize(("derivatives", "lib"), [("torch", torch), ("jax", jnp)])
def test_written_derivatives_receive_arrays_of_the_framework(derivatives: str, lib: Any) -> None:
    kind = torch.Tensor if lib is torch else np.ndarray | jnp.ndarray

    class PartialClass(VectorFunction):
        def input_sizes(self, config: Any) -> Sequence[int]:
            return (2,)

        def output_sizes(self, config: Any) -> Sequence[int]:
            return (1,)

        def evaluate(self, inputs: Any, config: Any) -> Any:
            return (inputs[0] ** 3).sum()

        def apply_jacobian(self, output: int, input: int, inputs: Any, vec: Any, config: Any) -> Any:  # noqa: A002
            assert isinstance(inputs[0], kind)
            assert isinstance(vec, kind)
            return (3 * inputs[0] ** 2 * vec).sum()

        def apply_hessian(
            self, output: int, input1: int, input2: int, inputs: Any, sens: Any, vec: Any, config: Any
        ) -> Any:
            assert all(isinstance(each, kind) for each in (inputs[0], sens, vec))
            return 6 * inputs[0] * vec * sens[0]

    PartialClass.derivatives = derivatives
    function = build_vector_function(PartialClass())
    vec, sens = np.array([2.0, -1.0]), np.array([1.5])
    np.testing.assert_allclose(np.asarray(function.apply_jacobian(0, 0, [X], vec, {})).reshape(-1), [3 * X**2 @ vec])
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X], sens, vec, {}), 6 * X * vec * 1.5)


def test_hessian_actions_by_differences_of_a_written_gradient() -> None:
    def gradient(x: Any, y: Any, output: int, input: int, sens: Any) -> Any:  # noqa: A002
        return sens[0] * (2 * x * y[0] if input == 0 else np.array([x @ x]))

    function = build(
        lambda x, y: x @ x * y, inputs=[2, 1], gradient=gradient, derivatives="finite differences", outputs=[1]
    )
    y, vec = np.array([4.0]), np.array([1.0, 2.0])
    weight = np.array([0.5])
    np.testing.assert_allclose(function.apply_hessian(0, 0, 0, [X, y], weight, vec, {}), vec * 4, rtol=1e-7)
    np.testing.assert_allclose(function.apply_hessian(0, 0, 1, [X, y], weight, np.array([3.0]), {}), 3 * X, rtol=1e-7)
    np.testing.assert_allclose(function.apply_hessian(0, 1, 0, [X, y], weight, vec, {}), [X @ vec], rtol=1e-7)


@pytest.mark.parametrize("output", [0, 1])
def test_a_written_gradient_gives_the_jacobian_of_each_output(output: int) -> None:
    matrices = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])

    def gradient(x: Any, sens: Any, output: int) -> Any:
        return matrices[output].T @ sens

    function = build(lambda x: tuple(m @ x for m in matrices), inputs=[2], outputs=[2, 3], gradient=gradient)
    assert function.sources()["apply_jacobian"] == "gradient (author)"
    np.testing.assert_allclose(function.apply_jacobian(output, 0, [X], X, {}), matrices[output] @ X)


def test_dual_numbers_that_disagree_with_the_function_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def is_number(x: Any) -> bool:
        return isinstance(x[0], float | complex | np.number) or np.asarray(x[0]).dtype.kind in "fc"

    def with_wrong_dual_numbers(wrong: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: x**3 if is_number(x) else wrong(x)

    for wrong, quantity in (
        (lambda x: 2 * x**3, "value"),
        (lambda x: x, "gradient"),
        (lambda x: 3 * x - 2, "Hessian action"),
    ):
        with caplog.at_level("INFO", "dragoman"):
            function = build(with_wrong_dual_numbers(wrong), at=[[1.0]])
        assert f"their {quantity} differs by " in caplog.text
        assert "apply_hessian" not in function.sources()
        caplog.clear()


def test_an_error_equal_to_the_tolerance_passes() -> None:
    function = build(lambda x: 2 * x, inputs=[1], jacobian=lambda x: np.array([[2.0]]), derivatives=None)
    results = run_checks(function, [(np.array([0.5]),)], {}, 0, Tolerance(identities=0.0))
    (adjoint,) = (result for result in results if result.check == "adjoint")
    assert (adjoint.error, adjoint.passed) == (0.0, True)


def test_extrapolated_differences_are_checked() -> None:
    # Central differences of a cubic are off by h²; two of them extrapolated are exact but for rounding.
    function = build(lambda x: x**3, inputs=[1], apply_jacobian=lambda x, vec: 3 * x**2 * vec, derivatives=None)
    (result,) = run_checks(function, [(np.array([0.5]),)], {}, 0, Tolerance(differences=1e-13))
    assert result.passed
    assert result.error < 1e-13
    assert result.order == pytest.approx(2.0, rel=0.02)
    assert result.curve[0][1] == pytest.approx(1 / 301, rel=1e-9)


@pytest.mark.parametrize("factor", [1e6, 1.0, 1e-6])
def test_dual_numbers_are_used_at_any_scale(factor: float) -> None:
    function = build(lambda x: factor * np.exp(x) * x[0], inputs=[2])
    assert function.sources()["apply_hessian"] == "dual numbers"
    expected = factor * np.exp(X[0]) * (2 + X[0])
    assert np.asarray(function.apply_hessian(0, 0, 0, [X], np.array([1.0, 0.0]), np.array([1.0, 0.0]), {}))[
        0
    ] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["svd", "svdvals", "qr", "pinv", "eigh", "eigvalsh", "cholesky", "matrix_rank", "cond"]
)
def test_decompositions_that_are_not_analytic_are_rejected(name: str) -> None:
    with pytest.raises(NotAnalyticError, match=rf"^it uses np.linalg.{name}$"):
        getattr(np.linalg, name)(as_analytic(np.eye(2) * (1 + 1j)))


def test_the_decorator_needs_no_parentheses() -> None:
    def double(x: Annotated[Any, dragoman.Shape(2)]) -> Any:
        return 2 * x

    marked: Any = vector_function(double)
    assert marked is double
    np.testing.assert_allclose(build_vector_function(marked).apply_jacobian(0, 0, [X], X, {}), 2 * X)


REJECTED_UFUNCS = (
    *("absolute", "fabs", "conjugate", "sign", "heaviside", "hypot", "arctan2", "copysign", "signbit", "maximum"),
    *("minimum", "fmax", "fmin", "clip", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "floor", "ceil", "trunc", "rint", "floor_divide"),
    *("remainder", "fmod", "divmod", "modf", "vecdot", "vecmat"),
)
REJECTED_FUNCTIONS = (
    *("real", "imag", "angle", "real_if_close", "vdot", "correlate", "cov", "corrcoef", "var", "std", "sort"),
    *("argsort", "argmax", "argmin", "partition", "argpartition", "searchsorted", "unique", "histogram", "max", "min"),
    *("amax", "amin", "ptp", "median", "percentile", "quantile", "nanmax", "nanmin", "nanvar", "nanstd", "round"),
    *("around", "fix", "clip", "interp", "digitize", "allclose", "isclose", "array_equal", "iscomplex", "isreal", "i0"),
    *("linalg.norm", "linalg.eigh", "linalg.eigvalsh", "linalg.cholesky", "linalg.svd", "linalg.svdvals", "linalg.qr"),
    *("linalg.pinv", "linalg.lstsq", "linalg.slogdet", "linalg.matrix_rank", "linalg.cond"),
)
REJECTED_METHODS = (
    *("conj", "conjugate", "argmax", "argmin", "sort", "argsort", "partition", "argpartition", "searchsorted", "var"),
    *("std", "round"),
)


@pytest.mark.parametrize("name", [name for name in REJECTED_UFUNCS if isinstance(getattr(np, name, None), np.ufunc)])
def test_every_ufunc_that_is_not_analytic_is_rejected(name: str) -> None:
    ufunc: np.ufunc = getattr(np, name)
    z = as_analytic(np.eye(2) * (1 + 1j))
    with pytest.raises(NotAnalyticError, match=rf"^it uses np\.{ufunc.__name__}$"):
        z.__array_ufunc__(ufunc, "__call__", *[z] * ufunc.nin)


@pytest.mark.parametrize("name", REJECTED_FUNCTIONS)
def test_every_function_that_is_not_analytic_is_rejected(name: str) -> None:
    z = as_analytic(np.eye(2) * (1 + 1j))
    function = getattr(np.linalg if name.startswith("linalg.") else np, name.removeprefix("linalg."))
    with pytest.raises(NotAnalyticError, match=rf"^it uses np\.(linalg\.)?{function.__name__}$"):
        z.__array_function__(function, (type(z),), (z,), {})


@pytest.mark.parametrize("name", REJECTED_METHODS)
def test_every_method_that_is_not_analytic_is_rejected(name: str) -> None:
    with pytest.raises(NotAnalyticError, match=rf"^it uses {name}$"):
        getattr(as_analytic(np.array([1 + 1j])), name)()


def test_casts_respect_order_and_copy() -> None:
    z = as_analytic(np.ones((2, 3)) * 1j)
    assert z.astype(np.complex64, "F").flags.f_contiguous
    assert z.astype(np.complex128, copy=False).base is not None


def test_a_vectorised_function_that_is_not_analytic_is_an_error() -> None:
    def length(x: Any) -> Any:
        return np.abs(x).sum(-1, keepdims=True)

    function = build(
        length, inputs=[2], outputs=[1], vectorised=True, derivatives="complex step", evaluate_at_load=False
    )
    message = error_message(lambda: function.gradient(0, 0, [X], ONE, {}), ModelFailed)
    assert message.startswith("'length' is not analytic, so the complex step does not apply: it uses np.absolute; ")


def test_a_function_without_inputs_has_outputs_only() -> None:
    function = build(lambda: np.ones(2), inputs=[])
    assert (list(function.input_sizes({})), list(function.output_sizes({}))) == ([], [2])
    assert np.asarray(function.evaluate([], {})).tolist() == [1.0, 1.0]


def test_a_written_gradient_of_a_wrong_size_is_an_error_in_differences() -> None:
    function = build(
        lambda x: x @ x, inputs=[2], outputs=[1], gradient=lambda x: x[:1], derivatives="finite differences"
    )
    message = error_message(lambda: function.apply_hessian(0, 0, 0, [X], ONE, X, {}), InvalidOutput)
    assert message == "gradient: expected 2 numbers, got 1"
