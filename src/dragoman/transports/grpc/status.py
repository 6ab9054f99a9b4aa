"""Headers and trailers of gRPC responses, encoded for HTTP/2."""

from base64 import b64encode
from typing import Final
from urllib.parse import quote

from dragoman.protocols.wire import Headers
from dragoman.transports.grpc.handlers import GrpcError
from dragoman.transports.http2.fields import Field, encoded

CODES: Final = {
    "OK": 0,
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}

_HEAD: Final[tuple[Field, ...]] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
HEAD: Final = encoded(_HEAD)
OK: Final = encoded([(b"grpc-status", b"0")])

# Percent-encoding of the gRPC specification: printable ASCII except the percent sign is unchanged.
_PLAIN: Final = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "%")


def ok(metadata: Headers) -> bytes:
    """Return the trailers of a response with metadata."""
    return encoded([(b"grpc-status", b"0"), *(_metadata(name, value) for name, value in metadata)])


def trailers(error: GrpcError) -> bytes:
    """Return the trailers of a response that ends with an error."""
    return encoded(_fields(error))


def trailers_only(error: GrpcError) -> bytes:
    """Return the headers of a response that is only an error."""
    return encoded((*_HEAD, *_fields(error)))


def _fields(error: GrpcError) -> list[Field]:
    found = [(b"grpc-status", b"%d" % CODES[error.status])]
    if error.message:
        found.append((b"grpc-message", quote(error.message, safe=_PLAIN).strip().encode("ascii")))
    return found + [_metadata(name, value) for name, value in error.metadata]


def _metadata(name: str, value: str | bytes) -> Field:
    """Return a field of metadata; binary metadata (`-bin`) is sent as base64."""
    if name.endswith("-bin"):
        data = value if isinstance(value, bytes) else value.encode()
        return name.encode(), b64encode(data).rstrip(b"=")
    return name.encode(), value.encode("ascii", "replace") if isinstance(value, str) else value
