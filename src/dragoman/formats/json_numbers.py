"""Parse arrays of numbers in JSON text.

Long arrays are parsed by simdjson where it is installed and the text is plain, all others by msgspec. Both give the
same values; errors come from msgspec alone.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from dragoman.core.datatypes import BYTES, Array, Datatype, round_to
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.formats.policy import Buffer
from dragoman.system.shared_memory import empty_array

LONG = 2048  # performance only: bytes of JSON; for shorter arrays lists of Python numbers are as fast
_PIECE = 1 << 18  # bytes of numbers parsed at a time
_OPEN, _CLOSE, _COMMA, _BLANK = b"[], "
_SPACE = b" \t\r\n"

# The Python type of one element. Open Inference allows conversions; only lossless ones are done.
_ELEMENT: dict[str, Any] = {"bool": bool, "uint": int, "int": int, "float": float | None, "number": float, "bytes": str}
_WHERE = re.compile(r" - at `\$(.*)`$")
_PLACE = re.compile(r"\[([0-9]+)\]")
_EXACT = 1 << 53  # beyond, a float no longer identifies the integer that was written

Position = tuple[int, Sequence[int]]  # the index of an element in row-major order, and the shape of nested lists
Read = TypeVar("Read")
PARSER_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def describe_parser_error(error: Exception) -> str:
    """Return the message of a parser without its own notation for positions."""
    if isinstance(error, RecursionError):
        return "JSON nests too deep"
    if isinstance(error, UnicodeDecodeError):
        return "JSON is not valid UTF-8"
    text = str(error).replace("`", "'")
    match = _WHERE.search(str(error))
    if match is None:
        return text
    where, reason = match[1].lstrip("."), text[: match.start()]
    return f"{where}: {reason[:1].lower()}{reason[1:]}" if where else reason


# --- parsing ------------------------------------------------------------------------------------------------------


def parse_array(
    where: str,
    datatype: Datatype,
    text: Buffer,
    shape: Sequence[int] = (),
    *,
    literal: bool = False,
    null: bool = True,
) -> Array:
    """Return the numbers of a flat JSON array, parsed in pieces.

    So a Python object exists for each number of one piece only, and other threads run between two of them. null:
    whether floats may be null, which is NaN. literal: whether they may be beyond the range of doubles, which is an
    infinity. Raises InvalidInput naming `where` and the element, whose index is that of nested lists of `shape`.
    """
    codes = np.frombuffer(text, np.uint8)
    count = sum(int(np.count_nonzero(block == _COMMA)) for block in _blocks(codes)) + 1
    array = empty_array(count, datatype.dtype)
    first = 0
    for numbers_text in pieces(memoryview(text)[1:-1]):
        piece = b"".join((b"[", numbers_text, b"]"))
        numbers = parse_with_simdjson(piece, datatype)
        if numbers is None:
            values = parse_list(where, datatype, msgspec.Raw(piece), 1, (first, shape), literal, null)
            numbers = to_array(values, datatype, where)
        elif datatype.kind == "float":
            numbers = _round(numbers, datatype, where)
        array[first : first + numbers.size] = numbers
        first += numbers.size
    if first != count and (first or count > 1):  # an empty array has no comma, and no element either
        raise InvalidInput(f"{where}: data: JSON is malformed: expected an element beside each comma")
    return array[:first]


def pieces(text: memoryview, end: bytes = b",") -> Iterator[bytes]:
    """Yield the elements of a flat array, which is valid JSON, in pieces between commas. end: of an element."""
    at, size = 0, _PIECE
    while at < len(text):
        piece = bytes(text[at : at + size])
        comma = piece.rfind(end) + len(end) - 1 if at + size < len(text) else len(piece)
        if comma < len(end) - 1:  # an element or white space that is longer
            size *= 2
            continue
        yield piece[:comma]
        at, size = at + comma + 1, _PIECE


def _blocks(codes: Array) -> Iterator[Array]:
    """Yield an array in blocks: with little memory for the results of comparisons."""
    return (codes[at : at + _PIECE] for at in range(0, codes.size, _PIECE))


def flatten_lists(text: Buffer, shape: Sequence[int]) -> Buffer | None:
    """Return nested lists of numbers, which are valid JSON, as one list; None unless they nest as the shape says.

    A list without the element that it should have is left to the parser of the list, as a missing value.
    """
    sizes = tuple(shape[: shape.index(0) + 1]) if 0 in shape else tuple(shape)
    count = math.prod(sizes)
    lists = sum(math.prod(sizes[:axis]) for axis in range(len(sizes)))
    codes = np.frombuffer(text, np.uint8)
    # Nothing longer than the text may be made of the shape.
    if lists > codes.size or count > codes.size:
        return None
    brackets = b""
    for size in reversed(sizes):
        brackets = b"[" + (brackets + b",") * (size - 1) + brackets * (size > 0) + b"]"
    if not count:
        return b"[]" if bytes(text).translate(None, _SPACE) == brackets else None
    flat = np.empty_like(codes)
    structure: list[bytes] = []
    for block, flat_block in zip(_blocks(codes), _blocks(flat), strict=True):
        is_bracket = (block == _OPEN) | (block == _CLOSE)
        structure.append(block[is_bracket | (block == _COMMA)].tobytes())
        flat_block[:] = np.where(is_bracket, np.uint8(_BLANK), block)
    return flat.data if b"".join(structure) == brackets else None


def parse_list(
    where: str,
    datatype: Datatype,
    data: Any,
    depth: int,
    first: Position = (0, ()),
    literal: bool = False,
    null: bool = True,
) -> Any:
    """Parse nested lists of this depth in `data`, JSON text or the values of another parser.

    `first` is the position of the first element in the message, for error messages. Raises InvalidInput naming
    `where`.
    """
    try:
        return _decode(data, datatype.kind if null or datatype.kind != "float" else "number", depth)
    except PARSER_ERRORS as error:
        values = _with_literals(data, datatype, null) if literal else _integral(data, datatype, depth)
        if values is None:
            raise InvalidInput(f"{where}: data{_shift_index(describe_parser_error(error), first)}") from error
        return values


def _innermost(element: Any, depth: int) -> Any:
    return element if depth == 0 else list[_innermost(element, depth - 1)]  # type: ignore[misc]


_DECODERS: dict[tuple[str, int], msgspec.json.Decoder[Any]] = {}


def _decode(data: Any, kind: str, depth: int) -> Any:
    """Return the nested lists in `data`, with elements of one kind."""
    if not isinstance(data, msgspec.Raw):
        return msgspec.convert(data, _innermost(_ELEMENT[kind], depth))
    decoder = _DECODERS.get((kind, depth))
    if decoder is None:
        decoder = _DECODERS[kind, depth] = msgspec.json.Decoder(_innermost(_ELEMENT[kind], depth))
    return decoder.decode(data)


def _with_literals(data: Any, datatype: Datatype, null: bool) -> Any:
    """Return a flat list of numbers with NaN and infinities as bare words, which only Python's parser accepts."""
    if datatype.kind != "float" or not isinstance(data, msgspec.Raw):
        return None
    try:
        return msgspec.convert(parse_json(bytes(memoryview(data))), list[float | None] if null else list[float])
    except ValueError:
        return None


