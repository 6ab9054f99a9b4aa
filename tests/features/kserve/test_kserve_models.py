"""Scripts of custom KServe models and transformers, served unchanged."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import kserve_messages  # noqa: F401 (before kserve)
import numpy as np
import pytest
import pytest_asyncio
from httpx import HTTPStatusError
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.errors import UnsupportedProtocol
from kserve.inference_client import RESTConfig

import dragoman
from dragoman.cli.serve import expand
from dragoman.core.errors import InvalidInput, ModelFailed, NotReady, NotSupported
from dragoman.core.runtime import Runtime
from dragoman.plugins import built_in_runtimes
from dragoman.runtimes.recognise import recognise
from dragoman_kserve.model import dragoman_error
from e2e.server_process import running_server
from rest.rest_server import RestServer, read_chunks, read_headers, request

SCRIPTS = Path(__file__).parent / "scripts"
ROWS = [[1.0, 2.0], [3.0, 4.5]]
TENSOR = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4.5]}
JSON_TYPE = "application/json"
JSON = {"Content-Type": JSON_TYPE}


async def _serving(*scripts: str, **settings: Any) -> AsyncIterator[RestServer]:
    paths = [str(SCRIPTS / script) for script in scripts]
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0}
    async with dragoman.Server(*paths, **ports, placement="inline", **settings) as server:
        yield RestServer(server.http_ports[0], server)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    scripts = ("rows.py", "outputs.py", "one_class.py:Plain")
    async for each in _serving(*scripts, forward_headers="x-*"):
        yield each


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # KServe's client passes the file of REQUESTS_CA_BUNDLE, if it is set, in a way that httpx deprecates.
    pytest.mark.filterwarnings("ignore:.verify=<str>:DeprecationWarning"),
]


async def post(server: RestServer, path: str, body: Any, headers: Mapping[str, str] = JSON) -> Any:
    return await server.request("POST", path, body, headers)


# --- V1 ------------------------------------------------------------------------------------------------------


async def test_v1_rows_are_a_dict_for_the_model(server: RestServer) -> None:
    for path in ("/v1/models/model:predict", "/v1/models/model%3Apredict"):
        for content_type in (
            "application/json",
            "application/json; charset=utf-8",
            "application/x-www-form-urlencoded",
        ):
            response = await post(server, path, {"instances": ROWS}, {"Content-Type": content_type})
            assert (response.status, response.json) == (200, {"predictions": [[2.0, 4.0], [6.0, 9.0]]})
            assert (response.headers["x-factor"], response.headers["content-type"]) == ("2", "application/json")
            assert response.headers["date"] != "never"
    response = await post(server, "/v1/models/model:predict", {"instances": ["a", "é"]})
    assert response.json == {"predictions": ["aa", "éé"]}
    response = await post(
        server, "/v1/models/model:predict", {"instances": [{"a": [1], "b": [2]}, {"a": [3], "b": [4]}]}
    )
    assert response.json == {"predictions": [{"a": 2, "b": 4}, {"a": 6, "b": 8}]}
    assert (await server.request("GET", "/v1/models/model")).json == {"name": "model", "ready": True}
    assert (await post(server, "/v1/models/Plain:predict", {"instances": [1, 2]})).json == {"predictions": [2]}


async def test_v1_explain(server: RestServer) -> None:
    response = await post(server, "/v1/models/model:explain", {"instances": ROWS})
    assert response.json == {"explanations": ["application/json"] * 2}
    response = await post(server, "/v1/models/first:explain", {"instances": ROWS})
    assert (response.status, response.error) == (501, "Could not find explainer_host.")


async def test_v1_bodies_of_other_types_are_bytes(server: RestServer) -> None:
    response = await post(server, "/v1/models/model:predict", b"\xff\x00", {"Content-Type": "image/png"})
    assert (response.status, response.body) == (200, b"<\xff\x00>")
    assert response.headers["content-type"] == "application/octet-stream"


async def test_v1_chunks_of_a_generator_are_sent_as_they_come(server: RestServer) -> None:
    path = "/v1/models/model:predict"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", path, {"chunks": 3}, JSON))
    status, headers = await read_headers(reader)
    assert (status, headers["transfer-encoding"], "content-type" in headers) == (200, "chunked", False)
    chunks = read_chunks(reader)
    assert await anext(chunks) == b"0;"
    assert (await post(server, path, '"continue"')).body == b"done"  # only then does the model yield the others
    assert b"".join([chunk async for chunk in chunks]) == b"1;2;"
    writer.close()


async def test_v1_errors_of_a_generator(server: RestServer) -> None:
    path = "/v1/models/model:predict"
    response = await post(server, path, {"chunks": 1, "fail_at": 0})
    assert (response.status, response.error) == (500, "broken")
    response = await post(server, path, {"chunks": 9})
    assert response.status == 500
    assert "expected chunks that are text or bytes, got int" in response.error
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", path, {"chunks": 3, "fail_at": 1}, JSON))
    assert (await read_headers(reader))[0] == 200
    assert await anext(read_chunks(reader)) == b"0;"  # is sent although the error follows at once
    assert await asyncio.wait_for(reader.read(), 60) == b""  # closed without the last chunk
    writer.close()


async def test_a_generator_is_closed_if_the_client_disconnects(server: RestServer) -> None:
    path = "/v1/models/model:predict"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", path, {"chunks": 3}, JSON))
    await read_headers(reader)
    writer.close()
    assert (await post(server, path, '"wait until closed"')).body == b"closed"


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("invalid", 400, "no rows"),
        ("inference", 500, "broken"),
        ("not ready", 503, "Model with name rows is not ready."),
        ("not implemented", 501, "not offered"),
        ("value", 500, "ValueError: odd"),
    ],
)
async def test_errors_have_the_status_of_kserve(server: RestServer, kind: str, status: int, message: str) -> None:
    response = await post(server, "/v1/models/model:predict", {"fail": kind})
    assert (response.status, message in response.error) == (status, True)


async def test_invalid_json_is_an_error_of_the_caller(server: RestServer) -> None:
    response = await post(server, "/v1/models/model:predict", b'{"instances": [')
    assert (response.status, response.error[:28]) == (400, "Unrecognized request format:")
    response = await post(server, "/v1/models/model:predict", b"[" * 5000)
    assert response.status == 400


# --- CloudEvents ------------------------------------------------------------------------------------------------------

ATTRIBUTES = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "time": "2026-01-01T00:00:00Z", "own": "x"}
BINARY = {f"ce-{name}": value for name, value in ATTRIBUTES.items()}


async def test_a_binary_event_is_answered_by_one(server: RestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, changed in (({}, {}), ({"CE_MERGE": "true", "CE_TYPE": "u", "CE_SOURCE": "v"}, {"own": "x"})):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        response = await post(server, "/v1/models/model:predict", {"instances": ROWS}, {**BINARY, **JSON})
        assert (response.status, response.json) == (200, {"predictions": [[2.0, 4.0], [6.0, 9.0]]})
        found = {name[3:]: value for name, value in response.headers.items() if name.startswith("ce-")}
        assert (found.pop("id") != "1", found.pop("time") > ATTRIBUTES["time"]) == (True, True)
        kind, source = environment.get("CE_TYPE"), environment.get("CE_SOURCE")
        expected = {"type": kind or "io.kserve.inference.response", "source": source or "io.kserve.inference.model"}
        assert found == {"specversion": "1.0", **expected, **changed}
    response = await post(server, "/v1/models/model:predict", b"\xff", {**BINARY, "ce-content-type": "text/plain"})
    assert (response.status, response.body) == (200, b"<\xff>")  # not JSON: the model gets the bytes
    for body in (b"{", b"0\x80"):
        response = await post(server, "/v1/models/model:predict", body, {**BINARY, "ce-content-type": JSON_TYPE})
        assert response.status == 400
        assert response.error.startswith("Failed to decode or parse binary json cloudevent: ")
    response = await post(server, "/v1/models/model:predict", {"instances": ROWS}, {"ce-id": "1", **JSON})
    assert "ce-id" not in response.headers  # not all attributes: not an event


async def test_a_structured_event_is_answered_by_one(server: RestServer) -> None:
    event = {**ATTRIBUTES, "data": {"instances": ROWS}}
    headers = {"Content-Type": "application/cloudevents+json"}
    response = await post(server, "/v1/models/model:predict", event, headers)
    assert (response.status, response.headers["content-type"]) == (200, headers["Content-Type"])
    assert response.json["data"] == {"predictions": [[2.0, 4.0], [6.0, 9.0]]}
    assert (response.json["source"], response.json["id"] != "1") == ("io.kserve.inference.model", True)
    response = await post(server, "/v1/models/model:predict", event)
    assert response.json == {"predictions": [[2.0, 4.0], [6.0, 9.0]]}


# --- V2 ------------------------------------------------------------------------------------------------------


async def test_v2_requests_are_infer_requests(server: RestServer) -> None:
    response = await server.infer("model", {"id": "7", "inputs": [TENSOR]})
    output = {"name": "output-0", "datatype": "FP32", "shape": [2, 2], "data": [2.0, 4.0, 6.0, 9.0]}
    assert response.json == {"model_name": "model", "id": "7", "outputs": [output]}
    assert response.headers["x-factor"] == "2"
    words = {"name": "x", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}
    assert (await server.infer("model", {"inputs": [words]})).json["outputs"][0]["data"] == ["aa", "éé"]
    columns = [{**TENSOR, "name": name, "shape": [4]} for name in ("a", "b")]
    response = await server.infer("model", {"inputs": columns, "parameters": {"content_type": "pd"}})
    assert [(each["name"], each["data"][3]) for each in response.json["outputs"]] == [("a", 9.0), ("b", 9.0)]
    metadata = (await server.request("GET", "/v2/models/model")).json
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert metadata["outputs"] == [{"name": "output-0", "datatype": "FP32", "shape": [-1, 2]}]


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("inexact", 500, "1.5 does not fit into INT32"),
        ("twice", 500, "expected unique names, got it twice"),
        ("dict of V1", 500, "expected an InferResponse for a V2 request, got dict"),
    ],
)
async def test_v2_responses_are_checked(server: RestServer, kind: str, status: int, message: str) -> None:
    response = await server.infer("first", {"inputs": [TENSOR], "parameters": {"kind": kind}})
    assert (response.status, message in response.error) == (status, True)


async def test_v2_response_in_the_form_of_grpc(server: RestServer) -> None:
    response = await server.infer("second", {"inputs": [TENSOR], "parameters": {"kind": "grpc"}})
    assert response.json["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]}]


@pytest.mark.parametrize("protocol", ["v2", "grpc"])
@pytest.mark.parametrize("binary", [False, True])
async def test_every_datatype_through_a_model_and_the_clients(server: RestServer, protocol: str, binary: bool) -> None:
    arrays = {
        name: np.array([[0, 1]], name.replace("FP", "float").lower()) for name in ("INT8", "UINT64", "FP32", "FP64")
    }
    arrays |= {"BOOL": np.array([[True, False]]), "BYTES": np.array([["a", "é"]], object)}
    arrays |= {"FP16": np.array([[0.5, 1]], np.float16)} if binary else {}
    inputs = [InferInput(name, [1, 2], name) for name in arrays]
    for each in inputs:
        each.set_data_from_numpy(arrays[each.name], binary_data=binary)
    parameters = {"kind": "echo", "binary_data_output": binary}
    request = InferRequest("first", inputs, "9", parameters=parameters)
    if protocol == "grpc":
        async with InferenceGRPCClient(f"127.0.0.1:{server.dragoman.grpc_port}") as client:
            response = await client.infer(request)
    else:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest:
            response = await rest.infer(f"http://127.0.0.1:{server.port}", request, "first")
    assert response.id == "9"
    count = response.parameters["n"]
    assert (count.int64_param if protocol == "grpc" else count) == len(arrays)
    for output in response.outputs:
        found = [each.decode() if isinstance(each, bytes) else each for each in output.as_numpy().ravel().tolist()]
        assert (output.datatype, found) == (output.name, arrays[output.name].ravel().tolist())


async def test_bytes_that_are_not_text_stay_bytes(server: RestServer) -> None:
    for content, from_grpc in ((b"\xff", True), (b"a", False)):
        tensor = InferInput("x", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([content], object))
        request = InferRequest("first", [tensor], parameters={"kind": "from_grpc"})
        async with InferenceGRPCClient(f"127.0.0.1:{server.dragoman.grpc_port}") as client:
            response = await client.infer(request)
        assert response.outputs[0].as_numpy().tolist() == [from_grpc]


# --- clients ---------------------------------------------------------------------------------------------------


async def test_health_for_the_clients(server: RestServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(url)
        assert await client.is_server_ready(url)
        assert [await client.is_model_ready(url, name) for name in ("model", "missing")] == [True, False]
        with pytest.raises(UnsupportedProtocol):
            await client.explain(url, "model", {"instances": ROWS})
    async with InferenceRESTClient() as client:
        assert await client.is_server_live(url)
        assert await client.explain(url, "model", {"instances": ROWS}) == {"explanations": ["application/json"] * 2}
        with pytest.raises(HTTPStatusError, match=r"is not found, '404 Not Found' for url") as error:
            await client.infer(url, {"instances": ROWS}, "missing")
        assert error.value.response.status_code == 404
    async with InferenceGRPCClient(f"127.0.0.1:{server.dragoman.grpc_port}") as grpc:
        assert await grpc.is_server_live()
        assert await grpc.is_server_ready()
        assert [await grpc.is_model_ready(name) for name in ("model", "missing")] == [True, False]
    # KServe's client of V1 reads this body.
    assert (await server.request("GET", "/")).json == {"status": "alive"}


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["v1", "v2", "grpc-v2"])
async def test_a_transformer_calls_its_predictor(server: RestServer, protocol: str) -> None:
    port = server.dragoman.grpc_port if protocol.startswith("grpc") else server.port
    arguments = f"--predictor_host=127.0.0.1:{port} --predictor_protocol {protocol}"
    async for transformer in _serving("halves.py", script_arguments=arguments):
        response = await post(transformer, "/v1/models/model:predict", {"instances": ROWS})
        assert (response.status, response.json) == (200, {"predictions": ROWS})
        response = await transformer.infer("model", {"inputs": [{**TENSOR, "datatype": "FP64"}]})
        if protocol == "v1":  # the transformer returns what its V1 predictor does
            assert response.status == 500
        else:
            assert response.json["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.5]


async def test_errors_of_a_predictor(server: RestServer) -> None:
    async for transformer in _serving("halves.py", script_arguments=f"--predictor_host 127.0.0.1:{server.port}"):
        for kind, status in (("invalid", 400), ("not ready", 503), ("not implemented", 501), ("value", 500)):
            response = await post(transformer, "/v1/models/model:predict", {"fail": kind})
            assert (response.status, f"'{status} " in response.error) == (status, True)
    async for transformer in _serving("halves.py", script_arguments="--predictor_host 127.0.0.1:9"):
        response = await post(transformer, "/v1/models/model:predict", {"fail": "value"})
        assert (response.status, response.error) == (
            500,
            "model 'model' failed: ConnectError: All connection attempts failed",
        )
    async for transformer in _serving("halves.py"):
        response = await post(transformer, "/v1/models/model:predict", {"fail": "value"})
        assert (response.status, response.error) == (501, "Could not find predictor_host.")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("INVALID_ARGUMENT", InvalidInput),
        ("UNIMPLEMENTED", NotSupported),
        ("UNAVAILABLE", NotReady),
        ("INTERNAL", ModelFailed),
    ],
)
async def test_errors_of_a_predictor_over_grpc(code: str, expected: type[Exception]) -> None:
    async def fail(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode[code], "no tensor")
        return b""

    server = grpc.aio.server()
    method = {"ModelInfer": grpc.unary_unary_rpc_method_handler(fail)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", method),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"")
    finally:
        await server.stop(None)
    error = dragoman_error(caught.value)
    assert (type(error), str(error)) == (expected, "predictor: no tensor")


# --- scripts ---------------------------------------------------------------------------------------------------------


async def test_names_and_runtimes_are_read_from_the_source(tmp_path: Path) -> None:
    runtime: Runtime = built_in_runtimes()["kserve"]
    assert runtime.own_name is not None
    assert {path.stem: runtime.own_name(path) for path in SCRIPTS.glob("*.py")} == {
        "rows": "model",  # KServe's default of --model_name
        "halves": "model",
        "outputs": "",
        "one_class": "",
    }
    assert recognise(SCRIPTS / "halves.py") == "kserve"
    file = tmp_path / "model.py"
    for text, name in (
        ("Mine('a')", "a"),
        ("Mine(name='b')", "b"),
        ("p.add_argument('--model_name', default='c')\nMine(args.model_name)", "c"),
        ("Mine(variable)", ""),
    ):
        file.write_text(f"import kserve\nclass Mine(kserve.Model): pass\n{text}\n")
        assert (recognise(file), recognise(tmp_path), runtime.own_name(file)) == ("kserve", "kserve", name)
    file.write_text("import dragoman  # not kserve\nclass Mine(dragoman.Model): pass\n")
    assert (recognise(file), runtime.own_name(file)) == ("python", "")
    file.write_text("import kserve\nfunction = print\n")  # a client
    assert recognise(file) == "python"


async def test_one_of_several_models_and_a_class_without_a_server() -> None:
    async for server in _serving("outputs.py:second", "one_class.py"):
        assert (await server.request("GET", "/v2/models")).json == {"models": ["one_class", "second"]}
        assert (await post(server, "/v1/models/one_class:predict", {"instances": [1, 2]})).json == {"predictions": [2]}
        response = await server.infer("second", {"inputs": [TENSOR], "parameters": {"kind": "echo"}})
        assert response.json["outputs"][0]["data"] == TENSOR["data"]


FOLDERS = """
import os
from kserve import Model, ModelRepository, ModelServer

