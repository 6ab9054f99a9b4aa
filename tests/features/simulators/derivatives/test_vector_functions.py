"""`@dragoman.vector_function`: sizes, configs, results and methods of differentiation."""

import logging
import math
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dragoman
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.vectors import VectorFunction, as_vector, as_vectors, find_vector_function
from dragoman_simulators.derivatives.decorator import build_vector_function
from dragoman_simulators.vector_model import is_vector_function
from features.simulators.derivatives.derivative_models import ONE, X, build, vector_function


def value(function: VectorFunction, *inputs: Any, **config: Any) -> list[list[float]]:
    result = function.evaluate([np.asarray(x, np.float64) for x in inputs], config)
    return [each.tolist() for each in as_vectors(result, function.output_sizes(config))]


# --- sizes, names, configs and results --------------------------------------------------------------------


def test_the_decorator_returns_the_function() -> None:
    @dragoman.vector_function(inputs=[2])
    def double(x: Any) -> Any:
        return 2 * x

    assert double(X).tolist() == [0.6, 1.4]
    assert double.__name__ == "double"
    assert is_vector_function(double)
    assert isinstance(find_vector_function(double), VectorFunction)
    assert not is_vector_function(lambda x: x)


@pytest.mark.parametrize(
    ("result", "outputs"),
    [
        (3, [[3.0]]),
        (np.float32(0.5), [[0.5]]),
        ([1, 2], [[1.0, 2.0]]),
        (np.arange(3), [[0.0, 1.0, 2.0]]),
        ([[1, 2]], [[1.0, 2.0]]),
        (([1, 2], 3), [[1.0, 2.0], [3.0]]),
        ([[1, 2], [3]], [[1.0, 2.0], [3.0]]),
        ([np.ones(1), np.zeros(2)], [[1.0], [0.0, 0.0]]),
        (torch.ones(2, requires_grad=True), [[1.0, 1.0]]),
        (jnp.ones(2), [[1.0, 1.0]]),
        ([], [[]]),
    ],
    ids=repr,
)
def test_results_and_their_inferred_sizes(result: Any, outputs: list[list[float]]) -> None:
    function = build(lambda x: result, inputs=[1], derivatives=None)
    assert list(function.output_sizes({})) == [len(each) for each in outputs]
    assert value(function, [1.0]) == outputs


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([True, False], "output 0: expected real numbers, got list of bool"),
        (None, "output 0: expected real numbers, got NoneType"),
        ("1.0", "output 0: expected real numbers, got str"),
        (np.array([1j]), "output 0: expected real numbers, got ndarray of complex128"),
        ([1.0, 2.0, 3.0], "output 0: expected 2 numbers, got 3"),
        (np.ones((2, 2)), "expected 1 output vectors, got 2"),
        (([1.0, 2.0], [1.0]), "expected 1 output vectors, got 2"),
        ([[1.0], [2.0, 3.0]], "expected 1 output vectors, got 2"),
        ([1.0, [2.0]], "output 0: expected numbers"),
        (np.ones((1, 2, 1)), r"output 0: expected a vector of 2 numbers, got shape \[1, 2, 1\]"),
    ],
    ids=repr,
)
def test_results_of_wrong_sizes_or_types(result: Any, message: str) -> None:
    function = build(lambda x: result, inputs=[1], outputs=[2], derivatives=None)
    with pytest.raises(InvalidOutput, match=message):
        as_vectors(function.evaluate([ONE], {}), [2])


def test_declared_names_and_sizes() -> None:
    function = build(lambda a, b: (a.sum(), b), inputs={"a": 2, "b": 3}, outputs={"sum": 1, "same": 3})
    assert (function.input_names, function.output_names) == (("a", "b"), ("sum", "same"))
    assert (list(function.input_sizes({})), list(function.output_sizes({}))) == ([2, 3], [1, 3])
    by_point = build(lambda u, v: u.sum() * v, at=[[1.0, 2.0], 3.0])
    assert (by_point.input_names, list(by_point.input_sizes({}))) == (("u", "v"), [2, 1])
    starred = build(lambda *xs: sum(x.sum() for x in xs), inputs=[1, 2, 3])
    assert list(starred.input_sizes({})) == [1, 2, 3]
    assert value(starred, [1], [2, 3], [4, 5, 6]) == [[21.0]]


