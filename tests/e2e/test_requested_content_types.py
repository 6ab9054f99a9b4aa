"""Requests can set the content type of an output, over REST and gRPC."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc

from e2e.server_process import ServerProcess, running_server

MODEL = """
import numpy as np
import dragoman
from datetime import datetime


class Mixed(dragoman.Model):
    def infer(self, call):
        return {
            "numbers": np.array([1.5, 2.5]),
            "words": np.array(["to", "be"], dtype=object),
            "blobs": np.array([b"\\xff\\x00", b"ok"], dtype=object),
        }


@dragoman.model
def day() -> list[datetime]:
    return [datetime(2020, 1, 2)]
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("wanted")
    (folder / "wanted_models.py").write_text(MODEL)
    names = [str(folder / f"wanted_models.py:{name}") for name in ("Mixed", "day")]
    with running_server(*names, "--placement", "inline") as server:
        yield server


def infer(process: ServerProcess, *outputs: tuple[str, Any], model: str = "Mixed") -> requests.Response:
    requested = [{"name": name, "parameters": {"content_type": kind}} for name, kind in outputs]
    body = {"inputs": [], "outputs": requested}
    return requests.post(f"http://{process.url}/v2/models/{model}/infer", json=body, timeout=60)


def test_an_output_is_encoded_as_requested(process: ServerProcess) -> None:
    numbers, words, blobs = infer(process, ("numbers", "np"), ("words", "str"), ("blobs", "base64")).json()["outputs"]
    assert (numbers["shape"], numbers["parameters"]["content_type"], numbers["data"]) == ([2, 1], "np", [1.5, 2.5])
    assert (words["parameters"], words["data"]) == ({"content_type": "str"}, ["to", "be"])
    assert [base64.b64decode(e) for e in blobs["data"]] == [b"\xff\x00", b"ok"]
    assert blobs["parameters"] == {"content_type": "base64"}


def test_a_content_type_can_be_replaced(process: ServerProcess) -> None:
    name = requests.get(f"http://{process.url}/v2/models/day", timeout=60).json()["outputs"][0]["name"]
    (output,) = infer(process, (name, "datetime"), model="day").json()["outputs"]
    assert (output["parameters"]["content_type"], output["data"]) == ("datetime", ["2020-01-02T00:00:00"])


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        ("numbers", "nope", "output 'numbers': unknown content type 'nope'"),
        ("numbers", "datetime", "output 'numbers': content type 'datetime' cannot encode FP64 [2]"),
        ("numbers", 7, "output 'numbers': parameter 'content_type' expects a name, got 7"),
        ("else", "np", "unexpected inference output 'else'"),
    ],
)
def test_impossible_content_types_are_rejected(process: ServerProcess, output: str, kind: Any, message: str) -> None:
    response = infer(process, (output, kind))
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_over_grpc(process: ServerProcess) -> None:
    client = triton_grpc.InferenceServerClient(process.grpc_url)
    requested = triton_grpc.InferRequestedOutput("numbers")
    requested._output.parameters["content_type"].string_param = "np"
    response = client.infer("Mixed", [], outputs=[requested])
    np.testing.assert_array_equal(response.as_numpy("numbers"), [[1.5], [2.5]])
    client.close()
