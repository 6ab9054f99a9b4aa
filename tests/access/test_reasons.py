"""The reason of a failed load, a text of an exception: only for those who may control models, and in the log."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from access.access_models import BODY, Doubler, KeyFile, bearer
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, serving

SECRET = "cannot read /srv/secret"
MODEL = b'{"model": "Broken", "prompt": "a", "input": [[1]], "name": "Broken", "config": {}, "messages": '
TEXT = MODEL + b'[{"role": "user", "content": "a"}], "max_tokens": 1}'
CALLS = [
    ("GET", "/v2/models/Broken", None),
    ("GET", "/v2/models/Broken/ready", None),
    ("GET", "/v2/models/Broken/config", None),
    ("GET", "/v2/models/Broken/stats", None),
    ("POST", "/v2/models/Broken/infer", BODY),
    ("POST", "/v2/models/Broken/infer_stream", BODY),
    ("POST", "/v2/models/Broken/generate", b'{"text_input": "a"}'),
    ("POST", "/v2/models/Broken/generate_stream", b'{"text_input": "a"}'),
    ("GET", "/v2/repository/status", None),
    ("GET", "/v1/models/Broken", None),
    ("POST", "/v1/models/Broken:predict", b'{"instances": [1]}'),
    ("POST", "/v1/completions", TEXT),
    ("POST", "/v1/chat/completions", TEXT),
    ("POST", "/v1/responses", TEXT),
    ("POST", "/v1/embeddings", TEXT),
    ("POST", "/v1/messages", TEXT),
    ("POST", "/api/generate", TEXT),
    ("POST", "/api/chat", TEXT),
    ("GET", "/models", None),
    ("GET", "/models/Broken", None),
    ("POST", "/models/Broken/invocations", b'{"instances": [1]}'),
    ("POST", "/predictions/Broken", b'{"instances": [1]}'),
    ("POST", "/Evaluate", TEXT),
    ("POST", "/InputSizes", TEXT),
    ("POST", "/ModelInfo", TEXT),
    ("GET", "/metrics", None),
    ("GET", "/v2/models/Broken/docs/dataplane.json", None),
]
UNARY = {
    "ModelMetadata": m.ModelMetadataRequest(name="Broken"),
    "ModelReady": m.ModelReadyRequest(name="Broken"),
    "ModelConfig": m.ModelConfigRequest(name="Broken"),
    "ModelStatistics": m.ModelStatisticsRequest(name="Broken"),
    "ModelInfer": m.ModelInferRequest(model_name="Broken"),
}


class Broken(Doubler):
    def load(self) -> None:
        raise RuntimeError(SECRET)


@pytest_asyncio.fixture(params=[{}, {"load_on_demand": True}], ids=["at start", "on demand"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RestServer]:
    async with serving(Doubler, Broken, grpc_port=0, control_token="t", **request.param) as server:
        yield server


async def test_no_protocol_tells_clients(server: RestServer, caplog: pytest.LogCaptureFixture) -> None:
    found = {path: await server.request(method, path, body) for method, path, body in CALLS}
    assert not [path for path, response in found.items() if b"secret" in response.body]
    assert not [path for path, response in found.items() if "secret" in str(response.headers)]
    expected = b"model 'Broken' is not ready: UNAVAILABLE; the reason is in the log and in the repository index"
    shown = [path for path, response in found.items() if expected in response.body]
    assert {"/v2/models/Broken/infer", "/v1/models/Broken:predict", "/v1/completions", "/Evaluate"} <= {*shown}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.dragoman.grpc_port}") as channel:
        for name, message in UNARY.items():
            call: Any = channel.unary_unary(f"/{m.SERVICE}/{name}")(message.SerializeToString())
            assert "secret" not in f"{await call.details()} {await call.trailing_metadata()}", name
            assert (await call.code() is grpc.StatusCode.UNAVAILABLE) == (name not in ("ModelReady", "ModelStatistics"))
        stream: Any = channel.stream_stream(f"/{m.SERVICE}/ModelStreamInfer")
        answers = [a async for a in stream(iter([UNARY["ModelInfer"].SerializeToString()]))]
        assert answers
        assert b"secret" not in b"".join(answers)
    assert SECRET in "".join(record.getMessage() for record in caplog.get_records("setup"))


async def test_the_control_token_shows_it(server: RestServer) -> None:
    index = ("POST", "/v2/repository/index", b"{}")
    assert (await server.request(*index)).status == 401
    assert SECRET in (await server.request(*index, bearer("t"))).body.decode()
    load = await server.request("POST", "/v2/repository/models/Broken/load", b"{}", bearer("t"))
    assert (load.status, SECRET in load.body.decode()) == (400, True)


async def test_status_and_the_description_of_lmi_show_it_to_the_token() -> None:
    async with serving(Doubler, Broken, control_token="t") as server:
        for path in ("/v2/repository/status", "/models/Broken"):
            for token, shows in (("", False), ("x", False), ("t", True)):
                body = (await server.request("GET", path, headers=bearer(token))).body.decode()
                assert (SECRET in body) is shows, (path, token)
                assert ("in the log of the server; shown here with --control-open" in body) is not shows, (path, token)


@pytest.mark.parametrize(("settings", "shows"), [({}, False), ({"control_open": True}, True)])
async def test_without_a_token(settings: dict[str, Any], shows: bool) -> None:
    async with serving(Doubler, Broken, **settings) as server:
        assert (SECRET.encode() in (await server.request("GET", "/v2/repository/status")).body) is shows


async def test_a_model_that_the_next_request_loads_says_so_to_all(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text("def double(x: float) -> float:\n    return 2 * x\n")
    async with serving(f"{tmp_path}/double.py:double", load_on_demand=True) as server:
        status = await server.request("GET", "/v2/repository/status")
        assert json.loads(status.body)["models"][0]["reason"] == "not loaded: the next request loads it"


async def test_keys_that_may_read_show_it(keys: KeyFile) -> None:
    async with serving(Doubler, Broken, api_keys=str(keys.path)) as server:
        status = await server.request("GET", "/v2/repository/status", headers=bearer(keys.keys["user"]))
        assert {e["name"]: SECRET in e["reason"] for e in json.loads(status.body)["models"]} == {
            "Doubler": False,
            "Broken": True,
        }
