"""HTTP limits: sizes, timeouts, malformed requests and disconnects."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from rest.rest_server import (
    Gate,
    RawResponse,
    RestServer,
    binary,
    encode_body,
    inputs,
    outputs,
    read_chunks,
    read_headers,
    read_response,
    request,
    serving,
    tensor,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("on_uvloop")]
INFER = "/v2/models/Identity/infer"
LIVE = request("GET", "/v2/health/live")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving() as server:
        yield server


class Wire:
    """A raw connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def response(self) -> RawResponse:
        return await read_response(self.reader)

    async def hung_up(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), 60) == b""
        except ConnectionError:
            return True


async def wire(server: RestServer, **options: Any) -> Wire:
    return Wire(*await asyncio.open_connection("127.0.0.1", server.port, **options))


async def check_rejected(wire: Wire, status: int, *words: str) -> None:
    """Assert status and message of the next response, and that the connection closes after it."""
    response = await wire.response()
    assert response.status == status, response
    for word in words:
        assert word in response.error
    assert response.headers["connection"] == "close"
    assert await wire.hung_up()


# --- heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        request("GET", "/v2/health/live", headers={"X": "y" * 17_000}),
        request("GET", "/v2/health/live", headers={f"x{i}": "y" * 100 for i in range(200)}),
        request("GET", "/" + "v" * 17_000),
        b"GET /v2 HTTP/1.1\r\nx: " + b"y" * 100_000,
    ],
)
async def test_headers_too_large(server: RestServer, raw: bytes) -> None:
    async with await wire(server) as client:
        await client.send(raw)
        await check_rejected(client, 431, "16384 bytes")


async def test_headers_too_large_in_chunks_on_a_used_connection(server: RestServer) -> None:
    async with await wire(server) as client:
        await client.send(LIVE)
        assert (await client.response()).status == 200
        await client.send(b"GET /v2 HTTP/1.1\r\n")
        for _ in range(20):
            await client.send(b"x: " + b"y" * 1000 + b"\r\n")
            await asyncio.sleep(0)
        await check_rejected(client, 431, "16384 bytes")


async def test_headers_at_the_limit(server: RestServer) -> None:
    assert (await server.request("GET", "/v2/health/live", headers={"X": "y" * 16_000})).status == 200


@pytest.mark.parametrize("start", [b"GET /v2 HT", b"GET /v2/health/live HTTP/1.1\r\nHost: te"])
@pytest.mark.parametrize("before", [b"", LIVE, LIVE + LIVE])
async def test_slow_headers(start: bytes, before: bytes) -> None:
    async with serving(header_timeout_s=0.05) as server, await wire(server) as client:
        for part in (before[len(LIVE) :], before[: len(LIVE)] + start):
            if part:
                await client.send(part)
        for _ in range(before.count(b"GET")):
            assert (await client.response()).status == 200
        await check_rejected(client, 408, "0.05 s")


async def test_empty_lines_before_a_request() -> None:
    async with serving(header_timeout_s=0.05) as server, await wire(server) as client:
        await client.send(b"\r\n")
        await check_rejected(client, 408)


async def test_a_silent_connection_is_closed_without_response() -> None:
    async with serving(header_timeout_s=0.05) as server, await wire(server) as client:
        assert await client.hung_up()


async def test_an_idle_connection_closes_after_its_timeout() -> None:
    async with serving(header_timeout_s=0.02, keep_alive_timeout_s=1) as server, await wire(server) as client:
        await client.send(LIVE)
        assert (await client.response()).status == 200
        await asyncio.sleep(0.1)
        await client.send(LIVE)
        assert (await client.response()).status == 200
        assert await client.hung_up()