def test_sizes_from_annotations() -> None:
    sizes: Any = [Annotated[Any, dragoman.Shape(n)] for n in (1, 2)]

    def function(x, y, config):  # type: ignore[no-untyped-def]
        return x.sum(), y

    function.__annotations__ = {"x": sizes[1], "y": sizes[0], "return": tuple[sizes[0], sizes[0]]}
    vector_function = build(function)
    assert (list(vector_function.input_sizes({})), list(vector_function.output_sizes({}))) == ([2, 1], [1, 1])
    function.__annotations__.pop("y")
    with pytest.raises(ModelFailed, match=r"or annotations with Shape\(n\); got none for \['y'\]"):
        build(function)


def test_annotated_outputs_need_no_evaluation() -> None:
    def function(x: Annotated[Any, dragoman.Shape(2)]) -> Annotated[Any, dragoman.Shape(3)]:
        raise NotImplementedError

    vector_function = build(function, derivatives=None)
    assert (list(vector_function.input_sizes({})), list(vector_function.output_sizes({}))) == ([2], [3])


def test_sizes_that_depend_on_the_config() -> None:
    def sizes(config: Mapping[str, Any]) -> list[int]:
        return [config.get("n", 2)]

    def powers(x: Any, config: Mapping[str, Any]) -> Any:
        return x ** config.get("power", 2)

    function = build(powers, inputs=sizes)
    assert list(function.output_sizes({})) == [2]
    assert list(function.output_sizes({"n": 4, "power": 3})) == [4]
    assert value(function, [1, 2, 3], n=3, power=3) == [[1.0, 8.0, 27.0]]
    slopes = function.gradient(0, 0, [np.array([1.0, 2.0, 3.0])], np.ones(3), {"n": 3, "power": 3})
    assert np.asarray(slopes) == pytest.approx([3, 12, 27], rel=1e-14)


def test_keyword_parameters_are_entries_of_the_config() -> None:
    def scaled(x: Any, *, by: float = 2.0, plus: float = 0.0) -> Any:
        return by * x + plus

    function = build(scaled, inputs=[1])
    assert value(function, [3]) == [[6.0]]
    assert value(function, [3], by=5, plus=1) == [[16.0]]
    with pytest.raises(InvalidInput, match="config: unexpected entry 'bye': expected entries of 'scaled': by, plus"):
        value(function, [3], bye=5)


def test_options_that_do_not_fit_the_function_are_an_error() -> None:
    with pytest.raises(ModelFailed, match="sizes of its input vectors are unknown: expected inputs="):
        build(lambda x: x)
    with pytest.raises(ModelFailed, match="inputs: expected 2 sizes, for x, y; got 1"):
        build(lambda x, y: x, inputs=[1])
    with pytest.raises(ModelFailed, match=r"inputs: expected sizes, got \[-1\]"):
        build(lambda x: x, inputs=[-1])
    with pytest.raises(ModelFailed, match=r"derivatives: expected 'auto', .* got 'magic'"):
        vector_function(inputs=[1], derivatives="magic")
    with pytest.raises(ModelFailed, match=r'^inputs: expected \[3\] or \{"x": 3\}, got 3$'):
        vector_function(inputs=3)
    with pytest.raises(ModelFailed, match=r"outputs: expected \[3\] or \{\"x\": 3\}, got 'y'"):
        vector_function(outputs="y")
    with pytest.raises(ModelFailed, match=r"at: expected a list with a vector for each input, got 2\.5"):
        vector_function(at=2.5)
    with pytest.raises(ModelFailed, match="expected a parameter 'input', the index of an input"):
        build(lambda x, y: x, inputs=[1, 1], gradient=lambda x, y, sens: sens)

    def irregular(x: Any, *, needed: float) -> Any:
        return x * needed

    with pytest.raises(ModelFailed, match="parameter 'needed' is not a vector: expected a default value"):
        build(irregular, inputs=[1])
    with pytest.raises(ModelFailed, match="is not a function of vectors"):
        build_vector_function(len)


# --- derivatives written by the author --------------------------------------------------------------------


