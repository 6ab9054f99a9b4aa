"""Messages of Open Inference over gRPC: their classes, and their tensors from and to arrays.

protobuf parses and serializes the messages, but for tensors it is a detour: it makes an object of each typed element,
takes up to 16 bytes of memory for one of two bytes, and holds the interpreter lock until it finishes. A message may be
cut between its fields, and serialized fields may be joined. So

- requests: the raw contents of a large message are cut out and become views of it (`split_raw_contents`), and so do
  large typed contents of numbers (`split_typed_contents`), whose elements are counted first and decoded by NumPy
  (`PackedContents`). protobuf parses what is left, and `tensor_from_contents` takes either kind of contents.
- responses: the fields that name the model and describe an output are serialized once and cached, and the elements
  follow them as views (`format_raw_response`). Many typed elements are encoded by NumPy (`format_typed_response`).

The classes are in a descriptor pool of their own: protobuf's default pool accepts each name once, and a client library
in the same process may have registered them.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from dragoman.core.bytes_tensor import reshape_read_only
from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.sizes import INLINE, SHARED
from dragoman.core.tensor import NONE, Parameters, Scalar, Tensor
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import check_shape, raw_from_tensor
from dragoman.formats.small_messages import add_to_cache

SERVICE = "inference.GRPCInferenceService"

# A serialized FileDescriptorSet, compiled from open_inference.proto by scripts/protos.
DESCRIPTORS = files("dragoman.formats").joinpath("open_inference.binpb").read_bytes()
# The same for a service of MLServer, whose messages are those of Open Inference in another package.
REPOSITORY_SERVICE = "inference.model_repository.ModelRepositoryService"
REPOSITORY_DESCRIPTORS = files("dragoman.formats").joinpath("model_repository.binpb").read_bytes()


_creating = threading.Lock()
_classes: dict[str, Any] = {}


def _create_classes() -> dict[str, Any]:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    classes: dict[str, Any] = {}
    for file in FileDescriptorSet.FromString(DESCRIPTORS).file:
        pool.Add(file)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            classes[message.name] = GetMessageClass(descriptor)
    return classes


def __getattr__(name: str) -> Any:
    """Return the class of a message, such as `ModelInferRequest`. Classes created at run time have no static types."""
    try:
        if not name.startswith("_"):  # Python's import asks for `__path__`
            return message_class(name)
    except KeyError:
        pass
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def message_class(name: str) -> Any:
    """Return the class of a message by its name. Raises KeyError.

    The first one imports protobuf and creates them all, for which each start would wait.
    """
    if not _classes:
        with _creating:  # one thread: classes of two pools do not match
            if not _classes:
                _classes.update(_create_classes())
    return _classes[name]


def decode_error() -> type[Exception]:
    """Return the class of protobuf's errors of messages that it cannot parse."""
    from google.protobuf.message import DecodeError

    return DecodeError


def parse_message(kind: Any, body: Buffer) -> Any:
    """Parse a message. Raises InvalidInput."""
    try:
        return kind.FromString(body)
    except decode_error() as error:
        raise InvalidInput(f"the message is not a valid {kind.DESCRIPTOR.full_name}: {error}") from error


def parameters_from_proto(message: Mapping[str, Any], where: str) -> dict[str, Scalar]:
    """Return the parameters of a message. Raises InvalidInput, beginning with `where`, if one has no value."""
    parameters: dict[str, Scalar] = {}
    if not message:  # faster than an empty loop over a protobuf map
        return parameters
    for name, value in message.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidInput(f"{where}parameter '{name}': expected a value, got none")
        parameters[name] = getattr(value, choice)
    return parameters


