"""Request ids: taken from `x-request-id` or generated, in each response, error and log line."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

import dragoman
from dragoman.formats import grpc_messages as m
from e2e.server_process import ServerProcess, running_server

MODELS = """
import logging

import dragoman
import numpy as np

log = logging.getLogger("author")


class Talkative(dragoman.Model):
    batched = True
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        log.warning("the model computes")
        if 13 in call.inputs["x"].data:
            raise ValueError("unlucky")
        return {"y": call.inputs["x"].data}


class Inline(Talkative):
    placement = "inline"


class Thread(Talkative):
    placement = "thread"


class Process(Talkative):
    placement = "process"
"""
PLACEMENTS = ("Inline", "Thread", "Process")
GENERATED = re.compile(r"[0-9a-f]{16}-[0-9]{10}")
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
UNLUCKY = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [13.0]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("models") / "authored.py"
    file.write_text(MODELS)
    with running_server(*(f"{file}:{name}" for name in PLACEMENTS)) as process:
        yield process


def infer(server: ServerProcess, model: str, body: Any = X, request_id: str = "") -> tuple[int, str]:
    """Return status and request id of an inference request."""
    headers = {"x-request-id": request_id} if request_id else {}
    status, _, headers = server.request("POST", f"/v2/models/{model}/infer", body, headers)
    return status, headers["x-request-id"]


# Each protocol over HTTP, and requests that reach none: method, path, body, status.
REQUESTS: dict[str, tuple[str, str, Any, int]] = {
    "open inference": ("POST", "/v2/models/Inline/infer", X, 200),
    "health": ("GET", "/v2/health/live", None, 200),
    "metrics": ("GET", "/metrics", None, 200),
    "umbridge": ("GET", "/Info", None, 200),
    "openai": ("POST", "/v1/chat/completions", {"model": "none", "messages": []}, 404),
    "tgi": ("POST", "/generate", {"inputs": "a"}, 404),
    "lmi": ("POST", "/invocations", {"inputs": "a"}, 404),
    "invalid JSON": ("POST", "/v2/models/Inline/infer", b"{", 400),
    "unknown model": ("POST", "/v2/models/none/infer", X, 404),
    "failed model": ("POST", "/v2/models/Inline/infer", UNLUCKY, 500),
    "unknown path": ("GET", "/nowhere", None, 404),
    "wrong method": ("DELETE", "/v2/health/live", None, 405),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_response_over_http_has_a_request_id(server: ServerProcess, name: str) -> None:
    method, path, body, status = REQUESTS[name]
    response, _, headers = server.request(method, path, body)
    if name not in ("openai", "tgi", "lmi"):
        assert response == status
    assert GENERATED.fullmatch(headers["x-request-id"])
    assert (
        server.request(method, path, body, {"X-Request-Id": f"id-of-{method}"})[2]["x-request-id"] == f"id-of-{method}"
    )


def test_requests_of_one_connection_get_different_ids(server: ServerProcess) -> None:
    with httpx2.Client(base_url=f"http://{server.url}") as client:
        ids = [client.post("/v2/models/Inline/infer", json=X).headers["x-request-id"] for _ in range(4)]
        for _ in range(2):  # equal headers, as a client that resends
            chosen = client.post("/v2/models/Inline/infer", json=X, headers={"x-request-id": "mine"})
            assert chosen.headers.get_list("x-request-id") == ["mine"]
        ids.append(client.post("/v2/models/Inline/infer", json=X).headers["x-request-id"])
    assert len({*ids}) == 5
    assert all(map(GENERATED.fullmatch, ids))


def test_equal_requests_in_one_piece_keep_the_id_of_the_client(server: ServerProcess) -> None:
    body = json.dumps(X).encode()
    line = b"POST /v2/models/Inline/infer HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\n"
    request = line + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        for _ in range(4):
            connection.sendall(request)
            response = http.client.HTTPResponse(connection)
            response.begin()
            response.read()
            assert (response.status, response.headers["x-request-id"]) == (200, "mine")


@pytest.mark.parametrize("sent", ["two words", "x" * 129, "a\tb", "caf\xe9", '"a", "b"'])
def test_an_invalid_id_is_replaced(server: ServerProcess, sent: str) -> None:
    _, response = infer(server, "Inline", request_id=sent)
    assert GENERATED.fullmatch(response)


def test_an_id_of_the_longest_length_is_taken(server: ServerProcess) -> None:
    assert infer(server, "Inline", request_id="~" * 128) == (200, "~" * 128)


@pytest.mark.parametrize("model", PLACEMENTS)
@pytest.mark.parametrize("sent", ["", "of-client"])
def test_log_lines_of_a_model_carry_the_id(server: ServerProcess, model: str, sent: str) -> None:
    sent = sent and f"{sent}-{model}"
    status, request_id = infer(server, model, UNLUCKY, sent)
    assert status == 500
    server.wait_for_log(f"the model computes request_id={request_id}")
    server.wait_for_log(f"model '{model}' failed on request '{request_id}' request_id={request_id}")


def test_each_call_of_a_batch_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(MODELS)
    options = ("--max-batch-size", "8", "--max-batch-wait-s", "1", "--log-format", "json", "--trial-s", "0")
    with running_server(f"{tmp_path / 'authored.py'}:Process", *options) as server:
        with ThreadPoolExecutor(3) as threads:
            bodies = (UNLUCKY, X, X)
            names = ("a", "b", "c")
            found = [*threads.map(lambda body, name: infer(server, "Process", body, name), bodies, names)]
        assert sorted(found) == [(200, "b"), (200, "c"), (500, "a")]
        lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    computed = [line["request_id"] for line in lines if line["message"] == "the model computes"]
    assert {*computed[0].split(",")} == {"a", "b", "c"}  # the batch, one of whose calls fails
    assert sorted(computed[1:]) == ["a", "b", "c"]  # each alone
    failed = [line["request_id"] for line in lines if line["message"] == "model 'Process' failed on request 'a'"]
    assert failed == ["a"]


def test_every_grpc_response_has_a_request_id(server: ServerProcess) -> None:
    infer_bytes = _infer_message("Inline").SerializeToString()
    service = "/inference.GRPCInferenceService/"
    with grpc.insecure_channel(server.grpc_url) as channel:
        unary, stream = channel.unary_unary(service + "ModelInfer"), channel.stream_stream(service + "ModelStreamInfer")
        _, call = unary.with_call(infer_bytes, metadata=(("x-request-id", "of-unary"),))
        assert ("x-request-id", "of-unary") in call.initial_metadata()
        _, call = unary.with_call(infer_bytes)
        assert GENERATED.fullmatch(dict(call.initial_metadata())["x-request-id"])
        for path in (service + "ModelInfer", service + "None"):
            message = _infer_message("none").SerializeToString()
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary(path)(message, metadata=(("x-request-id", "of-error"),))
            assert ("x-request-id", "of-error") in (*failed.value.initial_metadata(), *failed.value.trailing_metadata())
        streamed = stream(iter([infer_bytes]), metadata=(("x-request-id", "of-stream"),))
        assert len([*streamed]) == 1
        assert ("x-request-id", "of-stream") in streamed.initial_metadata()


def test_responses_over_http_2_and_asgi_have_a_request_id(server: ServerProcess) -> None:
    with httpx2.Client(http1=False, http2=True, base_url=f"http://{server.url}") as client:
        assert GENERATED.fullmatch(client.post("/v2/models/Inline/infer", json=X).headers["x-request-id"])
        for path in ("/v2/health/live", "/nowhere"):
            assert client.get(path, headers={"x-request-id": "of-h2"}).headers["x-request-id"] == "of-h2"


async def test_responses_over_asgi_have_a_request_id(tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(MODELS)
    transport = httpx2.ASGITransport(app=dragoman.asgi(f"{tmp_path / 'authored.py'}:Inline", load_at_start=False))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/v2/health/live", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        assert GENERATED.fullmatch((await client.get("/nowhere")).headers["x-request-id"])


def test_a_forwarded_call_has_one_id(tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(MODELS)
    with running_server(f"{tmp_path / 'authored.py'}:Process", "--processes", "2") as server:
        status, request_id = infer(server, "Process", UNLUCKY)
        assert status == 500
        server.wait_for_log(f"model 'Process' failed on request '{request_id}' request_id={request_id}")


def _infer_message(model: str) -> Any:
    message = m.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(1.0)
    return message
