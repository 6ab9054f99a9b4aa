"""gRPC of the client: a server of grpcio, and servers that send what the specification allows, or does not."""

import gc
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman
from client.client_servers import ClientKind, LoopThread
from dragoman import Tensor, errors
from dragoman.client.http2 import Http2Parser, NotProcessed
from dragoman.formats import grpc_messages as m
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from dragoman.formats.http2.frames import frame
from e2e.server_process import wait_until

X = {"x": Tensor.of([1.0])}
KINDS = pytest.mark.parametrize("client_kind", ["blocking", "asyncio"])


# --- a server of grpcio ----------------------------------------------------------------------------------------


def answer(request: Any) -> Any:
    """Return a response with the input as output."""
    response = m.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for each in request.inputs:
        response.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


class Library(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A service of grpcio that records the metadata of calls."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.cancelled = threading.Event()

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "ModelInfer":
            return grpc.unary_unary_rpc_method_handler(
                self.infer, m.ModelInferRequest.FromString, m.ModelInferResponse.SerializeToString
            )
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(
                self.stream, m.ModelInferRequest.FromString, m.ModelStreamInferResponse.SerializeToString
            )
        return None

    def infer(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        self.metadata["left_s"] = context.time_remaining()
        if request.model_name == "missing":
            context.set_trailing_metadata((("retry-after", "7"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "kein Modell: süß % 100\n")
        if request.model_name == "slow":
            context.add_callback(self.cancelled.set)
            self.cancelled.wait(20)
        return answer(request)

    def stream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        for request in requests:
            for _ in range(int(request.parameters["n"].int64_param)):
                yield m.ModelStreamInferResponse(infer_response=answer(request))


@pytest.fixture(scope="module")
def library() -> Iterator[tuple[str, Library]]:
    handler = Library()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), [handler], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}", handler
    server.stop(0).wait()


@pytest.fixture(params=["blocking", "asyncio"])
def own(request: Any, library: tuple[str, Library], loop_thread: LoopThread) -> Iterator[Any]:
    options = {"token": "t0", "headers": {"X-Extra": "1", "data-bin": "ab"}}
    with loop_thread.client(request.param, library[0], **options) as client:
        yield client


@pytest.fixture(params=["blocking", "asyncio"])
def without_retries(request: Any, library: tuple[str, Library], loop_thread: LoopThread) -> Iterator[Any]:
    with loop_thread.client(request.param, library[0], retries=0) as client:
        yield client


@pytest.mark.parametrize("count", [0, 1, 2000, 100_000, 1_500_000])
def test_messages_of_any_size(own: Any, count: int) -> None:
    array = np.arange(float(count))
    for _ in range(2):
        np.testing.assert_array_equal(own.infer("m", {"x": Tensor.of(array)})["x"], array)


def test_metadata_and_deadline(own: Any, library: tuple[str, Library]) -> None:
    own.infer("m", X, timeout_s=30)
    found = library[1].metadata
    assert (found["authorization"], found["x-extra"], found["data-bin"]) == ("Bearer t0", "1", b"ab")
    assert 25 < found["left_s"] <= 30.1
    own.infer("m", X, timeout_s=0)
    assert library[1].metadata["left_s"] > 1e9  # no deadline


def test_the_status_is_raised(without_retries: Any) -> None:
    with pytest.raises(errors.ModelNotFound) as caught:
        without_retries.infer("missing", X)
    assert caught.value.message == "kein Modell: süß % 100\n"
    assert caught.value.retry_after_s == 7
    with pytest.raises(errors.NotSupported):
        without_retries.live()
    without_retries.infer("m", X)


def test_a_timeout_ends_the_call(own: Any, library: tuple[str, Library]) -> None:
    library[1].cancelled.clear()
    with pytest.raises(errors.DeadlineExceeded):
        own.infer("slow", X, timeout_s=0.3)
    assert library[1].cancelled.wait(10)
    own.infer("m", X)


def test_streams(own: Any, library: tuple[str, Library]) -> None:
    array = np.arange(20_000.0)
    found = list(own.stream("m", {"x": Tensor.of(array)}, parameters={"n": 50}))
    assert len(found) == 50
    assert all((result["x"] == array).all() for result in found)
    assert list(own.stream("m", X, parameters={"n": 0})) == []
    library[1].cancelled.clear()
    results = own.stream("m", {"x": Tensor.of(array)}, parameters={"n": 100_000})
    assert next(results)["x"].size == array.size
    results.close()
    assert library[1].cancelled.wait(10)


@KINDS
@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(
    library: tuple[str, Library], loop_thread: LoopThread, client_kind: ClientKind, compression: Any
) -> None:
    array = np.zeros(300_000)
    with loop_thread.client(client_kind, library[0], compression=compression) as client:
        np.testing.assert_array_equal(client.infer("m", {"x": Tensor.of(array)})["x"], array)


def test_threads_share_a_client(library: tuple[str, Library]) -> None:
    with dragoman.Client(library[0]) as client, ThreadPoolExecutor(16) as pool:

        def call(i: int) -> bool:
            return bool((client.infer("m", {"x": Tensor.of(np.full(5000, i))})["x"] == i).all())

        assert all(pool.map(call, range(300)))


# --- scripted servers --------------------------------------------------------------------------------------------

HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]
OK = [(b"grpc-status", b"0")]
MESSAGE = answer(m.ModelInferRequest(model_name="m", inputs=[{"name": "x", "datatype": "UINT8", "shape": [3]}]))
MESSAGE.raw_output_contents.append(b"abc")
BODY = MESSAGE.SerializeToString()


def headers(fields: Any, *, ended: bool = False, stream: int = 1) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frame(frames.HEADERS, flags, stream, encode_fields(fields))


def message(body: bytes = BODY, compressed: bool = False) -> bytes:
    return b"%c%b%b" % (compressed, len(body).to_bytes(4, "big"), body)


def data(payload: bytes, *, stream: int = 1, flags: int = 0) -> bytes:
    return frame(frames.DATA, flags, stream, payload)


SETTINGS = frames.settings({})


class Peer:
    """The server's end of a connection, whose frames are read by `frame`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.file = connection.makefile("rb")
        assert self.file.read(len(frames.PREFACE)) == frames.PREFACE

    def frame(self) -> tuple[int, int, int, bytes]:
        head = self.file.read(9)
        high, low, kind, flags, number = frames.frame_header.unpack(head)
        return kind, flags, number, self.file.read(high << 8 | low)

    def request(self) -> int:
        """Read a request to its end; return the number of its stream."""
        while True:
            kind, flags, number, _ = self.frame()
            if kind == frames.DATA and flags & frames.END_STREAM:
                return number

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))


@contextmanager
def scripted(*scripts: Callable[[Peer], None]) -> Iterator[str]:
    """Serve one connection after the other, each with its script."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def serve() -> None:
        for script in scripts:
            with suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(20)
                with connection:
                    script(Peer(connection))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):  # to close with unread data would reset the connection
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(30)
        listener.close()


