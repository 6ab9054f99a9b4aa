"""KServe's V1 protocol: predictions of rows of values, and the readiness of models."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from dragoman.core.datatypes import BYTES, FP64
from text_server import ReverseModel, TextServer, serve


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * 2


def joined(a: NDArray[np.int64], b: NDArray[np.float64]) -> dict[str, Any]:
    return {"sum": a + b, "wide": np.stack([a, b], axis=-1)}


def uneven(x: NDArray[np.float64]) -> dict[str, Any]:
    return {"all": x, "first": x[:1]}


def diverges(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.full_like(x, np.inf)


def fails(x: NDArray[np.float64]) -> NDArray[np.float64]:
    raise RuntimeError("out of range")


class Matrix(dragoman.Model):
    """Return the number of rows for each row of a matrix with three columns."""

    placement = "inline"

    def signature(self) -> dragoman.Signature:
        return dragoman.Signature((dragoman.TensorSpec("x", FP64, (-1, 3)),), (dragoman.TensorSpec("n", FP64, (-1,)),))

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        rows = len(call.inputs["x"].data)
        return dragoman.Inference({"n": dragoman.Tensor.of(np.full(rows, float(rows)))})


class Column(dragoman.Model):
    """Add two columns, each of shape (rows, 1); return the sums and their texts."""

    placement = "inline"

    def signature(self) -> dragoman.Signature:
        inputs = (dragoman.TensorSpec("a", FP64, (-1, 1)), dragoman.TensorSpec("b", FP64, (-1, 1)))
        return dragoman.Signature(inputs, (dragoman.TensorSpec("sum", FP64, (-1,)), dragoman.TensorSpec("t", BYTES)))

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        sums = (call.inputs["a"].data + call.inputs["b"].data)[:, 0]
        texts = np.array([f"{each:g}".encode() for each in sums], dtype=object)
        return dragoman.Inference({"sum": dragoman.Tensor.of(sums), "t": dragoman.Tensor.of(texts)})


class Upper(dragoman.Model):
    """Return texts in capitals."""

    placement = "inline"

    def signature(self) -> dragoman.Signature:
        spec = dragoman.TensorSpec("text", BYTES, (-1,))
        return dragoman.Signature((spec,), (spec,))

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        texts = [text.upper() for text in call.inputs["text"].data]
        return dragoman.Inference({"text": dragoman.Tensor.of(np.array(texts, dtype=object))})


class NeverReady(dragoman.Model):
    """Raise NotReady while loading."""

    placement = "inline"

    def load(self) -> None:
        raise dragoman.errors.NotReady("its database is down")

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        raise AssertionError("never loaded")


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(
        ReverseModel, double, joined, uneven, diverges, fails, Matrix, Column, Upper, placement="inline"
    ) as server:
        yield server


async def predict(server: TextServer, model: str, body: Any) -> tuple[int, Any]:
    response = await server.post(f"/v1/models/{model}:predict", body)
    return response.status, response.json


@pytest.mark.parametrize(
    ("model", "body", "predictions"),
    [
        ("double", {"instances": [[1.5, 2], [3, 4]]}, [[3.0, 4.0], [6.0, 8.0]]),
        ("double", {"inputs": [[1.5, 2]], "signature_name": "serving_default"}, [[3.0, 4.0]]),
        ("double", {"inputs": {"x": [1, 2]}, "ignored": 1}, [2.0, 4.0]),
        ("double", {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}, [[2.0, 4.0], [6.0, 8.0]]),
        ("double", {"instances": [None, 1]}, None),
        ("Upper", {"instances": ["to", "be"]}, ["TO", "BE"]),
        ("Matrix", {"instances": [[1, 2, 3], [4, 5, 6]]}, [2.0, 2.0]),
        (
            "joined",
            {"instances": [{"a": 1, "b": 10.5}, {"a": 2, "b": 20.5}]},
            [{"sum": 11.5, "wide": [1.0, 10.5]}, {"sum": 22.5, "wide": [2.0, 20.5]}],
        ),
        (
            "Column",
            {"instances": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]},
            [{"sum": 3.0, "t": "3"}, {"sum": 7.0, "t": "7"}],
        ),
        ("Column", {"inputs": {"a": [[1]], "b": [[2]]}}, [{"sum": 3.0, "t": "3"}]),
    ],
)
async def test_predictions(server: TextServer, model: str, body: Any, predictions: Any) -> None:
    status, response = await predict(server, model, body)
    if predictions is None:
        assert (status, list(response)) == (400, ["error"])
    else:
        assert (status, response) == (200, {"predictions": predictions})


async def test_large_instances_are_parsed_without_an_object_for_each_number(server: TextServer) -> None:
    rows = np.arange(60_000.0).reshape(-1, 3)
    assert await predict(server, "Matrix", {"instances": rows.tolist()}) == (200, {"predictions": [20_000.0] * 20_000})


async def test_a_list_of_numbers_is_not_one_row(server: TextServer) -> None:
    status, response = await predict(server, "Matrix", {"instances": [1, 2, 3]})
    assert status == 400
    assert "'x'" in response["error"]
    assert (await server.post("/predictions/Matrix", {"instances": [1, 2, 3]})).json == {"predictions": [1.0]}


async def test_the_colon_may_be_percent_encoded(server: TextServer) -> None:
    response = await server.post("/v1/models/double%3Apredict", {"instances": [1]})
    assert (response.status, response.json) == (200, {"predictions": [2.0]})


@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("double", {}, 400, "expected an object with either 'instances' or 'inputs'"),
        ("double", {"instances": [1], "inputs": [1]}, 400, "either 'instances' or 'inputs'"),
        ("double", [1], 400, "expected an object with either"),
        ("double", {"instances": 3}, 400, "'instances': expected a list of rows, got 3"),
        ("double", {"instances": {"x": 3}}, 400, "'instances': expected a list of rows"),
        ("double", {"instances": [[1, 2], [3]]}, 400, "input 'x'"),
        (
            "double",
            {"instances": [{"x": 1}, {"y": 1}]},
            400,
            "'instances' must be objects that all have the same names",
        ),
        ("double", {"instances": [1], "signature_name": "other"}, 400, "'signature_name': expected 'serving_default'"),
        ("double", {"instances": [1], "parameters": {"a": [1]}}, 400, "parameter 'a' must be a string, a number"),
        ("double", b'{"instances": [1', 400, ""),
        ("double", b"", 400, "the request body is empty"),
        (
            "joined",
            {"instances": [1]},
            400,
            "takes 'a', 'b'; expected 'instances' to be an object with a value for each",
        ),
        ("joined", {"instances": [{"a": 1}]}, 400, "'b'"),
        ("uneven", {"instances": [1, 2]}, 501, "different numbers of rows; use /v2/models/uneven/infer"),
        ("diverges", {"instances": [1.0]}, 501, "holds NaN or infinity"),
        ("fails", {"instances": [1.0]}, 500, "out of range"),
        ("ReverseModel", {"instances": ["hello"]}, 501, "model 'ReverseModel' does not support inference"),
        ("nothing", {"instances": [1]}, 404, "nothing"),
    ],
)
async def test_errors_name_the_field(server: TextServer, model: str, body: Any, status: int, message: str) -> None:
    actual, response = await predict(server, model, body)
    assert (actual, list(response)) == (status, ["error"])
    assert message in response["error"]


async def test_other_verbs(server: TextServer) -> None:
    explain = await server.post("/v1/models/double:explain", {"instances": [1]})
    assert (explain.status, "does not support explanations" in explain.json["error"]) == (501, True)
    for path in ("/v1/models/double", "/v1/models/double:classify"):
        response = await server.post(path, {"instances": [1]})
        assert (response.status, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert list(response.json) == ["error"]


@pytest.mark.parametrize("protocols", ["openai,kserve_v1", "kserve_v1"])
async def test_readiness_of_a_model(protocols: str) -> None:
    async with serve(ReverseModel, double, NeverReady, placement="inline", protocols=protocols) as server:
        ready = await server.request("GET", "/v1/models/double")
        assert (ready.status, ready.json) == (200, {"name": "double", "ready": True})
        unready = await server.request("GET", "/v1/models/NeverReady")
        assert (unready.status, unready.json) == (503, {"name": "NeverReady", "ready": False})
        assert (await server.request("GET", "/v1/models/nothing")).status == 404
        for model in "nothing", "double":
            verb = await server.request("GET", f"/v1/models/{model}:predict")
            assert (verb.status, verb.headers["allow"]) == (405, "OPTIONS, POST")
            assert verb.json == {"error": f"method GET is not allowed for '/v1/models/{model}:predict'; expected POST"}
        text = (await server.request("GET", "/v1/models/ReverseModel")).json
        assert text.get("object") == ("model" if "openai" in protocols else None)


async def test_a_model_that_is_not_loaded(server: TextServer) -> None:
    async with serve(NeverReady, ReverseModel, placement="inline") as server:
        status, response = await predict(server, "NeverReady", {"instances": [1]})
        assert (status, list(response)) == (503, ["error"])
