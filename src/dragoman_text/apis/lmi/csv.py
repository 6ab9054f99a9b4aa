"""Tables in CSV: rows of cells; long tables of numbers are parsed and formatted in chunks."""

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from dragoman.core.datatypes import FP64, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import object_array
from dragoman.protocols.wire import Policy
from dragoman.system.shared_memory import empty_array

LONG = 1 << 18  # bytes; the numbers of larger tables are parsed in chunks
_CHUNK = 1 << 17  # bytes to parse at a time
_CELLS = 1 << 13  # to format at a time
_BLANK_START = re.compile(rb"(?:\r?\n)+")
_BLANK_LINES = re.compile(rb"\n{2,}")
_COMMA, _LINE_END = b",\n"


def numbers_of_csv(body: bytes, *, named: bool) -> tuple[Sequence[str], Array] | None:
    """Return the names and the cells of a long table of numbers; no names if it has none.

    `named`: its first line has names, whatever it looks like. None if a cell is quoted or is not a number, or if the
    line of names is very long. Raises InvalidInput if rows have different lengths.
    """
    blank = _BLANK_START.match(body, 0, _CHUNK)
    start = blank.end() if blank is not None else 0
    if body.startswith((b"\n", b"\r"), start):
        return None
    end = body.find(b"\n", start) + 1 or len(body)
    width, names = count_bytes(memoryview(body)[start:end], b",") + 1, None
    if end - start <= _CHUNK:
        first = body[start:end].removesuffix(b"\n").removesuffix(b"\r")
        if b'"' in first or b"\r" in first:
            return None
        cells = _decode(first).split(",")
        names = cells if named or not are_numbers([cells]) else None
    elif named:
        return None
    at = end if names is not None else start
    array = empty_array(count_bytes(memoryview(body)[at:], b",\n") + 1, FP64.dtype)
    lengths = _RowLengths(width, first_row=1 if names is None else 2)
    filled = 0
    for text in _chunks(body, at):
        if b'"' in text or b"\r" in text:
            return None
        lengths.check(text)
        count = _read_numbers(text[:-1].replace(b"\n", b","), array[filled:])
        if not count:
            return None
        filled += count
    return (names or (), array[:filled].reshape(-1, width)) if filled else None


class _RowLengths:
    """Check that each row has `width` cells, chunk by chunk."""

    def __init__(self, width: int, first_row: int) -> None:
        self._width = width
        self._row = first_row
        self._column = 0  # cells of the current row in the chunks so far

    def check(self, text: bytes) -> None:
        """Check the next chunk, which ends with a comma or a line end. Raises InvalidInput."""
        codes = np.frombuffer(text, np.uint8)
        separators = codes[(codes == _COMMA) | (codes == _LINE_END)]
        ends = np.flatnonzero(separators == _LINE_END)
        expected = np.arange(self._width - 1 - self._column, separators.size, self._width)
        if not np.array_equal(ends, expected):
            self._raise(ends.tolist(), expected.tolist())
        self._row += ends.size
        self._column = (self._column + separators.size) % self._width

    def _raise(self, ends: list[int], expected: list[int]) -> None:
        for row, (end, position) in enumerate(itertools.zip_longest(ends, expected)):
            if end != position:
                short = end is not None and (position is None or end < position)
                before = expected[row - 1] if row else -1 - self._column
                got = end - before if short else f"more than {self._width}"
                message = f"row {self._row + row} has {got} values, the first {self._width}"
                raise InvalidInput(f"expected text/csv with as many values in each row; {message}")


def _chunks(body: bytes, at: int) -> Iterator[bytes]:
    """The table without blank lines, in chunks that end with a comma or a line end. Raises InvalidInput."""
    limit = csv.field_size_limit()
    in_row = False
    while at < len(body):
        start = min(at + _CHUNK, len(body))
        ends = [body.find(separator, start, start + limit) for separator in (b",", b"\n")]
        end = min((position + 1 for position in ends if position >= 0), default=len(body))
        if end - start > limit:
            raise InvalidInput(f"the request body is not valid CSV: field larger than field limit ({limit})")
        text = body[at:end].replace(b"\r\n", b"\n")
        if not text.endswith((b",", b"\n")):
            text += b"\n"
        text = _BLANK_LINES.sub(b"\n", text if in_row else text.lstrip(b"\n"))
        in_row = text.endswith(b",") or (in_row and not text)
        at = end
        if text:
            yield text
    if in_row:
        yield b"\n"


