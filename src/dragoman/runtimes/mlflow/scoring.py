"""MLflow's scoring protocol, the body and the response of `/invocations`, by the functions of MLflow itself."""

import csv
import importlib
import io
import json
import logging
from collections.abc import Iterable
from typing import Any

from dragoman.core.calls import Handled
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.formats import fast_json
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy

log = logging.getLogger("dragoman.mlflow")
INVOCATIONS = "POST /invocations"
_POLICY = Policy()
_CSV = "text/csv"
_JSON = "application/json"
_PARQUET = "application/vnd.apache.parquet"
_MAX_COLUMNS = 1 << 18  # of CSV, each of which is an object of pandas
_MAX_SPARSE_CELLS = 1 << 20  # of a table with more cells than the request has bytes


def score(model: Any, body: bytes, content_type: str) -> Handled:
    """Return the predictions of an mlflow.pyfunc model for the body of a request, or an error as MLflow formats it.

    A body is JSON unless it is CSV. Parquet is rejected: the length of a request does not bound the table in it.
    """
    server = importlib.import_module("mlflow.pyfunc.scoring_server")
    error_class: Any = importlib.import_module("mlflow.exceptions").MlflowException
    kind, _, options = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == _PARQUET:
        return Handled(f"content type '{kind}' is not supported: send {_JSON} or {_CSV}".encode(), "text/plain", 415)
    try:
        if kind != _CSV:
            kind = _JSON
            _check_rows(body.count(b"["))
            check_json(body, _POLICY, elements=False)
            _check_table(body)
        else:
            _check_csv(body)
        given = f"{kind};{options}" if options else kind
        result = server.invocations(body, given, model, model.metadata.get_input_schema())
        content = _with_null(result.response)
    except InvalidInput as error:
        return _error("BAD_REQUEST", error.message, 400)
    except error_class as error:  # with a traceback if the model or pandas failed, which MLflow sends to the client
        if "stack_trace" in error.json_kwargs:
            log.warning("%s\n%s", error.message, error.json_kwargs["stack_trace"])
        return _error(error.error_code, error.message, error.get_http_status_code())
    except (ValueError, RecursionError) as error:
        return _error("BAD_REQUEST", f"the request cannot be parsed: {error}", 400)
    return Handled(content.encode(), result.mimetype, result.status)


def _check_rows(rows: int) -> None:
    """Raise InvalidInput for too many rows, each of which takes many times its text as objects of Python."""
    if rows > _POLICY.max_json_values:
        raise InvalidInput(f"too many rows: expected at most {_POLICY.max_json_values}, got {rows}")


def _check_table(body: bytes) -> None:
    """Raise InvalidInput for JSON of a table in which most cells are missing. MLflow rejects what is not JSON."""
    try:
        try:
            value = fast_json.loads(body)
        except fast_json.JSONDecodeError:  # also for NaN, which MLflow takes
            value = parse_json(body)
    except ValueError:
        return
    if not isinstance(value, dict):
        return
    split, inputs = value.get("dataframe_split"), value.get("inputs")
    sizes = [_table_size(value.get("dataframe_records"))]
    if isinstance(split, dict):
        rows, columns = _table_size(split.get("data"))
        sizes.append((max(rows, _length(split.get("index"))), max(columns, _length(split.get("columns")))))
    if isinstance(inputs, dict) and not all(isinstance(column, list) for column in inputs.values()):
        sizes.append(_table_size(inputs))  # single values are repeated
    for rows, columns in sizes:
        _check_cells(rows, columns, len(body))


def _table_size(data: Any) -> tuple[int, int]:
    """Return the numbers of rows and columns of a list of rows, or of an object of columns."""
    if isinstance(data, dict):
        return _width(data.values()), len(data)
    return (len(data), _width(data)) if isinstance(data, list) else (1, 1)


def _width(rows: Iterable[Any]) -> int:
    """Return the number of elements of rows that are lists or objects, with those that only some of them have."""
    names: set[str] = set()
    longest = 0
    for row in rows:
        if isinstance(row, dict):
            names.update(row)
        else:
            longest = max(longest, _length(row))
    return max(len(names), longest)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 1


def _check_csv(body: bytes) -> None:
    """Raise InvalidInput for CSV with too many rows, or in which most cells are missing."""
    _check_rows(max(body.count(b"\n"), body.count(b"\r")))
    lines = body.splitlines()
    columns = max((line.count(b",") + 1 for line in lines), default=0)
    if columns > _MAX_COLUMNS:
        raise InvalidInput(f"too many columns: expected at most {_MAX_COLUMNS}, got {columns}")
    if len(lines) * columns <= max(len(body), _MAX_SPARSE_CELLS):
        return
    try:  # exactly, as there may be commas and lines in quotes
        widths = [len(row) for row in csv.reader(io.StringIO(body.decode(errors="replace"), newline="")) if row]
    except csv.Error as error:
        raise InvalidInput(f"the request cannot be parsed: {error}") from error
    _check_cells(len(widths), max(widths, default=0), len(body))


def _check_cells(rows: int, columns: int, size: int) -> None:
    if rows * columns > max(size, _MAX_SPARSE_CELLS):
        raise InvalidInput(
            f"the table has {rows} rows and {columns} columns, most of them empty: expected at most "
            f"{_MAX_SPARSE_CELLS} cells, or fewer than bytes in the request"
        )


def _error(code: str, message: str, status: int) -> Handled:
    return Handled(json.dumps({"error_code": code, "message": message}).encode(), _JSON, status)


def _with_null(text: str) -> str:
    """Return JSON with null for NaN, which JSON does not have. Raises InvalidInput for an infinite number."""
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(parse_json(text, parse_constant=_constant))


def _constant(name: str) -> None:
    if name != "NaN":
        raise InvalidInput(
            "a prediction is infinite, which JSON does not support: ask for binary output over Open Inference"
        )
