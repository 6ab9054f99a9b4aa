"""gRPC over one channel, which blocks or is asyncio's."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

try:
    import grpc
except ModuleNotFoundError as missing:
    text = "a client for a grpc:// URL needs the package 'grpcio': pip install 'dragoman[grpc]'"
    raise ImportError(text) from missing

from dragoman.client import faults
from dragoman.client.address import Address, Headers
from dragoman.client.exchange import Deadline, GrpcQuestion
from dragoman.core.errors import DragomanError
from dragoman.formats.oip_messages import SERVICE

_COMPRESSION = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A server that was not there is looked for again as soon as our own retries ask.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
)

# Triton's: a fault ends the stream with its status instead of being told as text in it.
_TRUE_STATUS = ("triton_grpc_error", "true")


class GrpcTransport:
    """Sends calls to one server, from any thread, or if `asynchronous` from one event loop."""

    def __init__(self, address: Address, *, asynchronous: bool) -> None:
        self._address = address
        library = grpc.aio if asynchronous else grpc
        if address.secure:
            credentials = grpc.ssl_channel_credentials(root_certificates=address.tls_roots())
            self._channel = library.secure_channel(address.authority, credentials, _OPTIONS)
        else:
            self._channel = library.insecure_channel(address.authority, _OPTIONS)

    async def ask(self, question: GrpcQuestion, deadline: Deadline) -> bytes:
        """The answer's message. Raises what a status tells."""
        method = self._channel.unary_unary(f"/{SERVICE}/{question.method}")
        try:
            call = method(question.message, **self._options(deadline, self._address.headers))
            return bytes(await call if inspect.isawaitable(call) else call)
        except grpc.RpcError as fault:
            raise _told(fault, deadline, self._address) from fault

    async def stream(self, question: GrpcQuestion, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The messages as they come. Raises what a status tells."""
        method = self._channel.stream_stream(f"/{SERVICE}/{question.method}")
        call = method(iter([question.message]), **self._options(deadline, (*self._address.headers, _TRUE_STATUS)))
        try:
            async for message in call if isinstance(call, AsyncIterable) else _each(call):
                yield message
        except grpc.RpcError as fault:
            raise _told(fault, deadline, self._address) from fault
        finally:
            call.cancel()

    async def close(self) -> None:
        closing = self._channel.close()
        if inspect.isawaitable(closing):
            await closing

    def _options(self, deadline: Deadline, metadata: Headers) -> dict[str, Any]:
        compression = _COMPRESSION[self._address.compression]
        return {"timeout": deadline.left_s(), "metadata": metadata, "compression": compression}


async def _each(messages: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for message in messages:
        yield message


def _told(fault: Any, deadline: Deadline, address: Address) -> DragomanError:
    """What a status means to the caller."""
    code, details = fault.code().name, fault.details() or ""
    if code == "DEADLINE_EXCEEDED" and details.lower() == "deadline exceeded":  # the library's words, not a server's
        return deadline.over()
    metadata = {key: value for key, value in fault.trailing_metadata() or () if isinstance(value, str)}
    return faults.of_code(code, details, metadata, address.place)
