"""Persistent connections: repeated requests take a shortcut and get the same responses."""

import asyncio
import contextvars
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import Infer, TensorSpec
from rest.rest_server import (
    MODELS,
    Gate,
    RawResponse,
    RestServer,
    binary,
    inputs,
    read_response,
    request,
    serving,
    tensor,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("on_uvloop")]

_seen: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


class Context(dragoman.Model):
    """Count in a context variable, which each call has for itself."""

    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Any]:
        _seen.set(_seen.get() + 1)
        return {"seen": np.array([_seen.get()])}


class Same(dragoman.Model):
    """Return the same array each time and write to it afterwards."""

    placement = "inline"
    outputs = (TensorSpec("y", dragoman.FP32, (-1,)),)

    def load(self) -> None:
        self.array = np.zeros(30_000, np.float32)

    def infer(self, call: Infer) -> Any:
        self.array += 1
        return self.array


class Narrow(dragoman.Model):
    """Return a value that does not match its output."""

    placement = "inline"
    outputs = (TensorSpec("y", dragoman.INT32, (1,)),)

    def infer(self, call: Infer) -> Any:
        return np.zeros(2, np.int32) if call.parameters.get("long") else np.array([1.5])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(*MODELS, Context, Same, Narrow, Gate, control_token="secret") as server:
        yield server


def infer(model: str, body: Any, headers: Any = None) -> bytes:
    return request("POST", f"/v2/models/{model}/infer", body, headers)


_ONE, _TWO = (tensor(name, [1, 2], data=[1, 2]) for name in ("INPUT0", "INPUT1"))
_X = tensor(shape=[2, 2], datatype="FP32", data=[1, 2, 3, 4.5])
_IN_BINARY = inputs(tensor(), parameters={"binary_data_output": True})
REQUESTS = {
    "plain": infer("Identity", inputs(_X)),
    "with an id": infer("Identity", inputs(_X, id='a"b')),
    "in rows": infer("Identity", inputs({**_X, "data": [[1, 2], [3, 4]]})),
    "with parameters": infer("Identity", inputs(_X, parameters={"k": 1})),
    "two inputs": infer("Adder", inputs(_ONE, _TWO)),
    "two inputs in the other order": infer("Adder", inputs(_TWO, _ONE)),
    "text": infer("Identity", inputs(tensor(datatype="BYTES", data=["a"]))),
    "binary answer": infer("Identity", _IN_BINARY),
    "binary question": infer("Picture", *binary(inputs(tensor(shape=[1, 2], datatype="FP32")), b"")),
    "large answer": infer("Same", {"inputs": []}, {"accept-encoding": "gzip"}),
    "no such model": infer("Nobody", inputs(_X)),
    "no such version": request("POST", "/v2/models/Identity/versions/7/infer", inputs(_X)),
    "no JSON": infer("Identity", b"{"),
    "wrong kind": infer("Identity", inputs(tensor(data=[1.5]))),
    "too few": infer("Identity", inputs(tensor(shape=[3]))),
    "negative axes": infer("Identity", inputs(tensor(shape=[-1, -1]))),
    "unknown input": infer("Picture", inputs(tensor("z"))),
    "unknown field": infer("Identity", {**inputs(_X), "more": [[1]]}),
    "faulty": infer("Faulty", inputs(_X, parameters={"raise": "value"})),
    "not supported": infer("Faulty", inputs(_X, parameters={"raise": "not supported"})),
    "broken answer": infer("Faulty", inputs(_X, parameters={"raise": "parameter"})),
    "wrong output": infer("Narrow", {"inputs": []}),
    "output too long": infer("Narrow", {"inputs": [], "parameters": {"long": True}}),
    "several answers": infer("Counter", inputs(_X)),
    "deadline": infer("Identity", inputs(_X, parameters={"timeout": 10_000_000})),
    "live": request("GET", "/v2/health/live"),
    "ready": request("GET", "/v2/models/Identity/ready"),
    "metadata": request("GET", "/v2/models/Adder"),
    "index": request("POST", "/v2/repository/index", b"{}", {"authorization": "Bearer secret"}),
    "index for missing": request("POST", "/v2/repository/index", b"{}"),
    "no such path": request("GET", "/v2/nowhere"),
    "no such method": request("DELETE", "/v2/models/Adder"),
    "preflight": request("OPTIONS", "/v2/models/Adder"),
    "another site": infer("Identity", inputs(_X), {"origin": "https://a.org"}),
}