def parameters_to_proto(parameters: Parameters, message: Any) -> None:
    """Add parameters to the map of a message. Raises InvalidOutput for an integer beyond 64 bits or another type."""
    for name, value in parameters.items():
        match value:
            case bool():
                message[name].bool_param = value
            case int() if -(1 << 63) <= value < 1 << 63:
                message[name].int64_param = value
            case int() if (1 << 63) <= value < 1 << 64:
                message[name].uint64_param = value
            case float():
                message[name].double_param = value
            case str():
                message[name].string_param = value
            case _:
                raise InvalidOutput(
                    f"parameter '{name}': expected a bool, a 64-bit integer, a float or text, got {value!r}"
                )


def length_delimited(field: int, value: Buffer) -> tuple[Buffer, Buffer]:
    """Return a serialized field of type bytes or message: its tag and length, and its value."""
    return delimiter(field, len(value)), value


def delimiter(field: int, size: int) -> bytes:
    """Return the tag and length of a field of type bytes or message, or of packed numbers."""
    if field < 16 and size < 0x80:  # a byte each
        return bytes((field << 3 | 2, size))
    return bytes(_varint(field << 3 | 2) + _varint(size))


def _varint(number: int) -> bytearray:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return digits


# --- requests: contents cut out of the message -------------------------------------------------------------------

_DECODED_BYTES = 1 << 18  # performance only: decoded at a time
_MAX_SCANNED_FIELDS = 1000  # performance only: scanning more takes longer than it saves
_MAX_VARINT_BITS = 63
_MAX_VARINT_BYTES = 10
_MAX_HEAD_BYTES = 6  # of the tag and length of contents; protobuf allows longer encodings of the same length
_DELIMITED = 2  # wire type of fields with a length

# Numbers of fields: of ModelInferRequest, of its inputs and of their contents.
INPUTS, RAW_INPUT_CONTENTS, INPUT_CONTENTS = 5, 7, 5
CONTENTS: Mapping[str, int] = {
    "bool_contents": 1,
    "int_contents": 2,
    "int64_contents": 3,
    "uint_contents": 4,
    "uint64_contents": 5,
    "fp32_contents": 6,
    "fp64_contents": 7,
    "bytes_contents": 8,
}
_NAMES: Mapping[int, str] = {number: name for name, number in CONTENTS.items()}
# The dtype of elements of fixed size, and of those that are varints, by the name of their field.
FIXED: Mapping[str, Any] = {"fp32_contents": np.dtype("<f4"), "fp64_contents": np.dtype("<f8")}
_VARINTS: Mapping[str, Any] = {
    "bool_contents": np.dtype(np.bool_),
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
}


def split_raw_contents(body: Buffer) -> tuple[bytes, Sequence[memoryview]] | None:
    """Return a ModelInferRequest without its raw input contents, and these as views in order.

    None if it has none, and for protobuf to report an error if it is malformed or has very many fields. Only the fields
    of the outermost message are scanned.
    """
    view = memoryview(body).cast("B")
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    at = done = 0
    try:
        for _ in range(_MAX_SCANNED_FIELDS):
            if at == len(view):
                rest.append(view[done:])
                return (b"".join(rest), contents) if contents else None
            start = at
            tag, at = read_varint(view, at)
            value, at = field_extent(view, tag, at)
            if tag == RAW_INPUT_CONTENTS << 3 | _DELIMITED:
                if value - start > _MAX_HEAD_BYTES:
                    return None
                rest.append(view[done:start])
                contents.append(view[value:at])
                done = at
    except (IndexError, ValueError):
        pass
    return None


