"""Tables in files of CSV and Parquet."""

import csv
import re
from collections.abc import Sequence
from typing import Any

from dragoman.cli.files import read_file
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.formats.csv_table import Table, parse_csv

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
_COLUMNS = re.compile(r"(.+\.(?:csv|tsv|parquet)):(.+)", re.IGNORECASE | re.DOTALL)
_PARQUET_HINT = "needs the packages 'pandas' and 'pyarrow': pip install pandas pyarrow"


def split_columns(text: str) -> tuple[str, list[str]]:
    """Return the path and the columns of `data.csv:a,b`; no columns if it names none."""
    found = _COLUMNS.fullmatch(text)
    return (found[1], next(csv.reader([found[2]]))) if found else (text, [])


def read_table(path: str, names: Sequence[str]) -> Table:
    """Return the table in a file, by the rule of `parse_csv`. Raises InvalidInput if it cannot be read."""
    if path.lower().endswith(".parquet"):
        return _read_parquet(path)
    text = read_file(path).decode("utf-8-sig", "replace")
    return parse_csv(text, names, path, "\t" if path.lower().endswith(".tsv") else ",\t;")


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
