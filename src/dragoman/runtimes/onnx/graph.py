"""The files of ONNX graphs: which tensors have a shape, the classes of classifiers, and graphs without ZipMap nodes.

The files are protobuf messages. Only what is needed of them is read, so that the package `onnx` is not needed and
large weights are not copied. Fields of onnx.proto: ModelProto.graph 7, opset_import 8; OperatorSetIdProto.domain 1,
version 2; GraphProto.node 1, input 11, output 12; NodeProto.input 1, output 2, op_type 4, attribute 5;
AttributeProto.name 1, ints 8, strings 9; ValueInfoProto.name 1, type 2; TypeProto.tensor_type 1;
TypeProto.Tensor.elem_type 1, shape 2; TensorShapeProto.dim 1; Dimension.dim_value 1.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Data = mmap.mmap | bytes
_CLASSIFIERS = b"classlabels_"
_MAX_SCANNED = 1 << 26  # bytes of a file at its beginning and its end
_FLOAT = 1  # TensorProto.DataType.FLOAT
_OPERATORS = 7  # version of ONNX's own operators, the oldest that ONNX Runtime supports without a warning


@dataclass(frozen=True, slots=True)
class DenseGraph:
    """A graph whose ZipMap nodes are replaced by Identity: their outputs are the tensors in front of them.

    labels: the classes of each of these outputs, by name.
    """

    content: bytes
    labels: Mapping[str, tuple[str, ...]]


def shaped_names(path: Path) -> set[str]:
    """Return the names of the inputs and outputs of a file that have a shape.

    ONNX Runtime describes one without a shape, which may have any, like a scalar.
    """
    names: set[str] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for graph in _values(mapped, 7, 0, len(mapped)):
            for info in (*_values(mapped, 11, *graph), *_values(mapped, 12, *graph)):
                kinds = [kind for each in _values(mapped, 2, *info) for kind in _values(mapped, 1, *each)]
                if any(True for kind in kinds for _ in _values(mapped, 2, *kind)):
                    names.update(mapped[start:end].decode() for start, end in _values(mapped, 1, *info))
    return names


def class_names(path: Path) -> tuple[str, ...]:
    """Return the classes of the classifiers in a graph, such as TreeEnsembleClassifier; empty if they differ."""
    found: set[tuple[str, ...]] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if mapped.find(_CLASSIFIERS, 0, _MAX_SCANNED) >= 0 or mapped.find(_CLASSIFIERS, -_MAX_SCANNED) >= 0:
            for graph in _values(mapped, 7, 0, len(mapped)):
                for node in _fields(mapped, *graph):
                    if node.number == 1 and _text(mapped, 4, node) != "ZipMap":
                        found.add(_classes(mapped, node))
    found.discard(())
    return found.pop() if len(found) == 1 else ()


def without_zip_maps(path: Path) -> DenseGraph | None:
    """Return the graph of a file without ZipMap nodes; None if none of them makes an output of the graph.

    ZipMap (ai.onnx.ml) converts the rows of a matrix [rows, classes] to a list of maps from classes to numbers.
    """
    data = path.read_bytes()
    fields = [*_fields(data, 0, len(data))]
    for field in fields:
        if field.number == 7:
            graph, labels = _replace_zip_maps(data, field.start, field.end)
            has_identity = any(each.number == 8 and not _text(data, 1, each) for each in fields)
            operators = b"" if has_identity else _message(8, bytes([2 << 3, _OPERATORS]))
            content = data[: field.key] + _message(7, graph) + data[field.end :] + operators
            return DenseGraph(content, labels) if labels else None
    return None


def _replace_zip_maps(data: Data, at: int, end: int) -> tuple[bytes, dict[str, tuple[str, ...]]]:
    """Return the bytes of a graph without ZipMap nodes, and the classes of their outputs."""
    fields = [*_fields(data, at, end)]
    outputs = {_text(data, 1, each): each for each in fields if each.number == 12}
    labels: dict[str, tuple[str, ...]] = {}
    parts = []
    for field in fields:
        part = data[field.key : field.end]
        if field.number == 1 and _text(data, 4, field) == "ZipMap" and (name := _text(data, 2, field)) in outputs:
            labels[name] = _classes(data, field)
            part = _message(1, b"".join((_field(data, 1, field), _field(data, 2, field), _message(4, b"Identity"))))
        parts.append((field, part))
    rows = next((dim for name, each in outputs.items() if name not in labels for dim in _first_dim(data, each)), b"")
    return b"".join(_retyped(data, field, part, labels, rows) for field, part in parts), labels


def _retyped(data: Data, field: "_Field", part: bytes, labels: Mapping[str, Sequence[str]], rows: bytes) -> bytes:
    """Return an output of a ZipMap as a tensor FP32 [rows, classes], any other field as it is."""
    name = _text(data, 1, field) if field.number == 12 else ""
    if name not in labels:
        return part
    shape = _message(1, rows) + _message(1, b"\x08" + _encode_varint(len(labels[name])))
    tensor = bytes([8, _FLOAT]) + _message(2, shape)
    return _message(12, _message(1, name.encode()) + _message(2, _message(1, tensor)))


def _first_dim(data: Data, output: "_Field") -> Iterator[bytes]:
    """Yield the first axis of an output that is a tensor and whose first axis has no fixed length."""
    for kind in _values(data, 2, output.start, output.end):
        for tensor in _values(data, 1, *kind):
            for shape in _values(data, 2, *tensor):
                for start, end in [*_values(data, 1, *shape)][:1]:
                    if data[start : start + 1] != b"\x08":  # dim_value
                        yield data[start:end]


def _classes(data: Data, node: "_Field") -> tuple[str, ...]:
    """Return the classes of a ZipMap or classifier node, its attribute classlabels_int64s or classlabels_strings."""
    classes: list[str] = []
    for start, end in _values(data, 5, node.start, node.end):
        fields = [*_fields(data, start, end)]
        name = next((data[each.start : each.end] for each in fields if each.number == 1), b"")
        if name.startswith(_CLASSIFIERS):
            classes += [data[each.start : each.end].decode() for each in fields if each.number == 9]
            classes += [str(n) for each in fields if each.number == 8 for n in _integers(data, each)]
    return tuple(classes)


def _integers(data: Data, field: "_Field") -> Iterator[int]:
    """Yield the integers of a field of int64, one or packed."""
    at = field.start
    while at < field.end:
        value, at = _varint(data, at)
        yield value - (1 << 64) if value >> 63 else value


# --- protobuf ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a message. key: where it begins. start, end: its value, which of a message or text has a length."""

    number: int
    kind: int
    key: int
    start: int
    end: int


def _fields(data: Data, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        key_at = at
        key, at = _varint(data, at)
        start = at
        match key & 7:
            case 0:
                _, at = _varint(data, at)
            case 2:
                size, start = _varint(data, at)
                at = start + size
            case kind:
                at += 8 if kind == 1 else 4
        yield _Field(key >> 3, key & 7, key_at, start, at)


def _values(data: Data, number: int, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each value of a field, which has a length, in a message from `at` to `end`."""
    return ((each.start, each.end) for each in _fields(data, at, end) if each.number == number and each.kind == 2)


def _text(data: Data, number: int, message: _Field) -> str:
    """Return the first text of a field of a message, "" if there is none."""
    return next((data[a:b].decode() for a, b in _values(data, number, message.start, message.end)), "")


def _field(data: Data, number: int, message: _Field) -> bytes:
    """Return a field of a message with its key."""
    return b"".join(data[f.key : f.end] for f in _fields(data, message.start, message.end) if f.number == number)


def _message(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(content)) + content


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
