"""Tensor data of the Open Inference Protocol as JSON: arrays from it and for it, with no number changed."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from dragoman.core.bytes_tensor import BytesTensor, packed_texts, texts_of
from dragoman.core.datatypes import BYTES, Array, Datatype, rounded
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.tensor import NONE, Parameters, Tensor, numpy_numbers
from dragoman.formats.digits.machine import digits
from dragoman.formats.json_print import LongText
from dragoman.formats.json_scan import BLOCK, text_portions
from dragoman.formats.nesting import Nesting, mismatch
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import check_shape, shaped
from dragoman.formats.simd import LONG, numbers
from dragoman.system.shared_memory import empty_array

# What one element of a kind may be in JSON. OIP leaves coercion open: here only what changes no value is taken.
_ELEMENT: dict[str, Any] = {"bool": bool, "uint": int, "int": int, "float": float | None, "bytes": str}
_OPENING = re.compile(rb"[\s\[]*")
_OPENING_BLOCK = 1 << 12  # performance only: bytes of brackets that are matched at a time
_WHERE = re.compile(r" - at `\$(.*)`$")
_PLACE = re.compile(r"\[([0-9]+)\]")
_ALL_RANKS = 33
_NESTED = 1 << 16  # performance only: bytes of nested lists from which on they are read in portions
_PORTION = 1 << 18  # performance only: bytes read at a time, and 16 times the numbers written at a time
_STRETCH = 256  # performance only: bytes that are searched for a comma at a time
_OPEN, _CLOSE = b"[]"
_MANY = 512  # performance only: numbers from which on machine code prints sooner than orjson
_FEW = 64  # performance only: numbers that are printed sooner than tested for NaN and infinities
_EXACT = 1 << 53  # beyond, a float no longer tells which integer was written


def _nested(element: Any, depth: int) -> Any:
    return element if depth == 0 else list[_nested(element, depth - 1)]  # type: ignore[misc]


_DECODERS: dict[tuple[str, int], msgspec.json.Decoder[Any]] = {}


def _decode(data: Any, kind: str, depth: int) -> Any:
    """The nested lists in `data`, JSON bytes or what another parser made of them, each element of its kind."""
    if not isinstance(data, msgspec.Raw):
        return msgspec.convert(data, _nested(_ELEMENT[kind], depth))
    decoder = _DECODERS.get((kind, depth))
    if decoder is None:
        decoder = _DECODERS[kind, depth] = msgspec.json.Decoder(_nested(_ELEMENT[kind], depth))
    return decoder.decode(data)


def told(fault: Exception) -> str:
    """What a parser found, without its own way of saying where."""
    if isinstance(fault, RecursionError):
        return "JSON nests too deep"
    if isinstance(fault, UnicodeDecodeError):
        return "JSON is not valid UTF-8"
    text = str(fault).replace("`", "'")
    found = _WHERE.search(str(fault))
    if found is None:
        return text
    where, what = found[1].lstrip("."), text[: found.start()]
    return f"{where}: {what[:1].lower()}{what[1:]}" if where else what


PARSER_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def tensor_from_json(
    where: str, datatype: Datatype, shape: Sequence[int], data: Any, policy: Policy, parameters: Parameters = NONE
) -> Tensor:
    """The tensor in `data`: nested as the shape, or flat in row-major order.

    null is NaN for the floating datatypes. Raises InvalidInput naming the tensor: wrong kinds, numbers that do not
    fit the datatype, ragged nesting, and a count other than the shape's.
    """
    count = check_shape(shape, where, policy, datatype)
    depth = nesting_depth(data)
    if depth == 0:
        raise InvalidInput(f"{where}: expected 'data' to be an array")
    if depth > 1 and depth != len(shape) and not (count == 0 and depth < len(shape)):
        raise InvalidInput(f"{where}: 'data' nests {depth} deep, expected 1 or {len(shape)} by its shape")
    parsed = isinstance(data, msgspec.Raw)
    nested = depth > 1 or datatype is BYTES
    if parsed and nested and len(memoryview(data)) > _NESTED:
        return _in_shape(where, datatype, memoryview(data), shape, depth, parameters, policy)
    if parsed and depth == 1 and datatype is not BYTES and len(memoryview(data)) > _whole(datatype):
        array = in_portions(where, datatype, memoryview(data), count, literal=policy.nonfinite == "literal")
    else:
        values = _read(where, datatype, data, depth, shape)
        if parsed and depth == 1 and datatype is BYTES and len(values) == count > 0:
            return BytesTensor.of_texts(values, shape, parameters)
        array = values if isinstance(values, np.ndarray) else _array(values, datatype, where)
    if depth > 1 and array.shape != tuple(shape[:depth]):
        raise InvalidInput(f"{where}: 'data' nests as {list(array.shape)}, expected its shape {list(shape)}")
    if array.size != count:
        raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {array.size}")
    if datatype is BYTES and count:
        return BytesTensor.of_texts(array.reshape(-1).tolist(), shape, parameters)
    return Tensor(shaped(array, shape, where), datatype, parameters)


def _whole(datatype: Datatype) -> int:
    """The most bytes of a flat list that are read in one go."""
    return _PORTION if digits(datatype.dtype) is None else LONG


def _in_shape(
    where: str,
    datatype: Datatype,
    data: memoryview,
    shape: Sequence[int],
    depth: int,
    parameters: Parameters,
    policy: Policy,
) -> Tensor:
    """The tensor in long nested lists, or in a long list of texts: its size is checked first, then it is read in
    portions. So there never are lists for its rows, nor more texts than its shape has.
    """
    count, nested = math.prod(shape), depth > 1
    wrong = mismatch(data, shape if nested else [count])
    if wrong:
        raise InvalidInput(f"{where}: {wrong}")
    if not count:
        return Tensor(
            shaped(np.empty(0, object if datatype is BYTES else datatype.dtype), shape, where), datatype, parameters
        )
    nesting = Nesting(shape) if nested else None
    if datatype is BYTES:
        portions = texts_in_portions(where, stripped(data), nesting, policy.max_json_bytes)
        tensor = packed_texts(portions, tuple(shape), parameters)
        if tensor.count != count:
            raise InvalidInput(f"{where}: shape {list(shape)} needs {count} elements, got {tensor.count}")
        return tensor
    array = in_portions(where, datatype, data, count, nesting, literal=policy.nonfinite == "literal")
    return Tensor(shaped(array, shape, where), datatype, parameters)


def texts_in_portions(where: str, data: memoryview, nesting: Nesting | None, most: int) -> Iterator[list[str]]:
    """The texts in an array without its outer brackets, in portions; of nested lists in row-major order.

    None of them is longer than `most` bytes.
    """
    first = 0
    for raw, codes in text_portions(data):
        if len(raw) > most + BLOCK:
            raise InvalidInput(f"{where}: data[{first}]: expected at most {most} bytes as JSON; send it as binary data")
        if nesting is not None:
            if not nesting.next_fits(codes.tobytes()):
                raise InvalidInput(f"{where}: 'data' is ragged, expected rows of equal lengths")
            raw = np.frombuffer(raw, np.uint8)[(codes != _OPEN) & (codes != _CLOSE)].tobytes()
        found = _portion_of_texts(where, raw, first)
        first += len(found)
        yield found


def _portion_of_texts(where: str, raw: bytes, first: int) -> list[str]:
    try:
        texts: list[str] = _decode(msgspec.Raw(b"[" + raw + b"]"), BYTES.kind, 1)
        return texts
    except PARSER_FAULTS as fault:
        raise InvalidInput(f"{where}: data{_dotted(told(fault), first)}") from fault


def _read(
    where: str,
    datatype: Datatype,
    data: Any,
    depth: int,
    shape: Sequence[int] = (),
    first: int = 0,
    literal: bool = False,
) -> Any:
    """The array in JSON that nests so deep, by its shape if more than 1; as nested lists where that is shorter.

    `first` is the place of the first element in what was sent. `literal`: NaN and infinities may be bare words.
    """
    if isinstance(data, msgspec.Raw) and len(text := memoryview(data)) >= LONG:
        found = _numbers(where, datatype, bytes(text), shape if depth > 1 else None)
        if found is not None:
            return found
    try:
        return _decode(data, datatype.kind, depth)
    except PARSER_FAULTS as fault:
        values = _with_literals(data, datatype) if literal else _integral(data, datatype, depth)
        if values is None:
            raise InvalidInput(f"{where}: data{_dotted(told(fault), first)}") from fault
        return values


def _numbers(where: str, datatype: Datatype, text: bytes, shape: Sequence[int] | None) -> Array | None:
    """As `numbers`, in the datatype's own dtype."""
    found = numbers(text, datatype, shape)
    return found if found is None or datatype.kind != "float" else _rounded(found, datatype, where)


