"""A vector function computed by a UM-Bridge server, or by several servers with the same model."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from dragoman.client.errors import ServerUnreachable
from dragoman.client.http_sync import connect_transport, run_blocking
from dragoman.client.messages import Address, Deadline, RestRequest
from dragoman.core.documents import parse_json
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotReady,
    NotSupported,
)
from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors
from dragoman.formats import fast_json
from dragoman.formats.policy import Buffer, Policy
from dragoman.system.trace_context import trace_headers
from dragoman_simulators.umbridge.responses import format_vector, parse_output

T = TypeVar("T")

_ABILITIES: Mapping[str, Ability] = {
    "Evaluate": "evaluate",
    "Gradient": "gradient",
    "ApplyJacobian": "apply_jacobian",
    "ApplyHessian": "apply_hessian",
}
_ERRORS: Mapping[str, type[DragomanError]] = {
    "InvalidInput": InvalidInput,
    "UnsupportedFeature": NotSupported,
    "InvalidOutput": InvalidOutput,
    "NotReady": NotReady,
    "Overloaded": NotReady,
    "DeadlineExceeded": DeadlineExceeded,
}
# Statuses with which a proxy reports a server that is down or busy.
_UNAVAILABLE = frozenset({502, 503})
_POLICY = Policy(nonfinite="literal")  # NaN and Infinity, as servers in Python parse them
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
_INFO_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 5.0
_CACHED_SIZES = 256


class RemoteServer:
    """One server: the number of its calls, and how long it is not used after a failure."""

    def __init__(self, address: Address) -> None:
        self.url = address.name + address.base
        self.in_flight = 0
        self.is_being_checked = False
        self.is_silent = False  # /Info timed out, as it does while a server computes for other clients
        self.last_response_s = time.monotonic()
        self.backoff_until_s = 0.0
        self._backoff_s = 0.0
        self._address = address
        self._transport = connect_transport(address)

    @property
    def has_failed(self) -> bool:
        """True if the server has failed and must be checked."""
        return self._backoff_s > 0

    def send(self, method: str, path: str, body: Sequence[Buffer], deadline: Deadline) -> tuple[int, bytes]:
        """Return the status and the body of the response. Raises ServerUnreachable and DeadlineExceeded."""
        headers = (*self._address.headers, *trace_headers().items())
        request = RestRequest(method, self._address.base + path, headers, body)
        response = run_blocking(self._transport.send(request, deadline))
        return response.status, bytes(response.body)

    def back_off(self) -> None:
        """Stop using the server after a failure, for twice as long each time."""
        self._backoff_s = min(max(_MIN_BACKOFF_S, 2 * self._backoff_s), _MAX_BACKOFF_S)
        self.backoff_until_s = time.monotonic() + self._backoff_s

    def mark_recovered(self) -> None:
        self._backoff_s = self.backoff_until_s = 0.0
        self.is_silent = False
        self.last_response_s = time.monotonic()

    def close(self) -> None:
        run_blocking(self._transport.close())


class RemoteServers:
    """The servers of a model. A call goes to the least busy one, and to another if that fails."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.servers = [RemoteServer(address) for address in addresses]
        self._lock = threading.Lock()

    def call(self, send: Callable[[RemoteServer], T]) -> T:
        """Return the result of `send` for the first server that responds. Raises NotReady if none does."""
        self._check_failed()
        tried: list[RemoteServer] = []
        last_error: Exception | None = None
        for _ in range(max(2, len(self.servers))):  # a single server is tried twice: its connection may be stale
            with self._choose(tried) as server:
                tried.append(server)
                try:
                    if server.has_failed:
                        _check(server)
                    result = send(server)
                except (ServerUnreachable, NotReady) as error:
                    server.back_off()
                    last_error = error
                else:
                    server.mark_recovered()
                    return result
        raise NotReady(f"no server of {', '.join(s.url for s in self.servers)} answers: {last_error}") from last_error

    @contextmanager
    def _choose(self, tried: Sequence[RemoteServer]) -> Iterator[RemoteServer]:
        """Choose the server of the next call and count the call."""
        with self._lock:
            now_s = time.monotonic()
            server = min(
                self.servers,
                key=lambda s: (s in tried, s.has_failed, max(0.0, s.backoff_until_s - now_s), s.in_flight),
            )
            server.in_flight += 1
            # The next call takes another of equally busy servers.
            self.servers.remove(server)
            self.servers.append(server)
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def _check_failed(self) -> None:
        """Check failed servers in the background once they may be used again."""
        if not any(server.has_failed for server in self.servers):
            return
        with self._lock:
            now_s = time.monotonic()
            if all(server.has_failed for server in self.servers):
                return  # the call itself checks one
            due = [s for s in self.servers if s.has_failed and s.backoff_until_s <= now_s and not s.is_being_checked]
            for server in due:
                server.is_being_checked = True
        _check_in_background(due)

    def unavailable(self, interval_s: float) -> str:
        """Return why no server responds, "" if one does. Returns at once.

        Starts a background check of each server that has been idle for `interval_s` seconds; 0 disables it.
        """
        now_s = time.monotonic()
        with self._lock:
            due = [s for s in self.servers if interval_s and self._is_due(s, now_s, interval_s)]
            for server in due:
                server.is_being_checked = True
            down = [s.url for s in self.servers if s.has_failed or s.is_silent]
        _check_in_background(due)
        return f"no server of {', '.join(down)} answers" if len(down) == len(self.servers) else ""

    @staticmethod
    def _is_due(server: RemoteServer, now_s: float, interval_s: float) -> bool:
        idle = not server.in_flight and not server.is_being_checked
        return idle and now_s >= server.backoff_until_s and now_s - server.last_response_s >= interval_s

    def close(self) -> None:
        for server in self.servers:
            server.close()


