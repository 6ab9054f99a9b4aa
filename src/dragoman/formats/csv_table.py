"""Tables as text of CSV: a header, rows, where each row stands, and the values of cells for an input of a model."""

import csv
import io
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput
from dragoman.core.options import suggestion
from dragoman.core.signature import TensorSpec


class Table(msgspec.Struct, frozen=True):
    """Rows of cells: text of CSV, values of a Parquet file with None for a missing one.

    path: of the file, "" for the body of a request. header: names of the columns; empty if it has none. numbers: the
    line or row for each row.
    """

    path: str
    header: list[str]
    rows: list[list[Any]]
    numbers: Sequence[int]
    unit: str

    def place(self, row: int, column: int) -> str:
        """Return where a cell stands, for an error message."""
        name = f", column '{self.header[column]}'" if self.header else f", column {column + 1}"
        return f"{self.subject}, {self.unit} {self.numbers[row]}{name}"

    @property
    def subject(self) -> str:
        return f"'{self.path}'" if self.path else "the table"

    def select(self, columns: Sequence[str]) -> "Table":
        """Return the table with some columns only: by name, or by number from 1 without a header.

        Raises InvalidInput for a column that the file does not have, or has twice.
        """
        known = self.header or [str(i + 1) for i in range(len(self.rows[0]) if self.rows else 0)]
        for name in columns:
            if known.count(name) != 1:
                count = "no column" if name not in known else f"{known.count(name)} columns"
                hint = (suggestion(name, known) or f"; expected {', '.join(known[:10])}") if name not in known else ""
                raise InvalidInput(f"{self.subject} has {count} '{name}'{hint}")
        at = [known.index(name) for name in columns]
        header = [self.header[i] for i in at] if self.header else []
        return Table(self.path, header, [[row[i] for i in at] for row in self.rows], self.numbers, self.unit)


def parse_csv(text: str, names: Sequence[str], path: str = "", separators: str = ",\t;") -> Table:
    """Return the table in a text. Raises InvalidInput if a line has another number of columns, or is not CSV.

    The first line is a header if it has one of the names, or if it is text only and others have numbers. Columns are
    separated by the first of the separators that the first line has.
    """
    subject = f"'{path}'" if path else "the table"
    start = text.partition("\n")[0]
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
                    f"{subject}, line {reader.line_num}: expected {len(rows[0])} columns as in line {numbers[0]}, "
                    f"got {len(row)}"
                )
            rows.append(row)
            numbers.append(reader.line_num)
    except csv.Error as error:  # such as a cell of more than 128 kB
        raise InvalidInput(f"{subject}, line {reader.line_num}: {error}") from error
    first, others = rows[:1], rows[1:]
    is_text = not any(is_number(cell) for row in first for cell in row)
    has_numbers = any(is_number(cell) for row in others for cell in row)
    if first and (any(name in first[0] for name in names if not is_number(name)) or (is_text and has_numbers)):
        return Table(path, first[0], others, numbers[1:], "line")
    return Table(path, [], rows, numbers, "line")


def cell_values(table: Table, spec: TensorSpec, notes: list[str]) -> list[Any]:
    """Return the values of a table for an input: a list if it has one column, else a list of rows.

    Cells without a value are NaN for floats, with a note. Raises InvalidInput that names the line and the column of
    another one, and of a value of another type.
    """
    rows: list[list[Any]] = []
    empty = []
    for i, row in enumerate(table.rows):
        rows.append([])
        for j, cell in enumerate(row):
            is_empty = cell is None or (isinstance(cell, str) and cell.strip() == "" and spec.datatype is not BYTES)
            if is_empty and spec.datatype is not None and spec.datatype.kind == "float":
                empty.append(table.place(i, j))
                rows[-1].append(math.nan)
                continue
            if is_empty:
                raise InvalidInput(f"{table.place(i, j)}: no value; expected {spec.datatype or 'a value'}")
            try:
                rows[-1].append(parse_element(cell, spec))
                _check_integer(rows[-1][-1], spec)
            except InvalidInput as error:
                raise InvalidInput(f"{table.place(i, j)}: {error.message}") from error
    if empty:
        others = f", and {len(empty) - 1} more" if len(empty) > 1 else ""
        notes.append(f"{empty[0]}: no value, sent as NaN{others}")
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows


def _check_integer(value: Any, spec: TensorSpec) -> None:
    """Raise InvalidInput for a number that an input of integers does not take."""
    datatype = spec.datatype
    if datatype is None or datatype.kind not in ("int", "uint") or spec.accepts:
        return
    limits = np.iinfo(datatype.dtype)
    is_whole = isinstance(value, int) or float(value).is_integer()
    if not is_whole or not limits.min <= value <= limits.max:
        raise InvalidInput(f"expected {datatype}, got {value}")


def parse_element(value: Any, spec: TensorSpec) -> Any:
    """Return an element of the model's datatype, or a list of them: text as it is written, or a number."""
    if isinstance(value, list):
        return [parse_element(each, spec) for each in value]
    if spec.datatype is BYTES:
        return value if isinstance(value, (str, bytes)) else json.dumps(value)
    number = parse_scalar(value) if isinstance(value, str) else value
    if isinstance(number, str) and spec.datatype is not None:
        raise InvalidInput(f"expected {spec.datatype}, got {value!r}")
    # A column of a table that was true and false in training is one of numbers for the model.
    is_flag = isinstance(number, bool | np.bool_) and spec.datatype is not None and spec.datatype.kind != "bool"
    return int(number) if is_flag else number


def parse_scalar(text: str) -> bool | float | str:
    """Return the number, true or false in an element of a word or a cell of a CSV file, or the text if it is neither.

    Raises InvalidInput for a number that no float can hold.
    """
    if text.strip().lower() in ("true", "false"):  # "True" is what pandas writes
        return text.strip().lower() == "true"
    for kind in (int, parse_float):
        with suppress(ValueError):
            return kind(text) if "_" not in text else text
    return text


def parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value) and any(char.isdigit() for char in text):
        raise InvalidInput(f"expected a number within 1.8e308, got {text}")
    return value


def is_number(cell: str) -> bool:
    try:
        return not isinstance(parse_scalar(cell), str)
    except InvalidInput:  # too large
        return True
