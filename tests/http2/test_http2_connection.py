"""HTTP/2 by RFC 9113: requests, flow control, control frames and limits; errors end only their stream or connection."""

from collections.abc import Callable

import pytest
from http2_fakes import GET, POST, EchoHandler, EchoService, Wire

from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from dragoman.formats.http2.frames import frame
from dragoman.transports.http2.limits import Http2Limits

GRPC = [*POST, ("content-type", "application/grpc")]
Act = Callable[[Wire], object]


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_response_has_headers_body_and_trailers() -> None:
    wire = Wire()
    wire.headers(1).data(1, b"ab").data(1, b"c", ended=True)
    received = wire.read()
    assert [type(f).__name__ for f in received] == ["HeadersFrame", "DataFrame", "HeadersFrame"]
    assert wire.decoder.decode(received[0].data) == [(":status", "200")]
    assert received[1].data == b"abc"
    assert wire.decoder.decode(received[2].data) == [("done", "yes")]
    assert not wire.connection.streams


def test_concurrent_requests_without_body() -> None:
    wire = Wire(EchoService(responds=False))
    for number in range(1, 21, 2):
        wire.headers(number)
    for number in range(19, 0, -2):
        wire.data(number, b"%d" % number, ended=True)
    for listener in wire.service.handlers:
        listener.stream.connection.send_response(listener.stream, b"\x88", (listener.body,), len(listener.body), b"")
    bodies = {f.stream_id: f.data for f in wire.read() if type(f).__name__ == "DataFrame" and f.data}
    assert bodies == {n: b"%d" % n for n in range(1, 21, 2)}
    assert Wire().headers(1, GET, ended=True).frame_names() == ["Headers", "Data", "Headers"]


def test_settings_announce_the_limits() -> None:
    wire = Wire(with_preface=False, limits=Http2Limits(max_streams=7, stream_window=70_000, max_frame=20_000))
    settings, window = wire.read()
    result = settings.settings
    assert (result[3], result[4], result[5], result[6]) == (7, 70_000, 20_000, 16 << 10)
    assert window.window_increment == (16 << 20) - 65_535


def test_padding_and_priority_are_stripped() -> None:
    wire = Wire()
    block = wire.encoder.encode(POST)
    wire.send(frame(1, 0x2C, 1, b"\x03\x80\0\0\x09\x10" + block + b"pad"))
    wire.send(frame(0, 8, 1, b"\x05abcwaste"[:9]), frame(0, 9, 1, b"\0d"), frame(2, 0, 1, bytes(5)))
    assert wire.response_body(1) == b"abcd"[:3] + b"d"


def test_continuation_frames() -> None:
    wire = Wire()
    block = wire.encoder.encode(POST)
    wire.send(frame(1, 0, 1, block[:3]), frame(9, 0, 1, block[3:5]), frame(9, 4, 1, block[5:]))
    wire.data(1, b"x", ended=True)
    assert wire.response_body(1) == b"x"


def test_trailers_end_a_request() -> None:
    wire = Wire().headers(1).data(1, b"x").headers(1, [("checksum", "7")], ended=True)
    assert wire.response_body(1) == b"x"


def test_unknown_frames_flags_and_settings_are_ignored() -> None:
    wire = Wire().send(frame(0xEE, 0xFF, 3, b"what"), frames.settings({0x77: 1 << 31}), frame(6, 0xF0, 0, b"12345678"))
    assert wire.frame_names() == ["Settings", "Ping"]
    assert wire.still_responds()


def test_graceful_shutdown() -> None:
    wire = Wire(EchoService(responds=False))
    wire.headers(1, GRPC)
    wire.connection.drain()
    first, ping = wire.read()
    assert first.last_stream_id == frames.NUMBER
    assert not first.error_code
    wire.headers(3)  # sent before the GOAWAY arrived
    wire.send(frame(6, 1, 0, ping.opaque_data))
    assert wire.read()[-1].last_stream_id == 3
    wire.headers(5)
    assert [f.error_code for f in wire.read()] == [frames.REFUSED_STREAM]
    for listener in wire.service.handlers:
        assert wire.closed < 1
        listener.stream.send_headers(b"\x88", ended=True)
    assert wire.closed == 1