def test_a_jacobian_and_a_hessian_are_applied() -> None:
    def jacobian(x: Any, *, a: float = 1.0) -> Any:
        return a * np.array([[2 * x[0], 0.0], [x[1], x[0]], [0.0, 1.0]])

    def hessian(x: Any, *, a: float = 1.0) -> Any:
        return a * np.array([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])

    def function(x: Any, *, a: float = 1.0) -> Any:
        return a * np.array([x[0] ** 2, x[0] * x[1], x[1]])

    vector_function = build(function, inputs=[2], outputs=[3], jacobian=jacobian, hessian=hessian)
    assert set(vector_function.sources().values()) == {"author"}
    s, v, config = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0]), {"a": 2.0}
    assert vector_function.gradient(0, 0, [X], s, config) == pytest.approx(jacobian(X, a=2).T @ s)
    assert vector_function.apply_jacobian(0, 0, [X], v, config) == pytest.approx(jacobian(X, a=2) @ v)
    assert vector_function.apply_hessian(0, 0, 0, [X], s, v, config) == pytest.approx([2 * 8 + 2 * 2 * 5, 2 * 2 * 4])


def test_missing_derivatives_are_derived_from_written_ones() -> None:
    matrix = np.arange(6.0).reshape(3, 2)

    def square(x: Any) -> Any:
        return matrix @ x**2

    pushed = build(square, inputs=[2], outputs=[3], apply_jacobian=lambda x, vec: matrix @ (2 * x * vec))
    assert pushed.sources()["gradient"] == "apply_jacobian (author)"
    s, v = np.array([1.0, -1.0, 2.0]), np.array([4.0, 5.0])
    assert pushed.gradient(0, 0, [X], s, {}) == pytest.approx(2 * X * (matrix.T @ s))
    pulled = build(square, inputs=[2], outputs=[3], gradient=lambda x, sens: 2 * x * (matrix.T @ sens))
    assert pulled.sources() == {
        "evaluate": "author",
        "gradient": "author",
        "apply_jacobian": "gradient (author)",
        "apply_hessian": "complex step of gradient (author)",
    }
    assert pulled.apply_jacobian(0, 0, [X], v, {}) == pytest.approx(matrix @ (2 * X * v))
    assert pulled.apply_hessian(0, 0, 0, [X], s, v, {}) == pytest.approx(2 * v * (matrix.T @ s), rel=1e-15)


def test_derivatives_of_a_linear_function() -> None:
    matrix = np.arange(6.0).reshape(3, 2)
    function = build(lambda x: np.abs(matrix) @ x + 7, inputs=[2], linear=True)
    assert function.sources() == {
        "evaluate": "author",
        "gradient": "apply_jacobian (linear)",
        "apply_jacobian": "linear",
        "apply_hessian": "linear",
    }
    assert function.apply_jacobian(0, 0, [X], X, {}) == pytest.approx(matrix @ X)
    assert function.gradient(0, 0, [X], np.ones(3), {}) == pytest.approx(matrix.sum(axis=0))
    assert not function.apply_hessian(0, 0, 0, [X], np.ones(3), X, {}).any()


@pytest.mark.parametrize(("lib", "source"), [(torch, "torch"), (jnp, "jax")])
def test_a_written_gradient_is_differentiated_by_the_framework(lib: Any, source: str) -> None:
    def gradient(x: Any) -> Any:
        return 3 * x**2 * lib.exp(x[0]) + lib.stack([(x**3).sum() * lib.exp(x[0]), 0 * x[0]])

    function = build(lambda x: (x**3).sum() * lib.exp(x[0]), inputs=[2], derivatives=source, gradient=gradient)
    assert function.sources()["gradient"] == "author"
    assert function.sources()["apply_hessian"] == f"{source} of gradient (author)"
    plain = build(lambda x: (x**3).sum() * lib.exp(x[0]), inputs=[2])
    assert plain.sources()["apply_hessian"] == source
    v, s = np.array([1.0, 2.0]), np.array([1.5])
    expected = as_vector(plain.apply_hessian(0, 0, 0, [X], s, v, {}), 2, "")
    assert as_vector(function.apply_hessian(0, 0, 0, [X], s, v, {}), 2, "") == pytest.approx(expected, rel=1e-14)
    pulled = as_vector(function.gradient(0, 0, [X], s, {}), 2, "")
    assert pulled == pytest.approx(as_vector(plain.gradient(0, 0, [X], s, {}), 2, ""), rel=1e-14)


