"""Counters of all transports of a server: requests by protocol and status, connections, bytes, codec times."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from msgspec import structs

from dragoman.access.key_calls import KeyCalls
from dragoman.core.calls import Response
from dragoman.core.metrics import SECONDS, Family, Histogram, Sample
from dragoman.protocols.wire import EngineCall

# Small requests take a few microseconds to parse. Of this many, one is measured, and its time counts for all.
SAMPLED = 64
_CODEC_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, *SECONDS)
_STAGES = ("parse", "format")


Statuses = defaultdict[Any, int]  # HTTP statuses or names of gRPC's
# Statuses that the transport itself may give to a request of any protocol.
HTTP_STATUSES: Final = frozenset((200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503))
_REASONS: Final = ("bodies_memory", "connections", "grpc_calls", "loop_delay")


class TransportCounters:
    """Plain numbers, which the thread of the event loop counts.

    received, sent: bytes.
    accepted: connections.
    rejected: requests and connections beyond a limit, by reason.
    unmatched: responses to requests that no protocol has an endpoint for, by status.
    key_calls: calls of models by key.
    """

    def __init__(self) -> None:
        self.key_calls = KeyCalls()
        self.received = self.sent = self.accepted = 0
        self.rejected: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self.open_connections: list[Callable[[], int]] = []
        # Storing in a Counter takes 1 us, as it calls a method of Python; in a defaultdict 0.05 us.
        self._statuses: dict[tuple[str, bool], Statuses] = {}
        self._codec: dict[tuple[str, str], Histogram] = {}
        self.unmatched = self.statuses("none", (*HTTP_STATUSES, "INTERNAL", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"))

    def statuses(self, protocol: str, expected: Iterable[Any] = (), *, is_health: bool = False) -> Statuses:
        """Return the responses of a protocol by status, or those to its health checks.

        The expected ones are exported as 0 before the first one of them.
        """
        found = self._statuses.get((protocol, is_health))
        if found is None:
            found = self._statuses[protocol, is_health] = defaultdict(int, dict.fromkeys(expected, 0))
        return found

    def observe(self, protocol: str, stage: str, started_s: float, weight: int) -> None:
        """Count the time since `started_s` as that of a stage of `weight` requests."""
        histogram = self._codec.setdefault((protocol, stage), Histogram(_CODEC_SECONDS))
        histogram.observe(time.monotonic() - started_s, weight)

    def measure(self, protocol: str, stage: str, function: Callable[[Any], Any], weight: int) -> Callable[[Any], Any]:
        """Return a function that does the same and adds its time to a histogram, as the time of `weight` requests."""

        def call_with_timer(argument: Any) -> Any:
            started_s = time.monotonic()
            result = function(argument)
            self.observe(protocol, stage, started_s, weight)
            return result

        return call_with_timer

    def measure_endpoint(self, protocol: str, endpoint: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return an endpoint whose times to parse a request and to format its response are counted."""
        parse = self.measure(protocol, "parse", endpoint, 1)

        def endpoint_with_timer(request: Any) -> Any:
            result = parse(request)
            return self.measure_format(protocol, result, 1) if type(result) is EngineCall else result

        return endpoint_with_timer

    def measure_format(self, protocol: str, call: EngineCall[Any, Any], weight: int) -> EngineCall[Any, Any]:
        """Return a call whose time to format the response is counted."""
        format_response: Callable[[Response[Any]], Any] = call.format_response
        return structs.replace(call, format_response=self.measure(protocol, "format", format_response, weight))

    def families(self) -> Iterable[Family]:
        """Return all counters as metrics."""
        for name, help_text, are_health in (
            ("dragoman_requests_total", "Responses by protocol and status, without health checks.", False),
            ("dragoman_health_requests_total", "Responses to health checks by protocol and status.", True),
        ):
            responses = [
                Sample(name, {"protocol": protocol, "status": str(status)}, count)
                for (protocol, is_health), statuses in self._statuses.items()
                for status, count in sorted(statuses.items(), key=lambda item: str(item[0]))  # of HTTP or gRPC
                if is_health is are_health
            ]
            yield Family(name, "counter", help_text, tuple(responses))
        for stage in _STAGES:
            name = f"dragoman_{stage}_seconds"
            distributions = tuple(
                histogram.distribution(name, {"protocol": protocol})
                for (protocol, of), histogram in self._codec.items()
                if of == stage
            )
            help_text = (
                f"Seconds to {stage} {'requests' if stage == 'parse' else 'responses'}, estimated from a sample."
            )
            yield Family(name, "histogram", help_text, distributions=distributions)
        rejected = [Sample("dragoman_rejected_total", {"reason": r}, n) for r, n in sorted(self.rejected.items())]
        yield Family("dragoman_rejected_total", "counter", "Requests beyond a limit.", tuple(rejected))
        yield _single("dragoman_received_bytes_total", "counter", "Bytes received from clients.", self.received)
        yield _single("dragoman_sent_bytes_total", "counter", "Bytes sent to clients.", self.sent)
        yield _single("dragoman_connections_total", "counter", "Accepted connections.", self.accepted)
        is_open = sum(count() for count in self.open_connections)
        yield _single("dragoman_open_connections", "gauge", "Open connections.", is_open)
        yield from self.key_calls.families()


def _single(name: str, kind: Any, help_text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    return Family(name, kind, help_text, (Sample(name, labels or {}, value),))