class Named(Model):
    def load(self):
        self.ready = True

    async def predict(self, payload, headers=None):
        return {"predictions": [self.name]}

class Folders(ModelRepository):
    def __init__(self, models_dir):
        super().__init__(models_dir)
        self.load_models()

    def load_model(self, name):
        model = Named(name)
        model.load()
        self.update(model)
        return model.ready

ModelServer(registered_models=Folders(os.path.dirname(__file__))).start([])
"""


async def test_a_repository_loads_a_model_for_each_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "script.py").write_text(FOLDERS)
    async for server in _serving(f"{tmp_path}/script.py:b"):
        assert (await post(server, "/v1/models/b:predict", {"instances": [1]})).json == {"predictions": ["b"]}


async def test_arguments_after_two_dashes_are_those_of_the_script() -> None:
    given = ["model.py", "--", "--model_name", "m", "--http_port=8", "--predictor_host", "a b"]
    arguments = "--model_name m --http_port=8 --predictor_host 'a b'"
    assert expand(given) == ["--model-name=m", "--http-port=8", "model.py", f"--script-arguments={arguments}"]
    assert expand(["model.py", "--no-watch"]) == ["model.py", "--no-watch"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "ended with status 3, before it started a ModelServer"),
        ("ModelServer().start([Mine('a')])", "Model with name a is not ready."),
        ("raise ValueError('wrong')", "ValueError: wrong"),
        ("class Other(Mine): pass", "expected one model, or one called 'a'"),
    ],
)
async def test_scripts_that_cannot_be_served(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from kserve import Model, ModelServer\nclass Mine(Model):\n    def load(self): return False\n" + text
    )
    async with dragoman.Server(str(file), http_port=0, grpc_port=-1, placement="inline") as server:
        (model,) = server.engine.deployments()
        assert (model.state, message in model.reason) == ("UNAVAILABLE", True), model.reason


async def test_arguments_with_an_open_quote() -> None:
    path = str(SCRIPTS / "rows.py")
    async with dragoman.Server(path, http_port=0, grpc_port=-1, placement="inline", script_arguments="'a") as server:
        (model,) = server.engine.deployments()
        assert """setting 'script_arguments': No closing quotation, got "'a\"""" in model.reason, model.reason