def test_a_gradient_without_sens_needs_an_output_of_one_number() -> None:
    function = build(lambda x: x, inputs=[2], gradient=lambda x: x, derivatives=None)
    with pytest.raises(InvalidOutput, match="gradient without 'sens': expected an output of one number, got 2"):
        function.gradient(0, 0, [X], np.ones(2), {})


def test_a_jacobian_of_a_wrong_shape_is_an_error() -> None:
    function = build(lambda x: x, inputs=[2], jacobian=lambda x: np.ones((3, 2)), derivatives=None)
    with pytest.raises(InvalidOutput, match=r"jacobian: expected a matrix of shape \[2, 2\], got \[3, 2\]"):
        function.gradient(0, 0, [X], np.ones(2), {})


class Quadratic(dragoman.VectorFunction):
    """<x, A x> y with a written gradient."""

    input_names = ("x", "y")
    derivatives: str | None = "auto"
    matrix = np.array([[2.0, 1.0], [1.0, 3.0]])

    def input_sizes(self, config: Mapping[str, Any]) -> list[int]:
        return [2, 1]

    def output_sizes(self, config: Mapping[str, Any]) -> list[int]:
        return [1]

    def evaluate(self, inputs: Any, config: Mapping[str, Any]) -> Any:
        x, y = inputs
        return x @ self.matrix @ x * y

    def gradient(self, output: int, input: int, inputs: Any, sens: Any, config: Mapping[str, Any]) -> Any:  # noqa: A002
        x, y = inputs
        return (2 * self.matrix @ x * y if input == 0 else x @ self.matrix @ x) * sens[0]


def test_missing_derivatives_are_added_to_a_class() -> None:
    function = build_vector_function(Quadratic)
    assert function.sources() == {
        "evaluate": "author",
        "gradient": "author",
        "apply_jacobian": "gradient (author)",
        "apply_hessian": "complex step of gradient (author)",
    }
    assert function.input_names == ("x", "y")
    point, v = [X, np.array([2.0])], np.array([1.0, -1.0])
    hessian_action = function.apply_hessian(0, 0, 0, point, np.array([3.0]), v, {})
    assert hessian_action == pytest.approx(12 * Quadratic.matrix @ v, rel=1e-14)
    assert function.apply_hessian(0, 1, 0, point, ONE, v, {}) == pytest.approx([2 * X @ Quadratic.matrix @ v])
    assert function.apply_jacobian(0, 1, point, ONE, {}) == pytest.approx([X @ Quadratic.matrix @ X])


def test_a_class_in_jax() -> None:
    class InJax(Quadratic):
        derivatives = "jax"

        def evaluate(self, inputs: Any, config: Mapping[str, Any]) -> Any:
            x, y = inputs
            return jnp.dot(x, self.matrix @ x) * y

        gradient = dragoman.VectorFunction.gradient

    function = build_vector_function(InJax())
    assert set(function.sources().values()) == {"author", "jax"}
    point = [X, np.array([2.0])]
    expected = 4 * Quadratic.matrix @ X
    assert np.asarray(function.gradient(0, 0, point, ONE, {})) == pytest.approx(expected, rel=1e-14)


def test_a_class_without_the_attribute_has_only_its_own_derivatives() -> None:
    class Alone(Quadratic):
        derivatives = None

    function = build_vector_function(Alone())
    assert function.sources() == {"evaluate": "author", "gradient": "author"}
    assert function.gradient(0, 1, [X, np.array([2.0])], ONE, {}) == pytest.approx(X @ Quadratic.matrix @ X)


# --- JAX and PyTorch --------------------------------------------------------------------------------------


def test_jax_runs_in_double_precision_within_calls_only() -> None:
    function = build(lambda x: jnp.sum(x**2) / 3, inputs=[2])
    assert function.sources()["gradient"] == "jax"
    assert value(function, X)[0][0] == pytest.approx((X**2).sum() / 3, rel=1e-15)
    assert np.asarray(function.gradient(0, 0, [X], ONE, {})).dtype == np.float64
    assert jnp.ones(1).dtype == jnp.float32
    assert not jax.config.jax_enable_x64


