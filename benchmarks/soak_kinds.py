"""What the soak asks: each kind of question with the check of its answer, and clients that leave or ask wrongly."""

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

from benchmarks.soak_models import WORDS
from benchmarks.workloads import GRPC_PATH
from dragoman.formats.oip_messages import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

TOKEN = "soak"
_STREAM_PATH = GRPC_PATH.replace("ModelInfer", "ModelStreamInfer")
_LOADED = "Inline", "Thread", "Process"
_LENGTH = "inference-header-content-length"


class Wrong(Exception):
    """An answer that is not the right one."""


@dataclass(frozen=True, slots=True)
class Client:
    """Where to ask, on connections that are kept; `lot` draws what is checked."""

    port: int
    session: aiohttp.ClientSession
    channel: Any
    lot: random.Random

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def numbers(self, least: int, most: int) -> NDArray[np.float64]:
        count = self.lot.randint(least, most)
        return np.round(np.random.default_rng(self.lot.getrandbits(32)).standard_normal(count), 9)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()


def expect(right: bool, value: object) -> None:
    """Raises Wrong where it is not right."""
    if not right:
        raise Wrong(str(value)[:500])


# --- REST ------------------------------------------------------------------------------------------------------


async def _json(client: Client, least: int, most: int) -> None:
    given, model = client.numbers(least, most), client.lot.choice(_LOADED)
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(given)], "data": given.tolist()}
    status, _, body = await client.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
    expect(status == 200, (status, body))
    expect(json.loads(body)["outputs"][0]["data"] == (2 * given).tolist(), body)


async def json_small(client: Client) -> None:
    await _json(client, 1, 20)


async def json_large(client: Client) -> None:
    await _json(client, 10_000, 60_000)


async def binary(client: Client) -> None:
    given, model = client.numbers(1, client.lot.choice((30, 30_000, 300_000))), client.lot.choice(_LOADED)
    sized = {"binary_data_size": given.nbytes}
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(given)], "parameters": sized}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    path, headers = f"/v2/models/{model}/infer", {_LENGTH: str(len(head))}
    status, headers_received, body = await client.post(path, head + given.tobytes(), **headers)
    expect(status == 200, (status, body[:300]))
    expect(body[int(headers_received[_LENGTH]) :] == (2 * given).tobytes(), "other numbers")


async def simulator(client: Client) -> None:
    given = client.numbers(4, 400)
    checked = {"name": "Simulator", "input": [given.tolist()], "config": {"n": len(given)}}
    status, _, body = await client.post("/Evaluate", checked)
    expect(status == 200, (status, body))
    expect(json.loads(body) == {"output": [(2 * given).tolist()]}, body)


# --- gRPC ------------------------------------------------------------------------------------------------------


def _message(model: str, given: NDArray[np.float64]) -> bytes:
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(given)]}
    found: bytes = ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[given.tobytes()]
    ).SerializeToString()
    return found


async def unary(client: Client) -> None:
    given = client.numbers(1, client.lot.choice((20, 100_000)))
    body = await client.channel.unary_unary(GRPC_PATH)(_message(client.lot.choice(_LOADED), given), timeout=60)
    expect(ModelInferResponse.FromString(body).raw_output_contents == [(2 * given).tobytes()], "other numbers")


async def _counted(call: Any) -> AsyncIterator[float]:
    async for body in call:
        found = ModelStreamInferResponse.FromString(body)
        expect(not found.error_message, found.error_message)
        yield float(np.frombuffer(found.infer_response.raw_output_contents[0])[0])


async def stream(client: Client) -> None:
    """A few questions on one stream, each answered in pieces."""
    counts = [client.lot.randint(1, 5) for _ in range(3)]
    messages = [_message("Counting", np.array([float(n)])) for n in counts]
    call = client.channel.stream_stream(_STREAM_PATH)(iter(messages), timeout=60)
    found = [turn async for turn in _counted(call)]
    expect(found == [float(turn) for n in counts for turn in range(n)], found)


async def left_stream(client: Client) -> None:
    """A client that has heard enough."""
    call = client.channel.stream_stream(_STREAM_PATH)(iter([_message("Counting", np.array([1000.0]))]), timeout=60)
    async for turn in _counted(call):
        if turn >= 3:
            call.cancel()
            return


# --- texts -----------------------------------------------------------------------------------------------------


async def _spoken(client: Client, most: int) -> list[str]:
    word = f"word{client.lot.getrandbits(16)}"
    checked = {"model": "Speaker", "prompt": f"say {word}", "stream": True}
    found: list[str] = []
    async with client.session.post(f"{client.url}/v1/completions", json=checked) as answer:
        expect(answer.status == 200, answer.status)
        async for line in answer.content:
            if line.startswith(b"data: {"):
                found += [c["text"] for c in json.loads(line[6:])["choices"]]
            if len(found) >= most:
                answer.close()
                break
    expect(set(filter(None, found)) == {f" {word}"}, found)
    return found


async def text(client: Client) -> None:
    found = await _spoken(client, 1 << 30)
    expect(len(list(filter(None, found))) == WORDS, found)


async def left_text(client: Client) -> None:
    await _spoken(client, client.lot.randint(1, 9))


# --- what is wrong ---------------------------------------------------------------------------------------------

_GOOD = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
_BAD: list[tuple[str, Any, int]] = [
    ("/v2/models/Inline/infer", b'{"inputs": [', 400),
    ("/v2/models/Thread/infer", {"inputs": [_GOOD | {"shape": [2]}]}, 400),
    ("/v2/models/Process/infer", {"inputs": [_GOOD | {"datatype": "BYTES"}]}, 400),
    ("/v2/models/Nobody/infer", {"inputs": [_GOOD]}, 404),
    ("/v2/models/Counting/infer", {"inputs": [_GOOD | {"data": [0.0]}]}, 500),
    ("/Evaluate", {"name": "Simulator", "input": [[1.0]], "config": {}}, 400),
    ("/v1/completions", {"model": "Inline", "prompt": "x"}, 400),
    ("/nowhere", b"", 404),
]
_RAW = [
    b"NONSENSE\r\n\r\n",
    b"POST /v2/models/Inline/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\nonly a part",
    b"POST /v2/models/Inline/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x05\x01\x00\x00\x00\x00\x01xxxxx",
    b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
]


async def refused(client: Client) -> None:
    path, body, wanted = client.lot.choice(_BAD)
    status, _, said = await client.post(path, body)
    expect(status == wanted, (path, status, said))


async def raw(client: Client) -> None:
    """A client that says something odd, and leaves without a word or after one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        writer.write(client.lot.choice(_RAW))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(client.lot.choice((0.001, 0.2))):
                await reader.read(100)
    finally:
        writer.transport.abort()


async def control(client: Client) -> None:
    """A model that comes and goes."""
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for verb, wanted in (("unload", 400), ("load", 200)):
        status, _, body = await client.post(f"/v2/repository/models/Guest/{verb}", b"", **bearer)
        expect(status == 200, (verb, status, body))
        status, _, body = await client.post("/v2/models/Guest/infer", {"inputs": [_GOOD]})
        expect(status in (wanted, 503, 404) if verb == "unload" else status == wanted, (verb, status, body))
    await asyncio.sleep(0.5)


Kind = Callable[[Client], Awaitable[None]]
# How many clients at a time ask which kind.
KINDS: dict[Kind, int] = {
    json_small: 6, json_large: 1, binary: 3, simulator: 2, unary: 4, stream: 3, left_stream: 1, text: 4, left_text: 2,
    refused: 2, raw: 1, control: 1,
}  # fmt: skip
