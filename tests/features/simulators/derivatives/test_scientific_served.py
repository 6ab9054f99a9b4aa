"""The scientific examples, served from one folder and called with the umbridge client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import umbridge

import dragoman

EXAMPLES = Path(__file__).parents[4] / "examples" / "scientific"
NAMES = {"banana", "donut", "funnel", "mixture", "deconvolution", "beam", "heat", "posterior"}


def test_the_examples_are_served_by_name(serve_model: Callable[[Any], str]) -> None:
    url = serve_model(str(EXAMPLES))
    assert set(umbridge.supported_models(url)) == NAMES
    rng = np.random.default_rng(5)
    for name in NAMES:
        model = umbridge.HTTPModel(url, name)
        assert model.supports_evaluate(), name
        assert model.supports_gradient(), name
        assert model.supports_apply_jacobian(), name
        assert model.supports_apply_hessian(), name
        point = [(rng.normal(size=n) + (10 if name == "beam" else 0)).tolist() for n in model.get_input_sizes()]
        values = model(point)
        assert [len(each) for each in values] == model.get_output_sizes()
        for o, value in enumerate(values):
            sens = rng.normal(size=len(value)).tolist()
            # JAX compiles each method of the rod separately, which takes long; other tests call them.
            for i, x in enumerate(point if name != "heat" else ()):
                vec = rng.normal(size=len(x)).tolist()
                gradient, jacobian_action = model.gradient(o, i, point, sens), model.apply_jacobian(o, i, point, vec)
                assert np.dot(gradient, vec) == pytest.approx(np.dot(jacobian_action, sens), rel=1e-8, abs=1e-9), name
                hessian_action = model.apply_hessian(o, i, i, point, sens, vec)
                assert len(hessian_action) == len(x)
                assert np.isfinite(hessian_action).all()


def test_configs_and_published_values_over_the_wire(serve_model: Callable[[Any], str]) -> None:
    banana = umbridge.HTTPModel(serve_model(str(EXAMPLES / "banana")), "banana")
    assert banana([[0.0, 0.0]])[0][0] == pytest.approx(-5.534036030183454, rel=1e-14)
    assert banana.gradient(0, 0, [[2.0, 0.0]], [1.0]) == pytest.approx([1.84, 52 / 15], rel=1e-12)
    curved = banana.apply_hessian(0, 0, 0, [[2.0, 0.0]], [2.0], [1.0, -1.0])
    assert curved == pytest.approx([2 * (-97 / 75 + 3.6), 2 * (-3.6 + 16 / 3)], rel=1e-12)
    assert banana([[0.0, 0.0]], {"scale": 2.0})[0][0] == pytest.approx(-3.84 / 2 - np.log(2 * np.pi * 2 * 0.75**0.5))
    url = serve_model(str(EXAMPLES / "deconvolution"))
    deconvolution = umbridge.HTTPModel(url, "deconvolution")
    exact_config = {"prior": "ExactSolution"}
    assert deconvolution.get_input_sizes(exact_config) == [0]
    assert deconvolution.get_output_sizes(exact_config) == [128]
    exact = deconvolution([[]], exact_config)
    assert np.linalg.norm(exact[0]) == pytest.approx(4.242640687119285, rel=1e-15)
    assert deconvolution(exact, {"prior": "CMRF"})[0][0] == pytest.approx(828.4505233852567, rel=1e-12)
    metadata = requests.get(f"{url}/v2/models/deconvolution", timeout=60).json()
    assert metadata["details"]["derivatives"]["gradient"] == "author"


def test_a_declared_name_is_the_name_of_the_model(serve_model: Callable[[Any], str]) -> None:
    @dragoman.vector_function(inputs=[2], name="energy")
    def unnamed(x: Any) -> Any:
        return (x**2).sum()

    url = serve_model(unnamed)
    assert umbridge.supported_models(url) == ["energy"]
    assert umbridge.HTTPModel(url, "energy").apply_hessian(0, 0, 0, [[1.0, 2.0]], [1.0], [1.0, 3.0]) == [2.0, 6.0]


def test_derivatives_at_the_origin(serve_model: Callable[[Any], str]) -> None:
    donut = umbridge.HTTPModel(serve_model(str(EXAMPLES / "donut")), "donut")
    assert donut([[0.0, 0.0]])[0][0] == pytest.approx(-204.84848484848487, rel=1e-14)
    assert donut.gradient(0, 0, [[0.0, 0.0]], [1.0]) == [0.0, 0.0]
    assert donut.apply_jacobian(0, 0, [[0.0, 0.0]], [1.0, 1.0]) == [0.0]
    url = serve_model(str(EXAMPLES / "beam"))
    response = requests.post(f"{url}/Evaluate", json={"name": "beam", "input": [[0.0] * 31]}, timeout=60)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "InvalidInput")
    assert "'modulus': expected positive numbers, got 0.0 at node 0" in response.json()["error"]["message"]