def _integral(data: Any, datatype: Datatype, depth: int) -> Any:
    """Return integers of which some are written as floats (`1.0`); None if the data is invalid for another reason."""
    if datatype.kind not in ("int", "uint"):
        return None
    try:
        return _integers(_decode_numbers(data, depth), datatype)
    except PARSER_ERRORS:
        return None


def _decode_numbers(data: Any, depth: int) -> Any:
    kind = _innermost(int | float, depth)
    return msgspec.json.decode(data, type=kind) if isinstance(data, msgspec.Raw) else msgspec.convert(data, kind)


def _integers(values: Any, datatype: Datatype) -> Any:
    """Return the integers in nested lists; None if a number is not an integer, or a float too large to be exact."""
    try:
        wide = np.array(values, np.float64)
    except (ValueError, OverflowError):
        return values  # ragged, or too large for any datatype: `to_array` raises
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


def to_array(values: Any, datatype: Datatype, where: str) -> Array:
    """Return nested lists as an array. Raises InvalidInput if they are ragged or a number does not fit the datatype."""
    if isinstance(values, np.ndarray):
        return values
    try:
        if datatype is BYTES:
            texts = np.array(values, dtype=object)
            for text in texts.flat:
                text.encode()  # fails if it is not a string, or one that UTF-8 cannot encode
            return texts
        array = np.array(values, dtype=np.float64 if datatype.kind == "float" else datatype.dtype)
        return array if datatype.kind != "float" else _round(array, datatype, where)
    except OverflowError as error:
        limits = np.iinfo(datatype.dtype)
        bad = next(v for v in np.array(values, dtype=object).flat if not limits.min <= v <= limits.max)
        raise InvalidInput(f"{where}: {bad} does not fit into {datatype}") from error
    except (ValueError, AttributeError) as error:  # rows of unequal lengths
        raise InvalidInput(f"{where}: 'data' is ragged, expected rows of equal lengths") from error