def test_requests_in_flight_of_http_are_answered_before_goaway() -> None:
    """The package h2, which httpx uses, drops what comes after a GOAWAY."""
    wire = Wire(EchoService(responds=False)).headers(1)
    for _ in range(2):
        wire.connection.drain()
        assert wire.read() == []
    wire.headers(3)
    for handler in wire.service.handlers:
        assert wire.closed < 1
        handler.stream.send_headers(b"\x88", ended=True)
    *_, response, _, goaway = wire.read()
    assert (response.stream_id, "END_STREAM" in response.flags) == (3, True)
    assert (goaway.last_stream_id, goaway.error_code, wire.closed) == (3, 0, 1)


def test_a_connection_without_a_request_gets_goaway_at_once() -> None:
    wire = Wire().headers(1).data(1, ended=True)
    wire.read()
    wire.connection.drain()
    assert wire.frame_names() == ["GoAway", "Ping"]


def test_a_retired_connection_ends_with_its_last_stream_also_if_that_is_still_to_come() -> None:
    wire = Wire(EchoService(responds=False))
    wire.connection.retire()
    assert wire.read() == []  # a GOAWAY would cross a request, and the package h2 drop its response
    wire.headers(1)
    wire.service.handlers[0].stream.send_headers(b"\x88", ended=True)
    *_, response, _, goaway = wire.read()
    assert (response.stream_id, goaway.last_stream_id, wire.closed) == (1, 1, 1)


def test_a_retired_connection_of_grpc_gets_goaway_at_once() -> None:
    wire = Wire(EchoService(responds=False))
    wire.headers(1, GRPC)
    wire.connection.retire()
    assert wire.frame_names()[-2:] == ["GoAway", "Ping"]
    assert wire.closed < 1


def test_a_retired_connection_without_a_request_is_drained_at_once() -> None:
    wire = Wire()
    wire.connection.retire()
    wire.connection.drain()
    assert wire.frame_names()[-2:] == ["GoAway", "Ping"]


def test_a_connection_that_refuses_streams_ends_with_its_last_one_also_if_it_was_not_drained() -> None:
    wire = Wire(EchoService(responds=False)).headers(1)
    wire.connection.refuse_streams()
    assert wire.closed < 1
    wire.service.handlers[0].stream.send_headers(b"\x88", ended=True)
    assert wire.closed == 1


def test_goaway_of_the_client() -> None:
    wire = Wire(EchoService(responds=False)).headers(1).send(frames.goaway(0, 0))
    assert wire.closed < 1
    wire.service.handlers[0].stream.send_headers(b"\x88", ended=True)
    assert wire.closed == 1


# --- windows of the client -------------------------------------------------------------------------------------------


def test_responses_wait_for_flow_control_windows() -> None:
    wire = Wire()
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10})).read()
    wire.headers(1).data(1, b"x" * 25, ended=True)
    assert [len(f.data) for f in wire.read() if type(f).__name__ == "DataFrame"] == [10]
    wire.send(frames.window_update(1, 3))
    assert [len(f.data) for f in wire.read()] == [3]
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 16}))
    assert [len(f.data) for f in wire.read() if type(f).__name__ == "DataFrame"] == [6]
    assert not wire.service.handlers[0].drained_count
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), frames.window_update(1, 100))
    assert len(wire.response_body(1)) == 6


def test_a_window_may_become_negative() -> None:
    wire = Wire().headers(1).data(1, b"x" * 70_000, ended=True)
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), frames.window_update(0, 1 << 20))
    wire.read()
    wire.send(frames.window_update(1, 65_535))
    assert wire.read() == []
    wire.send(frames.window_update(1, 4_465))
    assert len(wire.response_body(1)) == 4_465


def test_the_window_of_the_connection_limits_all_streams() -> None:
    wire = Wire()
    for number in (1, 3):
        wire.headers(number).data(number, b"x" * 50_000, ended=True)
    sizes = [len(f.data) for f in wire.read() if type(f).__name__ == "DataFrame"]
    assert sum(sizes) == 65_535
    assert max(sizes) <= 16_384
    wire.send(frames.window_update(0, 100_000))
    assert sum(len(f.data) for f in wire.read() if type(f).__name__ == "DataFrame") == 100_000 - 65_535