def field_extent(view: memoryview, tag: int, at: int) -> tuple[int, int]:
    """Return the start and end of a field's value. Raises IndexError or ValueError if the message is malformed."""
    start = end = at
    match tag & 7:  # protobuf's wire types
        case 2:  # with a length
            size, start = read_varint(view, at)
            end = start + size
        case 0:  # a varint
            _, end = read_varint(view, at)
        case 1:
            end = at + 8
        case 5:
            end = at + 4
        case _:
            raise ValueError("a group, or not a field")
    if end > len(view):
        raise ValueError("truncated")
    return start, end


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at an index, and the index after it."""
    number = shift = 0
    while True:
        digit = view[at]
        at += 1
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            return number, at
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a varint is too long")


# --- typed contents ----------------------------------------------------------------------------------------------


class PackedContents(msgspec.Struct, frozen=True):
    """The elements of one packed field of an InferTensorContents, not yet decoded."""

    field: str
    wire: memoryview

    def __len__(self) -> int:
        if self.field in FIXED:
            return len(self.wire) // int(FIXED[self.field].itemsize)
        view = np.frombuffer(self.wire, np.uint8)
        return sum(
            int(np.count_nonzero(view[at : at + _DECODED_BYTES] < 0x80)) for at in range(0, view.size, _DECODED_BYTES)
        )

    def array(self) -> Array:
        """Return the elements. Raises InvalidInput if the last one is truncated."""
        if self.field in FIXED:
            if len(self.wire) % FIXED[self.field].itemsize:
                raise InvalidInput(f"'{self.field}' ends within an element")
            return np.frombuffer(self.wire, FIXED[self.field])
        array = np.empty(len(self), _VARINTS[self.field])
        view, at, done = np.frombuffer(self.wire, np.uint8), 0, 0
        while at < view.size:
            ends = np.flatnonzero(view[at : at + _DECODED_BYTES] < 0x80)
            if not ends.size:
                raise InvalidInput(f"'{self.field}' ends within an element")
            values = _decode_varints(view[at : at + int(ends[-1]) + 1], ends)
            array[done : done + values.size] = values.astype(array.dtype)
            done += values.size
            at += int(ends[-1]) + 1
        return array


def _decode_varints(view: Array, ends: Array) -> Array:
    """Return varints as uint64, without excess bits, as protobuf does; `ends` are the indices of their last bytes."""
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MAX_VARINT_BYTES:
        raise InvalidInput(f"a varint has {longest} bytes, expected at most {_MAX_VARINT_BYTES}")
    values = np.zeros(ends.size, np.uint64)
    for at in range(longest):
        longer = sizes > at
        values[longer] |= (view[starts[longer] + at] & 0x7F).astype(np.uint64) << np.uint64(7 * at)
    return values


def encode_varints(integers: Array) -> bytes:
    """Return integers as varints; negative ones take ten bytes, as 64-bit integers."""
    values = integers.astype(np.uint64 if integers.dtype.kind in "ub" else np.int64).view(np.uint64)
    sizes = np.ones(values.size, np.intp)
    for bits in range(7, 64, 7):
        sizes += values >> np.uint64(bits) > 0
    starts = np.cumsum(sizes) - sizes
    encoded = np.empty(int(sizes.sum()), np.uint8)
    for at in range(int(sizes.max())):
        longer = sizes > at
        low = values[longer] >> np.uint64(7 * at) & np.uint64(0x7F)
        encoded[starts[longer] + at] = low | np.where(sizes[longer] > at + 1, np.uint64(0x80), np.uint64(0))
    return encoded.tobytes()


def split_typed_contents(body: Buffer, policy: Policy) -> tuple[bytes, Mapping[int, PackedContents]] | None:
    """Return a ModelInferRequest without its large packed contents, and these by the index of their input.

    None for protobuf to report an error if the message is malformed. Raises InvalidInput if it has too many fields or
    elements to be parsed.
    """
    view = memoryview(body).cast("B")
    rest: list[Buffer] = []
    contents: dict[int, PackedContents] = {}
    done = index = 0
    budget = _Budget(policy.max_json_values, policy.max_bytes_elements)
    try:
        for number, wire_type, tag, start, end in _fields(view, budget.field):
            if number != INPUTS or wire_type != _DELIMITED:
                continue
            packed, other = _without_contents(view[start:end], budget)
            if packed is not None:
                rest += (view[done:tag], *length_delimited(number, other))
                contents[index] = packed
                done = end
            index += 1
    except (IndexError, ValueError):
        return None
    return b"".join((*rest, view[done:])), contents


class _Budget:
    """Counts the fields and elements of a message. Raises InvalidInput if there are too many."""

    def __init__(self, fields: int, elements: int) -> None:
        self._fields, self._max_fields = 0, fields
        self._elements, self._max_elements = 0, elements

    def field(self) -> None:
        self._fields += 1
        if self._fields > self._max_fields:
            raise InvalidInput(f"the message has too many fields: expected at most {self._max_fields}, got more")

    def element(self) -> None:
        self._elements += 1
        if self._elements > self._max_elements:
            raise InvalidInput(
                f"the message has too many elements in typed contents: expected at most {self._max_elements}"
                " (setting 'max_bytes_elements'), got more; send raw contents"
            )


def _without_contents(tensor: memoryview, budget: _Budget) -> tuple[PackedContents | None, bytes]:
    """Return the contents of an input if they are one large packed field of numbers, and the rest of the input."""
    packed, count, cut = None, 0, (0, 0)
    for number, wire_type, tag, start, end in _fields(tensor, budget.field):
        if number != INPUT_CONTENTS or wire_type != _DELIMITED:
            continue
        if cut[1]:
            count += 1  # the field may be repeated
        cut, contents = (tag, end), tensor[start:end]
        for field, kind, _, first, last in _fields(contents, budget.element):
            count += 1
            name = _NAMES.get(field, "")
            if kind == _DELIMITED and (name in FIXED or name in _VARINTS):
                packed = PackedContents(name, contents[first:last])
    if packed is None or count != 1 or len(packed.wire) < SHARED:
        return None, b""
    return packed, b"".join((tensor[: cut[0]], tensor[cut[1] :]))


def _fields(view: memoryview, count_field: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number and wire type of each field, and the indices of its tag, its value and its end."""
    at = 0
    while at < len(view):
        count_field()
        tag_at = at
        tag, at = read_varint(view, at)
        start, end = field_extent(view, tag, at)
        yield tag >> 3, tag & 7, tag_at, start, end
        at = end


