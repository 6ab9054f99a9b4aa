"""CSV at LMI's paths: long tables are parsed and formatted in chunks, with the same values as short ones."""

import io
import math
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from text_server import TextServer, serve

CSV = {"content-type": "text/csv"}
NPY = CSV | {"accept": "application/x-npy"}
ROWS = 60_000  # of a table that is parsed in several chunks


def same(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x


def columns(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([b, a], axis=-1)


class Table(dragoman.Model):
    """Return a table of `rows` x `width` numbers of some kind, and the row numbers if `pair`."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("size", dragoman.INT64, (4,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[np.generic]]:
        rows, width, kind, pair = call.inputs["size"].data.tolist()
        table = np.arange(rows * width).reshape(rows, width)
        kinds: Sequence[NDArray[np.generic]] = (
            table,
            table / 7,
            (table / 7).astype(np.float32),
            table % 2 == 0,
            np.where(table % 3, table, np.nan),
        )
        return {"a": kinds[kind]} | ({"b": np.arange(rows)} if pair else {})


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(same, columns, Table, placement="inline") as server:
        yield server


async def post_table(server: TextServer, table: bytes, model: str = "same") -> NDArray[np.float64]:
    response = await server.post(f"/predictions/{model}", table, NPY)
    assert response.status == 200, response.body[:200]
    values: NDArray[np.float64] = np.load(io.BytesIO(response.body))
    return values


CELLS = ["1", "-0.5", "+1", ".5", "5.", "", "nan", "-inf", "1e400", "01", " 7", "1_0", "2.5e-310", "0.1"]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n\n\r\n"])
@pytest.mark.parametrize("mostly_plain", [True, False])
async def test_cells_of_long_tables_are_parsed_as_by_float(
    server: TextServer, width: int, line_end: str, mostly_plain: bool
) -> None:
    cells = [str(n / 8) if mostly_plain or n % 5000 else CELLS[n // 5000 % len(CELLS)] for n in range(ROWS * 3)]
    if width == 1:
        cells = [cell or "nan" for cell in cells]  # an empty cell alone is a blank line
    lines = [",".join(cells[at : at + width]) for at in range(0, len(cells), width)]
    for end in ("", line_end):
        values = await post_table(server, (line_end.join(lines) + end).encode())
        expected = np.array([float(cell or "nan") for cell in cells]).reshape(-1, width)
        assert values.tobytes() == expected.tobytes()


async def test_a_row_may_be_longer_than_a_chunk(server: TextServer) -> None:
    row = np.arange(100_000) / 4
    text = ",".join(map(str, row))
    assert (await post_table(server, f"{text}\n{text}".encode())).tobytes() == np.stack([row, row]).tobytes()
    values = await post_table(server, f"{text},\n{text},".encode())
    assert np.isnan(values[:, -1]).all()
    assert values[:, :-1].tobytes() == np.stack([row, row]).tobytes()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_a_header_line_is_not_a_row(server: TextServer, line_end: bytes) -> None:
    rows = [b"%d,0.5" % n for n in range(ROWS)]
    values = await post_table(server, line_end.join([b"", b"x,y", *rows]))
    assert values.shape == (ROWS, 2)
    assert values[-1].tolist() == [ROWS - 1, 0.5]
    values = await post_table(server, line_end.join([b"a,b", *rows]), "columns")
    assert values[-1].tolist() == [0.5, ROWS - 1]
    numbers = await server.post("/predictions/columns", line_end.join([b"1,2", *rows]), NPY)
    assert numbers.status in (400, 424)  # the names of inputs are never numbers


@pytest.mark.parametrize("at", [1, 2, 17_000, ROWS - 1])
@pytest.mark.parametrize(
    ("row", "message"),
    [(b"1", "1 values"), (b"1,2", "2 values"), (b"1,2,3,4", "more than 3 values"), (b",,,,", "more")],
)
async def test_rows_of_unequal_length_are_rejected(server: TextServer, at: int, row: bytes, message: str) -> None:
    rows = [b"%d,0.5,7" % n for n in range(ROWS)]
    rows[at] = row
    for names in ([], [b"x,y,z"]):
        response = await server.post("/predictions/same", b"\n".join([*names, *rows]), CSV)
        assert response.status in (400, 424)
        assert f"row {at + 1 + len(names)} has {message}" in str(response.json)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"1\n" * 200_000 + b"1" * 300_000 + b"\n", "field larger than field limit (131072)"),
        (b"1\n" * 200_000 + b"\xff\n", "not valid UTF-8"),
        (b"1\n" * 1_200_000 + b"one\n", "too many cells in text/csv"),
        (b"1\n" * 1_200_000 + b'"1"\n', "too many cells in text/csv"),
        (b"\n" * 1_200_000 + b"1\n", "too many cells in text/csv"),
        (b"1\r2\n" * 100_000, "not valid CSV"),
    ],
)
async def test_long_tables_that_are_not_numbers_are_rejected(server: TextServer, table: bytes, message: str) -> None:
    response = await server.post("/predictions/same", table, CSV)
    assert response.status in (400, 424)
    assert message in str(response.json)


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 2), (20_000, 2), (2, 20_000), (0, 2), (1, 8193)])
@pytest.mark.parametrize("pair", [False, True])
async def test_responses_have_every_number(server: TextServer, rows: int, width: int, kind: int, pair: bool) -> None:
    response = await server.post("/predictions/Table", [rows, width, kind, int(pair)], {"accept": "text/csv"})
    assert response.status == 200
    lines = response.body.decode().split("\n")
    assert lines.pop() == ""
    assert len(lines) == rows
    for at, line in enumerate(lines):
        cells = line.split(",")
        if pair:
            assert cells.pop() == str(at)
        numbers = range(at * width, (at + 1) * width)
        match kind:
            case 0:
                assert cells == [str(n) for n in numbers]
            case 1:
                assert [float(cell) for cell in cells] == [n / 7 for n in numbers]
            case 2:
                assert [float(cell) for cell in cells] == [float(np.float32(n / 7)) for n in numbers]
            case 3:
                assert cells == [str(n % 2 == 0) for n in numbers]
            case _:
                values = [float(cell) for cell in cells]
                assert all(
                    math.isnan(cell) if n % 3 == 0 else cell == n for cell, n in zip(values, numbers, strict=True)
                )
