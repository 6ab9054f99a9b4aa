"""Open Inference tensors from and to JSON data."""

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from dragoman.core.bytes_tensor import BytesTensor, encode_elements, reshape_read_only, texts_of
from dragoman.core.datatypes import BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.sizes import THREAD
from dragoman.core.tensor import NONE, Parameters, Tensor, numpy_numbers, object_array
from dragoman.formats import fast_json
from dragoman.formats.json_numbers import LONG, PARSER_ERRORS, flatten_lists, parse_array, parse_list, pieces, to_array
from dragoman.formats.json_text import format_numbers
from dragoman.formats.policy import Policy
from dragoman.formats.raw import check_shape

_OPENING = re.compile(rb"[\s\[]*")
_OPENING_BLOCK = 1 << 12  # performance only: bytes of brackets matched at a time
_MAX_DEPTH = 33
_DATA_DEPTH = 3  # nesting of `data` in a message
_DESCRIBED_BYTES = 1 << 16  # of nested lists that are parsed again to describe how they differ from the shape
_MAX_NULLABLE = 1 << 12
_SHORT_TEXT = 256  # bytes; fewer texts, which are longer, are encoded fast
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_NULLABLE_TEXTS = msgspec.json.Decoder(Annotated[list[str | None], msgspec.Meta(max_length=_MAX_NULLABLE)])


