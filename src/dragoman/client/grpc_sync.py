"""gRPC over a channel that blocks."""

from collections.abc import Generator
from typing import Any

import grpc

from dragoman.client import faults
from dragoman.client.address import Address
from dragoman.client.exchange import Deadline, GrpcQuestion
from dragoman.core.errors import DragomanError
from dragoman.payload.oip_messages import SERVICE

_COMPRESSION = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

OPTIONS = (
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
    """Sends questions to one server; may be used by several threads at once."""

    def __init__(self, address: Address) -> None:
        self._address = address
        if address.secure:
            self._channel = grpc.secure_channel(address.authority, credentials(address), OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address.authority, OPTIONS)

    def ask(self, question: GrpcQuestion, deadline: Deadline) -> bytes:
        """The answer's message. Raises what a status tells."""
        method = self._channel.unary_unary(path(question))
        try:
            return bytes(method(question.message, **options(self._address, deadline)))
        except grpc.RpcError as fault:
            raise told(fault, deadline, self._address) from fault

    def stream(self, question: GrpcQuestion, deadline: Deadline) -> Generator[bytes, None, None]:
        """The messages as they come. Raises what a status tells."""
        method = self._channel.stream_stream(path(question))
        call = method(iter([question.message]), **options(self._address, deadline, streams=True))
        try:
            yield from call
        except grpc.RpcError as fault:
            raise told(fault, deadline, self._address) from fault
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()


def credentials(address: Address) -> Any:
    return grpc.ssl_channel_credentials(root_certificates=address.tls_roots())


def path(question: GrpcQuestion) -> str:
    return f"/{SERVICE}/{question.method}"


def options(address: Address, deadline: Deadline, *, streams: bool = False) -> dict[str, Any]:
    return {
        "timeout": deadline.left_s(),
        "metadata": (*address.headers, _TRUE_STATUS) if streams else address.headers,
        "compression": _COMPRESSION[address.compression],
    }


def told(fault: Any, deadline: Deadline, address: Address) -> DragomanError:
    """What a status means to the caller."""
    code, details = fault.code().name, fault.details() or ""
    if code == "DEADLINE_EXCEEDED" and details.lower() == "deadline exceeded":  # the library's words, not a server's
        return deadline.over()
    metadata = {key: value for key, value in fault.trailing_metadata() or () if isinstance(value, str)}
    return faults.of_code(code, details, metadata, address.place)