def replying(*parts: bytes, then: Callable[[Peer], Any] = lambda peer: None) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.send(SETTINGS)
        peer.request()
        peer.send(*parts)
        then(peer)

    return script


GOOD = headers(HEADERS) + data(message()) + headers(OK, ended=True)

VALID = {
    "plain": GOOD,
    "bytewise": GOOD,
    "split message": headers(HEADERS)
    + b"".join(data(message()[i : i + 1]) for i in range(len(message())))
    + (headers(OK, ended=True)),
    "empty data": headers(HEADERS) + data(b"") + data(message()) + data(b"") + headers(OK, ended=True),
    "padded": headers(HEADERS) + data(b"\x03" + message() + b"000", flags=frames.PADDED) + headers(OK, ended=True),
    "continued": frame(frames.HEADERS, 0, 1, encode_fields(HEADERS)[:1])
    + frame(frames.CONTINUATION, frames.END_HEADERS, 1, encode_fields(HEADERS)[1:])
    + data(message())
    + headers(OK, ended=True),
    "priority": frame(
        frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 1, b"\0\0\0\0\1" + encode_fields(HEADERS)
    )
    + data(message())
    + headers(OK, ended=True),
    "early hints": headers([(b":status", b"103")]) + GOOD,
    "unknown frame": frame(0xFA, 7, 1, b"abc") + GOOD,
    "compressed": headers([*HEADERS, (b"grpc-encoding", b"gzip")])
    + data(message(gzip.compress(BODY), compressed=True))
    + headers(OK, ended=True),
    "reset after the end": GOOD + frames.rst_stream(1, frames.NO_ERROR),
    "settings between": headers(HEADERS)
    + frames.settings({frames.MAX_FRAME_SIZE: 1 << 20})
    + data(message())
    + (headers(OK, ended=True)),
}