# --- typed contents and tensors ----------------------------------------------------------------------------------

# For more elements protobuf takes longer; for 16 integers a tenth of the time of `encode_varints` (7 us instead of 56).
_MANY_ELEMENTS = 1 << 10  # performance only
_ENCODED_ELEMENTS = 1 << 16  # performance only: elements encoded at a time
# Numbers of fields: of ModelInferResponse and of its outputs.
ID, OUTPUTS, RAW_OUTPUT_CONTENTS, OUTPUT_CONTENTS = 3, 5, 6, 5

# The dtypes of fields with elements that may be wider than the datatype.
_WIDE: Mapping[str, np.dtype[Any]] = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}


def tensor_from_contents(
    where: str, datatype: Datatype, shape: Sequence[int], contents: Any, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """Return the tensor with the elements of an InferTensorContents, or of its only field, cut out of the message.

    Raises InvalidInput naming the tensor if they are not in the field of the datatype alone, or do not fit the datatype
    or the shape.
    """
    count = check_shape(shape, where, policy, datatype)
    fields: dict[str, Any] = (
        {contents.field: contents}
        if type(contents) is PackedContents
        else {field.name: values for field, values in contents.ListFields()}
    )
    expected = datatype.contents_field
    values = fields.get(expected, ())
    if fields and [*fields] != [expected]:
        if not expected:
            raise InvalidInput(f"{where}: {datatype} has no typed contents; send it in 'raw_input_contents'")
        names = ", ".join(f"'{name}'" for name in fields)
        raise InvalidInput(f"{where}: expected contents of {datatype} in '{expected}', got {names}")
    if len(values) != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {len(values) or 'no data'}")
    if type(values) is PackedContents:
        try:
            wide = values.array()
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error.message}") from error
    else:
        wide = np.fromiter(values, _WIDE.get(expected, datatype.dtype), count)
    array: Array = wide.astype(datatype.dtype, copy=False)
    if array is not wide and (array != wide).any():
        raise InvalidInput(f"{where}: {wide[array != wide][0]} does not fit into {datatype}")
    return Tensor(reshape_read_only(array, shape, where), datatype, parameters)


