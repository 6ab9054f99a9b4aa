"""Cases of h2spec that the other tests of HTTP/2 do not cover, by section."""

from collections.abc import Callable

import pytest
from http2_fakes import GET, POST, EchoService, Wire

from dragoman.formats.http2 import frames
from dragoman.formats.http2.frames import frame

Act = Callable[[Wire], object]
OPEN_BLOCK = frame(frames.HEADERS, 0, 1, b"\x82")  # the beginning of a block
RESERVED = 1 << 31


def after_reset(wire: Wire) -> Wire:
    return wire.headers(1).send(frames.rst_stream(1, frames.CANCEL))


def after_end(wire: Wire) -> Wire:
    wire.headers(1).data(1, ended=True)
    wire.read()
    return wire


def literal(*fields: tuple[bytes, bytes]) -> bytes:
    """Return a header block with further fields as raw literals, each value preceded by the byte of its length."""
    start = b"\x82\x84\x86\x01\x01x"  # GET / http, authority x
    return start + b"".join(b"\0" + bytes((len(name),)) + name + value for name, value in fields)


CONNECTION: dict[str, tuple[Act, int]] = {
    "4.2 HEADERS larger than a frame may be": (
        lambda w: w.send(frame(frames.HEADERS, 4, 1, bytes((1 << 20) + 1))), frames.FRAME_SIZE_ERROR),
    "4.3 PRIORITY within a block": (lambda w: w.send(OPEN_BLOCK, frame(2, 0, 1, bytes(5))), frames.PROTOCOL_ERROR),
    "4.3 HEADERS of another stream within a block": (
        lambda w: w.send(OPEN_BLOCK, frame(1, 4, 3, b"\x82")), frames.PROTOCOL_ERROR),
    "5.1 CONTINUATION after the end of a block": (
        lambda w: w.headers(1).send(frame(9, 4, 1, b"\x82")), frames.PROTOCOL_ERROR),
    "5.1 HEADERS after a reset": (lambda w: after_reset(w).headers(1), frames.STREAM_CLOSED),
    "5.1 CONTINUATION after a reset": (lambda w: after_reset(w).send(frame(9, 4, 1, b"")), frames.PROTOCOL_ERROR),
    "5.1 HEADERS after the end": (lambda w: after_end(w).headers(1), frames.STREAM_CLOSED),
    "5.1 CONTINUATION after the end": (lambda w: after_end(w).send(frame(9, 4, 1, b"")), frames.PROTOCOL_ERROR),
    "5.5 an unknown frame within a block": (lambda w: w.send(OPEN_BLOCK, frame(22, 0, 1, b"?")), frames.PROTOCOL_ERROR),
    "6.8 GOAWAY on a stream": (lambda w: w.send(frame(7, 0, 1, bytes(8))), frames.PROTOCOL_ERROR),
    "6.9.1 a window of the connection that overflows in steps": (
        lambda w: w.send(frames.window_update(0, 1 << 30), frames.window_update(0, 1 << 30)),
        frames.FLOW_CONTROL_ERROR),
    "6.9.2 a setting that overflows a stream's window": (
        lambda w: w.headers(1).send(frames.window_update(1, 1 << 30), frames.settings({4: (1 << 31) - 1})),
        frames.FLOW_CONTROL_ERROR),
    "6.10 CONTINUATION on no stream": (lambda w: w.send(OPEN_BLOCK, frame(9, 4, 0, b"")), frames.PROTOCOL_ERROR),
    "6.10 DATA and then CONTINUATION": (lambda w: w.send(OPEN_BLOCK, frame(0, 1, 1, b"x")), frames.PROTOCOL_ERROR),
    "hpack 2.3.3 a literal whose name is out of the table": (
        lambda w: w.send(frame(1, 5, 1, b"\x82\x84\x86\x7f\x07\x01x")), frames.COMPRESSION_ERROR),
    "hpack 5.2 padding of more than seven bits": (
        lambda w: w.send(frame(1, 5, 1, literal((b"x", b"\x82\x1f\xff")))), frames.COMPRESSION_ERROR),
    "hpack 5.2 padding of zeros": (
        lambda w: w.send(frame(1, 5, 1, literal((b"x", b"\x81\x18")))), frames.COMPRESSION_ERROR),
    "hpack 5.2 the end of a string within it": (
        lambda w: w.send(frame(1, 5, 1, literal((b"x", b"\x84\xff\xff\xff\xff")))), frames.COMPRESSION_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", CONNECTION)
def test_connection_errors(name: str) -> None:
    act, code = CONNECTION[name]
    wire = Wire(EchoService(responds="the end" in name))
    act(wire)
    assert wire.goaway()[0] == code


STREAM: dict[str, tuple[Act, int]] = {
    "5.1 DATA after a reset": (lambda w: after_reset(w).data(1, b"x"), frames.STREAM_CLOSED),
    "5.1 DATA after the end": (lambda w: after_end(w).data(1, b"x"), frames.STREAM_CLOSED),
    "6.9.1 a window of a stream that overflows in steps": (
        lambda w: w.headers(1).send(frames.window_update(1, 1 << 30), frames.window_update(1, 1 << 30)),
        frames.FLOW_CONTROL_ERROR),
    "8.1.2.3 two schemes": (lambda w: w.headers(1, [*GET, (":scheme", "http")]), frames.PROTOCOL_ERROR),
    "8.1.2.3 two paths": (lambda w: w.headers(1, [*GET, (":path", "/")]), frames.PROTOCOL_ERROR),
    "8.1.2.6 a length that is not the sum of the DATA frames": (
        lambda w: w.headers(1, [*POST, ("content-length", "1")]).data(1, b"te").data(1, b"st", ended=True),
        frames.PROTOCOL_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAM)
def test_stream_errors(name: str) -> None:
    act, code = STREAM[name]
    wire = Wire(EchoService(responds="the end" in name))
    act(wire)
    assert [f.error_code for f in wire.read() if type(f).__name__ == "RstStreamFrame"][-1:] == [code]
    wire.service.responds = True
    assert wire.still_responds()


FINE: dict[str, Act] = {
    "2 PRIORITY on an idle stream": lambda w: w.send(frame(2, 0, 5, bytes(5))),
    "2 WINDOW_UPDATE on a stream that the client has ended": lambda w: w.headers(1, ended=True).send(
        frames.window_update(1, 5)
    ),
    "2 PRIORITY on a closed stream": lambda w: after_end(w).send(frame(2, 0, 1, bytes(5))),
    "2 RST_STREAM on a closed stream": lambda w: after_end(w).send(frames.rst_stream(1, 8)),
    "3.3 PRIORITY for a later stream than the next": lambda w: w.send(frame(2, 0, 99, bytes(5))),
    "4.1 a reserved bit": lambda w: w.send(frame(6, 0, RESERVED, bytes(8))),
    "4.1 flags that mean nothing": lambda w: w.send(frame(6, 0x16, 0, bytes(8))),
    "6.5.3 a setting twice": lambda w: w.send(frame(4, 0, 0, b"\0\4\0\0\0\1\0\4\0\0\xff\xff")),
    "6.7 an acknowledgement without a PING": lambda w: w.send(frame(6, 1, 0, bytes(8))),
    "7 an unknown code of a reset": lambda w: w.headers(1).send(frames.rst_stream(1, 0xFF)),
    # RFC 9113, 5.3.2: dependencies are ignored; RFC 7540 rejected a stream that depends on itself.
    "5.3.1 a stream that depends on itself": lambda w: w.send(frame(2, 0, 1, b"\0\0\0\1\0")),
    "5.5 an unknown frame on a stream": lambda w: w.headers(1).send(frame(0x16, 0xFF, 1, b"?" * 100)),
}


@pytest.mark.parametrize("name", FINE)
def test_allowed_frames(name: str) -> None:
    wire = Wire()
    FINE[name](wire)
    assert not wire.closed
    assert wire.still_responds()


def test_goaway_with_an_unknown_error_code() -> None:
    wire = Wire(EchoService(responds=False)).headers(1)
    wire.send(frames.goaway(0, 0xFF))
    assert not wire.closed
    wire.service.responds = True
    wire.data(1, b"x", ended=True)
    assert wire.response_body(1) == b"x"
    assert wire.closed


def test_pings_are_acknowledged_with_their_payload() -> None:
    wire = Wire().send(frame(6, 0, 0, b"12345678"), frame(6, 1, 0, b"87654321"))
    (pong,) = wire.read()
    assert (pong.opaque_data, pong.flags) == (b"12345678", {"ACK"})


def test_a_window_of_one_byte() -> None:
    wire = Wire().send(frames.settings({4: 1}))
    wire.read()
    wire.headers(1).data(1, b"abc", ended=True)
    assert [f.data for f in wire.read() if type(f).__name__ == "DataFrame"] == [b"a"]
    wire.send(frames.settings({4: 2}))
    assert [f.data for f in wire.read() if type(f).__name__ == "DataFrame"] == [b"b"]
    wire.send(frames.window_update(1, 1))
    assert [f.data for f in wire.read() if type(f).__name__ == "DataFrame"] == [b"c"]