def _round(wide: Array, datatype: Datatype, where: str) -> Array:
    try:
        return round_to(wide, datatype)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from error


def _shift_index(message: str, first: Position) -> str:
    """Return a parser's message for a chunk, with the element's index in the whole array."""
    place = _PLACE.match(message)
    if place is None:
        return f": {message}"
    index, shape = int(place[1]) + first[0], first[1]
    indices = np.unravel_index(index, shape) if len(shape) > 1 else (index,)
    return "".join(f"[{i}]" for i in indices) + message[place.end() :]


# --- simdjson ----------------------------------------------------------------------------------------------------

_SIMD_TYPES = {"float": ("d", np.float64), "int": ("i", np.int64), "uint": ("u", np.uint64)}
_REUSED_BYTES = 1 << 19  # performance only: a parser holds several times the memory of its longest text

# The parser that was used last: a new one has to get its memory from the system. One thread at a time has it.
_SIMD_PARSERS: list[Any] = []


def parse_with_simdjson(text: bytes, datatype: Datatype) -> Array | None:
    """Parse a flat array with simdjson, if it is installed: integers to their own dtype, floats to FP64.

    simdjson makes no Python object of each number. None if it is not installed, rejects the text, or would parse it to
    other values than the general parser.
    """
    if datatype.kind not in _SIMD_TYPES or text.find(b"[", 1) >= 0:  # it flattens
        return None
    code, dtype = _SIMD_TYPES[datatype.kind]
    numbers: Array | None = read_with_simdjson(text, lambda array: np.frombuffer(array.as_buffer(of_type=code), dtype))
    return numbers if numbers is None or datatype.kind == "float" else _narrow(numbers, datatype)


def read_with_simdjson(text: bytes, read: Callable[[Any], Read]) -> Read | None:
    """Return `read(document)`, whose result holds nothing of the document, for the text parsed by simdjson.

    None if it is not installed, if it rejects the text, or if the document has another form than `read` uses.
    """
    make = simd_parser_class()
    if make is None:
        return None
    try:
        parser = _SIMD_PARSERS.pop()
    except IndexError:
        parser = make()
    try:
        result = read(parser.parse(text))
    except (ValueError, TypeError, AttributeError, RuntimeError):  # not JSON, or not an array of such numbers
        return None
    if len(text) <= _REUSED_BYTES and not _SIMD_PARSERS:
        _SIMD_PARSERS.append(parser)
    return result


def _narrow(wide: Array, datatype: Datatype) -> Array | None:
    """Return integers in their own dtype; None if one does not fit."""
    narrow: Array = wide.astype(datatype.dtype, copy=False)
    return narrow if (narrow == wide).all() else None


@functools.cache
def simd_parser_class() -> Callable[[], Any] | None:
    """Return the parser class of pysimdjson; None if it is not installed or does not support this processor."""
    try:
        from simdjson import Parser
    except (ImportError, RuntimeError):  # not installed, or not for this machine
        return None
    parser_class: Callable[[], Any] = Parser
    return parser_class
