"""Requests, responses and deadlines of the client, independent of transports."""

import math
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from dragoman.core.calls import ClassLabels
from dragoman.core.datatypes import DATATYPES
from dragoman.core.errors import DeadlineExceeded, InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.formats import fast_json
from dragoman.formats.message import InferenceResponse
from dragoman.formats.policy import Buffer

Compression = Literal["gzip", "deflate"] | None
Headers = tuple[tuple[str, str], ...]

_PORTS = {"http": 80, "https": 443, "grpc": 0, "grpcs": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server.

    scheme: http, https, grpc or grpcs. base: prefix of every path. headers: sent with every request, including the
    token.
    """

    scheme: str
    host: str
    port: int
    base: str = ""
    headers: Headers = ()
    compression: Compression = None
    tls_ca: str = ""
    tls_verify: bool = True

    @property
    def is_grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    @property
    def uses_tls(self) -> bool:
        return self.scheme.endswith("s")

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def name(self) -> str:
        """The server as error messages name it."""
        return f"{self.scheme}://{self.authority}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, None without encryption. HTTP/2 is agreed on by ALPN."""
        if not self.uses_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except OSError as error:
            raise self._unreadable(error) from error
        context.set_alpn_protocols(["h2" if self.is_grpc else "http/1.1"])
        if not self.tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _unreadable(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"tls_ca: '{self.tls_ca}' cannot be read as certificates (PEM): {error.strerror or error}")


def address(
    url: str, token: str, headers: Mapping[str, str] | None, compression: Compression, tls_ca: str, tls_verify: bool
) -> Address:
    """Parse a URL. Raises InvalidInput if it is malformed or a setting does not apply to its scheme."""
    parts = urlsplit(url)
    try:
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        port = 0
    if not parts.hostname or not port or parts.query or parts.fragment or parts.username:
        raise InvalidInput(f"url: expected http://host:port, https://, grpc:// or grpcs://, got {url!r}")
    base = parts.path.rstrip("/")
    if base and parts.scheme.startswith("grpc"):
        raise InvalidInput(f"url: expected no path for gRPC, got {url!r}")
    if compression not in (None, "gzip", "deflate"):
        raise InvalidInput(f"compression: expected 'gzip', 'deflate' or None, got {compression!r}")
    return Address(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port,
        base=base,
        headers=_headers(token, headers or {}),
        compression=compression,
        tls_ca=tls_ca,
        tls_verify=tls_verify,
    )


def _headers(token: str, headers: Mapping[str, str]) -> Headers:
    all_headers = {name.lower(): value for name, value in headers.items()}
    if token:
        all_headers["authorization"] = f"Bearer {token}"
    for name, value in all_headers.items():
        if not name or any(c in f"{name}{value}" for c in "\r\n\0") or any(c in name for c in ": "):
            raise InvalidInput(f"header {name!r}: expected a name and a value without line breaks")
    return tuple(all_headers.items())


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """End of the time limit of a call, including retries."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """Return the deadline after a timeout in seconds; None or 0 is no limit."""
        limit_s = timeout_s or math.inf
        return cls(limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float | None:
        """Return the seconds left, None without a limit. Raises DeadlineExceeded if none are left."""
        if math.isinf(self.at_s):
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise self.deadline_error()
        return left

    def allows(self, wait_s: float) -> bool:
        """Return whether time is left after a wait."""
        return time.monotonic() + wait_s < self.at_s

    def deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no response within {self.timeout_s:g} s")


def spec_of_metadata(name: str, datatype: str, shape: Sequence[int], parameters: Mapping[str, Any]) -> TensorSpec:
    """Return an input or output of a model's metadata; the parameters are extensions of this server."""
    return TensorSpec(
        name,
        DATATYPES.get(datatype),
        None if parameters.get("any_rank") is True else tuple(shape),
        content_type=str(parameters.get("content_type", "")),
        columns=_names(parameters.get("columns")),
    )


def labels_of_metadata(outputs: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, ClassLabels]:
    """Return the class names of outputs from their parameters."""
    return {name: ClassLabels("", labels) for name, each in outputs if (labels := _names(each.get("labels")))}


def _names(text: Any) -> tuple[str, ...]:
    """Return the names in a JSON list; () if the parameter of another server is something else."""
    try:
        names = fast_json.loads(text) if isinstance(text, str) else ()
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


@dataclass(frozen=True, slots=True)
class RestRequest:
    """HTTP request; the buffers of the body are sent one after the other."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class RestResponse:
    """HTTP response with header names in lower case and the body decompressed."""

    status: int
    headers: dict[str, str]
    body: Buffer


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """gRPC request: a method of the inference service and one message."""

    method: str
    message: bytes
    metadata: Headers = ()


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[T]):
    """A request and the parser of its response; `read` raises the error that a response reports."""

    request: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class RemoteStream:
    """A request and the parser of its streamed responses.

    `reader` returns a function that takes the next bytes and yields the responses completed by them.
    """

    request: Any
    reader: Callable[[], Callable[[Buffer], Iterator[InferenceResponse]]]
