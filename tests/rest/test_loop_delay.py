"""Requests that wait too long for others in the event loop are rejected; health checks and administration never are."""

import asyncio
import time
from collections.abc import AsyncIterator

import h2.config
import h2.connection
import h2.events
import pytest

import dragoman
from dragoman import Infer, Tensor
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, inputs, read_response, request, serving, tensor

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.usefixtures("both_loops")]
LIMIT_S = 0.06


class Busy(dragoman.Model):
    """Return the input; keep the event loop busy before: for longer than the limit if it is 2, or a third of it
    if it is 3."""

    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Tensor]:
        time.sleep({2: 3 * LIMIT_S, 3: 0.4 * LIMIT_S}.get(int(call.inputs["x"].data[0]), 0))
        return dict(call.inputs)


def infer(number: int) -> bytes:
    return request("POST", "/v2/models/Busy/infer", inputs(tensor(data=[number])))


LONG, SHORT = infer(2), infer(1)


@pytest.fixture
async def limited() -> AsyncIterator[RestServer]:
    async with serving(Busy, max_loop_delay_s=LIMIT_S, grpc_port=0) as server:
        yield server


async def test_requests_behind_a_long_one_are_rejected(limited: RestServer) -> None:
    first, second, third = await limited.send(LONG + SHORT + SHORT, responses=3)
    assert (first.status, second.status, third.status) == (200, 503, 503)
    assert second.error == "the server is overloaded (max_loop_delay_s)"
    assert second.headers["retry-after"] == "1"
    metrics = (await limited.request("GET", "/metrics")).body.decode()
    assert 'dragoman_rejected_total{reason="loop_delay"} 2\n' in metrics
    assert 'outcome="ok"} 1\n' in metrics  # the model saw one call


async def test_a_burst_of_short_requests_is_served() -> None:
    async with serving(Busy, max_loop_delay_s=60) as server:  # a busy machine may stop the process for some time
        responses = await server.send(SHORT * 12, responses=12)
    assert {response.status for response in responses} == {200}


async def test_requests_wait_for_a_third_of_the_limit_in_one_iteration(limited: RestServer) -> None:
    """They may have waited as long in the iteration in which they arrived, and rejecting takes time."""
    responses = await limited.send(infer(3) + SHORT, responses=2)
    assert [response.status for response in responses] == [200, 503]


async def test_later_requests_are_served_again(limited: RestServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", limited.port)
    statuses = []
    for raw, count in ((LONG + SHORT, 2), (SHORT, 1), (SHORT, 1)):
        writer.write(raw)
        statuses += [(await read_response(reader)).status for _ in range(count)]
    writer.close()
    assert statuses == [200, 503, 200, 200]


async def test_health_checks_metrics_and_metadata_are_never_rejected(limited: RestServer) -> None:
    at_once = ("/v2/health/live", "/v2/health/ready", "/v2/models/Busy/ready", "/v2/models/Busy")
    raw = b"".join(request("GET", path) for path in at_once) + SHORT + request("GET", "/metrics")
    responses = await limited.send(LONG + raw, responses=len(at_once) + 3)
    assert [response.status for response in responses] == [200, *[200] * len(at_once), 503, 200]


async def test_without_the_setting_none_is_rejected() -> None:
    async with serving(Busy) as server:
        responses = await server.send(LONG + SHORT, responses=2)
    assert [response.status for response in responses] == [200, 200]


GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
CALL = m.ModelInferRequest(model_name="Busy").SerializeToString()


async def second_over_http2(port: int, path: str, body: bytes, *more: tuple[str, str]) -> dict[str, str]:
    """Send a long request and another one in one segment; return the headers and trailers of the second response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    long = ("/v2/models/Busy/infer", LONG.partition(b"\r\n\r\n")[2])
    for number, (at, data, fields) in {1: (*long, ()), 3: (path, body, more)}.items():
        client.send_headers(
            number, [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", at), *fields]
        )
        client.send_data(number, data, end_stream=True)
    writer.write(client.data_to_send())
    headers: dict[int, dict[str, str]] = {1: {}, 3: {}}
    ended = 0
    while ended < 2:
        for event in client.receive_data(await asyncio.wait_for(reader.read(1 << 16), 60)):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                headers[event.stream_id] |= dict(event.headers)
            ended += isinstance(event, h2.events.StreamEnded)
    writer.close()
    assert headers[1][":status"] == "200"
    return headers[3]


async def test_over_http2(limited: RestServer) -> None:
    headers = await second_over_http2(limited.port, "/v2/models/Busy/infer", SHORT.partition(b"\r\n\r\n")[2])
    assert (headers[":status"], headers["retry-after"]) == ("503", "1")


async def test_over_grpc(limited: RestServer) -> None:
    message = b"\0" + len(CALL).to_bytes(4) + CALL
    headers = await second_over_http2(limited.port, "/inference.GRPCInferenceService/ModelInfer", message, *GRPC)
    assert (headers["grpc-status"], headers["retry-after"]) == ("14", "1")
    assert headers["grpc-message"] == "the server is overloaded (max_loop_delay_s)"
    headers = await second_over_http2(limited.port, "/inference.GRPCInferenceService/ServerLive", bytes(5), *GRPC)
    assert headers["grpc-status"] == "0"