async def test_scripts_that_load_at_the_same_time(tmp_path: Path) -> None:
    main, arguments = sys.modules["__main__"], sys.argv
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "import sys, time\nfrom kserve import Model, ModelServer\nclass Mine(Model): pass\ntime.sleep(0.1)\n"
            "assert sys.argv[0] == __file__\n"
            "model = Mine(sys.argv[2])\nmodel.load()\nassert sys.modules['__main__'].model is model\n"
            "time.sleep(0.1)\nModelServer().start([model])\n"
        )
    paths = [str(tmp_path / f"{name}.py") for name in ("a", "b")]
    async with dragoman.Server(*paths, http_port=0, grpc_port=-1, placement="inline") as server:
        assert [(model.state, model.reason) for model in server.engine.deployments()] == [("READY", "")] * 2
    assert (sys.modules["__main__"], sys.argv) == (main, arguments)
    assert str(tmp_path) not in sys.path


async def test_a_script_in_a_worker_process(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text((SCRIPTS / "rows.py").read_text())
    with running_server(str(folder.parent), "--", "--factor", "3") as process:
        assert process.request("GET", "/v2/models")[1] == {"models": ["mine"]}  # as in KServe's /mnt/models
        headers = {"Content-Type": "application/json"}
        status, body, _ = process.request("POST", "/v1/models/mine:predict", {"instances": ROWS}, headers)
        assert (status, body) == (200, {"predictions": [[3.0, 6.0], [9.0, 13.5]]})