def tensor_from_json(
    where: str, datatype: Datatype, shape: Sequence[int], data: Any, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """Return the tensor with this data, nested as the shape or flat in row-major order. null is NaN.

    Raises InvalidInput naming the tensor for elements of another type, numbers that do not fit the datatype, ragged
    lists, and another number of elements than the shape's.
    """
    count = check_shape(shape, where, policy, datatype)
    depth = nesting_depth(data)
    if depth == 0:
        raise InvalidInput(f"{where}: expected 'data' to be an array")
    if depth > 1 and depth != len(shape) and not (count == 0 and depth < len(shape)):
        actual = f"{depth} deep" if depth < _MAX_DEPTH else f"deeper than {_MAX_DEPTH - 1}"
        expected = f"1 or {len(shape)}" if len(shape) > 1 else "1"
        raise InvalidInput(f"{where}: 'data' nests {actual}, expected {expected} by its shape")
    if _DATA_DEPTH + depth > policy.max_json_depth:
        raise InvalidInput(f"JSON nests too deep; the limit is {policy.max_json_depth}")
    parsed = isinstance(data, msgspec.Raw)
    if parsed and datatype is not BYTES and len(memoryview(data)) > LONG:
        try:
            return Tensor(_long_array(where, datatype, shape, memoryview(data), depth), datatype, parameters)
        except InvalidInput:
            if depth == 1 or len(memoryview(data)) > _DESCRIBED_BYTES:
                raise
    are_many = parsed and datatype is BYTES and depth == 1 and THREAD < len(memoryview(data)) < count * _SHORT_TEXT
    if are_many and (many := _many_texts(bytes(memoryview(data)), count)) is not None:
        return BytesTensor.of_raw(many, None, shape, parameters, came_as_text=True)
    values = parse_list(where, datatype, data, depth)
    if parsed and depth == 1 and datatype is BYTES and len(values) == count > 0:
        return BytesTensor.of_texts(values, shape, parameters)
    array = to_array(values, datatype, where)
    if depth > 1 and array.shape != tuple(shape[:depth]):
        raise InvalidInput(f"{where}: 'data' nests as {list(array.shape)}, expected its shape {list(shape)}")
    if array.size != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {array.size}")
    if datatype is BYTES and count:
        return BytesTensor.of_texts(array.reshape(-1).tolist(), shape, parameters)
    return Tensor(reshape_read_only(array, shape, where), datatype, parameters)


def _many_texts(text: bytes, count: int) -> bytes | None:
    """Return the raw encoding of a JSON array of `count` texts, None for anything else.

    It is parsed in pieces, if no text has an escape, and encoded here: an object for each text would take ten
    times the memory, no other thread runs while a text is parsed, and the event loop would encode them for a process.
    """
    lists = (b"[%b]" % piece for piece in pieces(memoryview(text)[1:-1], b'",')) if b"\\" not in text else (text,)
    encoded, found = [], 0
    try:
        for each in lists:
            texts = _TEXTS.decode(each)
            encoded.append(encode_elements(texts))
            found += len(texts)
    except PARSER_ERRORS:  # or a text that begins with a comma
        return None
    return b"".join(encoded) if found == count else None


def _long_array(where: str, datatype: Datatype, shape: Sequence[int], text: memoryview, depth: int) -> Array:
    flat = text if depth == 1 else flatten_lists(text, shape)
    if flat is None:
        raise InvalidInput(f"{where}: 'data' does not nest as its shape {list(shape)}")
    numbers = parse_array(where, datatype, flat, shape[:depth])
    if numbers.size != math.prod(shape):
        raise InvalidInput(f"{where}: shape {list(shape)} needs {math.prod(shape)} elements, got {numbers.size}")
    return reshape_read_only(numbers, shape, where)


def irregular_texts(data: Any, shape: Sequence[int], parameters: Parameters) -> Tensor | None:
    """Return a tensor of texts with null as None, or of one text, without an array or with its length as the shape.

    None for any other data.
    """
    try:
        if isinstance(data, msgspec.Raw) and bytes(memoryview(data)[:1]) == b'"':
            return BytesTensor.of_texts([_TEXT.decode(data)], (1,), parameters)
        values = _NULLABLE_TEXTS.decode(data) if isinstance(data, msgspec.Raw) else []
    except PARSER_ERRORS:
        return None
    if len(values) == 1 and values[0] is not None and list(shape) in ([len(values[0])], [len(values[0].encode())]):
        return BytesTensor.of_texts([values[0]], (1,), parameters)
    if None not in values or len(values) != math.prod(shape):
        return None
    elements = [None if value is None else value.encode() for value in values]
    return Tensor(object_array(elements, tuple(shape)), BYTES, parameters)


def nesting_depth(data: Any) -> int:
    """Return the nesting of the first element, at most 33; the others have to agree."""
    depth = 0
    if isinstance(data, msgspec.Raw):
        text = memoryview(data)
        for at in range(0, len(text), _OPENING_BLOCK):
            opening = _OPENING.match(text[at : at + _OPENING_BLOCK])
            assert opening is not None
            depth += opening[0].count(b"[")
            if len(opening[0]) < _OPENING_BLOCK or depth >= _MAX_DEPTH:
                break
        return min(depth, _MAX_DEPTH)
    while isinstance(data, list) and depth < _MAX_DEPTH:
        depth += 1
        data = data[0] if data else None
    return depth


# --- serializing -------------------------------------------------------------------------------------------


def json_from_tensor(where: str, tensor: Tensor, policy: Policy, at_once: bool = False) -> Any:
    """Return the flat data of a tensor as a value for `json_chunks`: floats in the fewest digits that identify them.

    A long array is serialized here in chunks, since no other thread runs while orjson serializes; `at_once` avoids
    the copies. Raises NotSupported, with an alternative, if JSON cannot carry an element.
    """
    if tensor.datatype is BYTES:
        try:
            return texts_of(tensor)
        except UnicodeDecodeError as error:
            raise NotSupported(
                f"{where} holds bytes that are not UTF-8 text, which JSON cannot carry; ask for binary output"
            ) from error
    flat = np.ascontiguousarray(numpy_numbers(tensor)).reshape(-1)
    if tensor.datatype.kind != "float":
        return format_numbers(flat, at_once)
    if not np.isfinite(flat).all():
        return _nonfinite(where, flat, policy, at_once)
    return format_numbers(flat, at_once)


def _nonfinite(where: str, flat: Array, policy: Policy, at_once: bool) -> Any:
    if policy.nonfinite == "literal":
        texts = json.dumps([float(v) for v in flat], separators=(",", ":"))
        return fast_json.Fragment(texts)
    lossless = policy.nonfinite == "null" and not np.isinf(flat).any()
    if lossless:
        return format_numbers(flat, at_once)  # orjson writes NaN as null, which is parsed as NaN
    first = int(np.flatnonzero(~np.isfinite(flat) if policy.nonfinite == "error" else np.isinf(flat))[0])
    raise NotSupported(
        f"{where} holds {flat[first]} at element {first}, which JSON cannot carry; ask for binary output, or "
        'let the operator set nonfinite = "literal"'
    )
