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
    """`metadata` is as handlers see it: without what is gRPC's own and without binary values. `encoding` is that of
    packed messages, "" where none are. `refused` is why there will be no call; `health` marks a health check."""

    handler: Handler | None
    metadata: Mapping[str, str]
    timeout_s: float | None
    encoding: str
    refused: GrpcError | None
    health: bool = False


def parse_call_headers(head: Http2Headers, handlers: Mapping[str, Handler]) -> CallHeaders:
    """The call that a request is for."""
    fields = dict(head.fields)
    handler, refused = handlers.get(head.path), None
    if head.fault is not None:
        refused = GrpcError("RESOURCE_EXHAUSTED" if head.fault.status == 431 else "INTERNAL", head.fault.message)
    elif head.method != "POST":
        refused = GrpcError("UNIMPLEMENTED", f"expected the method POST, got {head.method[:32]}")
    elif handler is None:
        refused = GrpcError("UNIMPLEMENTED", f"there is no method {head.path[:256]}")
    encoding = fields.get("grpc-encoding", "identity")
    if encoding not in ENCODINGS:
        # gRPC: tells what it accepts.
        told = f"the encoding '{encoding[:64]}' is not supported; expected one of {', '.join(ENCODINGS)}"
        refused = refused or GrpcError("UNIMPLEMENTED", told, (("grpc-accept-encoding", ",".join(ENCODINGS)),))
    timeout_s = None
    if "grpc-timeout" in fields:
        timeout_s = _timeout_s(fields["grpc-timeout"])
        if timeout_s is None:
            refused = refused or GrpcError("INTERNAL", f"malformed grpc-timeout {fields['grpc-timeout'][:32]!r}")
    metadata = {name: value for name, value in fields.items() if _is_metadata(name)}
    health = handler is not None and handler.health
    return CallHeaders(handler, metadata, timeout_s, "" if encoding == "identity" else encoding, refused, health)


def _is_metadata(name: str) -> bool:
    return not (name in _NOT_METADATA or name.startswith("grpc-") or name.endswith("-bin"))


def _timeout_s(text: str) -> float | None:
    """The specification's TimeoutValue and TimeoutUnit; None where it is neither."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]
