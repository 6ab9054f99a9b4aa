"""gRPC transport over one grpcio channel, blocking or asyncio."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

try:
    import grpc
except ModuleNotFoundError as missing:
    text = "a client for a grpc:// URL needs the package 'grpcio': pip install 'dragoman[grpc]'"
    raise ImportError(text) from missing

from dragoman.client import errors
from dragoman.client.address import Address, Headers
from dragoman.client.messages import Deadline, RpcRequest
from dragoman.core.errors import DragomanError
from dragoman.formats.oip_messages import SERVICE

_COMPRESSION = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # Reconnect as soon as our own retries need it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
)

# Triton extension: report an error as the status of the stream instead of as text in a message.
_TRUE_STATUS = ("triton_grpc_error", "true")


class GrpcTransport:
    """Transport to one server: thread-safe, or for one event loop if `asynchronous`."""

    def __init__(self, address: Address, *, asynchronous: bool) -> None:
        self._address = address
        library = grpc.aio if asynchronous else grpc
        if address.uses_tls:
            credentials = grpc.ssl_channel_credentials(root_certificates=address.tls_roots())
            self._channel = library.secure_channel(address.authority, credentials, _OPTIONS)
        else:
            self._channel = library.insecure_channel(address.authority, _OPTIONS)

    async def send(self, request: RpcRequest, deadline: Deadline) -> bytes:
        """Return the message of the response. Raises the error of its status."""
        method = self._channel.unary_unary(f"/{SERVICE}/{request.method}")
        try:
            call = method(request.message, **self._options(deadline, self._address.headers))
            return bytes(await call if inspect.isawaitable(call) else call)
        except grpc.RpcError as error:
            raise _error_of(error, deadline, self._address) from error

    async def stream(self, request: RpcRequest, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """Yield the messages as they arrive. Raises the error of the final status."""
        method = self._channel.stream_stream(f"/{SERVICE}/{request.method}")
        call = method(iter([request.message]), **self._options(deadline, (*self._address.headers, _TRUE_STATUS)))
        try:
            async for message in call if isinstance(call, AsyncIterable) else _iterate(call):
                yield message
        except grpc.RpcError as error:
            raise _error_of(error, deadline, self._address) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        closing = self._channel.close()
        if inspect.isawaitable(closing):
            await closing

    def _options(self, deadline: Deadline, metadata: Headers) -> dict[str, Any]:
        compression = _COMPRESSION[self._address.compression]
        return {"timeout": deadline.left_s(), "metadata": metadata, "compression": compression}


async def _iterate(messages: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for message in messages:
        yield message


def _error_of(error: Any, deadline: Deadline, address: Address) -> DragomanError:
    """Convert an error of grpcio."""
    code, details = error.code().name, error.details() or ""
    if code == "DEADLINE_EXCEEDED" and details.lower() == "deadline exceeded":  # written by grpcio, not by the server
        return deadline.expired()
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    return errors.error_of_code(code, details, metadata, address.name)