@KINDS
@pytest.mark.parametrize("name", VALID)
def test_valid_responses(loop_thread: LoopThread, client_kind: ClientKind, name: str) -> None:
    def bytewise(peer: Peer) -> None:
        peer.send(SETTINGS)
        peer.request()
        for at in range(len(GOOD)):
            peer.send(GOOD[at : at + 1])

    script = bytewise if name == "bytewise" else replying(VALID[name])
    with scripted(script) as url, loop_thread.client(client_kind, url) as client:
        assert client.infer("m", X)["x"].tobytes() == b"abc"


IDLE_FRAMES = {
    "ping": frame(frames.PING, 0, 0, bytes(8)),
    "settings": SETTINGS,
    "settings acknowledged": frame(frames.SETTINGS, frames.ACK, 0),
    "unknown": frame(0xFA, 0, 0),
    "long unknown": frame(0xFA, 0, 0, bytes(1 << 20)),
    "reset of another stream": frames.rst_stream(3, frames.CANCEL),
    "early hints": headers([(b":status", b"103")]),
    "other stream": headers(HEADERS, stream=3),
}


def flood(peer: Peer, part: bytes) -> None:
    """Send frames, and read the client's acknowledgements, until the client closes the connection."""
    part *= max(1, (1 << 14) // len(part))
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            peer.send(part)
            peer.socket.setblocking(False)
            with suppress(BlockingIOError):
                peer.socket.recv(1 << 16)
            peer.socket.settimeout(20)


@KINDS
@pytest.mark.parametrize("name", IDLE_FRAMES)
def test_a_call_ends_that_only_gets_frames_without_a_response(
    loop_thread: LoopThread, client_kind: ClientKind, name: str
) -> None:
    with (
        scripted(replying(then=lambda peer: flood(peer, IDLE_FRAMES[name]))) as url,
        loop_thread.client(client_kind, url) as client,
        pytest.raises(errors.ServerError, match=r"the server sent 10000 HTTP/2 frames .* without a response"),
    ):
        client.infer("m", X, timeout_s=0)


@KINDS
def test_empty_data_frames_are_counted(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    with (
        scripted(replying(headers(HEADERS), then=lambda peer: flood(peer, data(b"")))) as url,
        loop_thread.client(client_kind, url) as client,
        pytest.raises(errors.ServerError, match=r"the server sent 10000 HTTP/2 frames"),
    ):
        client.infer("m", X, timeout_s=0)


@KINDS
def test_many_frames_between_parts_of_a_response(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    pings = IDLE_FRAMES["ping"] * 9000
    with (
        scripted(replying(pings, headers(HEADERS), pings, data(message()), pings, headers(OK, ended=True))) as url,
        loop_thread.client(client_kind, url) as client,
    ):
        assert client.infer("m", X)["x"].tobytes() == b"abc"


@KINDS
@pytest.mark.parametrize("name", ["ping", "long unknown"])
def test_a_flood_between_calls_does_not_hold_the_next_one(
    loop_thread: LoopThread, client_kind: ClientKind, name: str
) -> None:
    with (
        scripted(replying(GOOD, then=lambda peer: flood(peer, IDLE_FRAMES[name])), replying(GOOD)) as url,
        loop_thread.client(client_kind, url) as client,
    ):
        assert client.infer("m", X, timeout_s=0)["x"].tobytes() == b"abc"
        with suppress(errors.ServerError):  # the limit was reached only after this call had begun
            assert client.infer("m", X, timeout_s=0)["x"].tobytes() == b"abc"
            return
        assert client.infer("m", X, timeout_s=0)["x"].tobytes() == b"abc"


INVALID = {
    "no status": (headers(HEADERS) + data(message(), flags=frames.END_STREAM), errors.ServerError, "no grpc-status"),
    "no message": (headers(HEADERS) + headers(OK, ended=True), errors.ServerError, "expected one message .* got 0"),
    "two": (headers(HEADERS) + data(message() * 2) + headers(OK, ended=True), errors.ServerError, "one message.*got 2"),
    "not gRPC": (
        headers([(b":status", b"404"), (b"content-type", b"application/json")])
        + data(b'{"error": "no such page"}', flags=frames.END_STREAM),
        errors.ModelNotFound,
        "no such page",
    ),
    "garbage": (
        headers(HEADERS) + data(message(b"\xff")) + headers(OK, ended=True),
        errors.InvalidOutput,
        "not a valid",
    ),
    "bad gzip": (
        headers([*HEADERS, (b"grpc-encoding", b"gzip")]) + data(message(b"x", compressed=True)),
        errors.ServerError,
        "not valid gzip",
    ),
    "encoding": (headers(HEADERS) + data(message(compressed=True)), errors.ServerError, "grpc-encoding 'identity'"),
    "reset": (frames.rst_stream(1, frames.INTERNAL_ERROR), errors.ServerError, "the server reset the stream"),
    "calm": (frames.rst_stream(1, frames.ENHANCE_YOUR_CALM), errors.Overloaded, "the server reset the stream"),
    "huffman": (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x00\xff"), errors.ServerError, "is not HTTP/2"),
    "push": (frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), errors.ServerError, "is not HTTP/2"),
    "data first": (data(message()), errors.ServerError, "is not HTTP/2: unexpected DATA"),
    "window": (frames.window_update(0, frames.NUMBER), errors.ServerError, "is not HTTP/2"),
    "long frame": (b"\xff\xff\xff\x04\0\0\0\0\0", errors.ServerError, "is not HTTP/2"),
    "interrupted": (frame(frames.HEADERS, 0, 1, b"") + SETTINGS, errors.ServerError, "header block is interrupted"),
    "closed": (headers(HEADERS), ConnectionError, "closed before the response was complete"),
    "unknown status": (headers([*HEADERS, (b"grpc-status", b"99")], ended=True), errors.ServerError, "UNKNOWN"),
}


@KINDS
@pytest.mark.parametrize("name", INVALID)
def test_invalid_responses(loop_thread: LoopThread, client_kind: ClientKind, name: str) -> None:
    reply, kind, text = INVALID[name]
    with (
        scripted(replying(reply)) as url,
        loop_thread.client(client_kind, url, retries=0, timeout_s=10) as client,
        pytest.raises(kind, match=text),
    ):
        client.infer("m", X)


@KINDS
@pytest.mark.parametrize(
    "refusal", [frames.rst_stream(1, frames.REFUSED_STREAM), frames.goaway(0, frames.NO_ERROR)], ids=["reset", "goaway"]
)
def test_a_call_that_was_not_begun_is_sent_again(
    loop_thread: LoopThread, client_kind: ClientKind, refusal: bytes
) -> None:
    with scripted(replying(refusal), replying(GOOD)) as url, loop_thread.client(client_kind, url) as client:
        assert client.infer("m", X)["x"].tobytes() == b"abc"


@KINDS
def test_a_server_that_shuts_down_at_once(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    def closing(peer: Peer) -> None:
        peer.send(SETTINGS, frames.goaway(0, frames.NO_ERROR))
        peer.file.read()

    with scripted(closing, replying(GOOD)) as url, loop_thread.client(client_kind, url, timeout_s=10) as client:
        assert client.infer("m", X)["x"].tobytes() == b"abc"


@KINDS
def test_a_connection_is_used_again_and_frames_between_calls_are_answered(
    loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    seen: list[Any] = []

    def script(peer: Peer) -> None:
        peer.send(SETTINGS)
        peer.request()
        peer.send(GOOD, frame(frames.PING, 0, 0, b"pingpong"), frames.window_update(0, 100))
        while True:
            kind, flags, number, payload = peer.frame()
            if kind == frames.PING:
                seen.append((flags, payload))
            if kind == frames.DATA and flags & frames.END_STREAM:
                seen.append(number)
                break
        peer.send(headers(HEADERS, stream=3), data(message(), stream=3), headers(OK, ended=True, stream=3))

    with scripted(script) as url, loop_thread.client(client_kind, url) as client:
        for _ in range(2):
            assert client.infer("m", X)["x"].tobytes() == b"abc"
    assert seen == [(frames.ACK, b"pingpong"), 3]


@KINDS
def test_a_connection_that_goes_away_is_not_used_again(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    going = replying(GOOD, frames.goaway(1, frames.NO_ERROR), then=lambda peer: peer.file.read())
    with scripted(going, replying(GOOD)) as url, loop_thread.client(client_kind, url) as client:
        for _ in range(2):
            assert client.infer("m", X)["x"].tobytes() == b"abc"


@KINDS
def test_requests_wait_for_the_windows_of_the_server(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    array, sizes = np.arange(100_000, dtype=np.uint8), []

    def script(peer: Peer) -> None:
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 70_000, frames.MAX_FRAME_SIZE: 20_000}))
        total = 0
        while True:
            kind, flags, number, payload = peer.frame()
            if kind != frames.DATA:
                continue
            total += len(payload)
            sizes.append(len(payload))
            if flags & frames.END_STREAM:
                break
            # The windows at the beginning hold 65,535 bytes of the connection and 70,000 of the stream.
            if total == 65_535:
                peer.send(frames.window_update(0, 1 << 20))
            if total == 70_000:
                peer.send(frames.window_update(number, 1 << 20))
        peer.send(GOOD)

    with scripted(script) as url, loop_thread.client(client_kind, url, timeout_s=10) as client:
        assert client.infer("m", {"x": Tensor.of(array)})["x"].tobytes() == b"abc"
    assert max(sizes) <= 20_000
    assert sum(sizes) > array.size


@KINDS
def test_an_answer_before_the_request_is_complete(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    refused = headers([*HEADERS, (b"grpc-status", b"8"), (b"grpc-message", b"message larger than max")], ended=True)

    def script(peer: Peer) -> None:
        peer.send(SETTINGS)
        while peer.frame()[0] != frames.DATA:
            pass
        peer.send(refused, frames.rst_stream(1, frames.NO_ERROR))
        peer.file.read()

    with (
        scripted(script, replying(GOOD)) as url,
        loop_thread.client(client_kind, url, timeout_s=10) as client,
    ):
        with pytest.raises(errors.InvalidInput, match="message larger than max"):
            client.infer("m", {"x": Tensor.of(np.zeros(1 << 20))})
        assert client.infer("m", X)["x"].tobytes() == b"abc"


@KINDS
def test_a_small_header_table_is_announced(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    blocks = []

    def script(peer: Peer) -> None:
        peer.send(frames.settings({frames.HEADER_TABLE_SIZE: 0}))
        peer.request()
        peer.send(GOOD)
        kind, *_, payload = peer.frame()
        while kind != frames.HEADERS:
            kind, *_, payload = peer.frame()
        blocks.append(payload)
        peer.request()
        peer.send(headers(HEADERS, stream=3), data(message(), stream=3), headers(OK, ended=True, stream=3))

    with scripted(script) as url, loop_thread.client(client_kind, url) as client:
        for _ in range(2):
            client.infer("m", X)
    assert blocks[0].startswith(b"\x20")


@KINDS
def test_a_server_of_http_1(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    def script(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with (
        scripted(script) as url,
        loop_thread.client(client_kind, url, timeout_s=10) as client,
        pytest.raises(errors.ServerError, match=r"answers in HTTP/1\.1, not in gRPC: expected another port"),
    ):
        client.infer("m", X)


@KINDS
def test_an_idle_connection_keeps_no_message_in_memory(
    library: tuple[str, Library], loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    array = np.zeros(1 << 20)
    with loop_thread.client(client_kind, library[0]) as client:
        client.infer("m", X)
        tracemalloc.start()
        try:
            client.infer("m", {"x": Tensor.of(array)})
            # The server is in this process, and may not have ended the call yet.
            wait_until(
                lambda: gc.collect() >= 0 and tracemalloc.get_traced_memory()[0] < array.nbytes / 4, "it is freed"
            )
        finally:
            tracemalloc.stop()


@KINDS
def test_windows_are_opened_again_after_much_data(
    loop_thread: LoopThread, client_kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.client.http2._REFILL", 5000)
    updates: list[tuple[int, int]] = []

    def script(peer: Peer) -> None:
        peer.send(SETTINGS)
        for stream in (1, 3):
            peer.request()
            peer.send(headers(HEADERS, stream=stream), data(message(b""), stream=stream))
            peer.send(data(message(bytes(6000)), stream=stream))
            while not {(0, 6010), (stream, 6010)} <= {*updates}:
                kind, _, number, payload = peer.frame()
                if kind == frames.WINDOW_UPDATE:
                    updates.append((number, int.from_bytes(payload, "big")))
            peer.send(headers([(b"grpc-status", b"5")], stream=stream, ended=True))

    with scripted(script) as url, loop_thread.client(client_kind, url, timeout_s=10) as client:
        for _ in range(2):
            with pytest.raises(errors.ModelNotFound):
                client.infer("m", X)


@KINDS
def test_a_connection_is_not_used_again_after_an_error_behind_a_complete_response(
    loop_thread: LoopThread, client_kind: ClientKind
) -> None:
    broken = replying(GOOD + frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), then=lambda peer: peer.file.read())
    with scripted(broken, replying(GOOD)) as url, loop_thread.client(client_kind, url, retries=0) as client:
        for _ in range(2):
            assert client.infer("m", X)["x"].tobytes() == b"abc"


def test_bytes_after_an_error_are_not_parsed() -> None:
    parser = Http2Parser().next(streams=False)
    parser.start([(b":method", b"POST")], b"", is_compressed=False)
    push = frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2")
    for received, is_error in ((SETTINGS + push, True), (GOOD, False)):
        parser.buffer()[: len(received)] = received
        with pytest.raises(errors.ServerError) if is_error else nullcontext():
            parser.bytes_received(len(received))
    assert not parser.done
    assert parser.messages() == []


@KINDS
def test_a_stream_whose_last_message_is_cut_is_an_error(loop_thread: LoopThread, client_kind: ClientKind) -> None:
    one = m.ModelStreamInferResponse(infer_response=MESSAGE).SerializeToString()
    cut = headers(HEADERS) + data(message(one) + message(one)[:-1]) + headers(OK, ended=True)
    with (
        scripted(replying(cut)) as url,
        loop_thread.client(client_kind, url, retries=0) as client,
        pytest.raises(errors.ServerError, match="the last message is not complete"),
    ):
        list(client.stream("m", X))


# --- any bytes -----------------------------------------------------------------------------------------------------

LONG = (
    SETTINGS
    + headers([*HEADERS, (b"x-text", b"a" * 50)])
    + data(message(bytes(range(256)) * 200))
    + frame(frames.PING, 0, 0, b"12345678")
    + data(message()[:3])
    + data(message()[3:])
    + headers(OK, ended=True)
)


def parsed(received: bytes, cuts: list[int]) -> tuple[list[bytes], dict[str, str], bool]:
    """Return messages, trailers and `done` of a response that arrives in pieces."""
    parser = Http2Parser().next(streams=False)
    parser.start([(b":method", b"POST")], b"", is_compressed=False)
    parser.body()
    found: list[bytes] = []
    for begin, end in pairwise([0, *sorted(cuts), len(received)]):
        at = begin
        while at < end:
            buffer = parser.buffer()
            size = min(len(buffer), end - at)
            buffer[:size] = received[at : at + size]
            parser.bytes_received(size)
            at += size
            found += map(bytes, parser.messages())
    return found, parser.trailers, parser.done


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(0, len(LONG)), max_size=12))
def test_a_response_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    assert parsed(LONG, cuts) == ([bytes(range(256)) * 200, BODY], {"grpc-status": "0"}, True)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(LONG) - 1), byte=st.integers(0, 255), cuts=st.lists(st.integers(0, len(LONG)), max_size=4))
def test_damaged_responses_raise_only_errors_of_the_server(at: int, byte: int, cuts: list[int]) -> None:
    with suppress(errors.ServerError, NotProcessed):
        parsed(LONG[:at] + bytes([byte]) + LONG[at + 1 :], cuts)


def test_a_length_is_only_a_claim() -> None:
    tracemalloc.start()
    try:
        parsed(headers(HEADERS) + data(b"\0\xff\xff\xff\xff" + bytes(100)), [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


@KINDS
@pytest.mark.parametrize("count", [131_071, 131_072, 131_073, 524_288, 700_000])
def test_messages_that_grow(
    library: tuple[str, Library], loop_thread: LoopThread, client_kind: Any, count: int
) -> None:
    array = np.random.default_rng(count).random(count)
    with loop_thread.client(client_kind, library[0]) as client:
        np.testing.assert_array_equal(client.infer("m", {"x": Tensor.of(array)})["x"], array)
