"""Parse the headers of a gRPC call; format its status as trailers."""

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from dragoman.core.callers import ANYONE, Caller
from dragoman.formats.grpc_status import CODES
from dragoman.formats.http2.fields import Field, encode_fields
from dragoman.protocols.wire import Headers
from dragoman.system.request_context import client_request_id
from dragoman.transports.counters import Statuses, TransportCounters
from dragoman.transports.grpc.handlers import GrpcError, Handler
from dragoman.transports.http2.request import Http2Headers, merge_fields

_RESPONSE_HEADERS: Final[tuple[Field, ...]] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
RESPONSE_HEADERS: Final = encode_fields(_RESPONSE_HEADERS)
OK: Final = encode_fields([(b"grpc-status", b"0")])

# Percent-encoding of the gRPC specification: printable ASCII except the percent sign is unchanged.
_PLAIN: Final = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "%")


def ok(metadata: Headers) -> bytes:
    """Return the trailers of a response with metadata."""
    return encode_fields([(b"grpc-status", b"0"), *(_metadata(name, value) for name, value in metadata)])


def trailers(error: GrpcError) -> bytes:
    """Return the trailers of a response that ends with an error."""
    return encode_fields(_fields(error))


def trailers_only(error: GrpcError) -> bytes:
    """Return the headers of a response that is only an error."""
    return encode_fields((*_RESPONSE_HEADERS, *_fields(error)))


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


ENCODINGS: Final = ("identity", "gzip", "deflate")

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NOT_METADATA: Final = frozenset(("te", "content-type", "content-length"))


class CallHeaders(msgspec.Struct, frozen=True):
    """Headers of a call.
    `metadata`: without the fields of gRPC itself and without binary values.
    `encoding`: of compressed messages, or "".
    `error`: why the call is rejected, or None.
    `health`: it is a health check.
    `request_id`: the client's, or "".
    `protocol`: its name in metrics and logs, "none" for an unknown method.
    `statuses`: ended calls of the protocol by status.
    `caller`: who has sent it.
    """

    handler: Handler | None
    metadata: Mapping[str, str]
    timeout_s: float | None
    encoding: str
    error: GrpcError | None
    health: bool
    request_id: str
    protocol: str
    path: str
    statuses: Statuses
    caller: Caller = ANYONE


def parse_call_headers(
    headers: Http2Headers, handlers: Mapping[str, Handler], counters: TransportCounters
) -> CallHeaders:
    """Return the headers of the call that a request begins."""
    fields = merge_fields(headers.fields)
    handler, error = handlers.get(headers.path), None
    if headers.error is not None:
        error = GrpcError("RESOURCE_EXHAUSTED" if headers.error.status == 431 else "INTERNAL", headers.error.message)
    elif headers.method != "POST":
        error = GrpcError("UNIMPLEMENTED", f"expected the method POST, got {headers.method[:32]}")
    elif handler is None:
        error = GrpcError("UNIMPLEMENTED", f"there is no method {headers.path[:256]}")
    encoding = fields.get("grpc-encoding", "identity")
    if encoding not in ENCODINGS:
        text = f"the encoding '{encoding[:64]}' is not supported; expected one of {', '.join(ENCODINGS)}"
        error = error or GrpcError("UNIMPLEMENTED", text, (("grpc-accept-encoding", ",".join(ENCODINGS)),))
    timeout_s = None
    if "grpc-timeout" in fields:
        timeout_s = _timeout_s(fields["grpc-timeout"])
        if timeout_s is None:
            error = error or GrpcError("INTERNAL", f"malformed grpc-timeout {fields['grpc-timeout'][:32]!r}")
    metadata = {name: value for name, value in fields.items() if _is_metadata(name)}
    health = handler is not None and handler.health
    encoding = "" if encoding == "identity" else encoding
    protocol = "none" if handler is None else handler.protocol or headers.path.split("/")[1]
    statuses, request_id = counters.statuses(protocol, CODES, is_health=health), client_request_id(fields)
    return CallHeaders(
        handler, metadata, timeout_s, encoding, error, health, request_id, protocol, headers.path, statuses
    )


def _is_metadata(name: str) -> bool:
    return not (name in _NOT_METADATA or name.startswith("grpc-") or name.endswith("-bin"))


def _timeout_s(text: str) -> float | None:
    """Parse TimeoutValue and TimeoutUnit of the gRPC specification; return None if the text is invalid."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]
