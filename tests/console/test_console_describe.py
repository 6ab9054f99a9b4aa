"""What models say of themselves: kind, description, class names and examples, over the routes of the console."""

import json
from typing import Any

import numpy as np

import dragoman
from access.access_models import Doubler, KeyFile, Tripler, bearer
from access.conftest import keys as keys
from dragoman import Infer
from rest.rest_server import serving


async def read(server: Any, path: str, **headers: str) -> Any:
    response = await server.request("GET", path, None, headers)
    assert response.status == 200, response.body
    return json.loads(response.body)


class Iris(dragoman.Model):
    """Classify flowers, i.e. Irises, by four lengths. Trained on 150 of them.

    More.
    """

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, 4)),)
    outputs = (dragoman.TensorSpec("probabilities", dragoman.FP32, (-1, 2)),)
    placement = "inline"

    def class_labels(self) -> dict[str, list[str]]:
        return {"probabilities": ["setosa", "virginica"]}

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"probabilities": np.tile(np.array([0.25, 0.75], np.float32), (len(call.inputs["x"].data), 1))}


async def test_the_list_has_the_kind_and_description_of_each_model() -> None:
    async with serving(Iris, Doubler) as server:
        listed = await read(server, "/console/models")
    versions = [{"version": "", "state": "READY", "reason": ""}]
    assert listed == {
        "models": [
            {
                "name": "Doubler",
                "state": "READY",
                "kind": "function",
                "description": "",
                "platform": "python_function",
                "versions": versions,
            },
            {
                "name": "Iris",
                "state": "READY",
                "kind": "classifier",
                "description": "Classify flowers, i.e. Irises, by four lengths.",
                "platform": "python_function",
                "versions": versions,
            },
        ]
    }


async def test_one_model_has_its_class_names_and_an_example() -> None:
    async with serving(Iris) as server:
        about = await read(server, "/console/models/Iris")
        missing = await server.request("GET", "/console/models/rose")
    assert about == {
        "name": "Iris",
        "versions": [],
        "kind": "classifier",
        "description": "Classify flowers, i.e. Irises, by four lengths.",
        "platform": "python_function",
        "labels": {"probabilities": ["setosa", "virginica"]},
        "examples": [
            {
                "name": "example",
                "is_complete": True,
                "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 1.0, 1.0, 1.0]}],
            }
        ],
    }
    assert missing.status == 404


async def test_a_key_sees_its_models_only(keys: KeyFile) -> None:
    keys.add("one", ["read"], ["Doubler"])
    keys.add("caller", ["infer"])
    async with serving(Doubler, Tripler, api_keys=str(keys.path)) as server:
        one, caller = bearer(keys.keys["one"]), bearer(keys.keys["caller"])
        listed = await read(server, "/console/models", **one)
        assert [model["name"] for model in listed["models"]] == ["Doubler"]
        assert (await read(server, "/console/models/Doubler", **one))["name"] == "Doubler"
        assert (await server.request("GET", "/console/models/Tripler", None, one)).status == 403
        for path in ("/console/models", "/console/models/Doubler", "/console/models/Doubler/versions/1"):
            assert (await server.request("GET", path, None, caller)).status == 403
            assert (await server.request("GET", path)).status == 401
