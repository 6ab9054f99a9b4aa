"""Record store: values that protocols keep between requests, bounded in number, bytes and age."""

import time
from collections import OrderedDict
from collections.abc import Callable

from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord

# Counted for each record in addition to its value.
_RECORD_BYTES = 512
MAX_BYTES = 64 << 20
MAX_AGE_S = 3600.0  # since the last use


class RecordStore:
    """Keeps records by owner and id. The least recently used ones are dropped to stay within the limits."""

    def __init__(self, max_records: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_records, self._clock = max_records, clock
        self._records: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()  # oldest use first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def answer(self, call: SaveRecord | ReadRecord | DeleteRecord) -> bytes | bool | None:
        """Return the answer to a call."""
        key = (call.owner, call.id)
        self._drop_old()
        if isinstance(call, DeleteRecord):
            return self._remove(key) is not None
        value = call.value if isinstance(call, SaveRecord) else self._remove(key)
        if value is not None:
            self._add(key, value)
        return None if isinstance(call, SaveRecord) else value

    def _add(self, key: tuple[str, str], value: bytes) -> None:
        self._remove(key)
        self._records[key] = self._clock(), value
        self.bytes += len(value) + _RECORD_BYTES
        while len(self._records) > self._max_records or self.bytes > MAX_BYTES:
            self._remove(next(iter(self._records)))

    def _remove(self, key: tuple[str, str]) -> bytes | None:
        record = self._records.pop(key, None)
        if record is None:
            return None
        self.bytes -= len(record[1]) + _RECORD_BYTES
        return record[1]

    def _drop_old(self) -> None:
        oldest_s = self._clock() - MAX_AGE_S
        while self._records and next(iter(self._records.values()))[0] < oldest_s:
            self._remove(next(iter(self._records)))
