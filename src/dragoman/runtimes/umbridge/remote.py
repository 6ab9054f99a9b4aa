"""A function of vectors that one UM-Bridge server computes, or several servers with the same model."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import orjson

from dragoman.client.address import Address
from dragoman.client.blocking import run_blocking
from dragoman.client.errors import ServerUnreachable
from dragoman.client.http_sync import connect_transport
from dragoman.client.messages import Deadline, RestRequest
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
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.umbridge_answer import numbers, read_output

T = TypeVar("T")

_ABILITIES: Mapping[str, Ability] = {
    "Evaluate": "evaluate",
    "Gradient": "gradient",
    "ApplyJacobian": "apply_jacobian",
    "ApplyHessian": "apply_hessian",
}
_FAULTS: Mapping[str, type[DragomanError]] = {
    "InvalidInput": InvalidInput,
    "UnsupportedFeature": NotSupported,
    "InvalidOutput": InvalidOutput,
    "NotReady": NotReady,
    "Overloaded": NotReady,
    "DeadlineExceeded": DeadlineExceeded,
}
# Statuses of whoever stands before a server that is not there, or busy.
_AWAY = frozenset({502, 503})
_POLICY = Policy(nonfinite="literal")  # the words that servers in Python read
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0
_CHECK_S = 10.0  # how long an answer to /Info may take
_CHECK_EVERY_S = 5.0  # unless told otherwise
_REMEMBERED = 256


class RemoteServer:
    """One server: its number of calls in progress, and until when it is not used after a failure."""

    def __init__(self, address: Address) -> None:
        self.place = address.name + address.base
        self.in_flight = 0
        self.checked = False  # somebody looks whether it is there again
        self.is_silent = False  # it did not answer /Info in time, as one does that computes for others
        self.heard_s = time.monotonic()
        self.rests_until_s = 0.0
        self._rest_s = 0.0
        self._address = address
        self._transport = connect_transport(address)

    @property
    def failed(self) -> bool:
        """Whether the server has failed and has to be checked."""
        return self._rest_s > 0

    def ask(self, method: str, path: str, body: Sequence[Buffer], deadline: Deadline) -> tuple[int, bytes]:
        """Return the status and the body of the response. Raises ServerUnreachable and DeadlineExceeded."""
        question = RestRequest(method, self._address.base + path, self._address.headers, body)
        answer = run_blocking(self._transport.send(question, deadline))
        return answer.status, bytes(answer.body)

    def rest(self) -> None:
        """Pause the use of the server after a failure, longer each time."""
        self._rest_s = min(max(_FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
        self.rests_until_s = time.monotonic() + self._rest_s

    def recovered(self) -> None:
        self._rest_s = self.rests_until_s = 0.0
        self.is_silent = False
        self.heard_s = time.monotonic()

    def close(self) -> None:
        run_blocking(self._transport.close())


class RemoteServers:
    """The servers of a model. A call goes to the least busy one, and to another if that fails."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._servers = [RemoteServer(address) for address in addresses]
        self._lock = threading.Lock()

    def call(self, ask: Callable[[RemoteServer], T]) -> T:
        """Return the result of `ask` for the first server that responds. Raises NotReady if none does."""
        self._look_for_the_lost()
        tried: list[RemoteServer] = []
        fault: Exception | None = None
        for _ in range(max(2, len(self._servers))):  # a lone one gets a second chance: its connection may be old
            with self._chosen(tried) as server:
                tried.append(server)
                try:
                    if server.failed:
                        _check(server)
                    found = ask(server)
                except (ServerUnreachable, NotReady) as away:
                    server.rest()
                    fault = away
                else:
                    server.recovered()
                    return found
        raise NotReady(f"no server of {', '.join(s.place for s in self._servers)} answers: {fault}") from fault

    @contextmanager
    def _chosen(self, tried: Sequence[RemoteServer]) -> Iterator[RemoteServer]:
        """Choose the server of the next call and count the call."""
        with self._lock:
            now_s = time.monotonic()
            server = min(
                self._servers, key=lambda s: (s in tried, s.failed, max(0.0, s.rests_until_s - now_s), s.in_flight)
            )
            server.in_flight += 1
            # Of equally busy ones the next call takes another.
            self._servers.remove(server)
            self._servers.append(server)
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def _look_for_the_lost(self) -> None:
        """Check failed servers in the background once their pause is over."""
        if not any(server.failed for server in self._servers):
            return
        with self._lock:
            now_s = time.monotonic()
            well = any(not server.failed for server in self._servers)
            rested = [s for s in self._servers if well and s.failed and s.rests_until_s <= now_s and not s.checked]
            for server in rested:
                server.checked = True
        for server in rested:
            threading.Thread(target=_see, args=(server,), name="umbridge-check", daemon=True).start()

    def unavailable(self, every_s: float) -> str:
        """Return why no server responds, "" if one does. Returns at once.

        Starts a background check of each server that has been idle for `every_s` seconds; 0 disables it.
        """
        now_s = time.monotonic()
        with self._lock:
            due = [s for s in self._servers if every_s and self._is_due(s, now_s, every_s)]
            for server in due:
                server.checked = True
            away = [s.place for s in self._servers if s.failed or s.is_silent]
        for server in due:
            threading.Thread(target=_see, args=(server,), name="umbridge-check", daemon=True).start()
        return f"no server of {', '.join(away)} answers" if len(away) == len(self._servers) else ""

    @staticmethod
    def _is_due(server: RemoteServer, now_s: float, every_s: float) -> bool:
        idle = not server.in_flight and not server.checked
        return idle and now_s >= server.rests_until_s and now_s - server.heard_s >= every_s

    def close(self) -> None:
        for server in self._servers:
            server.close()


