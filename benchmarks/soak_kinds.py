"""Clients of the soak test: requests with checks of the responses, cancelled streams, and invalid requests."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.soak_models import COMPLETION_WORDS
from benchmarks.workloads import GRPC_PATH
from dragoman.formats.grpc_messages import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

TOKEN = "soak"
_STREAM_PATH = GRPC_PATH.replace("ModelInfer", "ModelStreamInfer")
_MODELS = "Inline", "Thread", "Process"
_LENGTH = "inference-header-content-length"


class WrongResponse(Exception):
    """A response that is not the expected one."""


@dataclass(frozen=True, slots=True)
class Client:
    """The server with keep-alive connections; `rng` chooses the requests."""

    port: int
    session: aiohttp.ClientSession
    channel: Any
    rng: random.Random

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def numbers(self, minimum: int, maximum: int) -> NDArray[np.float64]:
        count = self.rng.randint(minimum, maximum)
        return np.round(np.random.default_rng(self.rng.getrandbits(32)).standard_normal(count), 9)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, response.headers, await response.read()


def expect(is_correct: bool, value: object) -> None:
    """Raise WrongResponse if a check failed."""
    if not is_correct:
        raise WrongResponse(str(value)[:500])


# --- REST ------------------------------------------------------------------------------------------------------


async def _json(client: Client, minimum: int, maximum: int) -> None:
    values, model = client.numbers(minimum, maximum), client.rng.choice(_MODELS)
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(values)], "data": values.tolist()}
    status, _, body = await client.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
    expect(status == 200, (status, body))
    expect(json.loads(body)["outputs"][0]["data"] == (2 * values).tolist(), body)


async def json_small(client: Client) -> None:
    await _json(client, 1, 20)


async def json_large(client: Client) -> None:
    await _json(client, 10_000, 60_000)


async def binary(client: Client) -> None:
    values, model = client.numbers(1, client.rng.choice((30, 30_000, 300_000))), client.rng.choice(_MODELS)
    sized = {"binary_data_size": values.nbytes}
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(values)], "parameters": sized}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    path, headers = f"/v2/models/{model}/infer", {_LENGTH: str(len(head))}
    status, headers_received, body = await client.post(path, head + values.tobytes(), **headers)
    expect(status == 200, (status, body[:300]))
    expect(body[int(headers_received[_LENGTH]) :] == (2 * values).tobytes(), "other numbers")


async def simulator(client: Client) -> None:
    values = client.numbers(4, 400)
    checked = {"name": "Simulator", "input": [values.tolist()], "config": {"n": len(values)}}
    status, _, body = await client.post("/Evaluate", checked)
    expect(status == 200, (status, body))
    expect(json.loads(body) == {"output": [(2 * values).tolist()]}, body)


# --- gRPC ------------------------------------------------------------------------------------------------------


def _message(model: str, values: NDArray[np.float64]) -> bytes:
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(values)]}
    received: bytes = ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[values.tobytes()]
    ).SerializeToString()
    return received


async def unary(client: Client) -> None:
    values = client.numbers(1, client.rng.choice((20, 100_000)))
    body = await client.channel.unary_unary(GRPC_PATH)(_message(client.rng.choice(_MODELS), values), timeout=60)
    expect(ModelInferResponse.FromString(body).raw_output_contents == [(2 * values).tobytes()], "other numbers")


async def _stream_values(call: Any) -> AsyncIterator[float]:
    async for body in call:
        received = ModelStreamInferResponse.FromString(body)
        expect(not received.error_message, received.error_message)
        yield float(np.frombuffer(received.infer_response.raw_output_contents[0])[0])


async def stream(client: Client) -> None:
    """Send a few requests on one stream, each with several responses."""
    counts = [client.rng.randint(1, 5) for _ in range(3)]
    messages = [_message("Counting", np.array([float(n)])) for n in counts]
    call = client.channel.stream_stream(_STREAM_PATH)(iter(messages), timeout=60)
    received = [index async for index in _stream_values(call)]
    expect(received == [float(index) for n in counts for index in range(n)], received)


async def cancelled_stream(client: Client) -> None:
    """Cancel a stream after a few responses."""
    call = client.channel.stream_stream(_STREAM_PATH)(iter([_message("Counting", np.array([1000.0]))]), timeout=60)
    async for index in _stream_values(call):
        if index >= 3:
            call.cancel()
            return


# --- text generation ------------------------------------------------------------------------------------------


async def _stream_completion(client: Client, maximum: int) -> list[str]:
    word = f"word{client.rng.getrandbits(16)}"
    checked = {"model": "Repeater", "prompt": f"say {word}", "stream": True}
    received: list[str] = []
    async with client.session.post(f"{client.url}/v1/completions", json=checked) as response:
        expect(response.status == 200, response.status)
        async for line in response.content:
            if line.startswith(b"data: {"):
                received += [c["text"] for c in json.loads(line[6:])["choices"]]
            if len(received) >= maximum:
                response.close()
                break
    expect(set(filter(None, received)) == {f" {word}"}, received)
    return received


async def text(client: Client) -> None:
    received = await _stream_completion(client, 1 << 30)
    expect(len(list(filter(None, received))) == COMPLETION_WORDS, received)


async def cancelled_text(client: Client) -> None:
    await _stream_completion(client, client.rng.randint(1, 9))


# --- invalid requests ---------------------------------------------------------------------------------------------

_VALID_INPUT = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
_INVALID_REQUESTS: list[tuple[str, Any, int]] = [
    ("/v2/models/Inline/infer", b'{"inputs": [', 400),
    ("/v2/models/Thread/infer", {"inputs": [_VALID_INPUT | {"shape": [2]}]}, 400),
    ("/v2/models/Process/infer", {"inputs": [_VALID_INPUT | {"datatype": "BYTES"}]}, 400),
    ("/v2/models/Missing/infer", {"inputs": [_VALID_INPUT]}, 404),
    ("/v2/models/Counting/infer", {"inputs": [_VALID_INPUT | {"data": [0.0]}]}, 500),
    ("/Evaluate", {"name": "Simulator", "input": [[1.0]], "config": {}}, 400),
    ("/v1/completions", {"model": "Inline", "prompt": "x"}, 400),
    ("/nowhere", b"", 404),
]
_INVALID_BYTES = [
    b"NONSENSE\r\n\r\n",
    b"POST /v2/models/Inline/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\nonly a part",
    b"POST /v2/models/Inline/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x05\x01\x00\x00\x00\x00\x01xxxxx",
    b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
]


async def rejected(client: Client) -> None:
    path, body, expected = client.rng.choice(_INVALID_REQUESTS)
    status, _, body = await client.post(path, body)
    expect(status == expected, (path, status, body))


async def raw(client: Client) -> None:
    """Send invalid bytes and close the connection, with or without reading."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        writer.write(client.rng.choice(_INVALID_BYTES))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(client.rng.choice((0.001, 0.2))):
                await reader.read(100)
    finally:
        writer.transport.abort()


async def control(client: Client) -> None:
    """Unload and load a model."""
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for verb, expected in (("unload", 400), ("load", 200)):
        status, _, body = await client.post(f"/v2/repository/models/Guest/{verb}", b"", **bearer)
        expect(status == 200, (verb, status, body))
        status, _, body = await client.post("/v2/models/Guest/infer", {"inputs": [_VALID_INPUT]})
        expect(status in (expected, 503, 404) if verb == "unload" else status == expected, (verb, status, body))
    await asyncio.sleep(0.5)


Kind = Callable[[Client], Awaitable[None]]
# Number of concurrent clients of each kind.
KINDS: dict[Kind, int] = {
    json_small: 6, json_large: 1, binary: 3, simulator: 2, unary: 4, stream: 3, cancelled_stream: 1, text: 4,
    cancelled_text: 2, rejected: 2, raw: 1, control: 1,
}  # fmt: skip
