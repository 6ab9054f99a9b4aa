"""The well-behaved client: health checks and a small inference every 10 ms; it records the longest wait of each.

It runs in its own process, so that the attacker does not share its interpreter lock.

usage: python -m benchmarks.attack.client HTTP_PORT GRPC_PORT [TOKEN]

GRPC_PORT is 0 for a server without gRPC. TOKEN is the credential of its inferences.

For each input line it prints one line of JSON: the measurements since the last one.
"""

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import grpc

from dragoman.formats.grpc_messages import ServerLiveRequest, ServerLiveResponse

_EVERY_S = 0.01
_LIMIT_S = 60.0  # a probe that takes longer has failed
_BODY = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[4],"data":[1,2,3,4]}]}'
_EXPECTED = [2, 4, 6, 8]


@dataclass(slots=True)
class Waits:
    """Measurements of one kind of probe since the last report."""

    probes: int = 0
    longest_ms: float = 0.0
    errors: int = 0
    error: str = ""  # the first one


class Probe(threading.Thread):
    """Repeat one request in a thread. The three threads are idle between their requests."""

    def __init__(self, name: str, request: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._request = request
        self._lock = threading.Lock()
        self._waits = Waits()
        self._began_s: float | None = None

    def run(self) -> None:
        while True:
            self._began_s = time.monotonic()
            message = ""
            try:
                self._request()
            except (OSError, http.client.HTTPException, grpc.RpcError, ValueError, KeyError) as error:
                message = f"{type(error).__name__}: {error}".partition("\n")[0]
            took_ms = (time.monotonic() - self._began_s) * 1000
            self._began_s = None
            with self._lock:
                self._waits.probes += 1
                self._waits.longest_ms = max(self._waits.longest_ms, took_ms)
                self._waits.errors += bool(message)
                self._waits.error = self._waits.error or message
            time.sleep(_EVERY_S)

    def report(self) -> Waits:
        """Return the measurements since the last report, including the wait of a request in flight."""
        with self._lock:
            found, self._waits = self._waits, Waits()
        began_s = self._began_s
        if began_s is not None:
            found.longest_ms = max(found.longest_ms, (time.monotonic() - began_s) * 1000)
        return found


def main() -> None:
    http_port, grpc_port = map(int, sys.argv[1:3])
    headers = {"authorization": f"Bearer {sys.argv[3]}"} if len(sys.argv) > 3 else {}
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=_LIMIT_S)
    channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
    live = channel.unary_unary(
        "/inference.GRPCInferenceService/ServerLive",
        request_serializer=ServerLiveRequest.SerializeToString,
        response_deserializer=ServerLiveResponse.FromString,
    )

    def grpc_health() -> None:
        if not live(ServerLiveRequest(), timeout=_LIMIT_S).live:
            raise ValueError("not live")

    probes = {
        "health_http": Probe("health_http", lambda: _health(http_port)),
        "health_grpc": Probe("health_grpc", grpc_health if grpc_port else lambda: None),
        "infer": Probe("infer", lambda: _infer(connection, headers)),
    }
    for probe in probes.values():
        probe.start()
    for _ in sys.stdin:
        print(json.dumps({name: asdict(probe.report()) for name, probe in probes.items()}), flush=True)


def _health(port: int) -> None:
    """Send a health check over a new connection, like a kubelet."""
    with _closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)) as connection:
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}")


@contextmanager
def _closing(connection: http.client.HTTPConnection) -> Iterator[http.client.HTTPConnection]:
    try:
        yield connection
    finally:
        connection.close()


def _infer(connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> None:
    try:
        connection.request("POST", "/v2/models/doubled/infer", _BODY, headers)
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException):
        connection.close()  # the next one opens it again
        raise
    if response.status != 200:
        raise ValueError(f"status {response.status}: {text[:200]!r}")
    if json.loads(text)["outputs"][0]["data"] != _EXPECTED:
        raise ValueError(f"wrong response: {text[:200]!r}")


if __name__ == "__main__":
    main()