def _check_in_background(servers: Sequence[RemoteServer]) -> None:
    for server in servers:
        threading.Thread(target=_check_and_record, args=(server,), name="umbridge-check", daemon=True).start()


def _check_and_record(server: RemoteServer) -> None:
    try:
        _check(server)
    except DeadlineExceeded:
        server.is_silent = True
        server.last_response_s = time.monotonic()
        if server.has_failed:
            server.back_off()
    except DragomanError:
        server.back_off()
    else:
        server.mark_recovered()
    finally:
        server.is_being_checked = False


def _check(server: RemoteServer) -> None:
    """Raise NotReady unless a server answers /Info."""
    status, body = server.send("GET", "/Info", (), Deadline.after(_INFO_TIMEOUT_S))
    if status != 200:
        raise NotReady(f"{server.url} answers {status}: {body[:200]!r}")


class RemoteFunction(VectorFunction):
    """The model `model` ("" for the only one) of the UM-Bridge servers at some addresses.

    Methods raise the errors of the server, NotReady if none responds, and InvalidOutput for an invalid response.

    Parameters
    ----------
    config : sent with every call; the config of a call overrides it.
    timeout_s : limit for one call; 0 for none.
    check_s : interval of the health checks of idle servers in `unavailable`; 0 disables them.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        model: str = "",
        config: Config | None = None,
        timeout_s: float = 0.0,
        check_s: float = _CHECK_INTERVAL_S,
    ) -> None:
        self.servers = RemoteServers(addresses)
        self._model = model
        self._config = dict(config or {})
        self._timeout_s = timeout_s
        self._check_s = check_s
        self._sources: Mapping[Ability, str] = {}
        self._sizes: OrderedDict[tuple[str, str], list[int]] = OrderedDict()

    def connect(self) -> None:
        """Read the abilities of the model. Raises ModelFailed if it is missing, NotReady if no server responds."""
        try:
            info = self._json("/Info", None, _INFO_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise NotReady(f"/Info is not answered within {_INFO_TIMEOUT_S:g} s") from error
        version = info.get("protocolVersion")
        if isinstance(version, bool) or version != 1:
            raise ModelFailed(f"/Info: expected the number 1.0 as protocolVersion, got {version!r:.40}")
        self._model = self._choose_model(info.get("models"))
        support = self._json("/ModelInfo", {"name": self._model}).get("support")
        if not isinstance(support, dict):
            raise InvalidOutput(f"/ModelInfo: expected an object as support, got {support!r:.200}")
        self._sources = {ability: "remote" for verb, ability in _ABILITIES.items() if support.get(verb) is True}

    def _choose_model(self, models: Any) -> str:
        """Return the model to call, of those that the server lists. Raises ModelFailed if it is missing."""
        if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
            raise ModelFailed(f"/Info: expected a list of names as models, got {models!r:.200}")
        if self._model in models:
            return self._model
        if self._model:
            raise ModelFailed(f"the UM-Bridge server has no model '{self._model}': expected one of {models}")
        if len(models) != 1:
            raise ModelFailed(
                f"the UM-Bridge server has {len(models) or 'no'} models; expected `model` to name one of {models}"
            )
        return str(models[0])

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self._read_sizes("InputSizes", "inputSizes", config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self._read_sizes("OutputSizes", "outputSizes", config)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return tuple(self._call("Evaluate", config, inputs, several=True))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._call("Gradient", config, inputs, outWrt=output, inWrt=input, sens=sens)[0]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._call("ApplyJacobian", config, inputs, outWrt=output, inWrt=input, vec=vec)[0]

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        ports: dict[str, Any] = {"outWrt": output, "inWrt1": input1, "inWrt2": input2}
        return self._call("ApplyHessian", config, inputs, **ports, sens=sens, vec=vec)[0]

    def unavailable(self) -> str:
        return self.servers.unavailable(self._check_s)

    def close(self) -> None:
        self.servers.close()

    def _call(
        self, verb: str, config: Config, inputs: Vectors, *, several: bool = False, **fields: Any
    ) -> list[Vector]:
        body = {
            "name": self._model,
            **{k: format_vector(v, k, _POLICY) if isinstance(v, np.ndarray) else v for k, v in fields.items()},
            "input": [format_vector(v, f"input[{i}]", _POLICY) for i, v in enumerate(inputs)],
            "config": self._config | dict(config),
        }
        text = fast_json.dumps(body)
        return parse_output(self._send(f"/{verb}", text), several=several)

    def _read_sizes(self, verb: str, key: str, config: Config) -> list[int]:
        cache_key = (verb, config_key(config))
        if cache_key not in self._sizes:
            sizes = self._json(f"/{verb}", {"name": self._model, "config": self._config | dict(config)}).get(key)
            if not isinstance(sizes, list) or not all(map(_is_size, sizes)):
                raise InvalidOutput(f"/{verb}: expected a list of integers from 0 as {key}, got {sizes!r:.200}")
            self._sizes[cache_key] = [int(n) for n in sizes]
            if len(self._sizes) > _CACHED_SIZES:
                self._sizes.popitem(last=False)
        return self._sizes[cache_key]

    def _json(self, path: str, body: Mapping[str, Any] | None, timeout_s: float = 0.0) -> Mapping[str, Any]:
        text = None if body is None else fast_json.dumps(body)
        text = self._send(path, text, timeout_s)
        try:
            value = parse_json(text)
        except ValueError as error:
            raise InvalidOutput(f"{path}: expected JSON, got {text[:200]!r}") from error
        if not isinstance(value, dict):
            raise InvalidOutput(f"{path}: expected a JSON object, got {text[:200]!r}")
        return value

    def _send(self, path: str, body: bytes | None, timeout_s: float = 0.0) -> bytes:
        """Return the body of the response; without a body, send a GET. `timeout_s` overrides that of all calls."""
        deadline = Deadline.after(timeout_s or self._timeout_s)

        def send(server: RemoteServer) -> bytes:
            method, body_parts = ("GET", ()) if body is None else ("POST", (body,))
            status, text = server.send(method, path, body_parts, deadline)
            if status != 200:
                raise _response_error(f"{server.url}{path}", status, text)
            return text

        return self.servers.call(send)


def _is_size(value: Any) -> bool:
    """Return whether a JSON value is a non-negative integer, also as 2.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and (isinstance(value, int) or value.is_integer())


def _response_error(url: str, status: int, text: bytes) -> DragomanError:
    """Return the error of a response, in the format of UM-Bridge or in any other."""
    try:
        value = parse_json(text)["error"]
        kind, message = str(value["type"]), str(value["message"])
    except (ValueError, TypeError, KeyError):
        kind, message = "", text[:200].decode(errors="replace").replace("\n", " ").strip()
    error = NotReady if status in _UNAVAILABLE and not kind else _ERRORS.get(kind, ModelFailed)
    return error(f"{url} answers {status}{f' {kind}' if kind else ''}: {message}")
