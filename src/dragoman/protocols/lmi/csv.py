"""Tables in CSV: rows of cells, numbers of long ones read in portions."""

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.protocols.wire import Policy

LONG = 1 << 18  # bytes of a table from which on its numbers are read in portions
_PORTION = 1 << 16


def numbers_of_csv(body: bytes, *, named: bool) -> tuple[Sequence[str], Array] | None:
    """The names and the cells of a long table of numbers, without a text for each cell; no names if it has none.

    `named`: its first line has names, whatever it looks like. None where a cell is quoted or is no number. Raises
    InvalidInput where rows are of different lengths.
    """
    if b'"' in body or b"\r" in body.replace(b"\r\n", b""):
        return None
    head: Sequence[str] = ()
    parts: list[Array] = []
    wide = count = 0
    for text in _portions(body):
        rows = _parsed(text)
        wide = wide or (len(rows[0]) if rows else 0)
        ragged = next((i for i, row in enumerate(rows) if len(row) != wide), None)
        if ragged is not None:
            told = f"row {count + ragged + 1} has {len(rows[ragged])} values, the first {wide}"
            raise InvalidInput(f"expected text/csv with as many values in each row; {told}")
        if not count and rows and (named or not are_numbers(rows[:1])):
            head, rows, count = rows[0], rows[1:], 1
        if rows:
            parts.append(cells_of(rows))
            if parts[-1].dtype.kind != "f":
                return None
        count += len(rows)
    return (head, np.concatenate(parts)) if parts else None


def check_cells(body: bytes, policy: Policy) -> None:
    """Raises InvalidInput where a table has more cells than a tensor of BYTES may have elements."""
    if body.count(b",") + body.count(b"\n") > policy.max_bytes_elements:
        raise InvalidInput(f"too many cells in text/csv: expected at most {policy.max_bytes_elements}, got more")


def _portions(body: bytes) -> Iterator[str]:
    """The table in texts of whole lines."""
    at = 0
    while at < len(body):
        end = body.find(b"\n", at + _PORTION) + 1 or len(body)
        try:
            yield body[at:end].decode()
        except UnicodeDecodeError as fault:
            raise InvalidInput(f"the request body is not valid UTF-8: {fault.reason}") from fault
        at = end


def _parsed(text: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as fault:
        raise InvalidInput(f"the request body is not valid CSV: {fault}") from fault


def rows_of(text: str) -> list[list[str]]:
    """The rows of a table, all of the same length. Raises InvalidInput."""
    rows = _parsed(text)
    ragged = next((i for i, row in enumerate(rows) if len(row) != len(rows[0])), 0)
    if ragged or not rows:
        told = (
            f"row {ragged + 1} has {len(rows[ragged])} values, the first {len(rows[0])}" if rows else "there is no row"
        )
        raise InvalidInput(f"expected text/csv with as many values in each row; {told}")
    return rows


def are_numbers(rows: Sequence[Sequence[str]]) -> bool:
    """Whether every cell is a number."""
    return cells_of(rows).dtype.kind == "f"


def cells_of(rows: Sequence[Sequence[str]]) -> Array:
    """The cells as numbers, an empty one as NaN, or as texts where one of them is no number."""
    try:
        return np.array([[float(cell or "nan") for cell in row] for row in rows])
    except ValueError:
        return np.array(rows, dtype=object)
