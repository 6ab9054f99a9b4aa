"""An unexpected exception affects only its request."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
from dragoman.transports.application import Application
from dragoman.transports.http1.response_writer import StreamFlushes
from dragoman.transports.http_server import HttpServer
from dragoman.transports.limits import Limits


def _respond(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (request.body,), (("x-path", request.path),))


def _bad_header(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (b"a",), (("x", "a\r\ncontent-length: 7"),))


def _raises(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("a secret")


def _str_body(request: HttpRequest) -> HttpResponse:
    parts: Any = (None,)
    return HttpResponse(200, parts)


def _error(error: Any, _request_id: str) -> HttpResponse:
    if "worst" in str(error):
        raise RuntimeError("even this")
    return json_response({"error": str(error)}, getattr(error, "status", 500))


TABLE = HttpProtocol(
    "test",
    tuple(
        Route(method, path, endpoint)
        for path, endpoint in (
            ("/", _respond),
            ("/line", _bad_header),
            ("/raises", _raises),
            ("/none", _str_body),
        )
        for method in ("GET", "POST")
    ),
    _error,
)


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    engine: Any = None  # not called
    server = HttpServer(Application(engine, (TABLE,), Limits()))
    (found,) = await server.start([("127.0.0.1", 0)])
    yield found
    await server.stop(0.0)


async def response_to(port: int, path: str) -> bytes:
    """Return all that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/line", "/raises", "/none"])
async def test_an_exception_is_hidden_from_the_client(port: int, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "dragoman.http"):
        text = await response_to(port, path)
    assert text.startswith(b"HTTP/1.1 500 ")
    assert text.count(b"content-length") == 1
    assert b"request id" in text
    assert b"secret" not in text
    assert (await response_to(port, "/")).startswith(b"HTTP/1.1 200 ")


async def test_an_error_that_cannot_be_formatted_closes_the_connection(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert await response_to(port, "/worst") == b""
    assert "HTTP/1.1 connection failed" in caplog.text
    assert (await response_to(port, "/")).startswith(b"HTTP/1.1 200 ")


class _Writer:
    """A response writer with one chunk, whose transport may fail."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.is_written, self.is_aborted = fails, False, False

    def flush(self) -> None:
        if self.fails:
            raise RuntimeError("the transport fails")
        self.is_written = True

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_stream_whose_transport_fails_does_not_stop_others() -> None:
    flushes, writers = StreamFlushes(), [_Writer(fails=True), _Writer(fails=False)]
    for writer in writers:
        flushes.add(writer, asyncio.get_running_loop())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert [(w.is_written, w.is_aborted) for w in writers] == [(False, True), (True, False)]
