"""Parse the headers of a gRPC call."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dragoman.transports.grpc.handlers import GrpcError, Handler
from dragoman.transports.http2.request import Http2Headers

ENCODINGS: Final = ("identity", "gzip", "deflate")

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NOT_METADATA: Final = frozenset(("te", "content-type", "content-length"))


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """Headers of a call. `metadata`: without the fields of gRPC itself and without binary values. `encoding`: of
    compressed messages, or "". `error`: why the call is rejected, or None. `health`: it is a health check."""

    handler: Handler | None
    metadata: Mapping[str, str]
    timeout_s: float | None
    encoding: str
    error: GrpcError | None
    health: bool = False


def parse_call_headers(head: Http2Headers, handlers: Mapping[str, Handler]) -> CallHeaders:
    """Return the headers of the call that a request begins."""
    fields = dict(head.fields)
    handler, error = handlers.get(head.path), None
    if head.error is not None:
        error = GrpcError("RESOURCE_EXHAUSTED" if head.error.status == 431 else "INTERNAL", head.error.message)
    elif head.method != "POST":
        error = GrpcError("UNIMPLEMENTED", f"expected the method POST, got {head.method[:32]}")
    elif handler is None:
        error = GrpcError("UNIMPLEMENTED", f"there is no method {head.path[:256]}")
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
    return CallHeaders(handler, metadata, timeout_s, "" if encoding == "identity" else encoding, error, health)


def _is_metadata(name: str) -> bool:
    return not (name in _NOT_METADATA or name.startswith("grpc-") or name.endswith("-bin"))


def _timeout_s(text: str) -> float | None:
    """Parse TimeoutValue and TimeoutUnit of the gRPC specification; return None if the text is invalid."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]