async def test_slow_headers_behind_a_slow_response() -> None:
    async with serving(Gate, header_timeout_s=0.05) as server, await wire(server) as client:
        await client.send(request("POST", "/v2/models/Gate/infer", inputs(tensor())) + b"GET /v2 HT")
        await asyncio.sleep(0.15)
        server.model("Gate").open.set()
        assert next(outputs(await client.response()))["data"] == [1]
        await check_rejected(client, 408)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"GET /v2\xff HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSN\r\n\r\n",
        request("POST", INFER, b"{}", {"Content-Length": "2"}),
        request("POST", INFER, b"{}", {"Content-Length": "-2"}, length=False),
        request("POST", INFER, b"{}", {"Content-Length": "2, 2"}, length=False),
        request("POST", INFER, b"{}", {"Content-Length": "99999999999999999999"}, length=False),
        request("POST", INFER, b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}),
        request("POST", INFER, b"0\r\n\r\n", {"Transfer-Encoding": "chunked, x"}, length=False),
    ],
)
async def test_invalid_http(server: RestServer, raw: bytes) -> None:
    async with await wire(server) as client:
        await client.send(raw)
        await check_rejected(client, 400, "not valid HTTP/1.1")


async def test_invalid_http_within_a_body(server: RestServer) -> None:
    headers = request("POST", INFER, b"", {"Transfer-Encoding": "chunked"}, length=False)
    async with await wire(server) as client:
        await client.send(headers + b"5\r\nhello\r\n")
        await client.send(b"zz\r\n")
        await check_rejected(client, 400, "not valid HTTP/1.1")


async def test_invalid_bytes_after_a_valid_request_keep_its_response() -> None:
    async with serving(Gate) as server, await wire(server) as client:
        await client.send(request("POST", "/v2/models/Gate/infer", inputs(tensor())) + b"\x00nonsense\r\n\r\n")
        await server.model("Gate").begun.wait()
        server.model("Gate").open.set()
        assert (await client.response()).status == 200
        await check_rejected(client, 400)


async def test_an_upgrade_to_http2_is_ignored(server: RestServer) -> None:
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"}
    raws = [request("POST", INFER, inputs(tensor(data=[i]), id="7"), offer) for i in range(300)]
    async with await wire(server) as client:
        await client.send(b"".join(raws) + LIVE)
        for i in range(300):
            assert (await client.response()).json["outputs"][0]["data"] == [i]
        assert (await client.response()).status == 200
        for at in (10, 40, 120, len(raws[0]) - 5):  # cut anywhere
            await client.send(raws[0][:at])
            await asyncio.sleep(0.01)
            await client.send(raws[0][at:])
            assert (await client.response()).status == 200


async def test_an_upgrade_to_websocket_is_ignored(server: RestServer) -> None:
    offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert (await server.request("GET", "/v2/health/live", headers=offer)).status == 200


