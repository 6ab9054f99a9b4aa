"""Arguments and requests of commands that talk to a running server."""

import argparse
import http.client
import json
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dragoman.core.documents import parse_json
from dragoman.core.errors import (
    CallerError,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    ServerError,
    Unauthorized,
)
from dragoman.core.options import suggestion
from dragoman.core.worker_status import HIDDEN_REASON

DEFAULT_URL = "http://127.0.0.1:8080"
_NOT_HTTP = "the response is not HTTP/1.1"
_MAX_NAMES = 5
# What a client of HTTP/2 sends first, with an empty SETTINGS frame; a server answers with a frame of that type.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_SETTINGS = 4
STATUS_PATH = "/v2/repository/status"
# What needs the role `read` where it is served.
_READ_PATHS = (STATUS_PATH, "/metrics")
KEY_VARIABLES = ("DRAGOMAN_API_KEY", "DRAGOMAN_CONTROL_TOKEN")
# What a command adds to a refusal: without a key, how to give one; without the role `read`, what reads.
_KEY_HINT = f"; give it with --key-file or ${KEY_VARIABLES[0]}"
_ROLE_HINT = "; commands read what a model takes before they call it: the key needs the role 'read' as well"
# What the errors of TLS say if the certificate of the server is not signed by an authority that is known here.
_UNTRUSTED = ("self-signed", "self signed", "unable to get local issuer", "unable to get issuer")
KEY_HELP = f"""\
A server with API keys needs one: in the file that --key-file names, or in the variable {KEY_VARIABLES[0]}, which other
users of the machine cannot see.
"""


def add_connection_arguments(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Declare the arguments of a connection, and --json."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON, for programs")
    add_credentials(add)
    add("--timeout-s", type=float, default=timeout_s, metavar="S", help="how long to wait (default: %(default)g)")


def add_credentials(add: Callable[..., Any]) -> None:
    """Declare the file of the key, and the certificate authority.

    No command takes the key itself: other users of the machine can see the arguments of programs.
    """
    add("--key-file", metavar="FILE", default="", help=f"file with an API key or token (default: ${KEY_VARIABLES[0]})")
    add("--ca", metavar="FILE", default="", help="certificate authority of the server (default: those of the system)")


