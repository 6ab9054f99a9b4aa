"""Parsing requests of HTTP/1.1 in chunks of any size; rejection of invalid ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.protocols.wire import HttpError, HttpProtocol, HttpRequest, HttpResponse, Route, json_response
from dragoman.transports.application import Application
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.http1.headers import CHUNKED, Http1Headers
from dragoman.transports.http1.request_reader import (
    ExpectContinue,
    Http1Context,
    Http1Request,
    RejectedRequest,
    RequestReader,
)
from dragoman.transports.limits import Limits


def _nothing(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200)


def _error(error: Any, _request_id: str) -> HttpResponse:
    return json_response({"error": str(error)}, getattr(error, "status", 500))


TABLE = HttpProtocol("test", (Route("POST", "/a/{b}", _nothing), Route("GET", "/a", _nothing)), _error)
LIMITS = Limits(max_body_bytes=10_000, max_header_bytes=1000, max_headers=10, max_bodies_bytes=50_000)


def make_context(limits: Limits = LIMITS) -> Http1Context:
    engine: Any = None  # not called
    return Http1Context(Application(engine, (TABLE,), limits))


@dataclass(frozen=True)
class Event:
    """The parts of an event that tests compare."""

    kind: str
    path: str = ""
    body: bytes = b""
    error: str = ""


class Reader(RequestReader):
    """A request reader with a public context."""

    def __init__(self, context: Http1Context | None = None) -> None:
        self.context = context or make_context()
        super().__init__(self.context)


def events(reader: Reader) -> list[Event]:
    """Return the events of all that has arrived, and release the bodies."""
    result: list[Event] = []
    while (event := reader.next()) is not None:
        match event:
            case Http1Request(headers, body):
                result.append(Event("request", f"{headers.method} {headers.path}?{headers.query}", bytes(body)))
                reader.context.bodies.release(len(body))
            case RejectedRequest(headers, error, fatal):
                assert isinstance(error, HttpError)
                result.append(Event("fatal" if fatal else "rejected", error=f"{error.status} {error.message}"))
                if fatal:
                    reader.drop()
                    return result
            case ExpectContinue():
                result.append(Event("continue"))
    return result


def parse_chunks(chunks: Sequence[bytes], reader: Reader | None = None, direct: bool = False) -> list[Event]:
    """Return the events of these chunks; `direct`: written to the reader's buffer, else passed as bytes."""
    reader = reader or Reader()
    result: list[Event] = []
    for chunk in chunks:
        while chunk:
            if direct:
                space = reader.free_space()
                count = min(len(space), len(chunk))
                space[:count] = chunk[:count]
                reader.advance(count)
                chunk = chunk[count:]
            else:
                reader.append(chunk)
                chunk = b""
            result += events(reader)
            if result and result[-1].kind == "fatal":
                return result
    return result


def parse_one(raw: bytes) -> Event:
    (result,) = parse_chunks([raw])
    return result


def headers(method: str = "POST", path: str = "/a/b", **fields: object) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(f"{n.replace('_', '-')}: {v}" for n, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def with_length(body: bytes, path: str = "/a/b") -> bytes:
    return headers(path=path, content_length=len(body)) + body


def with_chunks(parts: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = [b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts if p]
    return headers(transfer_encoding="chunked") + b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


# --- chunks ----------------------------------------------------------------------------------------------------------

BODIES = st.one_of(st.binary(max_size=60), st.integers(0, 3000).map(lambda n: bytes(n)))
REQUESTS = st.one_of(
    st.just(headers("GET", "/a?q=1")),
    st.just(headers("GET", "/nowhere")),
    st.just(b"\r\n" + headers("GET", "http://x:80/a")),
    BODIES.map(with_length),
    BODIES.map(lambda body: with_length(body, "/nowhere")),
    st.lists(st.binary(min_size=1, max_size=40), max_size=5).map(with_chunks),
    st.lists(st.binary(min_size=1, max_size=40), max_size=3).map(
        lambda parts: with_chunks(parts, b";a=b", b"x: y\r\nz: 1\r\n")
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=6), st.data(), st.booleans())
def test_chunking_does_not_change_requests(raws: list[bytes], data: st.DataObject, direct: bool) -> None:
    raw = b"".join(raws)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    expected = [result for each in raws for result in parse_chunks([each])]
    reader = Reader()
    assert parse_chunks(chunks, reader, direct) == expected
    assert len(expected) == len(raws)
    assert (reader.unparsed_size, reader.body_size, reader.in_body) == (0, 0, False)


def test_requests_byte_by_byte() -> None:
    raw = (
        with_length(b"abc") + with_chunks([b"de", b"f"], trailer=b"a: b\r\n") + headers("GET", "/a") + with_length(b"")
    )
    assert parse_chunks([bytes([byte]) for byte in raw]) == parse_chunks([raw])
    assert [result.body for result in parse_chunks([raw])] == [b"abc", b"def", b"", b""]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=50), REQUESTS), max_size=4), st.lists(st.binary(max_size=20), max_size=3))
