"""Record store: values that protocols keep between requests, bounded in number, bytes and age."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from dragoman.core.record_calls import AppendRecord, DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.state_store import StateTable

_Key = tuple[str, str]  # owner and id
# Bytes counted for each value in addition to its own.
_RECORD_BYTES = 512
MAX_BYTES = 64 << 20
MAX_AGE_S = 3600.0  # since the last use


class _Row(msgspec.Struct, omit_defaults=True):
    """A record in the state store. saved_s: when it was saved, in seconds since 1970."""

    value: bytes
    saved_s: float
    parts: Mapping[str, bytes] = {}


class RecordStore:
    """Keeps records by owner and id, in memory and, over restarts, in the rows of a table.

    To stay within the limits, the owner that has most of what is scarce loses its least recently used records, so that
    none can displace those of others.
    """

    def __init__(
        self, max_records: int, clock: Callable[[], float] = time.monotonic, *, table: StateTable | None = None
    ) -> None:
        self._max_records, self._clock = max_records, clock
        self._records: OrderedDict[_Key, tuple[float, SaveRecord]] = OrderedDict()  # least recently used first
        self._parts: dict[_Key, _Key] = {}  # the record that has a part
        self._counts: Counter[str] = Counter()  # records by owner
        self._sizes: Counter[str] = Counter()  # bytes by owner
        self.bytes = 0
        self._table = table
        if table is not None:
            self._restore(table)

    def _restore(self, table: StateTable) -> None:
        """Read the records of the last run. Their age counts from when they were saved: no use of them is written."""
        now_s, rows = time.time(), table.read(_Row)
        for (owner, record_id), row in sorted(rows.items(), key=lambda each: each[1].saved_s):
            if now_s - row.saved_s > MAX_AGE_S:
                table.delete(record_id, owner)
            else:
                self._add((owner, record_id), SaveRecord(owner, record_id, row.value, row.parts))

    def __len__(self) -> int:
        return len(self._records)

    def has(self, call: DeleteRecord) -> bool:
        """Return whether the record exists that a call deletes."""
        self._drop_old()
        return (call.owner, call.id) in self._records

    def answer(self, call: SaveRecord | AppendRecord | ReadRecord | DeleteRecord) -> bytes | bool | None:
        """Return the answer to a call."""
        key = (call.owner, call.id)
        self._drop_old()
        match call:
            case SaveRecord():
                self._add(key, call)
                if self._table is not None and key in self._records:
                    self._table.put(call.id, _Row(call.value, time.time(), call.parts), call.owner)
                return None
            case AppendRecord():
                return self._append(key, call)
            case DeleteRecord():
                return self._drop(key) is not None
        whole = self._parts.get(key) if call.is_part else key
        record = None if whole is None else self._remove(whole)
        if whole is None or record is None:
            return None
        self._add(whole, record)  # as the last one used
        return record.parts[call.id] if call.is_part else record.value

    def _append(self, key: _Key, call: AppendRecord) -> bool:
        if call.also is not None:
            self.answer(call.also)
        record = self._remove(key)
        if record is None:
            return False
        self.answer(msgspec.structs.replace(record, value=record.value + call.value))
        return True

    def _add(self, key: _Key, record: SaveRecord) -> None:
        self._remove(key)
        self._records[key] = self._clock(), record
        self._parts |= {(key[0], part): key for part in record.parts}
        self._count(key[0], 1, _size(record))
        while len(self._records) > self._max_records:
            self._drop_oldest(self._counts)
        while self.bytes > MAX_BYTES:
            self._drop_oldest(self._sizes)

    def _drop(self, key: _Key) -> SaveRecord | None:
        """Remove a record, also after a restart."""
        if self._table is not None and key in self._records:
            self._table.delete(key[1], key[0])
        return self._remove(key)

    def _remove(self, key: _Key) -> SaveRecord | None:
        _, record = self._records.pop(key, (0.0, None))
        if record is None:
            return None
        for part in record.parts:
            if self._parts.get((key[0], part)) == key:  # else a newer record has it
                del self._parts[key[0], part]
        self._count(key[0], -1, -_size(record))
        return record

    def _count(self, owner: str, records: int, size: int) -> None:
        self._counts[owner] += records
        self._sizes[owner] += size
        self.bytes += size
        if not self._counts[owner]:
            del self._counts[owner], self._sizes[owner]

    def _drop_oldest(self, amounts: Counter[str]) -> None:
        """Remove the least recently used record of the owner with the largest amount."""
        ((owner, _),) = amounts.most_common(1)
        self._drop(next(key for key in self._records if key[0] == owner))

    def _drop_old(self) -> None:
        oldest_s = self._clock() - MAX_AGE_S
        while self._records and next(iter(self._records.values()))[0] < oldest_s:
            self._drop(next(iter(self._records)))


def _size(record: SaveRecord) -> int:
    return sum(len(value) + _RECORD_BYTES for value in (record.value, *record.parts.values()))