def _read_numbers(text: bytes, into: Array) -> int:
    """Parse cells between commas, an empty one as NaN; return how many there are, 0 if one is not a number."""
    count = text.count(b",") + 1
    try:
        into[:count] = [float(cell or "nan") for cell in _decode(text).split(",")]
    except ValueError:
        return 0
    return count


def count_bytes(text: memoryview, characters: bytes) -> int:
    """Count these characters, without keeping other threads waiting."""
    codes = np.frombuffer(text, np.uint8)
    blocks = (codes[at : at + LONG] for at in range(0, codes.size, LONG))
    return sum(int(np.count_nonzero(block == code)) for block in blocks for code in characters)


def check_cells(body: bytes, policy: Policy) -> None:
    """Raise InvalidInput if a table has more cells than a BYTES tensor may have elements."""
    if count_bytes(memoryview(body), b",\n") > policy.max_bytes_elements:
        raise InvalidInput(f"too many cells in text/csv: expected at most {policy.max_bytes_elements}, got more")


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the request body is not valid UTF-8: {error.reason}") from error


def parse_rows(text: str) -> list[list[str]]:
    """Return the rows of a table, all of the same length. Raises InvalidInput."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise InvalidInput(f"the request body is not valid CSV: {error}") from error
    ragged = next((i for i, row in enumerate(rows) if len(row) != len(rows[0])), 0)
    if ragged or not rows:
        message = (
            f"row {ragged + 1} has {len(rows[ragged])} values, the first {len(rows[0])}" if rows else "there is no row"
        )
        raise InvalidInput(f"expected text/csv with as many values in each row; {message}")
    return rows


def are_numbers(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether every cell is a number."""
    return to_cells(rows).dtype.kind == "f"


def to_cells(rows: Sequence[Sequence[str]]) -> Array:
    """Return the cells as numbers, an empty one as NaN; as strings if one of them is not a number."""
    try:
        return np.array([[float(cell or "nan") for cell in row] for row in rows])
    except ValueError:
        return object_array(itertools.chain.from_iterable(rows), (len(rows), len(rows[0])))


def csv_chunks(tables: Sequence[Array]) -> Sequence[bytes]:
    """Format tables of as many rows, side by side, as CSV text in chunks."""
    width = max(sum(table.shape[1] for table in tables), 1)
    step = max(_CELLS // width, 1)
    chunks: list[bytes] = []
    for at in range(0, len(tables[0]), step):
        rows = [table[at : at + step] for table in tables]
        if step > 1:
            chunks.append(_text(rows))
        else:
            parts = [table[:, i : i + _CELLS] for table in rows for i in range(0, table.shape[1], _CELLS)]
            chunks += itertools.chain.from_iterable((_text([part])[:-1], b",") for part in parts)
            chunks[-1] = b"\n"
    return chunks


def _text(tables: Sequence[Array]) -> bytes:
    """The lines of some rows."""
    (table, *others), kind = tables, tables[0].dtype.kind
    if not others and table.size and (kind in "iu" or (kind == "f" and bool(np.isfinite(table).all()))):
        numbers = np.ascontiguousarray(table.astype(np.float64) if kind == "f" else table)
        return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].replace(b"],[", b"\n") + b"\n"
    text = io.StringIO()
    lists = [[[_cell(each) for each in row] for row in table.tolist()] for table in tables]
    csv.writer(text, lineterminator="\n").writerows(itertools.chain(*row) for row in zip(*lists, strict=True))
    return text.getvalue().encode(errors="replace")


def _cell(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