def test_random_bytes_are_rejected_or_incomplete(raws: list[bytes], more: list[bytes]) -> None:
    shared = make_context()
    reader = Reader(shared)
    for result in parse_chunks([*raws, *more], reader):
        if result.kind in ("fatal", "rejected"):
            assert result.error[:3] in ("400", "404", "405", "413", "431", "501", "503")
    assert reader.unparsed_size <= LIMITS.max_header_bytes + 5000
    reader.drop()
    shared.bodies.reserve(LIMITS.max_bodies_bytes)  # everything has been released


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_request_with_a_few_bytes_changed(data: st.DataObject) -> None:
    raw = bytearray(data.draw(REQUESTS) + headers("GET", "/a"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"\n", b"\r", b"\0", b" ", b"9", b":"])
        )
    for result in parse_chunks([bytes(raw)]):
        assert result.kind in ("request", "continue") or result.error[:3] in ("400", "404", "405", "413", "431", "501")


NO_HOSTS = (
    b"a b",
    b"u@a/../x",
    b"u@a",
    b"a/b",
    b"a,, b",
    b"a:b",
    b"a:1:2",
    b"a?b",
    b"a#b",
    b"a\\b",
    b"[::1",
    b"::1",
    b"a%g1",
)
HOSTS = (
    b"",
    b"a",
    b"a.b.",
    b"a_b-c:80",
    b"a:",
    b"127.0.0.1:8080",
    b"[::1]",
    b"[::1]:8080",
    b"[fe80::1%25eth0]",
    b"a%20b",
)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\naccept: a,  b  c\r\n\r\n"])
def test_valid_hosts(host: bytes, end: bytes) -> None:
    raw = b"POST /a/b HTTP/1.1\r\nhost: %b%b" % (host, end)
    assert [result.kind for result in parse_chunks([raw])] == ["request"]
    assert [result.kind for result in parse_chunks([raw[i : i + 1] for i in range(len(raw))])] == ["request"]


@pytest.mark.parametrize("line", [b"GET  /a/b HTTP/1.1\r\n", b"\r\nGET /a/b  HTTP/1.1\r\n"])
def test_two_spaces_in_a_request_line_in_chunks(line: bytes) -> None:
    raw = line + b"host: x\r\n\r\n"
    for size in (1, 2, 5, 7):
        (result,) = parse_chunks([raw[i : i + size] for i in range(0, len(raw), size)])
        assert (result.kind, result.error) == (
            "fatal",
            "400 the request is not valid HTTP/1.1: two spaces in a row in the request line",
        )


# --- rejected --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /a/b HTTP/1.1\nhost: x\n\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\ncontent-length: 1\r\n\r\na",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\nname : value\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\n: value\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\nx: a\rb\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"POST /a/b HTTP/1.1\r\nhost:\r\nhost: x\r\n\r\n",
        b"POST a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /a b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST  /a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /a/b  HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /a/b#c HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /a/b?c#d HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST http://x#c HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST http:///a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST http://u@x/a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        *(b"POST /a/b HTTP/1.1\r\nhost: %b\r\n\r\n" % host for host in NO_HOSTS),
        b"POST /a/b HTTP/1.0\r\nhost: a b\r\n\r\n",
        b"POST /a/b HTTP/2.0\r\nhost: x\r\n\r\n",
        b"F(O /a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"FOO /a/b HTTP/2.0\r\nhost: x\r\n\r\n",
        b"FOO  /a/b HTTP/1.1\r\nhost: x\r\n\r\n",
        headers(content_length="1", Content_Length="1"),
        headers(content_length="1", Content_Length="2"),
        headers(content_length="1, 1"),
        headers(content_length="+1"),
        headers(content_length="-1"),
        headers(content_length="0x1"),
        headers(content_length="1 1"),
        headers(content_length=""),
        headers(content_length="1_0"),
        headers(content_length="18446744073709551616"),
        headers(content_length="9" * 30),
        headers(content_length="٣").replace("٣".encode(), b"\xd9\xa3"),
        headers(content_length="1", transfer_encoding="chunked"),
        headers(transfer_encoding="chunked", content_length="1"),
        headers(transfer_encoding="gzip, chunked"),
        headers(transfer_encoding="chunked, chunked"),
        headers(transfer_encoding="identity"),
        headers(transfer_encoding="xchunked"),
        b"POST /a/b HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_rejected(raw: bytes) -> None:
    result = parse_one(raw)
    assert (result.kind, result.error[:3]) == ("fatal", "400"), result
    assert "not valid HTTP/1.1" in result.error


