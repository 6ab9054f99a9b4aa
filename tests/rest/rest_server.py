"""Shared by the REST tests: models, a server and a client that works on bytes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import dragoman
from dragoman import Infer, Inference, Tensor, TensorSpec
from loaded_models import recorded_models

# --- models ------------------------------------------------------------------------------------------------


class Identity(dragoman.Model):
    """Return the inputs."""

    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Tensor]:
        return dict(call.inputs)


class Adder(dragoman.Model):
    """Sum and difference of two INT32 vectors."""

    placement = "inline"
    inputs = (TensorSpec("INPUT0", dragoman.INT32, (-1, 2)), TensorSpec("INPUT1", dragoman.INT32, (-1, 2)))
    outputs = (TensorSpec("SUM", dragoman.INT32, (-1, 2)), TensorSpec("DIFF", dragoman.INT32, (-1, 2)))

    def infer(self, call: Infer) -> dict[str, Any]:
        a, b = call.inputs["INPUT0"].data, call.inputs["INPUT1"].data
        return {"SUM": a + b, "DIFF": a - b}


class Picture(dragoman.Model):
    """One input with a free axis, for raw binary requests."""

    placement = "inline"
    inputs = (TensorSpec("x", dragoman.FP32, (-1, 2)),)

    def infer(self, call: Infer) -> dict[str, Tensor]:
        return {"y": call.inputs["x"]}


class Phrase(dragoman.Model):
    """One BYTES input with one element."""

    placement = "inline"
    inputs = (TensorSpec("text", dragoman.BYTES, (1,)),)

    def infer(self, call: Infer) -> dict[str, Tensor]:
        return dict(call.inputs)


class Trio(dragoman.Model):
    """Three inputs of any datatype, returned as they are."""

    placement = "inline"
    inputs = outputs = (TensorSpec("x"), TensorSpec("y"), TensorSpec("z"))

    def infer(self, call: Infer) -> dict[str, Tensor]:
        return dict(call.inputs)


class Faulty(dragoman.Model):
    """Raise the error that the parameter `raise` names."""

    placement = "inline"

    def infer(self, call: Infer) -> Inference:
        match call.parameters.get("raise"):
            case "value":
                raise ValueError("that was too much")
            case "surrogate":
                raise ValueError("half a character: \udc80")
            case "not supported":
                raise dragoman.errors.NotSupported("not today")
            case "parameter":
                return Inference(call.inputs, {"p": object()})  # type: ignore[dict-item]
        return Inference(call.inputs)


class Gate(dragoman.Model):
    """Wait until a test sets `open`; `begun` and `cancelled` record the state."""

    placement = "inline"

    def load(self) -> None:
        self.begun = asyncio.Event()
        self.open = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def infer(self, call: Infer) -> Mapping[str, Tensor]:
        self.begun.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return call.inputs


class Counter(dragoman.Model):
    """A stream of `n` chunks with an error before chunk `fail`; endless and large if `n` is negative."""

    placement = "inline"

    def load(self) -> None:
        self.closed = asyncio.Event()

    async def infer(self, call: Infer) -> AsyncIterator[dict[str, Any]]:
        n, fail = int(call.parameters.get("n", 3)), int(call.parameters.get("fail", -1))
        size = 1 if n >= 0 else 1 << 16
        i = 0
        try:
            while i != n:
                if i == fail:
                    raise ValueError(f"no chunk {i}")
                yield {"i": np.full(size, i, np.int32)}
                i += 1
            if i == fail:
                raise ValueError(f"no chunk {i}")
        finally:
            self.closed.set()


MODELS = (Identity, Adder, Picture, Phrase, Faulty, Counter)


# Default settings of every server.
DEFAULTS: dict[str, Any] = {"http_port": 0, "grpc_port": -1}


@asynccontextmanager
async def serving(*models: Any, **settings: Any) -> AsyncIterator["RestServer"]:
    """Start a server with these models, by default all."""
    server = dragoman.Server(*(models or MODELS), **{**DEFAULTS, **settings})
    async with AsyncExitStack() as stack:
        with recorded_models() as loaded:
            await stack.enter_async_context(server)
        yield RestServer(server.http_ports[0], server, loaded)


# --- clients -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the message of an error after checking its format."""
        assert self.status >= 400, self
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}
        text: str = self.json["error"]
        assert isinstance(text, str)
        assert text
        assert "Traceback" not in text
        return text


@dataclass(frozen=True)
class RestServer:
    """A running server and a client of it."""

    port: int
    dragoman: Any
    models: Mapping[str, Any] = field(default_factory=dict)

    async def send(self, raw: bytes, *, responses: int = 1, head: bool = False) -> Any:
        """Send bytes over a new connection; return the response, or a list of several."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            found = [await read_response(reader, head=head) for _ in range(responses)]
        finally:
            writer.close()
        return found[0] if responses == 1 else found

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | str | dict[str, Any] | list[Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RawResponse:
        """Send a request over a new connection; a dict or list is sent as JSON."""
        response: RawResponse = await self.send(request(method, path, body, headers), head=method == "HEAD")
        return response

    async def infer(self, model: str, body: Any, headers: Mapping[str, str] | None = None) -> RawResponse:
        return await self.request("POST", f"/v2/models/{model}/infer", body, headers)

    def model(self, name: str) -> Any:
        """Return the model object, which runs in this process."""
        return self.models[name]


def request(
    method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, length: bool = True
) -> bytes:
    raw = encode_body(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    if body is not None and length:
        lines.append(f"Content-Length: {len(raw)}")
    lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def encode_body(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    if body is None:
        return b""
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


async def read_headers(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers


async def read_response(reader: asyncio.StreamReader, *, head: bool = False) -> RawResponse:
    status, headers = await read_headers(reader)
    if head or status in (100, 204, 304):
        return RawResponse(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return RawResponse(status, headers, b"".join([chunk async for chunk in read_chunks(reader)]))
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 60)
    return RawResponse(status, headers, body)


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 60), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


class KeepAliveClient:
    """A blocking client with one connection, for tests that send thousands of requests from a thread."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self._socket.makefile("rb")

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def request(self, raw: bytes) -> RawResponse:
        self.send(raw)
        status = int(self._file.readline().split()[1])
        headers = {}
        while line := self._file.readline().strip().decode("latin-1"):
            key, _, value = line.partition(":")
            headers[key.lower()] = value.strip()
        return RawResponse(status, headers, self._file.read(int(headers["content-length"])))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


# --- bodies ------------------------------------------------------------------------------------------------


def tensor(
    name: str = "x", shape: Any = (1,), datatype: Any = "INT32", data: Any = (1,), **more: Any
) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data, **more}


def inputs(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(tensors), **more}


def binary(head: dict[str, Any], *blobs: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body and the header of a binary request."""
    text = json.dumps(head).encode()
    return b"".join([text, *blobs]), {"Inference-Header-Content-Length": str(len(text))}


def blobs(response: RawResponse) -> tuple[Any, list[bytes]]:
    """Split a binary response into its JSON and the bytes of each binary output."""
    length = int(response.headers["inference-header-content-length"])
    document, at, found = json.loads(response.body[:length]), length, []
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        if size:
            found.append(response.body[at : at + size])
            at += size
    assert at == len(response.body)
    return document, found


def outputs(response: RawResponse) -> Iterator[dict[str, Any]]:
    assert response.status == 200, response.body
    return iter(response.json["outputs"])
