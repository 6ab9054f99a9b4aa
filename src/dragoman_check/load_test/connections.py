"""Client connections of load tests: they send one request at a time and record when the response came."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httptools

from dragoman.formats import fast_json
from dragoman_check.load_test.jobs import RequestJob


@dataclass(slots=True)
class TimedExchange:
    """Times of one exchange on the performance counter; `error` is empty if it succeeded.

    chunks: of a streamed response, with their times.
    tokens: number of tokens of a streamed response; 0 if the server does not report it.
    """

    sent_s: float
    end_s: float = 0.0
    error: str = ""
    received_bytes: int = 0
    tokens: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)


class LoadConnection(Protocol):
    """A connection that sends the request of a job."""

    async def exchange(self) -> TimedExchange: ...

    async def close(self) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection, opened when first needed and again after it was closed."""

    def __init__(self, job: RequestJob, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._transport: Any = None
        self._keeps_chunks = job.has_text is not None
        self._done: asyncio.Future[None] | None = None
        self._current = TimedExchange(0.0)

    async def exchange(self) -> TimedExchange:
        self._current = current = TimedExchange(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send()
        except TimeoutError:
            current.error = f"no response within {self._timeout_s:g} s"
            await self.close()
        except (OSError, httptools.HttpParserError) as error:
            current.error = f"connection: {getattr(error, 'strerror', None) or type(error).__name__}"
            await self.close()
        current.end_s = time.perf_counter()
        return current

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, self._job.host, self._job.port, ssl=self._job.tls)
        self._done = loop.create_future()
        self._transport.write(self._job.request)
        await self._done

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- asyncio.Protocol and the parser's events ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._current.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(exc or ConnectionResetError("closed by the server"))

    def on_body(self, chunk: bytes) -> None:
        if self._keeps_chunks:
            self._current.chunks.append((time.perf_counter(), chunk))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._current.error = f"HTTP status {status}"
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
            self._transport = None
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class GrpcConnection:
    """One gRPC channel with a connection of its own."""

    def __init__(self, job: RequestJob, timeout_s: float) -> None:
        import grpc

        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
        ]
        if isinstance(job.tls, ssl.SSLContext):
            authority = Path(job.ca).read_bytes() if job.ca else None
            credentials = grpc.ssl_channel_credentials(authority)
            self._channel: Any = grpc.aio.secure_channel(job.grpc, credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(job.grpc, options=options)
        self._call = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self._error = grpc.aio.AioRpcError
        self._job, self._timeout_s = job, timeout_s

    async def exchange(self) -> TimedExchange:
        current = TimedExchange(time.perf_counter())
        try:
            response = await self._call(self._job.request, timeout=self._timeout_s, metadata=self._job.metadata)
            current.received_bytes = len(response)
        except self._error as error:
            current.error = f"gRPC status {error.code().name}"
        current.end_s = time.perf_counter()
        return current

    async def close(self) -> None:
        await self._channel.close()


def open_connection(job: RequestJob, timeout_s: float) -> LoadConnection:
    return GrpcConnection(job, timeout_s) if job.grpc else HttpConnection(job, timeout_s)


def text_times(job: RequestJob, exchange: TimedExchange) -> list[float]:
    """Return the time of each event with text of a streamed response; sets its number of tokens, and its error."""
    times, rest = [], b""
    for time_s, chunk in exchange.chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event = _parse_line(line)
            if isinstance(event, dict) and event.get("error"):
                exchange.error = exchange.error or "error within the stream"
            elif isinstance(event, dict) and job.has_text is not None:
                exchange.tokens = _completion_tokens(event) or exchange.tokens
                if job.has_text(event):
                    times.append(time_s)
    if job.events_are_tokens:
        exchange.tokens = len(times)
    if not times and not exchange.error:
        exchange.error = "stream without tokens"
    return times


def _completion_tokens(event: Mapping[str, Any]) -> int:
    """Return the tokens that the usage of an OpenAI event counts; 0 without usage."""
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def _parse_line(line: bytes) -> Any:
    """Return the JSON of a line of a stream; None for other lines."""
    line = line.removeprefix(b"data:").strip()
    if not line.startswith(b"{"):
        return None
    try:
        return fast_json.loads(line)
    except fast_json.JSONDecodeError:
        return None