@pytest.mark.parametrize("method", ["FOO", "get", "X-Y", "CONNECT"])
def test_unknown_methods_are_not_implemented(method: str) -> None:
    target = "x:1" if method == "CONNECT" else "/a"
    result = parse_one(f"{method} {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert (result.kind, result.error) == ("fatal", f"501 method {method} is not implemented")


@pytest.mark.parametrize(
    ("target", "host", "is_same"),
    [
        ("http://a/a", "a", True),
        ("http://A:80/a", "a", True),
        ("https://a/a", "a:443", True),
        ("http://a/a", "b", False),
        ("http://a/a", "", False),
        ("http://a:81/a", "a", False),
        ("/a", "b", True),
    ],
)
@pytest.mark.parametrize("rejects", [False, True])
def test_a_host_that_differs_from_the_target(target: str, host: str, is_same: bool, rejects: bool) -> None:
    reader = Reader(make_context(replace(LIMITS, reject_host_mismatch=rejects)))
    (result,) = parse_chunks([f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()], reader)
    assert result.kind == ("request" if is_same or not rejects else "fatal"), result
    if result.kind == "fatal":
        assert result.error.startswith("400 the request is not valid HTTP/1.1: Host ")


@pytest.mark.parametrize(
    "coded",
    [
        b"g\r\n",
        b"-1\r\na\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"\r\n",
        b"1\na\r\n",
        b"1\ra\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\nb\r\n",
        b"1;\x00\r\na\r\n",
        b"1" * 16 + b"\r\n",
        b"1;" + b"x" * 5000,
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n x: folded\r\n\r\n",
        b"0\r\n" + b"x: y\r\n" * 4000,
        b"1;" + b"x" * 2000 + b"\r\na\r\n" + (b"1;" + b"x" * 2000 + b"\r\na\r\n") * 100,
    ],
)
def test_invalid_chunks(coded: bytes) -> None:
    result = parse_chunks([headers(transfer_encoding="chunked"), coded])
    assert [(f.kind, f.error[:3]) for f in result] == [("fatal", "400")]


def test_endless_chunks_are_too_large() -> None:
    result = parse_chunks([headers(transfer_encoding="chunked"), *[b"400\r\n" + bytes(1024) + b"\r\n"] * 20])
    assert result == [Event("fatal", error="413 the body is larger than the limit of 10000 bytes")]


@pytest.mark.parametrize("size", [10_001, 10**17])
def test_a_length_beyond_the_limit_is_rejected_before_memory_is_allocated(size: int) -> None:
    result = parse_one(headers(content_length=size))
    assert (result.kind, result.error[:3]) == ("fatal", "413")


def test_limits_of_headers() -> None:
    many: dict[str, Any] = {f"x{i}": 1 for i in range(10)}
    assert parse_one(headers(**many)).error == "431 the request head has more than 10 fields"
    assert parse_one(headers(x="y" * 1000)).error == "431 the request head is larger than the limit of 1000 bytes"
    assert parse_one(b"GET /a HTTP/1.1\r\nx: " + b"y" * 1000).error.startswith("431")
    assert parse_chunks([b"GET /a HTTP/1.1\r\nx: ", *[b"y" * 100] * 10])[-1].error.startswith("431")
    assert parse_chunks([b"\r\n" * 400 + b"\r"]) == []
    assert parse_chunks([b"\r\n" * 600])[-1].kind == "fatal"


def test_bodies_count_against_the_common_limit() -> None:
    shared = make_context(Limits(max_bodies_bytes=1000))
    first, second = Reader(shared), Reader(shared)
    assert parse_chunks([headers(content_length=900), bytes(800)], first) == []
    assert first.body_size == 800
    assert parse_chunks([with_length(bytes(300))], second)[-1].error.startswith("503")
    result = parse_chunks([headers(transfer_encoding="chunked") + b"fff\r\n" + bytes(300)], Reader(shared))
    assert result[-1].error.startswith("503")
    first.drop()
    assert parse_chunks([with_length(bytes(300))], Reader(shared))[-1].kind == "request"


def test_large_bodies_are_received_into_one_buffer() -> None:
    size = (1 << 20) * 5 + 17
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    limits = Limits(max_body_bytes=size)
    for direct in (True, False):
        chunks = [headers(content_length=size), *(body[i : i + 99_991] for i in range(0, size, 99_991))]
        (result,) = parse_chunks(chunks, Reader(make_context(limits)), direct)
        assert result.body == body


# --- accepted --------------------------------------------------------------------------------------------------------


def test_parsed_headers() -> None:
    result, _ = make_context().heads.parse(
        b"POST /a/%62?x=%20 HTTP/1.1\r\nHost: x\r\nACCEPT: a\r\nAccept:  b \r\nTransfer-Encoding: CHUNKED\r\n"
        b"Expect: 100-Continue\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    )
    assert (result.method, result.path, result.query) == ("POST", "/a/b", "x=%20")
    assert result.match is not None
    assert result.match.params == {"b": "b"}
    assert result.headers["accept"] == "a, b"
    assert (result.length, result.expects_continue, result.keep_alive) == (CHUNKED, True, False)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [("1.1", "", True), ("1.1", "close", False), ("1.0", "", False), ("1.0", "keep-alive", True)],
)
def test_keep_alive(version: str, connection: str, keep_alive: bool) -> None:
    line = f"connection: {connection}\r\n" if connection else ""
    result, _ = make_context().heads.parse(f"GET /a HTTP/{version}\r\nhost: x\r\n{line}\r\n".encode())
    assert result.keep_alive is keep_alive


def test_headers_with_credentials_are_cached_per_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_context()
    heads, reader = shared.heads, Reader(shared)
    parsed: list[bytes] = []
    parse = heads.parse

    def recorded_parse(raw: bytes) -> tuple[Http1Headers, bool]:
        parsed.append(raw)
        return parse(raw)

    monkeypatch.setattr(heads, "parse", recorded_parse)
    for secret in ("authorization", "cookie"):
        raw = headers("GET", "/a", **{secret: "s3"})
        assert [result.path for result in parse_chunks([raw, raw], reader)] == ["GET /a?", "GET /a?"]
        assert heads.get(raw) is None
        assert parsed.pop() == raw
        assert not parsed
    unknown = headers("GET", "/nowhere", cookie="s4")
    assert parse_chunks([headers("GET", "/a", cookie="s4"), unknown], reader)[1].kind == "rejected"
    reader.drop()
    parsed.clear()
    assert parse_chunks([unknown], reader)[0].kind == "rejected"
    assert parsed == [unknown]
    heads.parse(headers("GET", "/a"))
    assert heads.get(headers("GET", "/a")) is not None


def test_the_cache_of_headers_is_limited() -> None:
    heads = make_context().heads
    for i in range(2000):
        heads.parse(headers("GET", "/a", x=i))
    assert sum(heads.get(headers("GET", "/a", x=i)) is not None for i in range(2000)) <= 512


def test_100_continue_is_sent_once() -> None:
    reader = Reader()
    assert parse_chunks([headers(content_length=3, expect="100-continue")], reader) == [Event("continue")]
    assert parse_chunks([b"a", b"bc"], reader) == [Event("request", "POST /a/b?", b"abc")]
    assert parse_chunks([headers(content_length=3, expect="100-continue") + b"abc"])[0].kind == "request"
    assert parse_one(headers(path="/nowhere", content_length=3, expect="100-continue")).kind == "fatal"
    assert parse_one(headers(content_length=10_001, expect="100-continue")).error.startswith("413")


def test_the_body_of_a_rejected_request_is_skipped_unless_it_is_long() -> None:
    raw = with_length(bytes(5000), "/nowhere") + headers("GET", "/a")
    assert [result.kind for result in parse_chunks([raw[:100], raw[100:5000], raw[5000:]])] == ["rejected", "request"]
    assert parse_one(headers(path="/nowhere", content_length=1 << 21)).kind == "fatal"
    assert parse_one(headers(path="/nowhere", transfer_encoding="chunked")).kind == "fatal"
    assert parse_one(headers("DELETE", "/a")).error.startswith("405")


def test_small_bodies_have_memory_of_their_own() -> None:
    bodies = BodyMemory(1 << 20)
    bodies.reserve(1 << 20)
    bodies.count_unread(1 << 22)
    for size, body_size in (((1 << 16) + 1, 0), (1, (1 << 16) + 1)):
        with pytest.raises(HttpError, match="take all of the 1048576 bytes"):
            bodies.reserve(size, body_size)
    bodies.reserve(1 << 16)  # a sixteenth of the limit
    with pytest.raises(HttpError):
        bodies.reserve(1)
    bodies.release(1 << 16)
    bodies.reserve(100, 200)
    bodies.reserve(-100, 1 << 20)
    assert bodies.size == (1 << 20) + (1 << 22)
