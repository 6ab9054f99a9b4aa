"""Counters of all transports of a server: requests by protocol and status, connections, bytes, codec times."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from dragoman.core.calls import Response
from dragoman.core.metrics import SECONDS, Family, Histogram, Sample
from dragoman.protocols.wire import EngineCall

# Small requests take a few microseconds to parse. Of this many, one is measured, and its time counts for all.
SAMPLED = 64
_CODEC_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, *SECONDS)
_STAGES = ("parse", "format")


Statuses = defaultdict[Any, int]  # HTTP statuses or names of gRPC's


class TransportCounters:
    """Plain numbers, which the thread of the event loop counts.

    received, sent: bytes.
    accepted: connections.
    rejected: requests and connections beyond a limit, by reason.
    unmatched: responses to requests that no protocol has an endpoint for, by status.
    """

    def __init__(self) -> None:
        self.received = self.sent = self.accepted = 0
        self.rejected: Counter[str] = Counter()
        self.open_connections: list[Callable[[], int]] = []
        # Storing in a Counter takes 1 us, as it calls a method of Python; in a defaultdict 0.05 us.
        self._statuses: defaultdict[str, Statuses] = defaultdict(lambda: defaultdict(int))
        self._codec: dict[tuple[str, str], Histogram] = {}
        self.unmatched = self.statuses("none")

    def statuses(self, protocol: str) -> Statuses:
        """Return the responses of a protocol by status."""
        return self._statuses[protocol]

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
        responses = [
            Sample("dragoman_requests_total", {"protocol": protocol, "status": str(status)}, count)
            for protocol, statuses in self._statuses.items()
            for status, count in sorted(statuses.items(), key=lambda item: str(item[0]))  # of HTTP or gRPC
        ]
        yield Family("dragoman_requests_total", "counter", "Responses by protocol and status.", tuple(responses))
        for stage in _STAGES:
            name = f"dragoman_{stage}_seconds"
            samples = [
                sample
                for (protocol, of), histogram in self._codec.items()
                for sample in (histogram.samples(name, {"protocol": protocol}) if of == stage else ())
            ]
            noun = "requests" if stage == "parse" else "responses"
            yield Family(name, "histogram", f"Seconds to {stage} {noun}, estimated from a sample.", tuple(samples))
        rejected = [Sample("dragoman_rejected_total", {"reason": r}, n) for r, n in sorted(self.rejected.items())]
        yield Family("dragoman_rejected_total", "counter", "Requests beyond a limit.", tuple(rejected))
        yield _single("dragoman_received_bytes_total", "counter", "Bytes received from clients.", self.received)
        yield _single("dragoman_sent_bytes_total", "counter", "Bytes sent to clients.", self.sent)
        yield _single("dragoman_connections_total", "counter", "Accepted connections.", self.accepted)
        is_open = sum(count() for count in self.open_connections)
        yield _single("dragoman_open_connections", "gauge", "Open connections.", is_open)


def _single(name: str, kind: Any, help_text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    return Family(name, kind, help_text, (Sample(name, labels or {}, value),))