def test_jax_functions_with_python_control_flow_run_uncompiled() -> None:
    def turning(x: Any) -> Any:
        return jnp.sin(x[0]) if x[1] > 0 else jnp.cos(x[0])

    function = build(turning, inputs=[2], derivatives="jax", vectorised=False)
    for sign, slope in ((1.0, np.cos(0.3)), (-1.0, -np.sin(0.3))):
        slopes = function.gradient(0, 0, [np.array([0.3, sign])], ONE, {})
        assert np.asarray(slopes) == pytest.approx([slope, 0], rel=1e-15)


def test_rows_of_points_of_uncompiled_jax_functions() -> None:
    def turning(x: Any, y: Any) -> Any:
        return (2 * x if x[0] > 0 else -(x**2)), y[0]

    function = build(turning, inputs=[2, 1], derivatives="jax")
    assert function.vectorised
    x, y = np.array([[1.0, 2.0], [-1.0, 3.0], [2.0, 0.0]]), np.array([[1.0], [2.0], [3.0]])
    for _ in range(2):  # the second call knows that rows cannot be batched
        turned, same = function.evaluate([x, y], {})
        assert turned.tolist() == [[2.0, 4.0], [-1.0, -9.0], [4.0, 0.0]]
        assert same.tolist() == [[1.0], [2.0], [3.0]]
    assert [each.shape for each in function.evaluate([x[:0], y[:0]], {})] == [(0, 2), (0, 1)]


def test_rows_of_points_in_jax() -> None:
    function = build(lambda x, y: (x.sum() * y, x[0]), inputs=[2, 3], derivatives="jax")
    assert function.vectorised
    x, y = np.arange(10.0).reshape(5, 2), np.arange(15.0).reshape(5, 3)
    first, second = function.evaluate([x, y], {})
    assert first.tolist() == (x.sum(axis=1)[:, None] * y).tolist()
    assert second.tolist() == x[:, :1].tolist()


def test_torch_operations_without_forward_mode() -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Any) -> Any:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    def cube(x: Any) -> Any:
        return Cube.apply(x).sum()  # type: ignore[no-untyped-call]

    function = build(cube, inputs=[2], derivatives="torch")
    v = np.array([1.0, -2.0])
    assert as_vector(function.apply_jacobian(0, 0, [X], v, {}), 1, "") == pytest.approx([3 * X**2 @ v], rel=1e-14)
    assert as_vector(function.apply_hessian(0, 0, 0, [X], ONE, v, {}), 2, "") == pytest.approx(6 * X * v, rel=1e-14)