def _with_literals(data: Any, datatype: Datatype) -> Any:
    """The numbers in a flat list with NaN and infinities as bare words, which only Python's own parser reads."""
    if datatype.kind != "float" or not isinstance(data, msgspec.Raw):
        return None
    try:
        return msgspec.convert(json.loads(bytes(memoryview(data))), list[float | None])
    except (ValueError, RecursionError):
        return None


def stripped(data: memoryview) -> memoryview:
    """An array in JSON without its outer brackets and the white space around them."""
    if data[0] != _OPEN or data[-1] != _CLOSE:
        data = memoryview(bytes(data).strip())
    return data[1:-1]


def in_portions(
    where: str, datatype: Datatype, data: memoryview, count: int, nesting: Nesting | None = None, literal: bool = False
) -> Array:
    """The array in a long list of numbers, read in portions: no other thread runs while the parser does.

    The list is flat, or has `count` elements and nests as `nesting`. Where a flat one has not `count` elements, an
    array that is only good for telling how many there are.
    """
    data = stripped(data)
    array = empty_array(min(count, len(data)), datatype.dtype)
    machine = digits(datatype.dtype)
    at, end, first = 0, len(data), 0
    while at <= end:
        stop = _comma(data, at + _PORTION, end)  # short enough to stay in the core's own cache
        text: Buffer = data[at:stop]
        if nesting is not None:
            if not nesting.next_fits(bytes(text)):
                raise InvalidInput(f"{where}: 'data' is ragged, expected rows of equal lengths")
            text = bytes(text).translate(None, b"[]")
        size = machine.read(text, array[first:]) if machine is not None else -1
        if size < 0:
            part = _portion(where, datatype, b"".join((b"[", text, b"]")), first, literal)
            size = part.size
            if not size and (first or stop < end):
                raise InvalidInput(f"{where}: data[{first}]: expected a value between commas")
            if first + size <= array.size:
                array[first : first + size] = part
        first += size
        at = stop + 1
    return array if first == count else np.broadcast_to(np.empty(1, datatype.dtype), first)


