"""The last requests of a server with their times, found by their ids."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from dragoman.core.metrics import Family
from dragoman.core.record_calls import FindRequests
from dragoman.protocols.wire import OWN_PAGES, replace_surrogates
from dragoman.system.call_times import CallTimes
from dragoman.system.request_context import values
from dragoman.transports.observation import RequestLog, RequestRecord

_MAX_PATH: Final = 1024


class RecentRequests:
    """A request log that keeps the last `size` requests in memory; with size 0 it keeps none.

    is_partial: whether other processes keep requests of the same server.
    """

    def __init__(self, size: int, *, is_partial: bool = False) -> None:
        self.size = size
        self.is_partial = is_partial
        self._requests: deque[RequestRecord] = deque(maxlen=size)

    def record(self, record: RequestRecord) -> None:
        if record.protocol != OWN_PAGES:
            self._requests.append(record)

    def families(self) -> Iterable[Family]:
        return ()

    def close(self) -> None:
        """Keep what there is."""

    def find(self, query: FindRequests) -> list[dict[str, Any]]:
        """Return the last requests, newest first. Clients may use an id several times."""
        wanted = query.request_id
        newest = (record for record in reversed(self._requests) if not wanted or _ids(record)[0] == wanted)
        return [_describe(record) for record in islice(newest, query.count)]


class RequestLogs:
    """Several request logs as one."""

    def __init__(self, logs: Iterable[RequestLog]) -> None:
        self._logs = [*logs]

    def record(self, record: RequestRecord) -> None:
        for log in self._logs:
            log.record(record)

    def families(self) -> Iterable[Family]:
        return [family for log in self._logs for family in log.families()]

    def close(self) -> None:
        for log in self._logs:
            log.close()


def _ids(record: RequestRecord) -> tuple[str, ...]:
    return values(record.context) or ("",)


def _describe(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a request for JSON. Times are in milliseconds, None if unknown."""
    identity = _ids(record)
    started = time.time() - time.monotonic() + record.started_s
    return {
        "id": identity[0],
        "trace_id": identity[1] if len(identity) > 1 else "",
        "time": datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "protocol": record.protocol,
        "method": record.method,
        "path": replace_surrogates(record.path[:_MAX_PATH]),
        "model": replace_surrogates(record.model),
        "version": replace_surrogates(record.version),
        "status": record.status,
        "received_bytes": record.received,
        "sent_bytes": record.sent,
        **_phases(record),
        "calls": [*_calls(record.call)],
    }


def _phases(record: RequestRecord) -> dict[str, Any]:
    """Return how long the parts of a request took, which add up; the last one includes the way back from a worker."""
    call, is_accepted = record.call, bool(record.call.arrived_s and record.call.ended_s)
    first_s, total_s = call.first_chunk_s, record.ended_s - record.started_s
    before_s = call.arrived_s - record.started_s
    return {
        "parse_ms": _milliseconds(before_s) if is_accepted else None,
        "queue_ms": _milliseconds(call.queue_s) if is_accepted else None,
        "compute_ms": _milliseconds(call.compute_s) if is_accepted else None,
        "format_ms": _milliseconds(total_s - before_s - call.queue_s - call.compute_s) if is_accepted else None,
        "total_ms": _milliseconds(total_s),
        "first_chunk_ms": _milliseconds(first_s - record.started_s) if first_s else None,
        "batch": _batch(call),
    }


def _batch(times: CallTimes) -> dict[str, Any] | None:
    if times.batch is None:
        return None
    reason, calls, rows = times.batch
    return {"reason": reason, "calls": calls, "rows": rows}


def _calls(times: CallTimes, depth: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the calls of other models that a model has made, those of a graph's nodes for example."""
    for call in times.nested or ():
        yield {
            "model": call.served_by[0],
            "version": call.served_by[1],
            "depth": depth,
            "queue_ms": _milliseconds(call.queue_s),
            "compute_ms": _milliseconds(call.compute_s),
            "total_ms": _milliseconds(call.ended_s - call.arrived_s) if call.arrived_s and call.ended_s else None,
            "batch": _batch(call),
        }
        yield from _calls(call, depth + 1)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
