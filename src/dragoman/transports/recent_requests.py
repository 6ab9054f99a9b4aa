"""The last requests of a server with their times, found by their ids."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from dragoman.core.metrics import Family
from dragoman.core.record_calls import FindRequests
from dragoman.protocols.wire import replace_surrogates
from dragoman.system.call_times import CallTimes
from dragoman.system.request_context import values
from dragoman.transports.observation import CONTEXT, EXCHANGE, Begun, Exchange, RequestLog, find_exchange

_MAX_PATH: Final = 1024


class RecentRequests:
    """A request log that keeps the last `size` requests in memory; with size 0 it keeps none.

    is_partial: whether other processes keep requests of the same server.
    """

    def __init__(self, size: int, *, is_partial: bool = False) -> None:
        self.size = size
        self.is_partial = is_partial
        self._requests: deque[Begun] = deque(maxlen=size)
        self.add: Callable[[Begun], None] = self._requests.append

    def record(self, exchange: Exchange) -> None:
        self.add([exchange])

    def families(self) -> Iterable[Family]:
        return ()

    def close(self) -> None:
        """Keep what there is."""

    def find(self, query: FindRequests) -> list[dict[str, Any]]:
        """Return the last requests, newest first. Clients may use an id several times."""
        wanted = query.request_id
        newest = (begun for begun in reversed(self._requests) if not wanted or _ids(begun)[0] == wanted)
        return [_describe(begun) for begun in islice(newest, query.count)]


class RequestLogs:
    """Several request logs as one."""

    def __init__(self, logs: Iterable[RequestLog]) -> None:
        self._logs = [*logs]

    def add(self, begun: Begun) -> None:
        for each in self._logs:
            each.add(begun)

    def record(self, exchange: Exchange) -> None:
        for each in self._logs:
            each.record(exchange)

    def families(self) -> Iterable[Family]:
        return [family for each in self._logs for family in each.families()]

    def close(self) -> None:
        for each in self._logs:
            each.close()


def _ids(begun: Begun) -> tuple[str, ...]:
    exchange: Exchange | None = begun[EXCHANGE]
    return values(begun[CONTEXT] if exchange is None else exchange.context) or ("",)


def _describe(begun: Begun) -> dict[str, Any]:
    """Return the fields of a request for JSON. Times are in milliseconds, None if unknown."""
    exchange = begun[EXCHANGE]
    if exchange is None:  # it was answered at once, and its list is that of the access log, which must not change
        exchange = find_exchange(begun[:-3])
        exchange.status, exchange.sent, exchange.ended_s = begun[-3:]
    assert isinstance(exchange, Exchange)
    identity = _ids(begun)
    started = time.time() - time.monotonic() + exchange.started_s
    return {
        "id": identity[0],
        "trace_id": identity[1] if len(identity) > 1 else "",
        "time": datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "protocol": exchange.protocol,
        "method": exchange.method,
        "path": replace_surrogates(exchange.path[:_MAX_PATH]),
        "model": replace_surrogates(exchange.model),
        "version": replace_surrogates(exchange.version),
        "status": exchange.status,
        "received_bytes": exchange.received,
        "sent_bytes": exchange.sent,
        **_phases(exchange),
        "calls": [*_calls(exchange)],
    }


def _phases(exchange: Exchange) -> dict[str, Any]:
    """Return how long the parts of a request took; the parts up to the response add up to the whole."""
    started_s, ended_s = exchange.started_s, exchange.ended_s
    engine_s, responded_s = exchange.engine_s, exchange.responded_s
    is_answered = bool(engine_s and responded_s)
    first_s = exchange.first_chunk_s
    return {
        "parse_ms": _milliseconds(engine_s - started_s) if engine_s else None,
        "queue_ms": _milliseconds(exchange.queue_s) if is_answered else None,
        "compute_ms": _milliseconds(max(responded_s - engine_s - exchange.queue_s, 0.0)) if is_answered else None,
        "format_ms": _milliseconds(ended_s - responded_s) if is_answered else None,
        "total_ms": _milliseconds(ended_s - started_s),
        "first_chunk_ms": _milliseconds(first_s - started_s) if first_s else None,
        "batch": _batch(exchange),
    }


def _batch(times: CallTimes) -> dict[str, Any] | None:
    if times.batch is None:
        return None
    reason, calls, rows = times.batch
    return {"reason": reason, "calls": calls, "rows": rows}


def _calls(times: CallTimes, depth: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the calls of other models that a model has made, those of a graph's nodes for example."""
    for call in times.nested:
        yield {
            "model": call.model,
            "version": call.version,
            "depth": depth,
            "queue_ms": _milliseconds(call.queue_s),
            "total_ms": _milliseconds(call.ended_s - call.started_s) if call.ended_s else None,
            "batch": _batch(call),
        }
        yield from _calls(call, depth + 1)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
