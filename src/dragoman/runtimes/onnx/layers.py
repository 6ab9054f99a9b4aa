"""The nodes of an ONNX file as JSON values, without the values of weights.

The file is read in windows, since a mapped file that becomes shorter meanwhile would end the process; weights are
skipped by their lengths, and files beside it are never opened. The file may have changed since it was loaded, so every
length is checked, and nodes, fields, nesting, texts and time have limits: beyond them the result is not complete.
Numbers of fields: onnx.proto.
"""

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

_MAX_NODES: Final = 20_000
_MAX_FIELDS: Final = 1_000_000
_MAX_DEPTH: Final = 8
_MAX_S: Final = 4.0
_MAX_TEXT: Final = 200
_MAX_TEXTS: Final = 4 << 20  # bytes of all texts
_MAX_VALUES: Final = 8  # of an attribute; lists of floats are weights, such as the thresholds of trees
_MAX_TENSORS: Final = 50_000
_WINDOW: Final = 1 << 16
_TYPES: Final = (
    "", "FP32", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BYTES", "BOOL", "FP16", "FP64", "UINT32",
    "UINT64", "COMPLEX64", "COMPLEX128", "BF16", "FP8E4M3FN", "FP8E4M3FNUZ", "FP8E5M2", "FP8E5M2FNUZ", "UINT4", "INT4",
)  # fmt: skip

Field = tuple[int, int | None, int, int]  # number, value of a varint, start and end of the value


class _TooLargeError(Exception):
    """A limit is reached."""


def read_layers(path: Path) -> dict[str, Any]:
    """Return the graph of a file: its nodes in their order, and the datatypes and shapes of tensors that it declares.

    `is_complete` is false if the graph has more nodes, tensors or fields than are read. Raises ValueError for a file
    that is not ONNX.
    """
    with path.open("rb") as file:
        found: dict[str, Any] = {"producer": "", "opsets": {}, "name": "", "nodes": [], "inputs": [], "outputs": []}
        found |= {"tensors": {}, "weights": {}, "is_complete": True}
        reader = _Reader(file)
        try:
            _read_model(reader, found)
        except _TooLargeError:
            found["is_complete"] = False
        if not found["nodes"] and not found["outputs"]:
            raise ValueError("expected an ONNX graph")
        return found


