"""Reasons that clients of UM-Bridge get: missing derivatives, entries of the config; several functions in a file."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import umbridge

from e2e.server_process import running_server

CODE = """
import jax.numpy as jnp
import numpy as np
from dragoman import vector_function


@vector_function(inputs={"x": 2}, outputs={"y": 1})
def table(x):
    return np.array([np.interp(x[0], [0.0, 1.0], [0.0, 2.0]) * x[1]])


@vector_function(inputs={"x": 2}, outputs={"y": 1})
def scaled(x, *, scale=1.0, steps=3, name="a", fast=False, other=None):
    return jnp.array([scale * x[0] ** 2 * x[1]])


@vector_function(inputs={"x": 2}, outputs={"y": 1})
def units(x):
    x *= np.array([2.0, 10.0])
    return np.array([x[0] ** 2 * x[1]])


@vector_function(inputs={"x": 2}, outputs={"y": 1}, derivatives="finite differences")
def printed(x):
    return float("%.6g" % (np.sin(x[0]) * np.exp(x[1]) + 2))


@vector_function(inputs={"x": 9}, outputs={"y": 1}, derivatives="finite differences", max_evaluations=20)
def long(x):
    return x.sum()


@vector_function(inputs={"x": 2}, outputs={"y": 1}, derivatives="finite differences", evaluate_at_load=False)
def never_at_load(x):
    open(LOG, "a").write("evaluated\\n")
    return x[0] * x[1]


LOG = __file__ + ".log"
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("reasons") / "several.py"
    file.write_text(CODE)
    with running_server(str(file), "--placement", "thread") as process:
        yield f"http://127.0.0.1:{process.http_port}"
    assert not Path(f"{file}.log").exists()


def post(url: str, verb: str, **body: Any) -> tuple[int, Any]:
    body = {"input": [[0.7, 1.2]], "outWrt": 0, "inWrt": 0, "sens": [1.0], **body}
    request = urllib.request.Request(f"{url}/{verb}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_each_function_of_a_file_is_served(url: str) -> None:
    assert {*umbridge.supported_models(url)} == {"table", "scaled", "units", "printed", "long", "never_at_load"}
    assert umbridge.HTTPModel(url, "units")([[0.7, 1.2]]) == [[pytest.approx(23.52)]]
    assert umbridge.HTTPModel(url, "units").gradient(0, 0, [[0.7, 1.2]], [1.0]) == pytest.approx([67.2, 19.6])


def test_the_reason_of_a_missing_derivative(url: str) -> None:
    assert not umbridge.HTTPModel(url, "table").supports_gradient()
    for body in ({}, {"sens": "wrong"}):
        status, error = post(url, "Gradient", name="table", **body)
        assert (status, error["type"]) == (400, "UnsupportedFeature")
        assert error["message"].startswith("Gradient not supported by model! model 'table' does not support Gradient: ")
        assert "it uses np.interp; write it in JAX or PyTorch" in error["message"]
    with urllib.request.urlopen(f"{url}/v2/models/table") as response:
        details = json.load(response)
    assert "np.interp" in json.dumps(details)


def test_a_derivative_that_takes_too_many_evaluations_is_not_offered(url: str) -> None:
    model, x = umbridge.HTTPModel(url, "long"), [[1.0] * 9]
    supports = (model.supports_gradient(), model.supports_apply_jacobian(), model.supports_apply_hessian())
    assert supports == (False, True, False)
    assert model.apply_jacobian(0, 0, x, [1.0] * 9) == pytest.approx([9])
    status, error = post(url, "Gradient", name="long", input=x)
    assert (status, error["type"]) == (400, "UnsupportedFeature")
    assert (
        "Gradient by finite differences takes 36 evaluations of the function; expected at most 20" in error["message"]
    )


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("scale", "two", "config: entry 'scale': expected a number, got 'two'"),
        ("scale", [1, 2], "config: entry 'scale': expected a number, got [1, 2]"),
        ("steps", True, "config: entry 'steps': expected a number, got True"),
        ("name", 1, "config: entry 'name': expected a string, got 1"),
        ("fast", 1, "config: entry 'fast': expected a boolean, got 1"),
        ("level", 1, "config: unexpected entry 'level': expected entries of 'scaled': fast, name, other, scale, steps"),
    ],
)
@pytest.mark.parametrize("verb", ["Evaluate", "Gradient"])
def test_entries_of_a_config(url: str, verb: str, entry: str, value: Any, message: str) -> None:
    status, error = post(url, verb, name="scaled", config={entry: value})
    assert (status, error) == (400, {"type": "InvalidInput", "message": message})


def test_entries_that_fit(url: str) -> None:
    config = {"scale": 2, "steps": 4, "name": "b", "fast": True, "other": [1]}
    assert post(url, "Gradient", name="scaled", config=config)[1]["output"] == pytest.approx([2 * 1.68, 2 * 0.49])


def test_one_number_for_a_vector_of_one(url: str) -> None:
    """As the MATLAB client of UM-Bridge sends it."""
    assert post(url, "Gradient", name="scaled", sens=1)[1]["output"] == pytest.approx([1.68, 0.49])
    assert post(url, "Gradient", name="scaled", sens=1.0)[1]["output"] == pytest.approx([1.68, 0.49])
    assert post(url, "Gradient", name="scaled", sens=True)[0] == 400


def test_printed_digits_over_the_wire(url: str) -> None:
    x = [[0.7, 0.4]]
    assert umbridge.HTTPModel(url, "printed").gradient(0, 0, x, [1.0]) == pytest.approx([1.141, 0.961], rel=5e-3)
    status, error = post(url, "ApplyJacobian", name="printed", input=[[1.57, 1.0]], vec=[1.0, 0.0])
    assert (status, error["type"]) == (500, "ModelError")
    assert "with an estimated error of" in error["message"]