def _portion(where: str, datatype: Datatype, text: bytes, first: int, literal: bool) -> Array:
    """The array in a part of a long list, `first` being the place of its first element."""
    values = _read(where, datatype, msgspec.Raw(text), 1, first=first, literal=literal)
    return values if isinstance(values, np.ndarray) else _array(values, datatype, where)


def _comma(data: memoryview, at: int, end: int) -> int:
    """Where the next comma is, or `end`."""
    while at < end:
        found = bytes(data[at : min(at + _STRETCH, end)]).find(b",")
        if found >= 0:
            return at + found
        at += _STRETCH
    return end


def _dotted(text: str, first: int) -> str:
    place = _PLACE.match(text)
    return f"[{int(place[1]) + first}]{text[place.end() :]}" if place else f": {text}"


def nesting_depth(data: Any) -> int:
    """How deep the first element lies, up to one more than any tensor may; the others must agree."""
    depth = 0
    if isinstance(data, msgspec.Raw):
        text = memoryview(data)
        for at in range(0, len(text), _OPENING_BLOCK):
            opening = _OPENING.match(text[at : at + _OPENING_BLOCK])
            assert opening is not None
            depth += opening[0].count(b"[")
            if len(opening[0]) < _OPENING_BLOCK or depth >= _ALL_RANKS:
                break
        return min(depth, _ALL_RANKS)
    while isinstance(data, list) and depth < _ALL_RANKS:
        depth += 1
        data = data[0] if data else None
    return depth


def _integral(data: Any, datatype: Datatype, depth: int) -> Any:
    """Integers of which some are written as floats (`1.0`), or None where that is not what is wrong."""
    if datatype.kind not in ("int", "uint"):
        return None
    try:
        return _integers(_decode_numbers(data, depth), datatype)
    except PARSER_FAULTS:
        return None


def _decode_numbers(data: Any, depth: int) -> Any:
    kind = _nested(int | float, depth)
    return msgspec.json.decode(data, type=kind) if isinstance(data, msgspec.Raw) else msgspec.convert(data, kind)


