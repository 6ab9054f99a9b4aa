"""The scientific examples: published values, and derivatives against closed forms or the complex step."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.vectors import Config, Vector, VectorFunction, as_vectors
from dragoman.plugins import import_file
from dragoman_simulators.derivatives.decorator import build_vector_function

EXAMPLES = Path(__file__).parents[4] / "examples" / "scientific"
STEP = 1e-30
Function = Callable[..., Any]


def module(name: str) -> Any:
    if name == "mixture":
        pytest.importorskip("torch")
    return import_file(EXAMPLES / name / "model.py")


@pytest.fixture(scope="module")
def loaded() -> Callable[[str], VectorFunction]:
    functions: dict[str, VectorFunction] = {}

    def load(name: str) -> VectorFunction:
        if name not in functions:
            functions[name] = build_vector_function(getattr(module(name), name))
        return functions[name]

    return load


# --- published values (source: the UM-Bridge benchmarks, re-derived) --------------------------------------

KNOWN: tuple[tuple[str, list[float], float, list[float] | None, list[list[float]] | None], ...] = (
    ("banana", [0, 0], -5.534036030183454, [-0.8, 6.4], [[167 / 75, 2 / 3], [2 / 3, -16 / 3]]),
    ("banana", [2, 0], -3.3207026968501214, [1.84, 52 / 15], [[-97 / 75, -3.6], [-3.6, -16 / 3]]),
    ("donut", [0, 0], -204.84848484848487, [0, 0], None),
    ("donut", [2, 2], -1.581180343024592, [-9.78923448] * 2, [[-32.750338923, -27.8557216831]]),
    ("funnel", [0, 0], -2.936489355077455, [-0.5, 0], [[-1 / 9, 0], [0, -1]]),
    ("funnel", [2, 2], -4.429382143772902, [-0.45155166, -0.27067057], [[-0.3817816776, 0.2706705665]]),
    ("mixture", [0, 0], -3.7296275264036907, [-0.01779553, 0.01779553], [[2.3175131736, 3.4291189602]]),
    ("mixture", [2, 2], -1.9272329630852132, None, None),
    ("mixture", [100, 18], -6235.677233515095, None, None),
)


@pytest.mark.parametrize(("name", "x", "value", "gradient", "hessian"), KNOWN)
def test_published_values(
    loaded: Callable[[str], VectorFunction],
    name: str,
    x: list[float],
    value: float,
    gradient: list[float] | None,
    hessian: list[list[float]] | None,
) -> None:
    function, at, one = loaded(name), [np.array(x, np.float64)], np.ones(1)
    assert as_vectors(function.evaluate(at, {}), [1])[0][0] == pytest.approx(value, rel=1e-12, abs=1e-10)
    if gradient is not None:
        assert np.asarray(function.gradient(0, 0, at, one, {})) == pytest.approx(np.array(gradient), abs=6e-9)
    for row, expected in enumerate(hessian or ()):
        actual = np.asarray(function.apply_hessian(0, 0, 0, at, one, np.eye(2)[row], {}))
        assert actual == pytest.approx(np.array(expected), abs=6e-11)


def test_the_ring_has_no_second_derivative_at_the_origin(loaded: Callable[[str], VectorFunction]) -> None:
    with pytest.raises(InvalidInput, match="expected a point other than the origin"):
        loaded("donut").apply_hessian(0, 0, 0, [np.zeros(2)], np.ones(1), np.ones(2), {})


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan])
def test_a_beam_without_stiffness_is_rejected(loaded: Callable[[str], VectorFunction], wrong: float) -> None:
    beam, modulus, ones = loaded("beam"), np.full(31, 10.0), np.ones(31)
    modulus[7] = wrong
    at = [modulus]
    calls: list[Callable[[], Any]] = [
        lambda: beam.evaluate(at, {}),
        lambda: beam.gradient(0, 0, at, ones, {}),
        lambda: beam.apply_jacobian(0, 0, at, ones, {}),
        lambda: beam.apply_hessian(0, 0, 0, at, ones, ones, {}),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match=f"input 'modulus': expected positive numbers, got {wrong} at node 7"):
            call()


@pytest.mark.parametrize(
    ("prior", "value"),
    [
        ("Gaussian", -322.41863494564063),
        ("GMRF", 480.0112712565403),
        ("LMRF", 705.1255731015503),
        ("CMRF", 828.4505233852567),
    ],
)
def test_the_priors_of_the_deconvolution(loaded: Callable[[str], VectorFunction], prior: str, value: float) -> None:
    function = loaded("deconvolution")
    exact_config = {"prior": "ExactSolution"}
    assert function.input_sizes(exact_config) == (0,)
    (exact,) = as_vectors(function.evaluate([np.zeros(0)], exact_config), function.output_sizes(exact_config))
    assert np.linalg.norm(exact) == pytest.approx(4.242640687119285, rel=1e-15)
    config = {"prior": prior}
    assert function.input_sizes(config) == (128,)
    assert as_vectors(function.evaluate([exact], config), [1])[0][0] == pytest.approx(value, rel=1e-12)
    if prior == "LMRF":
        with pytest.raises(NotSupported, match="LMRF"):
            function.gradient(0, 0, [exact], np.ones(1), config)


def test_an_unknown_prior_is_an_error(loaded: Callable[[str], VectorFunction]) -> None:
    with pytest.raises(InvalidInput, match=r"'prior': expected Gaussian, .* got 'Laplace'"):
        loaded("deconvolution").evaluate([np.zeros(128)], {"prior": "Laplace"})
    with pytest.raises(InvalidInput, match="unexpected entry 'priors'"):
        loaded("deconvolution").evaluate([np.zeros(128)], {"priors": "GMRF"})


def test_the_beam_follows_euler_bernoulli_theory(loaded: Callable[[str], VectorFunction]) -> None:
    # The tip of a uniform beam under a uniform load is at q L⁴ / 8 E I.
    modulus, load, beam = 5.0, 2.0, module("beam")
    (deflection,) = as_vectors(loaded("beam").evaluate([np.full(31, modulus)], {"load": load}), [31])
    assert deflection[0] == 0
    assert deflection[-1] == pytest.approx(load / (8 * modulus * beam.MOMENT), rel=2 * beam.STEP**2)


def test_the_rod_reaches_the_steady_state(loaded: Callable[[str], VectorFunction]) -> None:
    # With the conductivity 1 everywhere u -> power x, to which e^(-pi² t / 4) is missing at t = 0.5: about a third.
    temperature, flux = loaded("heat").evaluate([np.zeros(20), np.array([3.0])], {})
    assert (np.diff(temperature) > 0).all()
    assert flux[0] == pytest.approx(3 * (1 - 4 / np.pi * np.exp(-(np.pi**2) / 8)), rel=0.05)


# --- every derivative -------------------------------------------------------------------------------------
# The models in plain NumPy, which accepts complex numbers; each returns a tuple of outputs.


def plain_donut(x: Any, config: Config) -> Any:
    r = np.sqrt((x * x).sum())
    return (np.array([-((r - 2.6) ** 2) / 0.033]),)


def gradient_of_donut(x: Any, sens: Any, config: Config) -> Any:
    r = np.sqrt((x * x).sum())
    return -2 * (r - 2.6) / 0.033 * x / r * sens[0]


def gradient_of_mixture(x: Any, sens: Any, config: Config) -> Any:
    means, variances = np.array([[-1.5, -1.5], [1.5, 1.5], [-2.0, 2.0]]), np.array([0.8, 0.8, 0.5])
    densities = np.exp(-((x - means) ** 2).sum(axis=1) / 2 / variances) / variances
    return sens[0] * (densities / densities.sum() / variances) @ (means - x)


def plain_mixture(x: Any, config: Config) -> Any:
    means, variances = np.array([[-1.5, -1.5], [1.5, 1.5], [-2.0, 2.0]]), np.array([0.8, 0.8, 0.5])
    densities = np.exp(-((x - means) ** 2).sum(axis=1) / 2 / variances) / (2 * np.pi * variances)
    return (np.log(densities.sum())[None],)


def plain_deconvolution(x: Any, config: Config) -> Any:
    model, delta = module("deconvolution"), 0.01
    d = np.diff(np.concatenate([[0.0], x, [0.0]]))
    prior = {
        "Gaussian": lambda: -(x * x).sum() / 2 / delta,
        "GMRF": lambda: -(d * d).sum() / 2 / delta,
        "CMRF": lambda: -np.log(d * d + delta**2).sum(),
    }[config.get("prior", "Gaussian")]()
    misfit = (model.BLUR @ x - model.DATA) / model.NOISE
    return (np.array([prior - (misfit * misfit).sum() / 2]),)


@cache
def modes(length: float) -> Vector:
    values: Vector = module("heat").modes(length)
    return values


def plain_heat(field: Any, power: Any, config: Config) -> Any:
    model = module("heat")
    k = np.exp(modes(config.get("length", 0.2)) @ field)
    n, width, pause = model.CELLS, model.WIDTH, model.PAUSE
    matrix, source = np.eye(n) * (1 + 0j), np.zeros(n) * (1 + 0j)
    matrix[0, 0] += pause * 2 * k[0] / width**2
    for i in range(n - 1):
        between = pause * 2 * k[i] * k[i + 1] / (k[i] + k[i + 1]) / width**2
        matrix[i : i + 2, i : i + 2] += between * np.array([[1, -1], [-1, 1]])
    source[-1] = pause * power[0] / width
    u, step = np.zeros(n), np.linalg.inv(matrix)
    for _ in range(model.STEPS):
        u = step @ (u + source)
    return u, np.array([2 * k[0] * u[0] / width])


def example_function(name: str) -> Function:
    """Return the function of an example that accepts complex numbers."""

    def plain(*inputs: Any) -> Any:
        return (getattr(module(name), name)(*inputs[:-1], **inputs[-1]),)

    return plain


def gradient_of_example(name: str) -> Function:
    """Return the gradient of an example, which accepts complex numbers; it is checked against the function too."""

    def gradient(x: Any, sens: Any, config: Config) -> Any:
        function = module(name).gradient
        return function(x, sens, **config) if name == "beam" else function(x, **config) * sens[0]

    return gradient


OWN = gradient_of_example
CASES: tuple[tuple[str, Function, Function | None, Mapping[str, Any], float], ...] = (
    ("banana", example_function("banana"), OWN("banana"), {}, 0.0),
    ("banana", example_function("banana"), OWN("banana"), {"a": 1.5, "b": -0.4, "scale": 2.0}, 0.0),
    ("donut", plain_donut, gradient_of_donut, {}, 0.0),
    ("funnel", example_function("funnel"), OWN("funnel"), {}, 0.0),
    ("mixture", plain_mixture, gradient_of_mixture, {}, 0.0),
    ("deconvolution", plain_deconvolution, OWN("deconvolution"), {}, 0.0),
    ("deconvolution", plain_deconvolution, OWN("deconvolution"), {"prior": "GMRF"}, 0.0),
    ("deconvolution", plain_deconvolution, OWN("deconvolution"), {"prior": "CMRF"}, 0.0),
    ("beam", example_function("beam"), OWN("beam"), {"load": 3.0}, 10.0),
    ("heat", plain_heat, None, {"length": 0.3}, 1.0),
)


@pytest.mark.parametrize(("name", "plain", "gradient", "config", "centre"), CASES, ids=[c[0] for c in CASES])
def test_derivatives_match_the_reference(
    loaded: Callable[[str], VectorFunction],
    name: str,
    plain: Function,
    gradient: Function | None,
    config: Mapping[str, Any],
    centre: float,
) -> None:
    function, rng = loaded(name), np.random.default_rng(7)
    point = [centre + 0.5 * rng.normal(size=size) for size in function.input_sizes(config)]
    for output, rows in enumerate(function.output_sizes(config)):
        sens = rng.normal(size=rows)
        for i, x in enumerate(point):
            vec = rng.normal(size=len(x))
            expected = slope(plain, point, i, vec, config)[output]
            assert_close(function.apply_jacobian(output, i, point, vec, config), expected)
            assert_close(
                function.gradient(output, i, point, sens, config),
                gradient_by_complex_step(plain, point, output, i, sens, config),
            )
            for j, y in enumerate(point):
                vec = rng.normal(size=len(y))
                if gradient is not None:
                    curved = np.imag(gradient(x + STEP * 1j * vec, sens, config)) / STEP
                else:
                    curved = hessian_by_differences(plain, point, output, i, j, sens, vec, config)
                assert_close(function.apply_hessian(output, i, j, point, sens, vec, config), curved)


def assert_close(actual: Any, expected: Vector) -> None:
    scale = max(float(np.abs(expected).max()), 1e-9)
    assert np.abs(np.asarray(actual) - expected).max() <= 1e-8 * scale


def slope(plain: Function, point: list[Vector], i: int, vec: Vector, config: Config) -> list[Vector]:
    """Return J vec of every output, by the complex step."""
    moved = [*point[:i], point[i] + STEP * 1j * vec, *point[i + 1 :]]
    return [np.imag(np.asarray(each)) / STEP for each in plain(*moved, config)]


def gradient_by_complex_step(
    plain: Function, point: list[Vector], output: int, i: int, sens: Vector, config: Config
) -> Vector:
    return np.array([sens @ slope(plain, point, i, unit, config)[output] for unit in np.eye(len(point[i]))])


def hessian_by_differences(
    plain: Function, point: list[Vector], output: int, i: int, j: int, sens: Vector, vec: Vector, config: Config
) -> Vector:
    """Return the change of the complex-step gradient along vec: central differences, extrapolated twice."""

    def quotient(h: float) -> Vector:
        ends = ([*point[:j], point[j] + s * h * vec, *point[j + 1 :]] for s in (1, -1))
        there, back = (gradient_by_complex_step(plain, at, output, i, sens, config) for at in ends)
        return (there - back) / (2 * h)

    first, second, third = (quotient(h) for h in (0.02, 0.01, 0.005))
    return (16 * (4 * third - second) / 3 - (4 * second - first) / 3) / 15
