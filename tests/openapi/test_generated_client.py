"""A client that openapi-python-client generates from the document of a running server."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dragoman import FP64, Infer, Model, TensorSpec
from rest.rest_server import serving

PACKAGE = "generated_client"


class Square(Model):
    inputs = (TensorSpec("x", FP64, (2,)),)
    outputs = (TensorSpec("y", FP64, (2,)),)
    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data ** 2}


def generate(document: dict[str, Any], folder: Path) -> None:
    """Write the package of the client to a folder."""
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "config.yaml").write_text("post_hooks: []\n")  # no formatting
    target = ("--path", "openapi.json", "--config", "config.yaml", "--meta", "none", "--output-path", PACKAGE)
    command = (str(Path(sys.executable).with_name("openapi-python-client")), "generate", *target)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # What it cannot express: a body of CSV.
    skipped = [line for line in done.stderr.splitlines() if "will not be generated" in line or "omitted" in line]
    assert all(" within lmi." in line for line in skipped), done.stderr


async def test_a_generated_client_runs_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Square) as server:
        document = (await server.request("GET", "/openapi.json")).json
        await asyncio.to_thread(generate, document, tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        await asyncio.to_thread(check_calls, f"http://127.0.0.1:{server.port}")


def check_calls(url: str) -> None:
    with importlib.import_module(f"{PACKAGE}.client").Client(base_url=url) as client:
        check_responses(client, importlib.import_module(f"{PACKAGE}.models"))


def check_responses(client: Any, models: Any) -> None:
    def call(tag: str, name: str, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module(f"{PACKAGE}.api.{tag}.{name}").sync(*arguments, client=client, **options)

    tensor = {"name": "x", "shape": [2], "datatype": "FP64", "data": [1.5, -2.0]}
    body = models.InferRequest.from_dict({"inputs": [tensor]})
    response = call("open_inference_v2", "post_v2_models_model_infer", "Square", body=body)
    assert (response.model_name, response.outputs[0].data) == ("Square", [2.25, 4.0])
    metadata = call("open_inference_v2", "get_v2_models_model", "Square")
    assert [(each.name, each.shape) for each in metadata.inputs] == [("x", [2])]
    unknown = call("open_inference_v2", "post_v2_models_model_infer", "Cube", body=body)
    assert isinstance(unknown, models.ErrorMessage)
    point = models.EvaluateRequest(name="Square", input_=[[1.5, -2.0]])
    assert call("um_bridge", "post_evaluate", body=point).output == [[2.25, 4.0]]
    rows = models.Instances(instances=[1.5, -2.0])
    assert call("k_serve_v1", "post_v1_models_name_predict", "Square", body=rows).predictions == [2.25, 4.0]
    assert call("open_ai", "get_v1_models")["data"] == []