def _without_time(response: RawResponse, name: str) -> Any:
    body = response.body
    if name == "large answer":  # its numbers rise with each call
        body = b""
    elif b"request id" in body:
        body = b"internal"
    headers = {k: v for k, v in response.headers.items() if k not in ("date", "content-length", "x-request-id")}
    return response.status, headers, body


@pytest.mark.parametrize("name", REQUESTS)
async def test_repeated_requests_get_equal_responses(server: RestServer, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    found = []
    for _ in range(4):
        writer.write(REQUESTS[name])
        found.append(_without_time(await read_response(reader), name))
    writer.close()
    assert found == [found[0]] * 4


async def test_chunking_of_requests_does_not_matter(server: RestServer) -> None:
    good, bad = REQUESTS["plain"], REQUESTS["wrong kind"]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    statuses = []
    for parts in ([good], [good], [good + bad], [good[:10], good[10:]], [good], [good + good[:50], good[50:]], [bad]):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01)
        statuses += [(await read_response(reader)).status for _ in range(b"".join(parts).count(b"POST "))]
    writer.close()
    assert statuses == [200, 200, 200, 400, 200, 200, 200, 200, 400]


async def test_each_call_has_its_own_context(server: RestServer) -> None:
    responses = []
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(4):
        writer.write(infer("Context", {"inputs": []}))
        responses.append(await read_response(reader))
    writer.close()
    assert [json.loads(a.body)["outputs"][0]["data"] for a in responses] == [[1]] * 4


async def test_responses_do_not_alias_the_models_arrays(server: RestServer) -> None:
    """A model that writes to an array after returning it does not change a response in flight."""
    body = {"inputs": [], "parameters": {"binary_data_output": True}}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(infer("Same", body))
    responses = [await read_response(reader)]
    for _ in range(5):
        writer.write(infer("Same", body))
        responses.append(await read_response(reader))
    writer.write(infer("Same", body) * 20)
    responses += [await read_response(reader) for _ in range(20)]
    writer.close()
    for response in responses:
        numbers = np.frombuffer(response.body[int(response.headers["inference-header-content-length"]) :], np.float32)
        assert len(set(numbers.tolist())) == 1
    firsts = [np.frombuffer(a.body[-4:], np.float32)[0] for a in responses]
    assert firsts == [firsts[0] + n for n in range(26)]


async def test_a_waiting_request_keeps_its_position(server: RestServer) -> None:
    gate: Gate = server.model("Gate")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUESTS["plain"])
    await read_response(reader)
    writer.write(infer("Gate", inputs(_X, id="waits")))
    await asyncio.wait_for(gate.begun.wait(), 60)
    writer.write(REQUESTS["with an id"])
    gate.open.set()
    responses = [await read_response(reader), await read_response(reader)]
    writer.close()
    assert [a.json["id"] for a in responses] == ["waits", 'a"b']


async def test_the_calls_are_counted(server: RestServer) -> None:
    def count(text: bytes) -> float:
        lines = [line for line in text.decode().splitlines() if line.startswith("dragoman_calls_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'model="Narrow"' in line)

    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    before = count((await server.request("GET", "/metrics")).body)
    for _ in range(7):
        writer.write(REQUESTS["wrong output"])
        assert (await read_response(reader)).status == 500
    writer.close()
    assert count((await server.request("GET", "/metrics")).body) == before + 7
