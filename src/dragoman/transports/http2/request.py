"""Headers of a request, checked against the rules of HTTP/2 (RFC 9113, section 8)."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from dragoman.formats.http2.fields import Field
from dragoman.formats.http2.frames import PROTOCOL_ERROR, Http2StreamError
from dragoman.protocols.wire import HttpError
from dragoman.transports.clients import is_host

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
# No control characters that could split a field, and no white space around it (8.2.1).
_VALUE = re.compile(rb"(?:[^\x00\r\n\t ](?:[^\x00\r\n]*[^\x00\r\n\t ])?)?")
_BLANKS = b"\t "
_PATH = re.compile(r"[^\x00-\x20#\x7f]*")
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))


class Http2Headers(msgspec.Struct, frozen=True):
    """Headers of a request. `path` is as it was sent, `length` the announced length of the body or -1.

    `error` is the HTTP error to respond with; `fields` may then be incomplete. `note` belongs to the service and is
    shared by requests with equal headers.
    """

    method: str
    scheme: str
    authority: str
    path: str
    fields: tuple[tuple[str, str], ...]
    length: int = -1
    is_grpc: bool = False
    error: HttpError | None = None
    note: list[Any] = msgspec.field(default_factory=list)


def parse_headers(fields: Iterable[Field], error: HttpError | None = None) -> Http2Headers:
    """Return the headers with these fields; `error` is one that is known already.

    Values of gRPC's metadata lose blanks around them, as its specification allows; in any other request they are
    malformed (RFC 9113, 8.2.1). Raises Http2StreamError PROTOCOL_ERROR if the request is malformed.
    """
    pseudo: dict[bytes, str] = {}
    plain: list[tuple[str, str]] = []
    cookies: list[str] = []
    padded = b""
    for name, value in fields:
        if name[:1] == b":":
            if plain or cookies or name in pseudo or name not in _PSEUDO:
                raise _malformed_request(f"the field {_quote(name)} is unknown, duplicate or after other fields")
            pseudo[name] = value.decode("latin-1")
            continue
        if value[:1] in _BLANKS or value[-1:] in _BLANKS:
            stripped = value.strip(_BLANKS)
            padded, value = padded if stripped == value else name, stripped
        _check(name, value)
        if name == b"cookie":
            cookies.append(value.decode("latin-1"))  # 8.2.3: may be split into several fields
        else:
            plain.append((name.decode("latin-1"), value.decode("latin-1")))
    if cookies:
        plain.append(("cookie", "; ".join(cookies)))
    kind = next((value for name, value in plain if name == "content-type"), "")
    is_grpc = kind == "application/grpc" or kind.startswith(("application/grpc+", "application/grpc;"))
    if padded and not is_grpc:
        raise _malformed_request(f"the value of field {_quote(padded)} begins or ends with a blank")
    method, scheme, path = (pseudo.get(name, "") for name in (b":method", b":scheme", b":path"))
    if error is not None:  # fields may be missing
        return Http2Headers(method, scheme, "", path, tuple(plain), is_grpc=is_grpc, error=error)
    authority = _check_pseudo_fields(method, scheme, path, pseudo.get(b":authority", ""), plain)
    error = _target_error(path, authority)
    return Http2Headers(method, scheme, authority, path, tuple(plain), _length(plain), is_grpc, error)


def _check_pseudo_fields(method: str, scheme: str, path: str, authority: str, plain: list[tuple[str, str]]) -> str:
    """Check the pseudo-fields and return the authority, which the field Host may name as well."""
    if not all(_NAME.fullmatch(text.lower().encode("latin-1")) for text in (method, scheme)):
        raise _malformed_request("expected a :method, a :scheme and a :path")
    if not (path.startswith("/") or (path == "*" and method == "OPTIONS")):
        raise _malformed_request(f"expected a :path that begins with a slash, got {path[:64]!r}")
    hosts = {value for name, value in plain if name == "host"}
    authority = authority or next(iter(hosts), "")
    if len(hosts) > 1 or (hosts and hosts != {authority}):
        raise _malformed_request("the fields :authority and host name different hosts")
    return authority


def _target_error(path: str, authority: str) -> HttpError | None:
    """Return the error of a path or an authority that is not valid in a URI."""
    if _PATH.fullmatch(path) is None:
        return HttpError(400, f":path: expected no blanks, control characters or '#', got {path[:64]!r}")
    if not is_host(authority):
        return HttpError(400, f":authority: expected a host and perhaps a port, got {authority[:64]!r}")
    return None


def _length(plain: list[tuple[str, str]]) -> int:
    lengths = {value for name, value in plain if name == "content-length"}
    if not lengths:
        return -1
    value = lengths.pop()
    if lengths or not value.isascii() or not value.isdecimal() or len(value) > 18:
        raise _malformed_request(f"expected one content-length, a number of bytes, got {value[:32]!r}")
    return int(value)


def merge_fields(fields: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Join fields of one name to a list (RFC 9110, 5.3): two credentials are none, for calls of gRPC too."""
    headers: dict[str, str] = {}
    for name, value in fields:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def check_trailers(fields: Iterable[Field]) -> None:
    """Raise Http2StreamError PROTOCOL_ERROR if trailers are malformed."""
    for name, value in fields:
        _check(name, value)


def _check(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise _malformed_request(f"the name of field {_quote(name)} is not allowed")
    if not _VALUE.fullmatch(value):
        raise _malformed_request(f"the value of field {_quote(name)} is not allowed")
    if name in _CONNECTION_FIELDS or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed_request(f"the field {_quote(name)} is not for HTTP/2")


def _quote(name: bytes) -> str:
    return repr(name[:64].decode("latin-1"))


def _malformed_request(message: str) -> Http2StreamError:
    return Http2StreamError(PROTOCOL_ERROR, message)