@dataclass(frozen=True)
class ServerConnection:
    """A server as the arguments of a command describe it."""

    url: str
    key: str
    ca: str
    timeout_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace, url: str) -> "ServerConnection":
        """Return the connection. Raises InvalidInput for an invalid URL, key, timeout or file of certificates."""
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(url)
        try:
            is_valid = parts.scheme in ("http", "https", "grpc", "grpcs") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is not a number
            is_valid = False
        if not is_valid:
            raise InvalidInput(f"expected a URL such as http://HOST:PORT, got {url.removeprefix('http://')!r}")
        if not 0 < arguments.timeout_s <= threading.TIMEOUT_MAX:
            raise InvalidInput(f"--timeout-s: expected seconds above 0, got {arguments.timeout_s:g}")
        if arguments.ca:
            _check_certificates(arguments.ca)
        return cls(url, _find_key(arguments.key_file), arguments.ca, arguments.timeout_s)

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Yield a `dragoman.Client`; errors say what to do about them."""
        from dragoman.client.client import Client
        from dragoman.client.errors import ServerUnreachable

        options: Any = {"token": self.key, "tls_ca": self.ca or None, "timeout_s": self.timeout_s, "retries": 0}
        try:
            opened = Client(self.url, **options)
        except ImportError as error:  # the package of gRPC
            raise NotSupported(str(error)) from None
        try:
            with opened as client:
                yield client
        except (Unauthorized, Forbidden) as error:
            raise type(error)(f"{self.url}: {error.message}{self._key_hint(error.message)}") from None
        except ServerUnreachable as error:  # no other OSError: that may be one of standard output
            raise self._unreachable(error) from None
        except ServerError as error:
            if not error.message.startswith(_NOT_HTTP):
                raise
            grpc = re.sub("^http", "grpc", self.url)
            raise NotReady(f"{self.url}: {_NOT_HTTP}{self.grpc_hint(f'expected {grpc}')}") from None

    @contextmanager
    def suggesting(self, model: str) -> Iterator[None]:
        """Add the name that may be meant to the error for an unknown model."""
        try:
            yield
        except ModelNotFound as error:
            names_models = "; there are " in error.message  # those that answer: the text APIs name them
            raise ModelNotFound(error.message + ("" if names_models else self.suggestion(model))) from None

    @contextmanager
    def explaining(self, model: str) -> Iterator[None]:
        """Add the reason that the status of a model has to the error for one that does not respond or is not ready."""
        try:
            yield
        except (DeadlineExceeded, NotReady) as error:
            reason = self._status_reason(model)
            says_so = reason in error.message or (reason == HIDDEN_REASON and isinstance(error, NotReady))
            raise type(error)(error.message + ("" if says_so else f"; its status: {reason}")) from None

    def _status_reason(self, model: str) -> str:
        """Return why workers or versions of a model are not ready, as far as the server shows it; else ""."""
        if not self.url.startswith("http"):
            return ""
        with suppress(DragomanError, ValueError, LookupError, TypeError, AttributeError):
            with self.open(STATUS_PATH) as response:
                models = [each for each in parse_json(response.read())["models"] if each["name"] == model]
            return "; ".join(dict.fromkeys(str(each["reason"]) for each in models if each["reason"]))
        return ""

    def suggestion(self, model: str) -> str:
        """Return `; did you mean ...` for a model that the server does not have, or its models; "" if it has it."""
        names = self._model_names()
        return "" if model in names else _nearest(model, names)

    def check_names(self, names: Sequence[str], known: Sequence[str]) -> None:
        """Raise ModelNotFound for the first name that is not known."""
        for name in names:
            if name not in known:
                raise ModelNotFound(f"{self.url} has no model '{name}'{_nearest(name, known)}")

    def _model_names(self) -> list[str]:
        """Return the names of the models and adapters, as far as the server lists them."""
        names: list[str] = []
        with suppress(DragomanError), self.client() as client:
            try:
                names += client.models()
            except (ModelNotFound, NotSupported):
                names += [entry.name for entry in client.index()]
        if self.url.startswith("http"):
            with suppress(DragomanError, ValueError, LookupError, TypeError), self.open("/v1/models") as response:
                names += [str(each["id"]) for each in parse_json(response.read())["data"]]
        return list(dict.fromkeys(names))

    def grpc_hint(self, expected: str) -> str:
        """Return a question that ends in what is expected if the server speaks HTTP/2, as gRPC does; else ""."""
        parts = urlsplit(self.url)
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        with suppress(OSError), socket.create_connection(address, timeout=min(2.0, self.timeout_s)) as opened:
            connection = opened
            if parts.scheme == "https":
                tls = ssl.create_default_context(cafile=self.ca or None)
                tls.set_alpn_protocols(["h2"])
                connection = tls.wrap_socket(opened, server_hostname=address[0])
            connection.sendall(_HTTP2_PREFACE)
            header = connection.recv(9)
            if len(header) > 3 and header[3] == _HTTP2_SETTINGS:
                return f"; is this a gRPC port? {expected}"
        return ""

    @contextmanager
    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str | None = None,
        data: bytes | None = None,
        content_type: str = "application/json",
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request over HTTP and yield its response, while it may still arrive. Raises the server's error.

        body: sent as JSON. data: sent as it is. method: by default POST with one of them, else GET.

        The key is sent to this server only: redirects and the proxies of the environment are not used.
        """
        if not self.url.startswith("http"):
            raise InvalidInput(f"expected a URL of HTTP, got '{self.url}'")
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        data = data if body is None else json.dumps(body).encode()
        if data is not None:
            headers["content-type"] = content_type
        request = urllib.request.Request(self.url + path, data, headers, method=method)  # noqa: S310 - checked above
        handlers: list[Any] = [urllib.request.ProxyHandler({}), _NoRedirects]
        if self.url.startswith("https"):  # reading the certificates of the system takes some 50 ms
            context = ssl.create_default_context(cafile=self.ca or None)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._status_error(error, path) from None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _status_error(self, error: urllib.error.HTTPError, path: str) -> CallerError:
        if 300 <= error.code < 400:
            location = error.headers.get("location", "")
            return NotReady(f"{self.url} redirects to {location!r}: expected the URL of the server itself")
        kind = ModelNotFound if error.code == 404 else NotReady
        reason = _reason(error)
        if error.code == 403 and path.endswith(_READ_PATHS) and "role 'infer'" in reason:
            # The role that paths need which the server does not have.
            return ModelNotFound(f"{self.url} has no {path}")
        hint = self._key_hint(reason) if error.code in (401, 403) else ""
        return kind(f"{self.url} responds with {error.code}: {reason}{hint}")

    def _key_hint(self, reason: str) -> str:
        return _KEY_HINT if not self.key else _ROLE_HINT if "role 'read'" in reason else ""

    def _unreachable(self, error: Exception) -> NotReady:
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            return NotReady(f"{self.url}: {_NOT_HTTP}{self.grpc_hint('expected the port of HTTP')}")
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "verify_message", "") or getattr(reason, "strerror", "") or str(reason)
        text = re.sub(r"^cannot reach \S+: ", "", text)
        text = f"no response within {self.timeout_s:g} s" if isinstance(reason, TimeoutError) else text
        if self.url.startswith("https") and ("WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text):
            text = "the response is not TLS"
            return NotReady(f"cannot reach {self.url}: {text}; expected {re.sub('^https', 'http', self.url)}?")
        return NotReady(f"cannot reach {self.url}: {text}{self._unreachable_hint(text)}")

    def _unreachable_hint(self, text: str) -> str:
        if "refused" in text:
            return "; is the server running?"
        if any(each in text for each in _UNTRUSTED):
            return "; name the certificate or its authority with --ca FILE"
        is_plain = self.url.startswith("http:")
        return f"; expected {re.sub('^http', 'https', self.url)}?" if is_plain and self._speaks_tls() else ""

    def _speaks_tls(self) -> bool:
        """Say whether the server completes a handshake of TLS, with any certificate."""
        parts = urlsplit(self.url)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            address = (parts.hostname or "", parts.port or 80)
            with socket.create_connection(address, timeout=min(2.0, self.timeout_s)) as opened:
                context.wrap_socket(opened).close()
        except OSError:
            return False
        return True


def _nearest(model: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    some = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    return suggestion(model, names) or f"; expected {some}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Return a redirect as the error that it is."""

    def redirect_request(self, *_: Any) -> None: ...


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message in an error of any protocol."""
    try:
        body = parse_json(error.read())
        message = body.get("error") or body.get("detail") or body.get("message")
        reason = message.get("message") if isinstance(message, dict) else message
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        reason = None
    return reason if isinstance(reason, str) else str(error.reason)


def _check_certificates(file: str) -> None:
    """Raise InvalidInput unless a file has certificates."""
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise InvalidInput(f"--ca: expected certificates (PEM) in '{file}'") from error
    except OSError as error:
        raise InvalidInput(f"--ca: '{file}' cannot be read: {error.strerror}") from error


def _find_key(file: str) -> str:
    """Return the key of a file, else that of the environment, else ""."""
    source = "--key-file" if file else next(filter(os.environ.get, KEY_VARIABLES), "")
    key = _read_key(file) if file else os.environ.get(source, "")
    if not re.fullmatch(r"[!-~]*", key):
        raise InvalidInput(f"{source}: expected a key of ASCII characters without spaces")
    return key


def _read_key(file: str) -> str:
    """Return the only word in a file."""
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise InvalidInput(f"--key-file: '{file}' cannot be read: {reason}") from error
    if not key or len(key.split()) != 1:
        raise InvalidInput(f"--key-file: expected one key in '{file}'")
    return key