def _integers(values: Any, datatype: Datatype) -> Any:
    """The integers in nested lists of numbers, None where one is none or where a float cannot tell which it was."""
    try:
        wide = np.array(values, np.float64)
    except (ValueError, OverflowError):
        return values  # ragged, or too large for any datatype, as whoever makes the array will tell
    if not (np.isfinite(wide) & (wide == np.trunc(wide))).all():
        return None
    if (np.abs(wide) < _EXACT).all():
        limits = np.iinfo(datatype.dtype)
        fits = wide.min(initial=0) >= limits.min and wide.max(initial=0) <= limits.max
        return wide.astype(datatype.dtype) if fits else wide.astype(np.int64).tolist()
    exact = np.array(values, dtype=object)
    if any(type(v) is float and abs(v) > _EXACT for v in exact.flat):
        return None
    return np.vectorize(int, otypes=[object])(exact).tolist()


def _array(values: Any, datatype: Datatype, where: str) -> Array:
    try:
        if datatype is BYTES:
            texts = np.array(values, dtype=object)
            for text in texts.flat:
                text.encode()  # what is no text, or none that UTF-8 can hold, is found here
            return texts
        array = np.array(values, dtype=np.float64 if datatype.kind == "float" else datatype.dtype)
        return array if datatype.kind != "float" else _rounded(array, datatype, where)
    except OverflowError as fault:
        limits = np.iinfo(datatype.dtype)
        bad = next(v for v in np.array(values, dtype=object).flat if not limits.min <= v <= limits.max)
        raise InvalidInput(f"{where}: {bad} does not fit into {datatype}") from fault
    except (ValueError, AttributeError) as fault:  # rows of unequal lengths
        raise InvalidInput(f"{where}: 'data' is ragged, expected rows of equal lengths") from fault


def _rounded(wide: Array, datatype: Datatype, where: str) -> Array:
    try:
        return rounded(wide, datatype)
    except InvalidInput as fault:
        raise InvalidInput(f"{where}: {fault.message}") from fault


# --- the other way -----------------------------------------------------------------------------------------


def json_from_tensor(where: str, tensor: Tensor, policy: Policy, at_once: bool = False) -> Any:
    """What `json_chunks` writes as the flat `data` of an output: floats in the fewest digits that tell them apart.

    A long array is printed here in portions, since no other thread runs while orjson prints; `at_once` spares the
    copies that this takes. Raises NotSupported, with what to do instead, where JSON has no form for an element.
    """
    if tensor.datatype is BYTES:
        try:
            return texts_of(tensor)
        except UnicodeDecodeError as fault:
            raise NotSupported(
                f"{where} holds bytes that are not UTF-8 text, which JSON cannot carry; ask for binary output"
            ) from fault
    flat = np.ascontiguousarray(numpy_numbers(tensor)).reshape(-1)
    if tensor.datatype.kind != "float":
        return printed(flat, at_once)
    if flat.size <= _FEW:
        text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
        if b"null" not in text:
            return orjson.Fragment(text)
    if not np.isfinite(flat).all():
        return _nonfinite(where, flat, policy, at_once)
    return printed(flat, at_once)


def printed(flat: Array, at_once: bool = False) -> Any:
    """A flat array of numbers as `json_chunks` writes it at the end; a long one is written here, in chunks.

    `at_once`: it may be given to orjson itself instead.
    """
    step = _PORTION // 16
    machine = digits(flat.dtype) if flat.size >= _MANY else None
    if machine is not None:
        chunks = machine.chunks(flat)
        return orjson.Fragment(b"".join(chunks)) if at_once or len(chunks) == 1 else LongText(chunks)
    if at_once or flat.size <= step:
        return flat
    parts: list[Buffer] = [b"["]
    for at in range(0, flat.size, step):
        text = orjson.dumps(flat[at : at + step], option=orjson.OPT_SERIALIZE_NUMPY)
        parts += (memoryview(text)[1:-1], b",")
    parts[-1] = b"]"
    return LongText(parts)


def _nonfinite(where: str, flat: Array, policy: Policy, at_once: bool) -> Any:
    if policy.nonfinite == "literal":
        texts = json.dumps([float(v) for v in flat], separators=(",", ":"))
        return orjson.Fragment(texts)
    lossless = policy.nonfinite == "null" and not np.isinf(flat).any()
    if lossless:
        return printed(flat, at_once)  # orjson prints NaN as null, which reads as NaN again
    first = int(np.flatnonzero(~np.isfinite(flat) if policy.nonfinite == "error" else np.isinf(flat))[0])
    raise NotSupported(
        f"{where} holds {flat[first]} at element {first}, which JSON cannot carry; ask for binary output, or "
        'let the operator set nonfinite = "literal"'
    )