def test_streams_are_sent_in_turns() -> None:
    wire = Wire()
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 30}))
    for number in (1, 3):
        wire.headers(number).data(number, b"x" * 900_000, ended=True)
    wire.send(frames.window_update(0, 1 << 30))
    order = [f.stream_id for f in wire.read() if type(f).__name__ == "DataFrame"]
    assert order.index(3) < len(order) // 2


def test_no_body_is_sent_while_the_transport_is_full() -> None:
    wire = Wire()
    wire.connection.sender.paused = True
    wire.headers(1).data(1, b"x" * 100, ended=True)
    assert [k for k in wire.frame_names() if k == "Data"] == []
    wire.connection.sender.paused = False
    wire.connection.sender.pump()
    assert wire.response_body(1) == b"x" * 100


# --- windows of the server -------------------------------------------------------------------------------------------

SMALL = Http2Limits(stream_window=1000, connection_window=100_000, max_frame=16_384)


def test_acknowledged_data_refills_the_windows() -> None:
    wire = Wire(limits=SMALL).headers(1)
    for _ in range(50):
        wire.data(1, b"x" * 500)
    wire.data(1, ended=True)
    updates = [f for f in wire.read() if type(f).__name__ == "WindowUpdateFrame" and f.stream_id == 1]
    assert sum(f.window_increment for f in updates) == 25_000
    assert len(wire.service.handlers[0].body) == 25_000


def test_unacknowledged_data_stops_only_its_stream() -> None:
    wire = Wire(EchoService(reads=False), SMALL).headers(1).data(1, b"x" * 1000)
    assert wire.read() == []
    wire.data(1, b"x")
    assert [(f.stream_id, f.error_code) for f in wire.read()] == [(1, frames.FLOW_CONTROL_ERROR)]
    assert wire.service.handlers[0].code == frames.FLOW_CONTROL_ERROR
    assert wire.still_responds()


def test_padding_counts_and_is_acknowledged() -> None:
    wire = Wire(limits=SMALL).headers(1)
    for _ in range(500):  # more than both windows
        wire.send(frame(0, 8, 1, b"\xf0" + b"x" + bytes(240)))
    wire.data(1, ended=True)
    assert wire.service.handlers[0].body == b"x" * 500
    assert wire.still_responds()


def test_exceeding_the_window_of_the_connection_ends_it() -> None:
    limits = Http2Limits(stream_window=1 << 20, connection_window=65_535, max_frame=1 << 20)
    wire = Wire(limits=limits).headers(1).data(1, b"x" * 65_536)
    assert wire.goaway()[0] == frames.FLOW_CONTROL_ERROR


# --- connection errors -----------------------------------------------------------------------------------------------


def number_of(wire: Wire, fields: list[tuple[str, str]] | None = None) -> bytes:
    return wire.headers_frame(1, fields or POST)


