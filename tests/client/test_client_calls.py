"""Errors, streams, timeouts and model control, over REST and gRPC, with both clients."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

import dragoman
from client.client_servers import TOKEN, Counter, Echo, Gate, LoopThread, Rows, url_of
from dragoman import FP64, Tensor, TensorSpec, errors
from dragoman.client.errors import ServerUnreachable

X = {"x": Tensor.of([1.0])}  # needs no metadata
Kind = tuple[str, Any]


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["InvalidInput", "ModelNotFound", "Unauthorized", "Forbidden", "DeadlineExceeded"])
def test_errors_are_what_the_server_raised(client: Any, name: str) -> None:
    with pytest.raises(getattr(errors, name), match=f"^{name} was asked for$"):
        client.infer("Faulty", X, parameters={"raise": name})


@pytest.mark.parametrize("name", ["NotReady", "Overloaded"])
def test_retryable_errors_have_retry_after(client: Any, name: str) -> None:
    with pytest.raises(getattr(errors, name), match="was asked for") as caught:
        client.infer("Faulty", X, parameters={"raise": name}, timeout_s=1.0)  # no longer than Retry-After
    assert caught.value.retry_after_s == 1


def test_model_failures_are_server_errors(client: Any) -> None:
    with pytest.raises(errors.ServerError, match="ValueError"):
        client.infer("Faulty", X, parameters={"raise": "ValueError"})


def test_an_unknown_model(client: Any) -> None:
    for send_request in (client.infer, lambda m, _: client.metadata(m)):
        with pytest.raises(errors.ModelNotFound, match="unknown model: 'no/such model'"):
            send_request("no/such model", X)
    with pytest.raises(errors.InvalidInput, match="expected the name of a model"):
        client.infer("", X)


# --- health and metadata ---------------------------------------------------------------------------------------


def test_health_and_metadata(client: Any) -> None:
    assert client.live()
    assert client.ready()
    assert client.ready("Rows")
    assert client.metadata().name == "dragoman"
    metadata = client.metadata("Rows")
    assert (metadata.name, metadata.platform, metadata.versions) == ("Rows", "python_function", ())
    assert metadata.signature.inputs == Rows.inputs
    assert metadata.signature.outputs == Rows.outputs


def test_metadata_of_a_typed_function(client: Any) -> None:
    found = client.metadata("power").signature
    assert found.inputs == (TensorSpec("x", FP64, None), TensorSpec("by", FP64, (1,)))
    assert found.outputs == (TensorSpec("output-0", FP64, None),)
    assert client.infer("power", {"x": [1, 2]})["output-0"].tolist() == [1.0, 4.0]
    assert client.infer("power", {"x": [[1], [2]], "by": 3})["output-0"].tolist() == [[1.0], [8.0]]
    assert client.infer("power", {"x": 3})["output-0"].tolist() == [9.0]


def test_nothing_listens(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    url = "http://127.0.0.1:1" if wire == "rest" else "grpc://127.0.0.1:1"
    with loop_thread.client(client_kind, url, retries=2) as client:
        assert not client.live()
        assert not client.ready("Echo")
        began_s = time.monotonic()
        with pytest.raises(ConnectionError, match=r"cannot reach .*127\.0\.0\.1:1: .*[Rr]efused") as caught:
            client.infer("Echo", X)
        assert isinstance(caught.value, ServerUnreachable)
        assert time.monotonic() - began_s > 0.1  # two retries


def test_no_such_host(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    scheme = "http" if wire == "rest" else "grpc"
    with loop_thread.client(client_kind, f"{scheme}://nowhere.invalid:1") as client, pytest.raises(ConnectionError):
        client.live()


def test_a_server_that_starts_late(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    with loop_thread.serving(Echo) as early:
        port = early.http_ports[0] if wire == "rest" else early.grpc_port
    url = f"{'http' if wire == 'rest' else 'grpc'}://127.0.0.1:{port}"
    with loop_thread.client(client_kind, url, retries=6) as client, ThreadPoolExecutor(1) as pool:
        request = pool.submit(client.infer, "Echo", X)
        time.sleep(0.1)
        with loop_thread.serving(Echo, **{"http_port" if wire == "rest" else "grpc_port": port}):
            assert request.result(60)["x"].tolist() == [1]


def test_a_server_that_restarts(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    with loop_thread.serving(Echo) as server:
        ports = {"http_port": server.http_ports[0], "grpc_port": server.grpc_port}
        with loop_thread.client(client_kind, url_of(server, wire), retries=6) as client:
            assert client.infer("Echo", X)["x"].tolist() == [1]
            loop_thread.run(server.stop(0))
            with loop_thread.serving(Echo, **ports):
                assert client.infer("Echo", X)["x"].tolist() == [1]


# --- time ------------------------------------------------------------------------------------------------------


def test_a_timeout_cancels_the_call_on_the_server_too(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    gate = Gate(dragoman.ModelSpec(name="Gate"))
    with loop_thread.serving(gate) as server, loop_thread.client(client_kind, url_of(server, wire)) as client:
        for timeout_s in (0.2, 2.0, 20.0):  # on a busy machine the call may not arrive in time
            began_s = time.monotonic()
            message = rf"no response within {timeout_s:g} s|Request timeout expired"
            with pytest.raises(errors.DeadlineExceeded, match=message):
                client.infer("Gate", X, timeout_s=timeout_s)
            assert time.monotonic() - began_s > 0.75 * timeout_s
            if gate.begun.is_set():
                break
        assert gate.cancelled.wait(60)


def test_overload_is_retried(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    gate = Gate(dragoman.ModelSpec(name="Gate"))
    with (
        loop_thread.serving(gate, max_queue=1) as server,
        loop_thread.client("blocking", server.http_url) as first,
        loop_thread.client(client_kind, url_of(server, wire)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        stored = pool.submit(first.infer, "Gate", X)
        assert gate.begun.wait(60)
        with pytest.raises(errors.Overloaded, match="maximum queue size of 1"):
            for _ in range(20):
                with suppress(errors.DeadlineExceeded):  # a busy machine
                    client.infer("Gate", X, timeout_s=1.0)  # no longer than the Retry-After of 1 s
        threading.Timer(0.2, loop_thread.call, [gate.open.set]).start()
        assert client.infer("Gate", X)["x"].tolist() == [1]
        assert stored.result(60)["x"].tolist() == [1]


def test_cancelling_an_awaited_call_cancels_the_model(loop_thread: LoopThread) -> None:
    gate = Gate(dragoman.ModelSpec(name="Gate"))
    with loop_thread.serving(gate) as server:

        async def cancelled(url: str) -> None:
            gate.cancelled.clear()
            gate.begun.clear()
            async with dragoman.AsyncClient(url) as client:
                call = asyncio.ensure_future(client.infer("Gate", X))
                while not gate.begun.is_set():
                    await asyncio.sleep(0.01)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                while not gate.cancelled.is_set():
                    await asyncio.sleep(0.01)

        for wire in ("rest", "grpc"):
            loop_thread.run(cancelled(url_of(server, wire)))


def test_many_threads_share_a_client(loop_thread: LoopThread, server: dragoman.Server, kind: Kind) -> None:
    wire, client_kind = kind
    with loop_thread.client(client_kind, url_of(server, wire)) as client, ThreadPoolExecutor(8) as pool:

        def send_request(i: int) -> bool:
            return bool((client.infer("Echo", {"x": np.full(5000, i)})["x"] == i).all())

        assert all(pool.map(send_request, range(100)))


# --- streams ---------------------------------------------------------------------------------------------------


def test_a_stream(client: Any) -> None:
    results = list(client.stream("Counter", X, parameters={"n": 5}, id="seven"))
    assert [r["i"].tolist() for r in results] == [[0], [1], [2], [3], [4]]
    assert results[0].response.id == "seven"


def test_a_stream_of_one_and_of_none(client: Any) -> None:
    assert [r["x"].tolist() for r in client.stream("Echo", X)] == [[1]]
    assert list(client.stream("Counter", X, parameters={"n": 0})) == []


def test_errors_of_a_stream(client: Any) -> None:
    with pytest.raises(errors.CallerError, match="that far"):
        next(client.stream("Counter", X, parameters={"fail": 0}))
    results = client.stream("Counter", X, parameters={"fail": 2})
    assert [next(results)["i"][0], next(results)["i"][0]] == [0, 1]
    with pytest.raises(errors.DragomanError, match="that far and no further"):
        next(results)
    with pytest.raises(errors.ModelNotFound):
        next(client.stream("missing", X))


def test_closing_a_stream_cancels_it(loop_thread: LoopThread, kind: Kind) -> None:
    wire, client_kind = kind
    counter = Counter(dragoman.ModelSpec(name="Counter"))
    with loop_thread.serving(counter) as server, loop_thread.client(client_kind, url_of(server, wire)) as client:
        with closing(client.stream("Counter", X, parameters={"n": -1})) as results:
            assert next(results)["i"].tolist() == [0]
        assert counter.closed.wait(60)
        assert client.infer("Counter", X, parameters={"n": 1})["i"].tolist() == [0]


def test_a_stream_that_times_out(client: Any) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        for _ in client.stream("Counter", X, parameters={"n": -1}, timeout_s=0.2):
            pass


# --- tokens and model control ----------------------------------------------------------------------------------


def test_model_control_needs_the_token(loop_thread: LoopThread, kind: Kind, tmp_path: Any) -> None:
    wire, client_kind = kind
    (tmp_path / "m.py").write_text("def m(x: float) -> float:\n    return x\n")
    with loop_thread.serving(f"{tmp_path}/m.py:m", control_token=TOKEN, placement="thread") as server:
        with (
            loop_thread.client(client_kind, url_of(server, wire)) as client,
            pytest.raises(errors.Unauthorized, match="Bearer"),
        ):
            client.index()
        with loop_thread.client(client_kind, url_of(server, wire), token=TOKEN) as client:
            assert [(e.name, e.state) for e in client.index()] == [("m", "READY")]
            assert client.models() == ["m"]
            client.unload("m")
            assert not client.ready("m")
            assert client.index(ready=True) == []
            client.load("m")
            assert client.ready("m")
            with pytest.raises(errors.CallerError, match="failed to load 'missing'"):
                client.load("missing")


def test_model_control_that_is_off(client: Any) -> None:
    with pytest.raises(errors.Forbidden, match="control-token"):
        client.load("Echo")


def test_metadata_of_a_replaced_model_are_fetched_again(loop_thread: LoopThread, kind: Kind, tmp_path: Any) -> None:
    wire, client_kind = kind
    write: Callable[[str], Any] = (tmp_path / "m.py").write_text
    write("def m(x: list[float]) -> list[float]:\n    return x\n")
    with (
        loop_thread.serving(f"{tmp_path}/m.py:m", control_token=TOKEN, placement="thread") as server,
        loop_thread.client("blocking", server.http_url, token=TOKEN) as operator,
        loop_thread.client(client_kind, url_of(server, wire)) as client,
    ):
        assert client.infer("m", [1])["output-0"].tolist() == [1]
        write("def m(longer: list[bool]) -> list[bool]:\n    return longer\n")
        operator.load("m")
        with pytest.raises(errors.InvalidInput):
            client.infer("m", [True])
        assert client.infer("m", [True])["output-0"].tolist() == [True]


def test_compression(loop_thread: LoopThread, server: dragoman.Server, kind: Kind) -> None:
    wire, client_kind = kind
    array = np.tile(np.arange(100.0), 1000)
    for compression in ("gzip", "deflate"):
        with loop_thread.client(client_kind, url_of(server, wire), compression=compression) as client:
            np.testing.assert_array_equal(client.infer("Echo", {"x": array})["x"], array)


def test_headers_are_sent(loop_thread: LoopThread, server: dragoman.Server, kind: Kind) -> None:
    wire, client_kind = kind
    with loop_thread.client(client_kind, url_of(server, wire), headers={"X-Trace": "1", "x-bytes": "a b"}) as client:
        assert client.ready()


def test_the_blocking_client_within_a_running_event_loop(server: dragoman.Server) -> None:
    """The blocking client works in a running event loop, as in a notebook."""

    async def cell(url: str) -> list[int]:
        with dragoman.Client(url) as client:
            with closing(client.stream("Counter", X, parameters={"n": -1})) as results:
                assert next(results)["i"].tolist() == [0]
            left = client.stream("Counter", X, parameters={"n": -1})
            assert next(left)["i"].tolist() == [0]
            del left
            return [int(r["i"][0]) for r in client.stream("Counter", X, parameters={"n": 3})]

    for wire in ("rest", "grpc"):
        assert asyncio.run(cell(url_of(server, wire)), debug=True) == [0, 1, 2]


def test_a_slow_network_during_the_handshake(loop_thread: LoopThread, server: dragoman.Server) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        there, back = await asyncio.open_connection(*server.grpc_url.rsplit(":", 1))
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()

    proxy = loop_thread.run(asyncio.start_server(forward, "127.0.0.1", 0))
    port = proxy.sockets[0].getsockname()[1]
    with dragoman.Client(f"grpc://127.0.0.1:{port}") as client:
        assert client.infer("Echo", X)["x"].tolist() == [1]
    loop_thread.call(proxy.close)