async def test_http_1_0(server: RestServer) -> None:
    async with await wire(server) as client:
        await client.send(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        response = await client.response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert await client.hung_up()


# --- bodies --------------------------------------------------------------------------------------------------------


async def test_a_slow_body() -> None:
    async with serving(body_timeout_s=0.05) as server, await wire(server) as client:
        await client.send(request("POST", INFER, b"", {"Content-Length": "100"}, length=False) + b"{")
        response = await client.response()
        assert (response.status, response.headers["connection"]) == (408, "close")
        assert "too slowly" in response.error


@pytest.mark.parametrize("size", [1001, 5_000_000])
async def test_a_client_that_sends_all_of_a_too_large_body_gets_413(size: int) -> None:
    async with serving(max_body_bytes=1000) as server:
        text = "larger than the limit of 1000 bytes"
        async with await wire(server) as client:
            await client.send(request("POST", INFER, b" " * size))
            await check_rejected(client, 413, text)
        chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
        headers = request("POST", INFER, b"", {"Transfer-Encoding": "chunked"}, length=False)
        async with await wire(server) as client:
            await client.send(headers + chunk + b"0\r\n\r\n")
            await check_rejected(client, 413, text)
        assert (await server.request("GET", "/v2/health/live")).status == 200


async def test_large_json_is_rejected_with_413_and_sent_as_binary_data_instead() -> None:
    async with serving(max_json_bytes=1000) as server:
        values = np.arange(500, dtype=np.int32)
        body = inputs(tensor("x", [500], "INT32", values.tolist()))
        size = len(encode_body(body))
        rejected = await server.infer("Identity", body)
        assert rejected.status == 413
        assert f"expected at most 1000 bytes (max_json_bytes), got {size}; send large" in rejected.error
        v1 = json.dumps({"instances": values.tolist()}).encode()
        rejected = await server.request("POST", "/v1/models/Identity:predict", v1)
        assert rejected.status == 413
        assert "(max_json_bytes), got " in rejected.error
        assert "send large tensors as binary data to /v2/models/{model}/infer" in rejected.error
        binary = {"name": "x", "shape": [500], "datatype": "INT32", "parameters": {"binary_data_size": 2000}}
        head = encode_body(inputs(binary))
        headers = {"Inference-Header-Content-Length": str(len(head))}
        accepted = await server.request("POST", INFER, head + values.tobytes(), headers)
        assert next(outputs(accepted))["data"] == values.tolist()


async def test_a_too_large_body_is_rejected_before_it_is_sent() -> None:
    async with serving(max_body_bytes=1000) as server, await wire(server) as client:
        headers = {"Content-Length": "5000", "Expect": "100-continue"}
        await client.send(request("POST", INFER, b"", headers, length=False))
        assert (await client.response()).status == 413


async def test_100_continue(server: RestServer) -> None:
    body = encode_body(inputs(tensor()))
    headers = {"Content-Length": str(len(body)), "Expect": "100-continue"}
    async with await wire(server) as client:
        await client.send(request("POST", INFER, b"", headers, length=False))
        assert (await client.response()).status == 100
        await client.send(body)
        assert (await client.response()).status == 200


async def test_a_chunked_body(server: RestServer) -> None:
    body = encode_body(inputs(tensor()))
    headers = request("POST", INFER, b"", {"Transfer-Encoding": "chunked"}, length=False)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert (await server.send(headers + chunks)).status == 200


async def test_ten_thousand_tiny_inputs(server: RestServer) -> None:
    many = inputs(*(tensor(f"x{i}", [1], "INT32", [i]) for i in range(10_000)))
    response = await server.infer("Identity", many)
    assert response.status == 400
    assert response.error == "'inputs': expected at most 1024, got 10000"
    requested = [{"name": f"x{i}"} for i in range(1025)]
    assert "'outputs'" in (await server.infer("Identity", inputs(tensor(), outputs=requested))).error
    async with serving(max_tensors=10_000) as generous:
        assert len(list(outputs(await generous.infer("Identity", many)))) == 10_000


# --- one connection, many requests --------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(server: RestServer) -> None:
    async with await wire(server) as client:
        await client.send(b"".join(request("POST", INFER, inputs(tensor(data=[i]))) + LIVE for i in range(500)))
        for i in range(500):
            assert next(outputs(await client.response()))["data"] == [i]
            assert (await client.response()).body == b""


async def test_a_rejected_request_keeps_the_connection_usable(server: RestServer) -> None:
    async with await wire(server) as client:
        for path in ("/nope", "/v2", INFER):  # whose bodies are partly not even read
            await client.send(request("POST", path, b"{" * 100_000))
            assert (await client.response()).status in (400, 404, 405)
        await client.send(LIVE)
        assert (await client.response()).status == 200


async def test_responses_do_not_wait_for_acknowledgements(server: RestServer) -> None:
    """The kernel delays acknowledgements by 40 ms: so long takes each response whose head and body go apart."""
    async with await wire(server) as client:
        durations_s = []
        for _ in range(100):
            start_s = time.monotonic()
            await client.send(request("POST", INFER, inputs(tensor())))
            await client.response()
            durations_s.append(time.monotonic() - start_s)
            if len(durations_s) > 10 and durations_s[-1] < 0.03:  # the first ones are not delayed
                break
        assert durations_s[-1] < 0.03


# --- clients that leave ----------------------------------------------------------------------------------------------


async def test_a_disconnect_cancels_the_call(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Gate) as server:
        gate = server.model("Gate")
        async with await wire(server) as client:
            await client.send(request("POST", "/v2/models/Gate/infer", inputs(tensor())) + LIVE + LIVE)
            await gate.begun.wait()
        await asyncio.wait_for(gate.cancelled.wait(), 60)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_disconnect_within_a_body(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        async with await wire(server) as client:
            await client.send(request("POST", INFER, b"", {"Content-Length": "100"}, length=False) + b"{")
            await asyncio.sleep(0.02)
        assert (await server.request("GET", "/v2/health/live")).status == 200
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_disconnect_closes_the_models_generator(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        counter = server.model("Counter")
        async with await wire(server) as client:
            await client.send(stream(n=-1))
            assert (await read_headers(client.reader))[0] == 200
        await asyncio.wait_for(counter.closed.wait(), 60)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_client_that_does_not_read_a_stream_is_disconnected() -> None:
    async with serving(write_timeout_s=0.1) as server, await wire(server, limit=1024) as client:
        await client.send(stream(n=-1))
        await asyncio.wait_for(server.model("Counter").closed.wait(), 60)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            while True:
                await client.reader.readexactly(1 << 16)


async def test_a_client_that_does_not_read_responses_is_disconnected() -> None:
    async with (
        serving(write_timeout_s=0.1, compress_responses=False) as server,
        await wire(server, limit=1024) as client,
    ):
        big = request("POST", INFER, inputs(tensor("x", [1_000_000], "INT8", [1] * 1_000_000)))
        with pytest.raises(ConnectionError):
            for _ in range(20):
                await client.send(big)
        assert (await server.request("GET", "/v2/health/live")).status == 200


async def test_a_slow_reader_gets_the_whole_response() -> None:
    async with serving(write_timeout_s=0.3, compress_responses=False) as server:
        size = 24 << 20
        value = {"name": "x", "shape": [size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
        body, headers = binary(inputs(value, parameters={"binary_data_output": True}), bytes(size))
        async with await wire(server, limit=1 << 16) as client:
            await client.send(request("POST", INFER, body, headers))
            status, found_headers = await read_headers(client.reader)
            assert status == 200
            left = int(found_headers["content-length"])
            while left:
                left -= len(await client.reader.readexactly(min(left, 1 << 19)))
                await asyncio.sleep(0.02)


async def test_requests_in_flight_get_a_response_when_the_server_stops() -> None:
    async with serving(Gate) as server:
        client = await wire(server)
        await client.send(request("POST", "/v2/models/Gate/infer", inputs(tensor())))
        await server.model("Gate").begun.wait()
    async with client:
        response = await client.response()
        assert response.status in (500, 503)
        assert response.error


# --- streams of events -------------------------------------------------------------------------------------------


def stream(**parameters: Any) -> bytes:
    return request("POST", "/v2/models/Counter/infer_stream", inputs(tensor(), id="7", parameters=parameters))


def events(response: RawResponse) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = response.body.split(b"\n\n")
    assert rest == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


async def test_a_stream_has_one_event_per_chunk(server: RestServer) -> None:
    response = await server.send(stream(n=3))
    assert (response.status, response.headers["cache-control"]) == (200, "no-cache")
    found = events(response)
    assert [e["outputs"][0]["data"] for e in found] == [[0], [1], [2]]
    assert {(e["id"], e["model_name"]) for e in found} == {("7", "Counter")}


async def test_chunks_are_sent_immediately() -> None:
    class Slow(dragoman.Model):
        placement = "inline"

        def load(self) -> None:
            self.more = asyncio.Event()

        async def infer(self, call: dragoman.Infer) -> AsyncIterator[Any]:
            yield {"i": [0]}
            await self.more.wait()
            yield {"i": [1]}

    async with serving(Slow) as server, await wire(server) as client:
        await client.send(request("POST", "/v2/models/Slow/infer_stream", inputs(tensor())))
        assert (await read_headers(client.reader))[0] == 200
        chunks = read_chunks(client.reader)
        assert b'"data":[0]' in await anext(chunks)
        server.model("Slow").more.set()
        assert b'"data":[1]' in await anext(chunks)
        assert await anext(chunks, None) is None


async def test_an_empty_stream(server: RestServer) -> None:
    assert events(await server.send(stream(n=0))) == []


async def test_an_error_before_the_first_chunk_has_its_status(server: RestServer) -> None:
    response = await server.send(stream(n=3, fail=0))
    assert (response.status, response.error) == (500, "model 'Counter' failed: ValueError: no chunk 0")
    response = await server.request("POST", "/v2/models/nope/infer_stream", inputs(tensor()))
    assert response.status == 404
    assert (await server.request("POST", "/v2/models/Adder/infer_stream", inputs(tensor()))).status == 400


async def test_an_error_after_the_first_chunk_is_an_event(server: RestServer) -> None:
    found = events(await server.send(stream(n=3, fail=2)))
    assert [e.get("error") for e in found] == [None, None, "model 'Counter' failed: ValueError: no chunk 2"]


async def test_a_first_chunk_that_json_cannot_represent_has_its_status(server: RestServer) -> None:
    body = inputs(tensor("x", [1], "FP32", [1]), parameters={"raise": "parameter"})
    response = await server.request("POST", "/v2/models/Faulty/infer_stream", body)
    assert response.status == 500
    assert "request id" in response.error


async def test_a_plain_model_streams_one_response(server: RestServer) -> None:
    found = events(await server.request("POST", "/v2/models/Identity/infer_stream", inputs(tensor())))
    assert [e["outputs"][0]["data"] for e in found] == [[1]]


async def test_a_stream_of_several_chunks_is_not_a_plain_response(server: RestServer) -> None:
    response = await server.infer("Counter", inputs(tensor(), parameters={"n": 2}))
    assert response.status == 400
    assert "request a stream" in response.error
    assert next(outputs(await server.infer("Counter", inputs(tensor(), parameters={"n": 1}))))["data"] == [0]


async def test_events_carry_no_binary(server: RestServer) -> None:
    body = inputs(tensor(), parameters={"binary_data_output": True})
    response = await server.request("POST", "/v2/models/Counter/infer_stream", body)
    assert response.status == 400
    assert "expected no outputs in binary" in response.error


async def test_a_stream_ends_at_its_deadline() -> None:
    async with serving(Gate) as server:
        body = inputs(tensor(), parameters={"timeout": 20_000})
        response = await server.request("POST", "/v2/models/Gate/infer_stream", body)
        assert response.status == 504
        assert response.error.startswith("Request timeout expired")


# --- NaN and infinities in JSON ----------------------------------------------------------------------------------

INFINITE = '{"inputs":[{"name":"x","shape":[3],"datatype":"%s","data":[NaN,Infinity,-Infinity]}]}'


def from_bits(*values: float) -> tuple[bytes, dict[str, str]]:
    raw = np.array(values, np.float32).tobytes()
    value = {"name": "x", "shape": [len(values)], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    headers = encode_body(inputs(value))
    return headers + raw, {"Inference-Header-Content-Length": str(len(headers))}


async def test_by_default_nan_is_null_and_infinities_are_rejected(server: RestServer) -> None:
    response = await server.infer("Identity", *from_bits(1.5, float("nan")))
    assert next(outputs(response))["data"] == [1.5, None]
    response = await server.infer("Identity", *from_bits(float("nan"), float("-inf")))
    assert response.status == 400
    assert "output 'x' holds -inf at element 1" in response.error
    assert "binary output" in response.error


async def test_nonfinite_error_rejects_nan_too() -> None:
    async with serving(nonfinite="error") as server:
        response = await server.infer("Identity", *from_bits(1.5, float("nan")))
        assert response.status == 400
        assert "output 'x' holds nan at element 1" in response.error
        assert next(outputs(await server.infer("Identity", *from_bits(1.5))))["data"] == [1.5]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
async def test_nonfinite_literal_accepts_and_returns_literals(datatype: str) -> None:
    async with serving(nonfinite="literal") as server:
        response = await server.infer("Identity", INFINITE % datatype)
        assert response.status == 200
        assert b'"data":[NaN,Infinity,-Infinity]' in response.body
        assert (await server.infer("Identity", INFINITE % "INT32")).status == 400
        assert (await server.infer("Identity", "{" + INFINITE % datatype)).status == 400
        half = INFINITE.replace('"x"', '"\\ud800"') % datatype
        assert (await server.infer("Identity", half)).status == 400
        assert next(outputs(await server.infer("Identity", inputs(tensor()))))["data"] == [1]