class _Reader:
    """Fields of protobuf messages in a file, by their positions."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, 2)
        self._window, self._begin = b"", 0
        self._left, self._texts_left = _MAX_FIELDS, _MAX_TEXTS
        self._end_s = time.monotonic() + _MAX_S

    def bytes(self, at: int, size: int) -> bytes:
        if not self._begin <= at or at + size > self._begin + len(self._window):
            self._check_time()
            self._file.seek(at)
            self._window, self._begin = self._file.read(max(size, _WINDOW)), at
            if len(self._window) < size:
                raise ValueError("the file is truncated")
        return self._window[at - self._begin : at - self._begin + size]

    def _check_time(self) -> None:
        if time.monotonic() > self._end_s:
            raise _TooLargeError

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for i, byte in enumerate(self.bytes(at, min(10, end - at))):
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return value, at + i + 1
        raise ValueError("expected a number")

    def fields(self, at: int, end: int) -> Iterator[Field]:
        """Yield the fields of a message. A varint has its value, others have start and end."""
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise _TooLargeError
            if self._left % 4096 == 0:
                self._check_time()
            key, at = self.varint(at, end)
            value, start = None, at
            match key & 7:
                case 0:
                    value, at = self.varint(at, end)
                case 2:
                    size, start = self.varint(at, end)
                    at = start + size
                case 1:
                    at += 8
                case 5:
                    at += 4
                case _:
                    raise ValueError("expected a field")
            if at > end:
                raise ValueError("a field is longer than its message")
            yield key >> 3, value, start, at

    def text(self, start: int, end: int) -> str:
        size = min(end - start, _MAX_TEXT)
        self._texts_left -= size
        if self._texts_left < 0:
            raise _TooLargeError
        shown = self.bytes(start, size).decode(errors="replace")
        return shown if end - start <= _MAX_TEXT else f"{shown}…"


def _read_model(reader: _Reader, found: dict[str, Any]) -> None:
    for number, _, start, end in reader.fields(0, reader.size):
        if number == 2:
            found["producer"] = reader.text(start, end)
        elif number == 8:
            fields = {n: (value, s, e) for n, value, s, e in reader.fields(start, end)}
            domain = reader.text(*fields[1][1:]) if 1 in fields else ""
            found["opsets"][domain] = fields.get(2, (0,))[0] or 0
        elif number == 7:
            _read_graph(reader, start, end, found)


def _read_graph(reader: _Reader, start: int, end: int, found: dict[str, Any]) -> None:
    for number, _, a, b in reader.fields(start, end):
        if number == 1:
            if len(found["nodes"]) >= _MAX_NODES:
                raise _TooLargeError
            found["nodes"].append(_node(reader, a, b, 0))
        elif number == 2:
            found["name"] = reader.text(a, b)
        elif number in (5, 11, 12, 13):
            if len(found["tensors"]) + len(found["weights"]) >= _MAX_TENSORS:
                raise _TooLargeError
            name, tensor = _weight(reader, a, b) if number == 5 else _value_info(reader, a, b)
            found["weights" if number == 5 else "tensors"][name] = tensor
            if number in (11, 12):
                found["inputs" if number == 11 else "outputs"].append(name)


def _node(reader: _Reader, start: int, end: int, depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"name": "", "op": "", "domain": "", "inputs": [], "outputs": [], "attributes": {}}
    for number, _, a, b in reader.fields(start, end):
        if number in (1, 2):
            node["inputs" if number == 1 else "outputs"].append(reader.text(a, b))
        elif number in (3, 4, 7):
            node[{3: "name", 4: "op", 7: "domain"}[number]] = reader.text(a, b)
        elif number == 5:
            name, value = _attribute(reader, a, b, depth)
            node["attributes"][name] = value
    return node


def _attribute(reader: _Reader, start: int, end: int, depth: int) -> tuple[str, Any]:
    """Return the name and value of an attribute: of a tensor its shape, of a graph its operators."""
    name = ""
    value: Any = None
    values: list[Any] = []
    count = 0
    for number, integer, a, b in reader.fields(start, end):
        match number:
            case 1:
                name = reader.text(a, b)
            case 2:
                value = _float(reader, a, b)
            case 3:
                value = _signed(integer)
            case 4:
                value = reader.text(a, b)
            case 5:
                _, tensor = _weight(reader, a, b)
                value = f"tensor {tensor[0]} {tensor[1]}"
            case 6:
                value = _graph(reader, a, b, depth + 1)
            case 7 | 8 | 9:
                elements, n = _elements(reader, number, integer, a, b)
                count += n
                values += elements[: _MAX_VALUES - len(values)]
            case _:
                pass
    if count:
        value = values if len(values) == count else f"{count} values"
    return name, value


def _elements(reader: _Reader, number: int, integer: int | None, start: int, end: int) -> tuple[list[Any], int]:
    """Return the first integers or texts of a field, and how many values it has; packed ones have several."""
    if number == 9:
        return [reader.text(start, end)], 1
    if number == 7:
        return [], (end - start) // 4
    if integer is not None:  # one that is not packed
        return [_signed(integer)], 1
    found, at, count = [], start, 0
    while at < end and count <= _MAX_VALUES:
        value, at = reader.varint(at, end)
        found.append(_signed(value))
        count += 1
    while at < end:
        size = min(end - at, _WINDOW)
        count += sum(byte < 0x80 for byte in reader.bytes(at, size))
        at += size
    return found, count


def _graph(reader: _Reader, start: int, end: int, depth: int) -> dict[str, Any]:
    """Return how many nodes of which operators a graph in a node has, such as the body of a loop."""
    if depth > _MAX_DEPTH:
        raise _TooLargeError
    operators: dict[str, int] = {}
    name = ""
    for number, _, a, b in reader.fields(start, end):
        if number == 1:
            op = _node(reader, a, b, depth)["op"]
            operators[op] = operators.get(op, 0) + 1
        elif number == 2:
            name = reader.text(a, b)
    return {"graph": name, "operators": operators}


def _weight(reader: _Reader, start: int, end: int) -> tuple[str, tuple[str, list[int | str]]]:
    name, datatype = "", ""
    shape: list[int | str] = []
    for number, value, a, b in reader.fields(start, end):
        if number == 1:
            shape += _elements(reader, 8, value, a, b)[0]
        elif number == 2:
            datatype = _type_name(value)
        elif number == 8:
            name = reader.text(a, b)
    return name, (datatype, shape[:_MAX_VALUES])


def _value_info(reader: _Reader, start: int, end: int) -> tuple[str, tuple[str, list[int | str] | None]]:
    """Return the name, datatype and shape of a tensor; None for an unknown shape, "" for an unknown axis."""
    name, datatype, shape = "", "", None
    for number, _, a, b in reader.fields(start, end):
        if number == 1:
            name = reader.text(a, b)
        elif number == 2:
            for kind, _, c, d in reader.fields(a, b):
                if kind == 1:
                    datatype, shape = _tensor_type(reader, c, d)
    return name, (datatype, shape)


def _tensor_type(reader: _Reader, start: int, end: int) -> tuple[str, list[int | str] | None]:
    datatype, shape = "", None
    for number, value, a, b in reader.fields(start, end):
        if number == 1:
            datatype = _type_name(value)
        elif number == 2:
            shape = [_axis(reader, c, d) for axis, _, c, d in reader.fields(a, b) if axis == 1]
    return datatype, shape


def _axis(reader: _Reader, start: int, end: int) -> int | str:
    for number, value, a, b in reader.fields(start, end):
        if number in (1, 2):
            return _signed(value) if number == 1 else reader.text(a, b)
    return ""


def _type_name(value: int | None) -> str:
    return _TYPES[value] if value is not None and value < len(_TYPES) else f"type {value}"


def _signed(value: int | None) -> int:
    return 0 if value is None else value - (1 << 64) if value >> 63 else value


def _float(reader: _Reader, start: int, end: int) -> float | str:
    """Return a number; NaN and infinities, which JSON lacks, as text."""
    if end - start != 4:
        raise ValueError("expected a float")
    value: float = struct.unpack("<f", reader.bytes(start, 4))[0]
    return float(f"{value:.7g}") if value - value == 0 else str(value)
