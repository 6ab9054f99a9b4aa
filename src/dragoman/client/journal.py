"""Journal of `Client.map`: an append-only file of finished points, from which an interrupted run continues."""

import base64
import fcntl
import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dragoman.core.datatypes import DATATYPES
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.formats.message import InferenceRequest, InferenceResponse
from dragoman.formats.policy import Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw

_FORMAT = 1
_POLICY = Policy(max_bytes_elements=1 << 31)


class Journal:
    """Responses of one run by point, in a file with one line per finished point. Thread-safe.

    Each line is a CRC-32 and a JSON object; the first describes the run. Tensors are stored as raw bytes, so every
    element is the one that the server sent. A truncated end of the file, as after a crash, is removed. Equal points
    differ by their number of occurrence: a model with random results is computed for each of them.

    run: describes the call; a journal of another run is rejected. fsync: `store` waits until the record is on disk.
    Raises InvalidInput if the file is the journal of another run or of a running process, or not a journal.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], fsync: bool) -> None:
        self._path = path
        self._fsync = fsync
        self._append_lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._stored: dict[str, tuple[int, int]] = {}
        self._seen: Counter[bytes] = Counter()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._is_open = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._synced = self._end = self._read({"journal": _FORMAT, **run})
        except BlockingIOError as error:
            self.close()
            raise InvalidInput(f"journal '{path}' is in use by another process") from error
        except BaseException:
            self.close()
            raise

    def key(self, request: InferenceRequest) -> str:
        """Return the key of a point: a hash of its exact inputs, and how many equal points came before it."""
        digest = _digest(request)
        with self._append_lock:
            self._seen[digest] += 1
            return f"{digest.hex()}.{self._seen[digest]}"

    def find(self, key: str) -> InferenceResponse | None:
        """Return the stored response of a point. Raises InvalidInput if it can no longer be read."""
        if key not in self._stored:
            return None
        start, size = self._stored[key]
        record = _parse(os.pread(self._file, size, start))
        if record is None or record.get("key") != key:
            raise InvalidInput(f"journal '{self._path}' was changed while it was in use")
        return _response(record)

    def store(self, key: str, response: InferenceResponse) -> None:
        """Append a finished point; after `close` nothing is written. Raises OSError, for example ENOSPC."""
        line = _line({"key": key, **_fields(response)})
        with self._append_lock:
            if not self._is_open:
                return
            try:
                self._write(line)
            except OSError:
                os.ftruncate(self._file, self._end)  # no record may follow an incomplete one
                raise
            self._stored[key] = self._end, len(line)
            self._end += len(line)
            end = self._end
        if self._fsync:
            self._sync(end)

    def _sync(self, size: int) -> None:
        """Wait until the first `size` bytes are on disk; concurrent callers share one fsync."""
        with self._sync_lock:
            if self._is_open and self._synced < size:
                end = self._end
                os.fsync(self._file)
                self._synced = end

    def close(self) -> None:
        with self._append_lock, self._sync_lock:
            if self._is_open:
                self._is_open = False
                os.close(self._file)

    # --- file ----------------------------------------------------------------------------------------------------

    def _read(self, run: Mapping[str, Any]) -> int:
        """Read the records and return the size of the valid part; write the header of an empty file."""
        header = _line(run)
        text = os.pread(self._file, len(header), 0)
        if header.startswith(text) and text != header:
            os.ftruncate(self._file, 0)
            self._write(header)
            os.fsync(self._file)
            return len(header)
        end, invalid = 0, None
        for start, line in self._lines():
            record = _parse(line)
            if record is None:
                if start == 0:
                    raise InvalidInput(f"'{self._path}' is not a journal of Client.map: expected a new or empty file")
                invalid = invalid or start
                continue
            if invalid is not None:
                raise InvalidInput(f"journal '{self._path}' is damaged at byte {invalid}, before other records")
            if start == 0:
                self._check_run(record, run)
            else:
                self._stored[record["key"]] = start, len(line)
            end = start + len(line)
        os.ftruncate(self._file, end)
        return end

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                yield start, line
                start += len(line)

    def _check_run(self, found: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        for field, expected in run.items():
            if _json(found.get(field)) != _json(expected):
                raise InvalidInput(
                    f"journal '{self._path}' belongs to another run: {field}: expected {_json(expected)}, "
                    f"got {_json(found.get(field))}; use a new file"
                )

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def _digest(request: InferenceRequest) -> bytes:
    """Hash names, datatypes, shapes, parameters and bytes of the inputs, and the requested outputs."""
    raws = [raw_from_tensor(i.tensor) for i in request.inputs]
    inputs = [
        [i.name, i.datatype, list(i.shape), dict(i.parameters), len(raw)]
        for i, raw in zip(request.inputs, raws, strict=True)
    ]
    outputs = [[o.name, dict(o.parameters)] for o in request.outputs]
    digest = blake2b(_json([inputs, outputs, dict(request.parameters)]).encode(), digest_size=20)
    for raw in raws:
        digest.update(raw)
    return digest.digest()


def _fields(response: InferenceResponse) -> dict[str, Any]:
    outputs = [_tensor_fields(o.name, o.tensor) for o in response.outputs]
    parameters = dict(response.parameters)
    return {
        "model": response.model_name,
        "version": response.model_version,
        "parameters": parameters,
        "outputs": outputs,
    }


def _tensor_fields(name: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": tensor.datatype.name,
        "shape": list(tensor.shape),
        "parameters": dict(tensor.parameters),
        "data": base64.b64encode(raw_from_tensor(tensor)).decode(),
    }


def _response(record: Mapping[str, Any]) -> InferenceResponse:
    return InferenceResponse.of(
        {o["name"]: _tensor(o) for o in record["outputs"]},
        model_name=record["model"],
        model_version=record["version"],
        parameters=record["parameters"],
    )


def _tensor(fields: Mapping[str, Any]) -> Tensor:
    raw, parameters = base64.b64decode(fields["data"]), fields["parameters"]
    datatype = DATATYPES[fields["datatype"]]
    return tensor_from_raw(f"output '{fields['name']}'", datatype, fields["shape"], raw, _POLICY, parameters)


# --- lines -------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # floats as the shortest text that is read as the same float


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is incomplete or damaged."""
    checksum, _, text = line.partition(b" ")
    if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    record = parse_json(text)
    return record if isinstance(record, dict) else None