# --- the complex step's condition -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: abs(x[0]), "np.absolute"),
        (lambda x: np.max(x), "np.max"),
        (lambda x: x.max(), "np.maximum"),
        (lambda x: np.maximum(x, 0.5), "np.maximum"),
        (lambda x: np.linalg.norm(x), "np.linalg.norm"),
        (lambda x: 1.0 * x[0] if x[0] > 0 else x[1], "np.greater"),
        (lambda x: np.where(x < 0.5, x, x**2), "np.less"),
        (lambda x: x.astype(np.float64), r"astype\(float64\)"),
        (lambda x: math.exp(x[0]), "a number as float"),
        (lambda x: np.array([float(each) for each in x]), "a number as float"),
        (lambda x: np.array(x, dtype=np.float64), "ComplexWarning"),
        (lambda x: np.real(x) * x, "np.real"),
        (lambda x: x.imag + x, "the imaginary part|imag"),
        (lambda x: np.conj(x) * x, "np.conjugate"),
        (lambda x: np.floor(x), "np.floor"),
        (lambda x: np.arctan2(x[0], x[1]), "np.arctan2"),
        (lambda x: np.sort(x), "np.sort"),
        (lambda x: x.std(), "std"),
        (lambda x: np.asarray(x).real * 2, "derivative is -?0 where central differences give|kink"),
        (lambda x: np.abs(np.array([x[0], x[1]])), "derivative is -?0 where central differences give|kink"),
    ],
)
def test_functions_that_are_not_analytic_have_no_complex_step(
    function: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelFailed, match=f"is not analytic, so the complex step does not apply: .*({reason})"):
        build(function, inputs=[2], derivatives="complex step")
    with caplog.at_level(logging.INFO, "dragoman"):
        assert dict(build(function, inputs=[2]).sources()) == {"evaluate": "author"}
    assert "no derivatives added" in caplog.text


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (lambda x: np.sin(x) @ np.cos(x), lambda x: np.cos(2 * x)),
        (lambda x: np.sqrt((x**2).sum()), lambda x: x / np.linalg.norm(x)),
        (lambda x: np.log(sum(np.exp(each) for each in x)), lambda x: np.exp(x) / np.exp(x).sum()),
        (lambda x: np.linalg.solve(np.diag(x) + 1, np.ones(2)).sum(), None),
        (lambda x: [x[0] * x[1]], lambda x: x[::-1]),
        (lambda x: np.convolve(np.concatenate([x, [1.0]]), [1.0, 2.0])[1], lambda x: np.array([2.0, 1.0])),
        (lambda x: np.exp(np.interp(0.5, [0, 1], [1, 2])) * x.prod(), lambda x: np.exp(1.5) * x[::-1]),
        (lambda x: np.tanh(x).mean() if np.isfinite(x).all() else 0.0, lambda x: (1 - np.tanh(x) ** 2) / 2),
        (lambda x: 3.0, lambda x: np.zeros(2)),
    ],
)
def test_the_complex_step_is_exact(function: Callable[..., Any], slope: Callable[..., Any] | None) -> None:
    vector_function = build(function, inputs=[2])
    if slope is None:  # d (A⁻¹ 1) / d A_ii = -A⁻¹_i (A⁻¹ 1)_i, summed by 1ᵀ A⁻¹
        inverse = np.linalg.inv(np.diag(X) + 1)
        expected = -inverse.sum(axis=0) * inverse.sum(axis=1)
    else:
        expected = slope(X)
    if vector_function.sources().get("gradient") == "complex step":
        assert vector_function.gradient(0, 0, [X], ONE, {}) == pytest.approx(expected, rel=1e-14, abs=1e-15)
    else:
        raise AssertionError(vector_function.sources())


def test_a_function_may_be_analytic_for_some_configs_only() -> None:
    def either(x: Any, *, smooth: bool = True) -> Any:
        return x**2 if smooth else np.asarray(x).real * 2

    function = build(either, inputs=[2])
    assert function.gradient(0, 0, [X], np.ones(2), {}) == pytest.approx(2 * X)
    with pytest.raises(
        ModelFailed, match=r"Gradient of 'either' by complex step is not confirmed .* is 0 where .* give 2,"
    ):
        function.gradient(0, 0, [X], np.ones(2), {"smooth": False})


def test_a_branch_that_is_not_analytic_is_rejected() -> None:
    def turning(x: Any) -> Any:
        return x**2 if np.asarray(x).real[0] > 0 else np.abs(x)

    function = build(turning, inputs=[2])
    assert function.gradient(0, 0, [X], np.ones(2), {}) == pytest.approx(2 * X)
    with pytest.raises(ModelFailed, match=r"it uses np\.absolute"):
        function.gradient(0, 0, [-X], np.ones(2), {})


def test_the_gradient_of_a_vectorised_function_takes_one_evaluation() -> None:
    shapes = []

    def rosenbrock(x: Any, y: Any) -> Any:
        shapes.append((x.shape, y.shape))
        first, second = x[..., :-1], x[..., 1:]
        value = (100 * (second - first**2) ** 2 + (1 - first) ** 2).sum(axis=-1, keepdims=True)
        return value * y, x**3

    function = build(rosenbrock, inputs=[200, 1], outputs=[1, 200], vectorised=True)
    alone = build(rosenbrock, inputs=[200, 1], outputs=[1, 200])
    at = [np.linspace(-1, 1, 200), np.array([0.5])]
    for output, size in ((0, 1), (1, 200)):
        for i in (0, 1):
            sens = np.arange(1.0, size + 1)
            expected = alone.gradient(output, i, at, sens, {})
            function.gradient(output, i, at, sens, {})
            shapes.clear()
            assert function.gradient(output, i, at, sens, {}) == pytest.approx(expected, rel=1e-14, abs=1e-14)
            assert sum(len(x) == 2 for x, _ in shapes) == 1  # the others compare with differences
            assert len(shapes) < 20


