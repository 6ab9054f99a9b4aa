"""CSV of requests and responses, as SageMaker's clients and batch transforms send and read it.

A header is optional in requests, as SageMaker has none and MLflow needs one. Responses have none: a line for each row.
"""

import csv
import io
import math
from collections.abc import Mapping

from dragoman.core.calls import ModelDescription
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.signature import TensorSpec, check_columns
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.formats.csv_table import Table, cell_values, parse_csv
from dragoman.protocols.json_arrays import only_input, parse_tensor
from dragoman.protocols.wire import Policy

CSV = "text/csv"


def parse_csv_inputs(text: str, model: ModelDescription, policy: Policy) -> Mapping[str, Tensor]:
    """Return the inputs in a table: a column for each input, or a row for each row of the only one.

    Raises InvalidInput that names the line and the column of an invalid cell.
    """
    most = policy.max_json_values
    if text.count("\n") + text.count(",") > most:
        raise InvalidInput(f"too many cells in {CSV}: expected at most {most} (max_json_values)")
    specs = {spec.name: spec for spec in model.signature.inputs}
    columns = [name for spec in specs.values() for name in spec.columns]
    table = parse_csv(text, [*specs, *columns])
    if not table.rows:
        raise InvalidInput("the table has no rows")
    needed = [spec for spec in specs.values() if not spec.optional]
    if table.header and any(name in specs for name in table.header):
        return _named(table, specs, needed, is_open=model.signature.open_inputs)
    if len(needed) > 1:
        if table.header or len(table.rows[0]) != len(needed):
            names = ", ".join(f"'{spec.name}'" for spec in needed)
            got = ", ".join(map(repr, table.header)) or f"{len(table.rows[0])} without names"
            raise InvalidInput(f"expected the columns {names}, got {got}")
        table = Table("", [spec.name for spec in needed], table.rows, table.numbers, table.unit)
        return _named(table, specs, needed, is_open=False)
    spec = only_input(model)
    if table.header and spec.columns:
        check_columns(table.header, spec.columns, "table")
        table = table.select(spec.columns)
    return {spec.name: _tensor(table, spec)}


def _named(
    table: Table, specs: Mapping[str, TensorSpec], needed: list[TensorSpec], *, is_open: bool
) -> dict[str, Tensor]:
    """Return the columns of a table as inputs."""
    known = table.header if is_open else [name for name in table.header if name in specs]
    expected = [spec.name for spec in needed if spec.name not in table.header]
    if expected or len(known) < len(table.header):
        check_columns(table.header, [*dict.fromkeys([*known, *expected])], "table")
    return {name: _tensor(table.select([name]), specs.get(name, TensorSpec(name))) for name in known}


def _tensor(table: Table, spec: TensorSpec) -> Tensor:
    """Return the rows of a table in the shape of an input, the axes after the first in row-major order."""
    tensor = parse_tensor(cell_values(table, spec, []), spec, spec.name)
    if spec.shape is None or len(spec.shape) < 2:
        return tensor
    width, inner = len(table.rows[0]), spec.shape[1:]
    is_row = min(inner) > 0 and math.prod(inner) == width
    return Tensor(tensor.data.reshape(len(table.rows), *(inner if is_row else (width,))), tensor.datatype)


def format_csv(outputs: Mapping[str, Tensor]) -> bytes:
    """Return a line for each row, with the elements of every output. Raises NotSupported for other outputs."""
    lengths = {tensor.shape[0] if tensor.shape else 1 for tensor in outputs.values()}
    if len(lengths) != 1:
        raise NotSupported(f"outputs of {sorted(lengths)} rows are not a table of {CSV}: ask for application/json")
    (length,) = lengths
    columns: list[list[str]] = []
    for name, tensor in outputs.items():
        values = numpy_numbers(tensor)
        if length and values.size:
            columns += [[_text(value, name) for value in column] for column in values.reshape(length, -1).T]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue().encode()


def _text(value: object, output: str) -> str:
    """Return the shortest text of a number that has its value, or a text."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise NotSupported(f"output '{output}' holds bytes that are not UTF-8: they are no text of {CSV}") from error