FATAL: dict[str, tuple[Act, int]] = {
    "DATA on an idle stream": (lambda w: w.data(1, b"x"), frames.PROTOCOL_ERROR),
    "DATA on no stream": (lambda w: w.data(0, b"x"), frames.PROTOCOL_ERROR),
    "HEADERS on no stream": (lambda w: w.headers(0), frames.PROTOCOL_ERROR),
    "HEADERS on an even stream": (lambda w: w.headers(2), frames.PROTOCOL_ERROR),
    "HEADERS with a lower number": (lambda w: w.headers(5).headers(3), frames.STREAM_CLOSED),
    "HEADERS on a closed stream": (lambda w: w.headers(1, GET, ended=True).headers(1), frames.STREAM_CLOSED),
    "RST_STREAM on an idle stream": (lambda w: w.send(frames.rst_stream(3, 8)), frames.PROTOCOL_ERROR),
    "RST_STREAM on no stream": (lambda w: w.send(frames.rst_stream(0, 8)), frames.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (lambda w: w.headers(1).send(frame(3, 0, 1, b"123")), frames.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE on an idle stream": (lambda w: w.send(frames.window_update(1, 1)), frames.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (lambda w: w.send(frame(8, 0, 0, b"123")), frames.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of nothing": (lambda w: w.send(frames.window_update(0, 0)), frames.PROTOCOL_ERROR),
    "WINDOW_UPDATE beyond bounds": (lambda w: w.send(frames.window_update(0, 2**31 - 1)), frames.FLOW_CONTROL_ERROR),
    "SETTINGS of 5 bytes": (lambda w: w.send(frame(4, 0, 0, b"12345")), frames.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (lambda w: w.send(frame(4, 0, 1, b"")), frames.PROTOCOL_ERROR),
    "SETTINGS acknowledged with a payload": (lambda w: w.send(frame(4, 1, 0, b"123456")), frames.FRAME_SIZE_ERROR),
    "SETTINGS window": (lambda w: w.send(frames.settings({4: 1 << 31})), frames.FLOW_CONTROL_ERROR),
    "SETTINGS frame": (lambda w: w.send(frames.settings({5: 16_383})), frames.PROTOCOL_ERROR),
    "SETTINGS push": (lambda w: w.send(frames.settings({2: 2})), frames.PROTOCOL_ERROR),
    "PING of 7 bytes": (lambda w: w.send(frame(6, 0, 0, b"1234567")), frames.FRAME_SIZE_ERROR),
    "PING on a stream": (lambda w: w.send(frame(6, 0, 1, b"12345678")), frames.PROTOCOL_ERROR),
    "GOAWAY of 7 bytes": (lambda w: w.send(frame(7, 0, 0, b"1234567")), frames.FRAME_SIZE_ERROR),
    "PRIORITY of 4 bytes": (lambda w: w.send(frame(2, 0, 1, b"1234")), frames.FRAME_SIZE_ERROR),
    "PRIORITY of no stream": (lambda w: w.send(frame(2, 0, 0, b"12345")), frames.PROTOCOL_ERROR),
    "PUSH_PROMISE": (lambda w: w.headers(1).send(frame(5, 4, 1, bytes(8))), frames.PROTOCOL_ERROR),
    "CONTINUATION without HEADERS": (lambda w: w.send(frame(9, 4, 1, b"")), frames.PROTOCOL_ERROR),
    "CONTINUATION missing": (lambda w: w.send(frame(1, 0, 1, b""), frame(6, 0, 0, bytes(8))), frames.PROTOCOL_ERROR),
    "CONTINUATION of another": (lambda w: w.send(frame(1, 0, 1, b""), frame(9, 4, 3, b"")), frames.PROTOCOL_ERROR),
    "DATA within a block": (lambda w: w.headers(1).send(frame(1, 0, 3), frame(0, 0, 1, b"x")), frames.PROTOCOL_ERROR),
    "padding longer than DATA": (lambda w: w.headers(1).send(frame(0, 8, 1, b"\x05abcd")), frames.PROTOCOL_ERROR),
    "padding without DATA": (lambda w: w.headers(1).send(frame(0, 8, 1, b"")), frames.PROTOCOL_ERROR),
    "padding longer than HEADERS": (lambda w: w.send(frame(1, 0xC, 1, b"\x05abcd")), frames.PROTOCOL_ERROR),
    "HEADERS too short for priority": (lambda w: w.send(frame(1, 0x24, 1, b"1234")), frames.PROTOCOL_ERROR),
    "an oversized DATA": (lambda w: w.headers(1).data(1, bytes((1 << 20) + 1)), frames.FRAME_SIZE_ERROR),
    "an oversized frame": (lambda w: w.send(b"\xff\xff\xff\xee\0\0\0\0\0"), frames.FRAME_SIZE_ERROR),
    "a number without end": (lambda w: w.send(frame(1, 4, 1, b"\xff" * 5 + b"\x7f")), frames.COMPRESSION_ERROR),
    "an index out of the table": (lambda w: w.send(frame(1, 4, 1, b"\xfe")), frames.COMPRESSION_ERROR),
    "index zero": (lambda w: w.send(frame(1, 4, 1, b"\x80")), frames.COMPRESSION_ERROR),
    "bad Huffman": (lambda w: w.send(frame(1, 4, 1, b"\x04\x84\xff\xff\xff\xff")), frames.COMPRESSION_ERROR),
    "a table too large": (lambda w: w.send(frame(1, 4, 1, b"\x3f\xe2\x1f")), frames.COMPRESSION_ERROR),
    "a resize too late": (lambda w: w.send(frame(1, 4, 1, b"\x82\x20")), frames.COMPRESSION_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", FATAL)
def test_connection_errors(name: str) -> None:
    act, code = FATAL[name]
    wire = Wire(EchoService(responds=name == "HEADERS on a closed stream"))
    act(wire)
    assert wire.goaway()[0] == code
    wire.send(frames.settings({}), b"anything")
    assert wire.read() == []
    assert all(listener.code is not None or listener.ended for listener in wire.service.handlers)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"\x16\x03\x01",
        frames.PREFACE + frame(6, 0, 0, bytes(8)),
        frames.PREFACE + frame(4, 1, 0),
    ],
)
def test_an_invalid_preface(data: bytes) -> None:
    wire = Wire(with_preface=False).send(data)
    assert wire.goaway()[0] == frames.PROTOCOL_ERROR


# --- stream errors ---------------------------------------------------------------------------------------------------


def fields(*more: tuple[str, str]) -> list[tuple[str, str]]:
    return [*POST, *more]


MALFORMED: dict[str, list[tuple[str, str]]] = {
    "no method": POST[1:],
    "no path": [f for f in POST if f[0] != ":path"],
    "no scheme": [f for f in POST if f[0] != ":scheme"],
    "an empty path": [(n, "" if n == ":path" else v) for n, v in POST],
    "a path without slash": [(n, "x" if n == ":path" else v) for n, v in POST],
    "a method of blanks": [(n, "A B" if n == ":method" else v) for n, v in POST],
    "a scheme of blanks": [(n, "ht tp" if n == ":scheme" else v) for n, v in POST],
    "CONNECT": [(":method", "CONNECT"), (":authority", "localhost")],
    "two methods": [POST[0], *POST],
    "an unknown pseudo-field": [(":status", "200"), *POST],
    "a pseudo-field too late": fields(("x", "y"), (":authority", "z")),
    "an upper-case name": fields(("X-Y", "z")),
    "an empty name": fields(("", "z")),
    "a name with a blank": fields(("x y", "z")),
    "a line break": fields(("x", "a\r\nb: c")),
    "a null": fields(("x", "a\0b")),
    "blanks around": fields(("x", " y ")),
    "a tab before": fields(("x", "\ty")),
    "a blank alone": fields(("x", " ")),
    "a null in a call of gRPC": fields(("content-type", "application/grpc"), ("x", "a\0b ")),
    "connection": fields(("connection", "close")),
    "keep-alive": fields(("keep-alive", "5")),
    "proxy-connection": fields(("proxy-connection", "x")),
    "transfer-encoding": fields(("transfer-encoding", "chunked")),
    "upgrade": fields(("upgrade", "h2c")),
    "te": fields(("te", "gzip")),
    "another host": fields(("host", "elsewhere")),
    "two lengths": fields(("content-length", "1"), ("content-length", "2")),
    "an invalid length": fields(("content-length", "+1")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_resets_only_its_stream(name: str) -> None:
    wire = Wire(EchoService())
    wire.headers(1).headers(3, MALFORMED[name])
    assert [(f.stream_id, f.error_code) for f in wire.read()] == [(3, frames.PROTOCOL_ERROR)]
    wire.data(3, b"on its way", ended=True).data(1, b"x", ended=True)
    assert wire.response_body(1) == b"x"
    assert wire.still_responds()


UNFIT = {
    **{f"path {path!r}": [(n, path if n == ":path" else v) for n, v in GET]
       for path in ("/a b", "/a\tb", "/\x01", "/a\x7f", "/a\r\nb: c", "/a\0", "/a ", "/a#b", "/a?b#c")},
    **{f"authority {host!r}": [(n, host if n == ":authority" else v) for n, v in GET]
       for host in ("a b", "u@a", "a/../x", "a:b", "a:80:80", "a\r\nb", " a", "[::1", "a\x01", "é", "a?b", "a#b")},
    "host 'a b'": [*(f for f in GET if f[0] != ":authority"), ("host", "a b")],
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_an_invalid_path_or_authority_is_400(name: str) -> None:
    wire = Wire().headers(1, UNFIT[name], ended=True)
    (head,) = wire.read()
    assert wire.decoder.decode(head.data) == [(":status", "400")]
    assert wire.still_responds()


@pytest.mark.parametrize(
    "host", ["", "a", "a.example:80", "127.0.0.1:", "[::1]:8080", "[fe80::1%25eth0]", "a_b-c~d", "%2Ftmp%2Fsocket"]
)
def test_valid_authorities(host: str) -> None:
    wire = Wire().headers(1, [(n, host if n == ":authority" else v) for n, v in GET], ended=True)
    assert wire.decoder.decode(wire.read()[0].data) == [(":status", "200")]
    assert wire.service.handlers[0].headers.authority == host


def test_white_space_around_grpc_metadata_is_stripped() -> None:
    wire = Wire(EchoService(responds=False))
    wire.headers(1, fields(("x-a", "trail "), ("content-type", "application/grpc"), ("x-b", "\t lead"), ("x-c", " ")))
    assert wire.read() == []
    assert wire.service.handlers[0].headers.fields == (
        ("x-a", "trail"),
        ("content-type", "application/grpc"),
        ("x-b", "lead"),
        ("x-c", ""),
    )


def with_content_length(wire: Wire, length: int) -> Wire:
    return wire.headers(3, fields(("content-length", str(length))))


LATE = [("a", "b")]
PROTOCOL, CLOSED, FLOW = frames.PROTOCOL_ERROR, frames.STREAM_CLOSED, frames.FLOW_CONTROL_ERROR
STREAM_FAULTS: dict[str, tuple[Act, int]] = {
    "too short": (lambda w: with_content_length(w, 5).data(3, b"abc", ended=True), PROTOCOL),
    "too long": (lambda w: with_content_length(w, 2).data(3, b"abc"), PROTOCOL),
    "no body": (lambda w: w.headers(3, fields(("content-length", "5")), ended=True), PROTOCOL),
    "too short before trailers": (lambda w: with_content_length(w, 5).headers(3, LATE, ended=True), PROTOCOL),
    "DATA after the end": (lambda w: w.headers(3).data(3, ended=True).data(3, b"x"), CLOSED),
    "HEADERS after the end": (lambda w: w.headers(3, ended=True).headers(3, LATE, ended=True), CLOSED),
    "HEADERS that end nothing": (lambda w: w.headers(3).headers(3, LATE), PROTOCOL),
    "pseudo-fields in trailers": (lambda w: w.headers(3).headers(3, [(":path", "/")], ended=True), PROTOCOL),
    "WINDOW_UPDATE of nothing": (lambda w: w.headers(3).send(frames.window_update(3, 0)), PROTOCOL),
    "WINDOW_UPDATE beyond bounds": (lambda w: w.headers(3).send(frames.window_update(3, 2**31 - 1)), FLOW),
}


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_stream_errors(name: str) -> None:
    act, code = STREAM_FAULTS[name]
    wire = Wire(EchoService(responds=False)).headers(1)
    act(wire)
    assert [(f.stream_id, f.error_code) for f in wire.read()] == [(3, code)]
    assert wire.service.handlers[0].code is None
    assert all(listener.code is not None for listener in wire.service.handlers[1:])
    wire.service.responds = True
    wire.data(1, b"x", ended=True)
    assert wire.response_body(1) == b"x"


def test_frames_sent_before_a_reset_are_ignored() -> None:
    wire = Wire(EchoService(responds=False)).headers(1)
    wire.service.handlers[0].stream.reset(frames.CANCEL)
    wire.read()
    wire.data(1, b"late").headers(1, [("late", "too")], ended=True).send(frames.window_update(1, 5))
    assert wire.read() == []
    assert wire.service.handlers[0].code is None


@pytest.mark.parametrize("place", ["open", "receive"])
def test_an_exception_of_the_application_resets_only_its_stream(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(EchoService(responds=False)).headers(1)

    def fails(*_: object) -> None:
        raise ValueError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(EchoService if place == "open" else EchoHandler, place, fails)
        wire.headers(3).data(3, b"x", ended=True)
    assert (3, frames.INTERNAL_ERROR) in [(f.stream_id, f.error_code) for f in wire.read()]
    assert "a mistake" in caplog.text
    wire.service.responds = True
    wire.data(1, b"x", ended=True)
    assert wire.response_body(1) == b"x"


def test_a_reset_discards_unsent_data() -> None:
    wire = Wire().headers(1).data(1, b"x" * 100_000, ended=True)
    wire.send(frames.rst_stream(1, frames.CANCEL))
    wire.read()
    wire.send(frames.window_update(0, 1 << 20))
    assert wire.read() == []
    assert wire.service.handlers[0].code == frames.CANCEL
    assert wire.still_responds()


def test_too_many_concurrent_streams_are_refused() -> None:
    wire = Wire(EchoService(responds=False), Http2Limits(max_streams=3))
    for number in (1, 3, 5, 7):
        wire.headers(number)
    assert [(f.stream_id, f.error_code) for f in wire.read()] == [(7, frames.REFUSED_STREAM)]
    wire.service.handlers[0].stream.send_headers(b"\x88", ended=True)
    wire.service.responds = True
    assert wire.still_responds()


@pytest.mark.parametrize("limits", [Http2Limits(max_header_bytes=1000), Http2Limits(max_headers=20)])
def test_too_many_fields_are_rejected_and_the_table_stays_correct(limits: Http2Limits) -> None:
    wire = Wire(limits=limits)
    wire.headers(1, fields(*((f"name-{n}", "x" * 100) for n in range(20))))
    received = wire.read()
    assert [type(f).__name__ for f in received] == ["HeadersFrame", "RstStreamFrame"]
    assert wire.decoder.decode(received[0].data) == [(":status", "431")]
    assert wire.still_responds()


def test_a_client_without_dynamic_table_gets_a_table_size_update() -> None:
    wire = Wire(with_preface=False).send(frames.PREFACE + frames.settings({frames.HEADER_TABLE_SIZE: 0}))
    wire.read()
    for number in (1, 3):
        wire.headers(number, GET, ended=True)
    blocks = [f.data for f in wire.read() if type(f).__name__ == "HeadersFrame"]
    assert [b[:1] == b"\x20" for b in blocks] == [True, False, False, False]
    wire.decoder.max_allowed_table_size = 0
    assert wire.decoder.decode(blocks[0]) == [(":status", "200")]


# --- floods ----------------------------------------------------------------------------------------------------------


def flood(count: int, act_once: Callable[[Wire, int], object]) -> Act:
    def act(wire: Wire) -> None:
        for n in range(count):
            if wire.closed:
                return
            act_once(wire, n)

    return act


FLOODS: dict[str, Act] = {
    "rapid reset": flood(3000, lambda w, n: w.headers(2 * n + 1).send(frames.rst_stream(2 * n + 1, 8))),
    "provoked resets": flood(3000, lambda w, n: w.headers(2 * n + 1).send(frames.window_update(2 * n + 1, 0))),
    "malformed": flood(3000, lambda w, n: w.headers(2 * n + 1, GET[1:])),
    "settings": flood(3000, lambda w, n: w.send(frames.settings({}))),
    "settings acknowledgements": flood(3000, lambda w, n: w.send(frame(4, 1, 0, b""))),
    "ping acknowledgements": flood(3000, lambda w, n: w.send(frame(6, 1, 0, bytes(8)))),
    "pings": flood(100, lambda w, n: w.send(frame(6, 0, 0, bytes(8)))),
    "empty data": flood(3000, lambda w, n: w.data(1) if n else w.headers(1)),
    "padding alone": flood(3000, lambda w, n: w.send(frame(0, 8, 1, b"\x02\0\0")) if n else w.headers(1)),
    "window updates": flood(3000, lambda w, n: w.send(frames.window_update(0, 1))),
    "priorities": flood(3000, lambda w, n: w.send(frame(2, 0, 1, bytes(5)))),
    "unknown frames": flood(3000, lambda w, n: w.send(frame(0x55, 0, 1, b""))),
    "data on closed streams": flood(3000, lambda w, n: w.data(1, b"x") if n else w.headers(1, ended=True)),
    "goaway": flood(3000, lambda w, n: w.send(frames.goaway(0, 0)) if n else w.headers(1)),
    "continuation": flood(3000, lambda w, n: w.send(frame(9 if n else 1, 0, 1, b"\0\x01a\x01b"))),
    "empty continuation": flood(3000, lambda w, n: w.send(frame(9 if n else 1, 0, 1, b""))),
    "a block without end": flood(100, lambda w, n: w.send(frame(9 if n else 1, 0, 1, b"\0\x01a\x7f\x81\x7f" * 2000))),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_end_the_connection(name: str) -> None:
    wire = Wire(EchoService(responds=False))
    FLOODS[name](wire)
    assert wire.goaway()[0] == frames.ENHANCE_YOUR_CALM


def test_occasional_pings_are_acknowledged_and_too_many_are_an_error() -> None:
    wire = Wire()
    for _ in range(50):
        wire.now_s += 11.0
        wire.send(frame(6, 0, 0, b"12345678"))
    assert wire.frame_names() == ["Ping"] * 50
    for _ in range(5):
        wire.send(frame(6, 0, 0, b"12345678"))
    assert wire.goaway() == (frames.ENHANCE_YOUR_CALM, "too_many_pings")


def test_pings_that_measure_round_trip_times_are_allowed() -> None:
    wire = Wire()
    for number in range(1, 2001, 2):
        wire.headers(number, GET, ended=True).send(frame(6, 0, 0, b"12345678"), frames.window_update(0, 5))
    assert wire.still_responds()


def test_an_hpack_bomb_takes_no_memory_and_rejects_only_its_stream() -> None:
    wire = Wire()
    big = [(f"x-{n}", "v" * 1000) for n in range(3)]
    wire.headers(1, fields(*big), ended=True)
    wire.read()
    wire.send(frame(1, 5, 3, b"\xbe" * 15_000))  # each byte names a field of a kilobyte
    assert wire.decoder.decode(wire.read()[0].data) == [(":status", "431")]
    assert wire.still_responds()


def test_cancelling_calls_at_a_moderate_rate_is_allowed() -> None:
    wire = Wire(EchoService(responds=False))
    for number in range(1, 8001, 2):
        wire.now_s += 0.02
        wire.headers(number).send(frames.rst_stream(number, frames.CANCEL))
    assert wire.closed < 1


def test_resetting_all_streams_at_a_deadline_is_allowed() -> None:
    wire = Wire(EchoService(responds=False))
    for round_ in range(20):
        numbers = range(400 * round_ + 1, 400 * round_ + 400, 2)
        for number in numbers:
            wire.headers(number)
        wire.connection.sender.now_s += 0.1
        for number in numbers:
            wire.send(frames.rst_stream(number, frames.CANCEL))
    assert wire.closed < 1


def test_small_window_updates_are_allowed() -> None:
    wire = Wire().send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
    for number in range(1, 41, 2):
        wire.headers(number)
        for _ in range(20):
            wire.data(number, b"x" * 50_000)
        wire.data(number, ended=True)
        for _ in range(250):
            wire.send(frames.window_update(0, 4096))
        wire.received = b""
    assert wire.closed < 1


def test_long_headers_are_sent_with_continuation() -> None:
    wire = Wire(EchoService(responds=False)).headers(1, ended=True)
    fields = [(b":status", b"200"), *((b"x-%d" % n, b"y" * 900) for n in range(40))]
    wire.service.handlers[0].stream.send_headers(encode_fields(fields), ended=True)
    received = wire.read()
    assert [type(f).__name__ for f in received] == ["HeadersFrame", "ContinuationFrame", "ContinuationFrame"]
    assert ["END_HEADERS" in f.flags for f in received] == [False, False, True]
    assert "END_STREAM" in received[0].flags
    found = wire.decoder.decode(b"".join(f.data for f in received), raw=True)
    assert [(bytes(n), bytes(v)) for n, v in found] == fields


def test_the_rest_of_a_frame_is_skipped_once_its_stream_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    wire.headers(1)
    wire.send(frames.frame(frames.DATA, 0, 1, b"x" * 100)[:60])
    wire.connection.abort(wire.connection.streams[1], frames.CANCEL)
    assert wire.frame_names() == ["RstStream"]
    wire.send(b"x" * 49)
    assert wire.frame_names() == []
    assert wire.still_responds()
    assert not caplog.records
