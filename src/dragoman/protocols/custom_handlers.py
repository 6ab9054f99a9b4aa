"""Custom handlers of models, which answer paths of their own, and the headers that models set in responses."""

import re
from collections.abc import Mapping
from functools import lru_cache

from dragoman.core.calls import Handle, Handled, Request, Response
from dragoman.core.errors import InvalidOutput
from dragoman.protocols.wire import EngineCall, Headers, HttpRequest, HttpResponse, Policy
from dragoman.system.request_context import HEADER


def handler_call(
    http: HttpRequest, policy: Policy, model: str = "", version: str = "", path: str = ""
) -> EngineCall[Handled, HttpResponse]:
    """Return the call of the custom handler for the path of the request, or for `path`, of a model or of any model."""
    call = Handle(
        method=http.method,
        path=path or http.path,
        query=http.query,
        content=bytes(http.body),
        content_type=http.headers.get("content-type", ""),
    )
    metadata = policy.forwarded_headers(http.headers) if policy.forward_headers else {}
    return EngineCall(Request(call, model, version, metadata=metadata), _format_handled)


def _format_handled(response: Response[Handled]) -> HttpResponse:
    handled = response.answer
    if not 200 <= handled.status <= 599:
        raise InvalidOutput(f"the model returned the status {handled.status}; expected 200 to 599")
    content_type = handled.content_type.replace("\r", "").replace("\n", "")
    headers = (("content-type", content_type),) if content_type else ()
    return HttpResponse(handled.status, (handled.content,), headers + check_headers(handled.metadata))


# --- headers that a model sets -------------------------------------------------------------------------------

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110, 5.1: a token
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")  # no line break, which would start another header
_RESERVED = re.compile(
    r"(connection|keep-alive|te|trailer|upgrade|transfer-encoding|date|server|content-.*|inference-header-.*|vary)",
    re.ASCII,
)
# gRPC: names that end in -bin have binary values, names that begin with grpc- are reserved.
_METADATA_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)", re.ASCII)
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")


def check_headers(metadata: Mapping[str, str]) -> Headers:
    """Return a model's headers with names in lower case, without x-request-id, which the server sends.

    Raises InvalidOutput for one that is invalid or reserved.
    """
    headers = (_check_header(name, value) for name, value in metadata.items())
    return tuple(header for header in headers if header[0] != HEADER)


def check_metadata(metadata: Mapping[str, str]) -> Headers:
    """Return a model's headers as gRPC metadata, whose names and values are more limited."""
    headers = check_headers(metadata)
    for name, value in headers:
        if _METADATA_NAME.fullmatch(name) is None or _METADATA_VALUE.fullmatch(value) is None:
            raise InvalidOutput(f"the model set the header {name[:64]!r}, which is not valid as gRPC metadata")
    return headers


def _check_header(name: str, value: str) -> tuple[str, str]:
    lower = _check_name(name)
    if _VALUE.fullmatch(value) is None:
        raise InvalidOutput(f"the model set the header {name!r} to a value with control characters")
    return lower, value.strip()


@lru_cache(maxsize=256)
def _check_name(name: str) -> str:
    """Return the name in lower case. Raises InvalidOutput if a model may not set it."""
    lower = name.lower()
    if _NAME.fullmatch(lower) is None or _RESERVED.fullmatch(lower) is not None:
        raise InvalidOutput(f"the model set the header {name[:64]!r}, which is not one that a model may set")
    return lower