@pytest.mark.parametrize("derivatives", ["auto", "complex step", None])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x**2 + x.sum(), "expected the same numbers as for each point for three rows .* got a difference of"),
        (lambda x: x.sum(), r"expected shape \[3, 1\] for three rows of points in output 0, got \[\]"),
        (lambda x: x[0] * x[1] * x[2], r"expected shape \[3, 1\] .* got \[3\]|expected the same numbers"),
        (lambda x: [x[0], x @ np.ones((3, 3)) @ x], "got InvalidOutput"),
    ],
)
def test_functions_wrongly_declared_vectorised_are_an_error(
    function: Callable[..., Any], message: str, derivatives: str | None
) -> None:
    with pytest.raises(ModelFailed, match=f"is declared vectorised: .*({message})"):
        build(function, inputs=[3], vectorised=True, derivatives=derivatives)


def test_gradients_of_long_vectors_need_linear_memory() -> None:
    n = 20_000
    function = build(lambda x: (x**2).sum(axis=-1, keepdims=True), inputs=[n], outputs=[1], vectorised=True)
    x = np.linspace(0, 1, n)
    tracemalloc.start()
    try:
        pulled = function.apply_jacobian(0, 0, [x], np.ones(n), {})
        assert tracemalloc.get_traced_memory()[1] < 40 * 8 * n
    finally:
        tracemalloc.stop()
    assert pulled == pytest.approx([2 * x.sum()])


def test_a_function_that_fails_at_the_sample_point_has_no_derivatives(caplog: pytest.LogCaptureFixture) -> None:
    def picky(x: Any) -> Any:
        if np.asarray(x).real[0] < 5:
            raise ValueError("five at least")
        return x**2

    with caplog.at_level(logging.WARNING, "dragoman"):
        assert dict(build(picky, inputs=[2], outputs=[2]).sources()) == {"evaluate": "author"}
    assert "set at=[...] to a valid point: function=picky error=ValueError('five at least')" in caplog.text
    function = build(picky, inputs=[2], at=[[6.0, 1.0]])
    assert function.gradient(0, 0, [np.array([7.0, 1.0])], np.ones(2), {}) == pytest.approx([14, 2])
    with pytest.raises(ModelFailed, match="evaluated to infer the sizes of its outputs: five at"):
        build(picky, inputs=[2], derivatives=None).output_sizes({})
    with pytest.raises(
        ModelFailed, match=r"its value at the sample point is not finite; set another point, at=\[\.\.\.\]"
    ):
        build(lambda x: x * np.nan, inputs=[2], derivatives="complex step")


def test_finite_differences_on_request_report_their_cost() -> None:
    function = build(lambda x: np.abs(x).sum(), inputs=[2], at=[[1.0, -2.0]], derivatives="finite differences")
    assert set(function.sources().values()) == {"author", "finite differences"}
    note = function.notes()["finite differences"]
    assert note["relative_error"] < 1e-10
    assert note["evaluations"] == {
        "apply_jacobian": "5",
        "gradient": "1 + 4 per input element",
        "apply_hessian": "1 + 8 per element of input1",
    }
    matrix = np.array([[2.0, 1.0], [1.0, 3.0]])

    def solved(x: Any) -> Any:
        return np.linalg.solve(matrix, x**3)

    assert "apply_hessian" not in build(solved, inputs=[2]).sources()
    requested = build(solved, inputs=[2], derivatives="complex step")
    assert requested.sources()["apply_hessian"] == "finite differences of complex step"
    expected = 6 * X * np.linalg.solve(matrix, np.ones(2))
    assert requested.apply_hessian(0, 0, 0, [X], np.ones(2), np.ones(2), {}) == pytest.approx(expected, rel=1e-9)


def test_the_reported_cost_is_correct() -> None:
    calls = 0

    def counted(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return (x**2).sum()

    function = build(counted, inputs=[5], outputs=[1], derivatives="finite differences")
    x = np.ones(5)
    costs: dict[str, Any] = {"apply_jacobian": ((0, 0, [x], x, {}), 5), "gradient": ((0, 0, [x], ONE, {}), 1 + 4 * 5)}
    costs["apply_hessian"] = ((0, 0, 0, [x], ONE, x, {}), 1 + 8 * 5)
    for name, (arguments, cost) in costs.items():
        calls = 0
        getattr(function, name)(*arguments)
        assert calls == cost