def format_typed_response(message: Any, tensors: Collection[Tensor]) -> bytes | list[Buffer]:
    """Serialize a ModelInferResponse with these tensors as the typed contents of its outputs; changes the message.

    Many elements are encoded here, in chunks: protobuf needs an object for each and holds the interpreter lock.
    """
    if sum(tensor.data.size for tensor in tensors) < _MANY_ELEMENTS:
        for tensor, output in zip(tensors, message.outputs, strict=True):
            output.contents.SetInParent()  # a tensor without elements is marked as typed, too
            getattr(output.contents, tensor.datatype.contents_field).extend(tensor.data.reshape(-1).tolist())
        return bytes(message.SerializeToString())
    outputs: list[bytes] = [output.SerializeToString() for output in message.outputs]
    del message.outputs[:]
    parts: list[Buffer] = [message.SerializeToString()]
    for output, tensor in zip(outputs, tensors, strict=True):
        contents = _encode_contents(tensor)
        size = sum(map(len, contents))
        start = delimiter(OUTPUT_CONTENTS, size)
        parts += (delimiter(OUTPUTS, len(output) + len(start) + size), output, start, *contents)
    return parts


def _encode_contents(tensor: Tensor) -> list[Buffer]:
    """Serialize an InferTensorContents with the elements of a tensor."""
    flat, field = tensor.data.reshape(-1), tensor.datatype.contents_field
    number = CONTENTS[field]
    chunks = (flat[at : at + _ENCODED_ELEMENTS] for at in range(0, flat.size, _ENCODED_ELEMENTS))
    if tensor.datatype is BYTES:
        message = message_class("InferTensorContents")
        return [message(bytes_contents=part.tolist()).SerializeToString() for part in chunks]
    packed = (
        [np.ascontiguousarray(flat).data.cast("B")] if field in FIXED else [encode_varints(part) for part in chunks]
    )
    return [delimiter(number, sum(map(len, packed))), *packed] if flat.size else []


# --- responses with raw contents ---------------------------------------------------------------------------------

_starts: dict[tuple[str, str], bytes] = {}
_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}


def format_raw_response(response: Response[Inference], id_: str, message: Any = None) -> bytes | Sequence[Buffer]:
    """Serialize a ModelInferResponse with raw contents; large ones follow as views.

    `message` has all fields but the contents; without one they come from the cache, and there are no parameters.
    """
    outputs = response.answer.outputs
    parts: list[Buffer] = []
    if message is not None:
        parts.append(message.SerializeToString())
    else:
        parts.append(_starts.get((response.model, response.version)) or _start(response.model, response.version))
        if id_:
            parts += length_delimited(ID, id_.encode())
        for name, tensor in outputs.items():
            shape = tensor.data.shape if type(tensor) is Tensor else tensor.shape  # faster than the property
            parts.append(_heads.get((name, tensor.datatype.name, shape)) or _head(name, tensor))
    size = 0
    for tensor in outputs.values():  # the field with the highest number
        blob = raw_from_tensor(tensor)
        size += len(blob)
        parts += delimiter(RAW_OUTPUT_CONTENTS, len(blob)), blob
    return b"".join(parts) if size <= INLINE else parts


def _start(model: str, version: str) -> bytes:
    """Return the serialized fields that name the model."""
    message = message_class("ModelInferResponse")(model_name=model, model_version=version)
    return add_to_cache(_starts, (model, version), message.SerializeToString())


def _head(name: str, tensor: Tensor) -> bytes:
    """Return the serialized field that describes an output."""
    message = message_class("ModelInferResponse")()
    message.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
    return add_to_cache(_heads, (name, tensor.datatype.name, tensor.shape), message.SerializeToString())
