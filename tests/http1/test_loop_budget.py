"""Large messages share the time of the event loop: parsing, formatting and reading in limited parts of an iteration."""

import asyncio
import gzip
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvloop

from dragoman.core.calls import Inference, Response
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import Tensor
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
from dragoman.transports.application import Application
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.encoding import decompress
from dragoman.transports.executor import LoopBudget, MessageExecutor
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.request_reader import Http1Context
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.protocol import http2
from dragoman.transports.http2.requests import Http2Requests
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

from .loop_iterations import Iterations

LONG_S = 0.015  # more than the budget of an iteration
MIB = 1 << 20


def _gaps(numbers: list[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(numbers)]


async def test_work_beyond_the_budget_runs_in_later_iterations() -> None:
    now_s, done = 0.0, []
    budget = LoopBudget(0.01, lambda: now_s)

    def work(number: int) -> int:
        nonlocal now_s
        now_s += 0.004
        done.append(number)
        return number

    assert [budget.run(partial(work, number)) for number in range(10)] == [True] * 3 + [False] * 7
    assert done == [0, 1, 2]
    while len(done) == 3:
        await asyncio.sleep(0)
    assert done == [0, 1, 2, 3, 4, 5]
    assert await budget.call(work, 10) == 10
    assert done == list(range(11))


async def test_an_exception_does_not_stop_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    budget = LoopBudget(1e-9)
    done: list[int] = []

    def fails(*_: Any) -> None:
        raise ValueError("a mistake")

    budget.run(partial(done.append, 0))
    budget.run(fails)
    failed = asyncio.ensure_future(budget.call(fails, None))
    budget.run(partial(done.append, 1))
    while len(done) < 2:
        await asyncio.sleep(0)
    assert "a mistake" in caplog.text
    with pytest.raises(ValueError, match="a mistake"):
        await failed


async def test_cancelled_work_is_not_done() -> None:
    budget, done = LoopBudget(1e-9), list[int]()
    budget.run(lambda: time.sleep(LONG_S))
    cancelled = asyncio.ensure_future(budget.call(done.append, 0))
    await asyncio.sleep(0)
    cancelled.cancel()
    await budget.call(done.append, 1)
    assert done == [1]


@pytest.mark.parametrize("kind", ["parse", "format"])
@pytest.mark.parametrize(("size", "is_limited"), [(INLINE, False), (INLINE + 1, True)])
async def test_large_messages_are_handled_in_iterations_of_their_own(kind: str, size: int, is_limited: bool) -> None:
    executor, iterations = MessageExecutor(BodyMemory(0)), Iterations()

    def handle(message: Any) -> int:
        time.sleep(LONG_S)
        return iterations.number

    if kind == "parse":
        calls = [executor.parse(handle, None, size, in_thread=False) for _ in range(4)]
    else:
        response = Inference({"y": Tensor.of(np.zeros(size, np.uint8))})
        calls = [executor.format(handle, Response(response)) for _ in range(4)]
    gaps = _gaps(list(await asyncio.gather(*calls)))
    iterations.stop()
    assert all(gap > 4 for gap in gaps) if is_limited else sum(gaps) <= 1


async def test_small_compressed_bodies_share_the_budget() -> None:
    executor, iterations = MessageExecutor(BodyMemory(0)), Iterations()
    body = gzip.compress(bytes(7 * MIB // 2))
    assert len(body) < 4096, "a larger one is decompressed in a thread"
    bodies = await asyncio.gather(*(decompress(body, "gzip", 4 * MIB, executor) for _ in range(20)))
    iterations.stop()
    assert {len(each) for each in bodies} == {7 * MIB // 2}
    assert iterations.number > 4


class Transport:
    """A transport whose client sends as fast as possible."""

    def __init__(self) -> None:
        self.is_reading = True
        self.is_closed = False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def get_extra_info(self, name: str) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None: ...

    def writelines(self, buffers: list[bytes]) -> None: ...


def _http1(application: Application) -> tuple[Callable[[Listener], Any], bytes]:
    return http1(Http1Context(application)), b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 15000000\r\n\r\n"


def _http2(application: Application) -> tuple[Callable[[Listener], Any], bytes]:
    limits = Http2Limits(max_frame=(1 << 24) - 1, stream_window=1 << 30, connection_window=1 << 30)
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")]
    headers = frames.frame(frames.HEADERS, 4, 1, encode_fields(fields))
    start = frames.PREFACE + frames.settings({}) + headers + b"\xff\xff\xff\0\0\0\0\0\1"  # of a DATA frame
    return http2(Http2Requests(application), limits, application.executor), start


def _respond(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200)


TABLE = HttpProtocol("test", (Route("POST", "/", _respond),), lambda error, _: json_response({}, 500))


def _read_until_paused(connection: Any, transport: Transport) -> int:
    """Read as libuv does and return how many bytes were read."""
    size = 0
    for _ in range(1000):
        buffer = connection.get_buffer(-1)
        size += len(buffer)
        connection.buffer_updated(len(buffer))
        if not transport.is_reading:
            return size
    raise AssertionError("reading does not pause")


@pytest.mark.parametrize(("protocol", "read_size"), [(_http1, MIB), (_http2, 1 << 18)])
async def test_reading_pauses_until_other_connections_were_read(protocol: Any, read_size: int) -> None:
    engine: Any = None
    wire, start = protocol(Application(engine, (TABLE,), Limits()))
    listener, connections = Listener(wire, limits=Limits()), []
    for _ in range(3):
        connections.append((wire(listener), Transport()))
        connections[-1][0].connection_made(connections[-1][1])
        connections[-1][0].begin(start)
    sizes = [_read_until_paused(*each) for each in connections]
    assert 2 * MIB < sizes[0] <= 2 * MIB + read_size
    assert max(sizes[1:]) <= read_size, "the limit is that of all connections"
    while not all(transport.is_reading for _, transport in connections):
        await asyncio.sleep(0)
    assert 2 * MIB < _read_until_paused(*connections[0]) <= 2 * MIB + read_size
    for connection, _ in connections:
        connection.connection_lost(None)
    listener.wheel.close()


async def test_many_connections_read_little_each_once_an_iteration_has_read_much() -> None:
    engine: Any = None
    wire, start = _http1(Application(engine, (TABLE,), Limits()))
    listener, connections = Listener(wire, limits=Limits()), []
    for _ in range(40):
        connections.append((wire(listener), Transport()))
        connections[-1][0].connection_made(connections[-1][1])
        connections[-1][0].begin(start)
    sizes = [_read_until_paused(*each) for each in connections]
    assert 16 * MIB < sum(sizes) <= 17 * MIB + 40 * (1 << 16)
    for connection, _ in connections:
        connection.connection_lost(None)
    listener.wheel.close()


def test_few_connections_are_accepted_in_an_iteration() -> None:
    async def run() -> list[int]:
        iterations, accepted = Iterations(), []

        def wire(listener: Listener) -> Any:
            accepted.append(iterations.number)
            return http1_wire(listener)

        engine: Any = None
        http1_wire, _ = _http1(Application(engine, (TABLE,), Limits()))
        listener = Listener(wire, limits=Limits())
        (port,) = await listener.start([("127.0.0.1", 0)])
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        while len(accepted) < len(sockets):
            await asyncio.sleep(0)
        for each in sockets:
            each.close()
        iterations.stop()
        await listener.stop(1.0)
        return accepted

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        counts = Counter(runner.run(run()))
    assert max(counts.values()) <= 66


async def test_nested_work_runs_at_once() -> None:
    now_s, done = 0.0, list[str]()
    budget = LoopBudget(1.0, lambda: now_s)

    def exhaust() -> None:
        nonlocal now_s
        now_s += 1.0

    async def parse() -> None:
        await budget.call(done.append, "parsed")

    def response() -> None:
        with pytest.raises(StopIteration):
            parse().send(None)

    budget.run(exhaust)
    budget.run(response)
    budget.run(response)
    budget.run(partial(done.append, "next"))
    while len(done) < 3:
        await asyncio.sleep(0)
    assert done == ["parsed", "parsed", "next"]


async def test_the_announced_cost_of_work_counts() -> None:
    budget, iterations, done = LoopBudget(0.01, lambda: 0.0), Iterations(), list[int]()
    for _ in range(4):
        budget.run_later(lambda: done.append(iterations.number), 0.005)
    while len(done) < 4:
        await asyncio.sleep(0)
    iterations.stop()
    assert done[0] == done[1] < done[2] - 4 == done[3] - 4


@pytest.mark.parametrize("protocol", [_http1, _http2])
async def test_a_server_may_stop_before_a_connection_is_made(protocol: Any) -> None:
    engine: Any = None
    wire, _ = protocol(Application(engine, (TABLE,), Limits()))
    listener = Listener(wire, limits=Limits())
    connection, transport = listener.open(wire), Transport()
    await listener.stop(0.0)
    connection.connection_made(transport)
    assert transport.is_closed


async def test_time_for_large_messages_counts_for_the_loop_delay() -> None:
    """With `max_loop_delay_s` they have a sixth of it, and requests behind them in an iteration are rejected sooner."""
    executor = MessageExecutor(BodyMemory(0), max_loop_delay_s=0.03)
    assert executor.budget.run(partial(time.sleep, 0.006))
    rejected: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def work() -> None:
        time.sleep(0.012)
        rejected.set_result(executor.loop_delay.rejects())

    assert not executor.budget.run(work)
    assert await rejected
