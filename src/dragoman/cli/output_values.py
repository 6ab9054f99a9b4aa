"""Outputs of a model for a terminal and for files: tables with class names, JSON, CSV and NumPy's format."""

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.cli.terminal import colour_text, escape_controls, printable, table
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import numpy_numbers

# Rows of an output that a terminal shows, and columns of an output without class names.
_MAX_ROWS = 20
_MAX_COLUMNS = 8
_MAX_NUMBERS = 200  # of an array on a terminal, some 40 lines; of more, only the range is shown
_TOP = 5  # classes with the highest scores

Labels = Mapping[str, Sequence[str]]


def print_result(result: Any, form: str, labels: Labels) -> None:
    """Print the outputs of a response. Raises InvalidInput if they have no such form.

    labels: class names by output and index.
    """
    if form == "json":
        print(escape_controls(result.response.to_json().decode()), flush=True)
    elif form == "csv":
        print(_csv(result.response.tensors), end="", flush=True)
    elif form == "npy":
        content = _npy(result.response.tensors)
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        print("\n".join(_lines(result.response.tensors, labels)), flush=True)


# --- table -----------------------------------------------------------------------------------------------------------


def _lines(tensors: Mapping[str, Any], labels: Labels) -> Iterator[str]:
    """Yield a table if the outputs are columns of equal length, else each output: its classes, or its array."""
    columns = _columns(tensors, labels)
    if columns:
        rows = list(zip(*columns.values(), strict=True))
        yield from table([list(columns), *rows[:_MAX_ROWS]])
        if len(rows) > _MAX_ROWS:
            yield colour_text(f"... {len(rows) - _MAX_ROWS} more rows; --format json prints all", "2", sys.stdout)
        return
    for name, tensor in tensors.items():
        shape = ",".join(map(str, tensor.shape))
        yield colour_text(f"{printable(name)}  {tensor.datatype}[{shape}]", "1", sys.stdout)
        names = _class_names(name, tensor, labels)
        if names and tensor.data.size == len(names):
            yield from table(
                [(names[i], _cell(tensor.data.flat[i])) for i in _top(tensor.data.reshape(-1))], indent="  "
            )
        elif (known := _class_numbers(name, tensor, labels)) and tensor.data.size <= _TOP:
            yield printable(", ".join(_class_cell(value, known) for value in tensor.data.flat))
        elif tensor.data.size > _MAX_NUMBERS and tensor.data.dtype.kind in "iufV" and sys.stdout.isatty():
            yield f"{_range(numpy_numbers(tensor))}; --format json prints all"
        else:
            yield printable(str(tensor.data))


def _range(data: Any) -> str:
    """Return the smallest and largest number of an array, and how many are NaN."""
    unknown = int(np.isnan(data).sum())
    text = f"smallest {_cell(np.fmin.reduce(data, axis=None))}, largest {_cell(np.fmax.reduce(data, axis=None))}"
    return f"{text}, {unknown} NaN" if unknown else text


def _columns(tensors: Mapping[str, Any], labels: Labels) -> dict[str, Sequence[str]]:
    """Return cells by column, one for each element of a row or one for its scores; none if there is no such form."""
    lengths = {tensor.shape[0] if tensor.shape else -1 for tensor in tensors.values()}
    if len(lengths) != 1 or not all(_is_column(name, each, labels) for name, each in tensors.items()):
        return {}
    columns: dict[str, Sequence[str]] = {}
    for name, tensor in tensors.items():
        names = _class_names(name, tensor, labels)
        if len(tensor.shape) == 1:
            columns[name] = [_class_cell(value, _class_numbers(name, tensor, labels)) for value in tensor.data]
        elif names:
            columns[name] = [", ".join(f"{names[i]} {row[i]:.3g}" for i in _top(row)) for row in tensor.data]
        elif tensor.shape:
            for i in range(tensor.shape[1]):
                columns[f"{name}[{i}]"] = [_cell(value) for value in tensor.data[:, i]]
    return columns


def _is_column(name: str, tensor: Any, labels: Labels) -> bool:
    if len(tensor.shape) != 2:
        return len(tensor.shape) < 2
    if _class_names(name, tensor, labels):
        return bool(tensor.shape[0] != 1)  # the scores of one row get a line each
    return bool(tensor.shape[1] <= _MAX_COLUMNS)


def _class_names(name: str, tensor: Any, labels: Labels) -> Sequence[str]:
    """Return the class names of scores, empty for other outputs."""
    names = labels.get(name, ())
    is_scores = bool(tensor.shape) and tensor.shape[-1] == len(names) and tensor.data.dtype.kind == "f"
    return names if is_scores else ()


def _class_numbers(name: str, tensor: Any, labels: Labels) -> Sequence[str]:
    """Return the class names of an output that has the numbers of classes, empty for other outputs."""
    return labels.get(name, ()) if tensor.data.dtype.kind in "iu" else ()


def _top(scores: Any) -> Sequence[int]:
    order: Sequence[int] = np.argsort(-scores, kind="stable")[:_TOP].tolist()
    return order


def _class_cell(value: Any, names: Sequence[str]) -> str:
    text = _cell(value)
    return f"{text} ({names[int(value)]})" if names and 0 <= int(value) < len(names) else text


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value:.6g}" if hasattr(value, "dtype") and value.dtype.kind == "f" else str(value)


# --- files -----------------------------------------------------------------------------------------------------------


def _csv(tensors: Mapping[str, Any]) -> str:
    """Return a CSV file with a line for each row, and the shortest text of each number that has its value."""
    lengths = {tensor.shape[0] if tensor.shape else 1 for tensor in tensors.values()}
    if len(lengths) != 1:
        raise InvalidInput("--format csv: the outputs have different numbers of rows; choose one with --output NAME")
    (length,) = lengths
    header: list[str] = []
    columns: list[list[str]] = []
    for name, tensor in tensors.items():
        inner = tensor.shape[1:]
        header += [name + (f"[{','.join(map(str, i))}]" if i else "") for i in np.ndindex(*inner)]
        columns += [[_exact(v) for v in each] for each in tensor.data.reshape(length, -1).T] if length else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    return printable(text.getvalue()) if sys.stdout.isatty() else text.getvalue()


def _exact(value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput("--format csv: an output is not text; use --format json") from error
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


def _npy(tensors: Mapping[str, Any]) -> bytes:
    """Return a file of NumPy's format with the only output."""
    if len(tensors) != 1:
        raise InvalidInput(
            f"--format npy: expected one output, got {', '.join(tensors)}; choose one with --output NAME"
        )
    (tensor,) = tensors.values()
    data = numpy_numbers(tensor)
    if data.dtype.kind == "O":
        raise InvalidInput("--format npy: the output is text; use --format json or csv")
    if sys.stdout.isatty():
        raise InvalidInput("--format npy: binary data for a file; add > output.npy")
    file = io.BytesIO()
    np.save(file, data, allow_pickle=False)
    return file.getvalue()