def _see(server: RemoteServer) -> None:
    """Check whether a failed server is back; if not, its pause gets longer."""
    try:
        _check(server)
    except DeadlineExceeded:
        server.is_silent = True
        server.heard_s = time.monotonic()
        if server.failed:
            server.rest()
    except DragomanError:
        server.rest()
    else:
        server.recovered()
    finally:
        server.checked = False


def _check(server: RemoteServer) -> None:
    """Raise NotReady unless a failed server speaks UM-Bridge again."""
    status, body = server.ask("GET", "/Info", (), Deadline.after(_CHECK_S))
    if status != 200:
        raise NotReady(f"{server.place} answers {status}: {body[:200]!r}")


class RemoteFunction(VectorFunction):
    """The model `model` ("" for the only one) of the UM-Bridge servers at some addresses.

    `config` is sent with every call; the call's own config overrides it. `timeout_s` limits one call, 0 is no limit.
    `check_s`: interval of the health checks of idle servers in `unavailable`, in seconds; 0 disables them.
    Methods raise the errors of the server, NotReady if none responds, and InvalidOutput for an invalid response.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        model: str = "",
        config: Config | None = None,
        timeout_s: float = 0.0,
        check_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._servers = RemoteServers(addresses)
        self._model = model
        self._config = dict(config or {})
        self._timeout_s = timeout_s
        self._check_s = check_s
        self._sources: Mapping[Ability, str] = {}
        self._sizes: OrderedDict[tuple[str, str], list[int]] = OrderedDict()

    def connect(self) -> None:
        """Ask for the model's abilities. Raises ModelFailed if the model is missing, NotReady if no server responds."""
        try:
            info = self._json("/Info", None, _CHECK_S)
        except DeadlineExceeded as error:
            raise NotReady(f"/Info is not answered within {_CHECK_S:g} s") from error
        version = info.get("protocolVersion")
        if isinstance(version, bool) or version != 1:
            raise ModelFailed(f"/Info: expected the number 1.0 as protocolVersion, got {version!r:.40}")
        self._model = self._chosen_model(info.get("models"))
        support = self._json("/ModelInfo", {"name": self._model}).get("support")
        if not isinstance(support, dict):
            raise InvalidOutput(f"/ModelInfo: expected an object as support, got {support!r:.200}")
        self._sources = {ability: "remote" for verb, ability in _ABILITIES.items() if support.get(verb) is True}

    def _chosen_model(self, models: Any) -> str:
        """Return the model to call, of those that the server lists. Raises ModelFailed if it is missing."""
        if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
            raise ModelFailed(f"/Info: expected a list of names as models, got {models!r:.200}")
        if self._model in models:
            return self._model
        if self._model:
            raise ModelFailed(f"the UM-Bridge server has no model '{self._model}'; there are {models}")
        if len(models) != 1:
            raise ModelFailed(
                f"the UM-Bridge server has {len(models) or 'no'} models; expected `model` to name one of {models}"
            )
        return str(models[0])

    # --- what a function of vectors can do -----------------------------------------------------------------------

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self._told_sizes("InputSizes", "inputSizes", config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self._told_sizes("OutputSizes", "outputSizes", config)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return tuple(self._asked("Evaluate", config, inputs, several=True))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._asked("Gradient", config, inputs, outWrt=output, inWrt=input, sens=sens)[0]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._asked("ApplyJacobian", config, inputs, outWrt=output, inWrt=input, vec=vec)[0]

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        where: dict[str, Any] = {"outWrt": output, "inWrt1": input1, "inWrt2": input2}
        return self._asked("ApplyHessian", config, inputs, **where, sens=sens, vec=vec)[0]

    def unavailable(self) -> str:
        return self._servers.unavailable(self._check_s)

    def close(self) -> None:
        self._servers.close()

    # --- asking ----------------------------------------------------------------------------------------------------

    def _asked(
        self, verb: str, config: Config, inputs: Vectors, *, several: bool = False, **fields: Any
    ) -> list[Vector]:
        body = {
            "name": self._model,
            **{k: numbers(v, k, _POLICY) if isinstance(v, np.ndarray) else v for k, v in fields.items()},
            "input": [numbers(v, f"input[{i}]", _POLICY) for i, v in enumerate(inputs)],
            "config": self._config | dict(config),
        }
        text = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return read_output(self._posted(f"/{verb}", text), several=several)

    def _told_sizes(self, verb: str, key: str, config: Config) -> list[int]:
        known = (verb, config_key(config))
        if known not in self._sizes:
            found = self._json(f"/{verb}", {"name": self._model, "config": self._config | dict(config)}).get(key)
            if not isinstance(found, list) or not all(map(_is_size, found)):
                raise InvalidOutput(f"/{verb}: expected a list of integers from 0 as {key}, got {found!r:.200}")
            self._sizes[known] = [int(n) for n in found]
            if len(self._sizes) > _REMEMBERED:
                self._sizes.popitem(last=False)
        return self._sizes[known]

    def _json(self, path: str, body: Mapping[str, Any] | None, timeout_s: float = 0.0) -> Mapping[str, Any]:
        text = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        text = self._posted(path, text, timeout_s)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidOutput(f"{path}: expected JSON, got {text[:200]!r}") from error
        if not isinstance(found, dict):
            raise InvalidOutput(f"{path}: expected a JSON object, got {text[:200]!r}")
        return found

    def _posted(self, path: str, body: bytes | None, timeout_s: float = 0.0) -> bytes:
        """Return the body of the response; without a body, send a GET. `timeout_s` overrides that of all calls."""
        deadline = Deadline.after(timeout_s or self._timeout_s)

        def ask(server: RemoteServer) -> bytes:
            method, sent = ("GET", ()) if body is None else ("POST", (body,))
            status, text = server.ask(method, path, sent, deadline)
            if status != 200:
                raise _fault(f"{server.place}{path}", status, text)
            return text

        return self._servers.call(ask)


def _is_size(value: Any) -> bool:
    """Return whether a JSON value is a non-negative integer, also as 2.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and (isinstance(value, int) or value.is_integer())


def _fault(place: str, status: int, text: bytes) -> DragomanError:
    """Return the error of a response, in UM-Bridge's form or in any other."""
    try:
        value = json.loads(text)["error"]
        kind, message = str(value["type"]), str(value["message"])
    except (ValueError, TypeError, KeyError):
        kind, message = "", text[:200].decode(errors="replace").replace("\n", " ").strip()
    found = NotReady if status in _AWAY and not kind else _FAULTS.get(kind, ModelFailed)
    return found(f"{place} answers {status}{f' {kind}' if kind else ''}: {message}")
