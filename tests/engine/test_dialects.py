"""Models of several servers in one folder: each keeps the habits of its own server, and ours those of the folder."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

import dragoman
from dragoman.formats import grpc_messages as m
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write
from rest.rest_server import RestServer

TRITON = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(number(request)) for request in requests]
"""
# Answers the text of its sequence id, and of the control input.
IDS = """
class TritonPythonModel:
    def execute(self, requests):
        control = pb_utils.get_input_tensor_by_name
        texts = [f"{r.correlation_id()} {control(r, 'ID').as_numpy().ravel()[0]}" for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], object))]) for text in texts]
"""
ID_CONFIG = """backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 } output { name: "TEXT" data_type: TYPE_STRING dims: 1 }
sequence_batching { control_input {
  name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }
"""
MLSERVER = """
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse


class Parameters(MLModel):
    async def predict(self, payload):
        found = (payload.parameters.model_extra or {}) if payload.parameters else {}
        texts = [f"{name}={found[name]!r}" for name in ("timeout", "priority") if name in found]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("texts", texts)])
"""
OWN = """
import dragoman


class Own(dragoman.Model):
    inputs = (dragoman.TensorSpec("IN", dragoman.INT32, (1,)),)
    outputs = (dragoman.TensorSpec("OUT", dragoman.INT32, (1,)),)

    def infer(self, call):
        return {"OUT": call.inputs["IN"].data}
"""
TOKEN = {"Authorization": "Bearer t"}
MAX = (1 << 64) - 1


def write_models(folder: Path) -> None:
    write(folder / "tri/config.pbtxt", 'backend: "python"' + NUMBER_TENSORS)
    write(folder / "tri/1/model.py", NUMBER_HEAD + TRITON)
    write(folder / "ids/config.pbtxt", ID_CONFIG)
    write(folder / "ids/1/model.py", NUMBER_HEAD + IDS)
    write(folder / "ml/model-settings.json", '{"name": "ml", "implementation": "model.Parameters"}')
    write(folder / "ml/model.py", MLSERVER)
    write(folder / "own/model.py", OWN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestServer]:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "control_token": "t", "placement": "inline"}
    async with dragoman.Server(str(folder), **settings) as server:
        yield RestServer(server.http_ports[0], server)


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Grpc:
    """A client of the server that sends its parameters as they are."""

    def __init__(self, server: RestServer) -> None:
        assert server.dragoman is not None
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.dragoman.grpc_port}")

    async def __aenter__(self) -> "Grpc":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def call(self, method: str, message: Any) -> bytes:
        call = self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}", request_serializer=type(message).SerializeToString
        )
        return bytes(await call(message, metadata=(("authorization", "Bearer t"),), timeout=60))

    async def infer(self, model: str, **parameters: tuple[str, Any]) -> bytes:
        """Return the raw contents of the output; a parameter is the name of its field and its value."""
        message = m.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4)])
        message.inputs.add(name="IN", datatype="INT32", shape=[1])
        for name, (field, value) in parameters.items():
            setattr(message.parameters[name], field, value)
        response = m.ModelInferResponse.FromString(await self.call("ModelInfer", message))
        return bytes(response.raw_output_contents[0])


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}], "parameters": parameters}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tri/versions/7/infer", "Request for unknown model: 'tri' version 7 is not found; there are 1"),
        ("own/versions/7/infer", "Model own with version 7 not found"),
        ("ml/versions/7/infer", "Model ml with version 7 not found"),
        ("nobody/infer", "Request for unknown model: 'nobody' is not found"),
    ],
)
async def test_errors_about_unknown_models_and_versions(server: RestServer, path: str, text: str) -> None:
    response = await server.request("POST", f"/v2/models/{path}", body())
    assert (response.status, response.error) == (404, text)


async def test_the_errors_stay_when_a_model_is_unloaded(server: RestServer) -> None:
    texts = {"tri": "Request for unknown model: 'tri' is not found", "ml": "Model ml not found"}
    for name, text in texts.items():
        assert (await server.request("POST", f"/v2/repository/models/{name}/unload", b"", TOKEN)).status == 200
        response = await server.infer(name, body())
        assert (response.status, response.error) == (404, text)
        assert (await server.request("POST", f"/v2/repository/models/{name}/load", b"", TOKEN)).status == 200
        assert (await server.infer(name, body())).status == 200


async def test_to_unload_a_model_again_succeeds_but_for_those_of_mlserver(server: RestServer) -> None:
    async def unload(name: str, **parameters: Any) -> tuple[int, str]:
        path = f"/v2/repository/models/{name}/unload"
        response = await server.request("POST", path, {"parameters": parameters}, TOKEN)
        return response.status, response.error if response.status != 200 else ""

    async with Grpc(server) as client:
        for name in ("tri", "nobody"):
            assert [await unload(name) for _ in range(2)] == [(200, "")] * 2
            await client.call("RepositoryModelUnload", m.RepositoryModelUnloadRequest(model_name=name))
        assert await unload("tri", version="9") == (200, "")
        assert await unload("ml", version="9") == (404, "Model ml with version 9 not found")
        assert [await unload("ml") for _ in range(2)] == [(200, ""), (404, "Model ml not found")]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.call("RepositoryModelUnload", m.RepositoryModelUnloadRequest(model_name="ml"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    for name in ("tri", "ml"):
        assert (await server.request("POST", f"/v2/repository/models/{name}/load", b"", TOKEN)).status == 200


async def test_timeout_and_priority_are_parameters_of_models_of_mlserver(server: RestServer) -> None:
    response = await server.infer("ml", body(timeout=30, priority="low"))
    assert response.json["outputs"][0]["data"] == ["timeout=30", "priority='low'"]
    for model in ("tri", "own"):
        assert (await server.infer(model, body(timeout=30, priority=1))).status == 200
        for name, value in (("timeout", "soon"), ("priority", "low")):
            response = await server.infer(model, body(**{name: value}))
            assert response.status == 400
            assert f"'{name}'" in response.error


@pytest.mark.parametrize("id_", [1, 1 << 62, 1 << 63, MAX])
async def test_sequence_ids_have_64_bits(server: RestServer, id_: int) -> None:
    whole = {"sequence_start": True, "sequence_end": True}
    response = await server.infer("ids", body(sequence_id=id_, **whole))
    assert response.json["outputs"][0]["data"] == [f"{id_} {id_}"]
    signed = id_ - (1 << 64) if id_ >= 1 << 63 else id_
    flags = dict.fromkeys(whole, ("bool_param", True))
    async with Grpc(server) as client:
        for field, value in (("int64_param", signed), ("uint64_param", id_)):
            assert (await client.infer("ids", sequence_id=(field, value), **flags))[4:] == f"{id_} {id_}".encode()


async def test_a_sequence_id_may_come_in_either_field(server: RestServer) -> None:
    """One interface starts a sequence, the other continues it."""
    assert (await server.infer("ids", body(sequence_id=MAX, sequence_start=True))).status == 200
    async with Grpc(server) as client:
        await client.infer("ids", sequence_id=("int64_param", -1), sequence_end=("bool_param", True))
    for bad in (-1, 1 << 64, 1.5, True):
        response = await server.infer("ids", body(sequence_id=bad, sequence_start=True))
        assert response.status == 400
        assert "'sequence_id': expected a" in response.error


async def test_a_timeout_of_64_bits_in_a_signed_field(server: RestServer) -> None:
    async with Grpc(server) as client:
        for model in ("own", "tri"):
            assert await client.infer(model, timeout=("int64_param", -1)) == bytes(4)
