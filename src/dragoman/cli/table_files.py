"""Tables in files of CSV and Parquet: a header, rows, and where each row stands in its file."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.cli.files import read_file
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.options import suggestion

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_COLUMNS = re.compile(r"(.+\.(?:csv|tsv|parquet)):(.+)", re.IGNORECASE | re.DOTALL)
_PARQUET_HINT = "needs the packages 'pandas' and 'pyarrow': pip install pandas pyarrow"


@dataclass(frozen=True)
class Table:
    """Rows of cells: text of a CSV file, values of a Parquet file with None for a missing one.

    header: names of the columns; empty if the file has none. numbers: the line or row of the file for each row.
    """

    path: str
    header: list[str]
    rows: list[list[Any]]
    numbers: Sequence[int]
    unit: str

    def place(self, row: int, column: int) -> str:
        """Return where a cell stands, for an error message."""
        name = f", column '{self.header[column]}'" if self.header else f", column {column + 1}"
        return f"'{self.path}', {self.unit} {self.numbers[row]}{name}"

    def select(self, columns: Sequence[str]) -> "Table":
        """Return the table with some columns only: by name, or by number from 1 without a header.

        Raises InvalidInput for a column that the file does not have, or has twice.
        """
        known = self.header or [str(i + 1) for i in range(len(self.rows[0]) if self.rows else 0)]
        for name in columns:
            if known.count(name) != 1:
                count = "no column" if name not in known else f"{known.count(name)} columns"
                hint = (suggestion(name, known) or f"; expected {', '.join(known[:10])}") if name not in known else ""
                raise InvalidInput(f"'{self.path}' has {count} '{name}'{hint}")
        at = [known.index(name) for name in columns]
        header = [self.header[i] for i in at] if self.header else []
        return Table(self.path, header, [[row[i] for i in at] for row in self.rows], self.numbers, self.unit)


def split_columns(text: str) -> tuple[str, list[str]]:
    """Return the path and the columns of `data.csv:a,b`; no columns if it names none."""
    found = _COLUMNS.fullmatch(text)
    return (found[1], next(csv.reader([found[2]]))) if found else (text, [])


def read_table(path: str, names: Sequence[str], is_number: Callable[[str], bool]) -> Table:
    """Return the table in a file. Raises InvalidInput if it cannot be read, or a line has another number of columns.

    The first line of a CSV file is a header if it has one of the names, or if it is text only and others have numbers.
    Columns are separated by commas, or by tabs or semicolons if the first line has no comma; those of a .tsv by tabs.
    """
    if path.lower().endswith(".parquet"):
        return _read_parquet(path)
    text = read_file(path).decode("utf-8-sig", "replace")
    start = text.partition("\n")[0]
    separators = "\t" if path.lower().endswith(".tsv") else ",\t;"
    delimiter = next((each for each in separators if each in start), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: list[list[str]] = []
    numbers: list[int] = []
    try:
        for row in reader:
            if not row:
                continue
            if rows and len(row) != len(rows[0]):
                raise InvalidInput(
                    f"'{path}', line {reader.line_num}: expected {len(rows[0])} columns as in line {numbers[0]}, "
                    f"got {len(row)}"
                )
            rows.append(row)
            numbers.append(reader.line_num)
    except csv.Error as error:  # such as a cell of more than 128 kB
        raise InvalidInput(f"'{path}', line {reader.line_num}: {error}") from error
    first, others = rows[:1], rows[1:]
    is_text = not any(is_number(cell) for row in first for cell in row)
    has_numbers = any(is_number(cell) for row in others for cell in row)
    if first and (any(name in first[0] for name in names if not is_number(name)) or (is_text and has_numbers)):
        return Table(path, first[0], others, numbers[1:], "line")
    return Table(path, [], rows, numbers, "line")


def _read_parquet(path: str) -> Table:
    try:
        import pandas

        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise NotSupported(f"'{path}' {_PARQUET_HINT}") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from error
    columns = [_values(frame[name]) for name in frame.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Table(path, [str(name) for name in frame.columns], rows, range(1, len(rows) + 1), "row")


def _values(column: Any) -> list[Any]:
    """Return the values of a column as they are in Python; None for a missing one, NaN stays NaN in numbers."""
    missing = column.isna() if column.dtype.kind not in "fc" else [False] * len(column)
    return [None if gone else value for value, gone in zip(column.tolist(), missing, strict=True)]
