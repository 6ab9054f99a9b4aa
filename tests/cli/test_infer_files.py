"""`dragoman infer` with tables, and its outputs as a table with class names, CSV and NumPy's format."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import BYTES, FP32, FP64, INT64, Infer, Server, TensorSpec
from dragoman.cli import main

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Both(dragoman.Model):
    """Return its inputs: a matrix of two columns, and text."""

    placement = "inline"
    inputs = (TensorSpec("x", FP64, (-1, 2)), TensorSpec("n", INT64, (-1,)), TensorSpec("t", BYTES, (-1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        return dict(call.inputs)


class Pair(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("x", FP64, (-1, 2)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return dict(call.inputs)


class Houses(dragoman.Model):
    """Columns of a table, as models of scikit-learn have them; the prices tell which row was which."""

    placement = "inline"
    inputs = (TensorSpec("town", BYTES, (-1,)), TensorSpec("area", FP64, (-1, 1)), TensorSpec("rooms", FP64, (-1,)))
    outputs = (TensorSpec("price", FP64, (-1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"price": call.inputs["area"].data[:, 0] * call.inputs["rooms"].data}


class Scores(dragoman.Model):
    """Scores of seven classes; the number of the class that the input names has the highest."""

    placement = "inline"
    inputs = (TensorSpec("which", INT64, (-1,)),)
    outputs = (TensorSpec("scores", FP32, (-1, 7)), TensorSpec("class", INT64, (-1,)))

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        names = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
        return {"scores": names, "class": names}

    def infer(self, call: Infer) -> dict[str, Any]:
        which = call.inputs["which"].data
        scores = np.full((len(which), 7), 0.01, np.float32) + np.arange(7, dtype=np.float32) / 1000
        scores[np.arange(len(which)), which] = 0.9
        return {"scores": scores, "class": which}


class Estimator(Scores):
    """Returns classes, and scores on request, as classifiers of scikit-learn do."""

    outputs = (Scores.outputs[1], TensorSpec("scores", FP32, (-1, 7), optional=True))

    def infer(self, call: Infer) -> dict[str, Any]:
        found = super().infer(call)
        return {name: found[name] for name in call.outputs or ("class",)}


class Wide(dragoman.Model):
    """Return so many numbers, 0 1 2 ..., in two rows of one image; NaN instead of 0."""

    placement = "inline"
    inputs = (TensorSpec("n", INT64, (1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        y = np.arange(call.inputs["n"].data[0], dtype=np.float32)
        y[0] = np.nan
        return {"y": y.reshape(1, 2, -1)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(Both, Pair, Houses, Scores, Estimator, Wide, http_port=0, grpc_port=-1) as server:
        yield server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def run(*arguments: str) -> int:
    """Run a command in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, arguments)


async def infer(capsys: pytest.CaptureFixture[str], server: Server, *words: str) -> dict[str, Any]:
    """Return shape and data of the outputs."""
    assert await run("infer", server.http_url, *words, "--json") == 0, capsys.readouterr().err
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    return {each["name"]: (each["shape"], each["data"]) for each in outputs}


TABLE = "id,b,a,name\n9007199254740993,0.1,1,x\n-2,1e-300,2,\n"


async def test_columns_of_a_table(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "d.csv").write_text(TABLE)
    found = await infer(capsys, server, "Both", "x=d.csv:a,b", "n=d.csv:id", "t=d.csv:name")
    assert found == {
        "x": ([2, 2], [1.0, 0.1, 2.0, 1e-300]),
        "n": ([2], [9007199254740993, -2]),
        "t": ([2], ["x", ""]),
    }
    assert await infer(capsys, server, "Pair", "--data", "d.csv:a,b") == {"x": ([2, 2], [1.0, 0.1, 2.0, 1e-300])}
    (folder / "plain.csv").write_text("1;2;3\n4;5;6\n")  # no header: columns by their numbers
    assert await infer(capsys, server, "Pair", "plain.csv:3,1") == {"x": ([2, 2], [3.0, 1.0, 6.0, 4.0])}
    (folder / "d.tsv").write_text('"a, b"\tc\n1\t2\n')
    assert await infer(capsys, server, "Pair", 'd.tsv:c,"a, b"') == {"x": ([1, 2], [2.0, 1.0])}


async def test_a_table_whose_header_has_the_inputs(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.csv").write_text("n,t\n1,a\n\n2,b\n")
    found = await infer(capsys, server, "Both", "--data", "d.csv", "x=1,2,3,4")
    assert (found["n"], found["t"]) == (([2], [1, 2]), ([2], ["a", "b"]))


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("which,b\n1,2\n ,3\n", ["d.csv:which"], "'d.csv', line 3, column 'which': no value; expected INT64"),
        ('a,b\n"1\n",2\n3,x\n', ["d.csv"], "'d.csv', line 4, column 'b': expected FP64, got 'x'"),
        ("a,b\n1,2\n3,x\n", ["d.csv"], "'d.csv', line 3, column 'b': expected FP64, got 'x'"),
        ("a,b\n1,2\n\n3\n", ["d.csv"], "'d.csv', line 4: expected 2 columns as in line 1, got 1"),
        ("a,b\n1,2\n", ["d.csv:a,bb"], "'d.csv' has no column 'bb'; did you mean 'b'?"),
        ("a,b\n1,2\n", ["d.csv:a,zz"], "'d.csv' has no column 'zz'; expected a, b"),
        ("a,a\n1,2\n", ["d.csv:a,a"], "'d.csv' has 2 columns 'a'"),
        ("1,2\n", ["d.csv:3,1"], "'d.csv' has no column '3'; expected 1, 2"),
        ("a,b\n1,1e400\n", ["d.csv"], "'d.csv', line 2, column 'b': expected a number within 1.8e308"),
        ("x,y\n1,2\n", ["--data", "d.csv"], "d.csv: columns that the model does not have: y"),
        (f"a,b\n1,{'9' * 200_000}\n", ["d.csv"], "'d.csv', line 2: field larger than field limit"),
    ],
    ids=["missing", "quoted", "text", "ragged", "near", "unknown", "twice", "number", "large", "input", "long"],
)
async def test_wrong_tables_name_the_line(
    server: Server, folder: Path, content: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.csv").write_text(content)
    model = "Scores" if "which" in content else "Pair"
    assert await run("infer", server.http_url, model, *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


async def test_a_parquet_file(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.1, 0.2], "id": pandas.array([2**53 + 1, None], "Int64")})
    try:
        frame.to_parquet(folder / "d.parquet")
    except ImportError:
        (folder / "d.parquet").write_bytes(b"PAR1")
        assert await run("infer", server.http_url, "Pair", "d.parquet:a,b") == 2
        assert "pip install pandas pyarrow" in capsys.readouterr().err
        return
    assert await infer(capsys, server, "Pair", "d.parquet:a,b") == {"x": ([2, 2], [1.0, 0.1, 2.0, 0.2])}
    assert await run("infer", server.http_url, "Both", "n=d.parquet:id") == 2
    assert "'d.parquet', row 2, column 'id': no value; expected INT64" in capsys.readouterr().err


# --- outputs ---------------------------------------------------------------------------------------------------------


async def test_scores_with_class_names(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Scores", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "scores  FP32[1,7]",
        *["  cat  0.9", "  gnu  0.016", "  fox  0.015", "  eel  0.014", "  dog  0.013"],
        "class  INT64[1]",
        "2 (cat)",
    ]
    assert await run("infer", server.http_url, "Scores", "2,0") == 0
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "class",
        "2 (cat)",
        "0 (ant)",
    ]
    assert await run("infer", server.http_url, "Scores", "2,0", "--output", "scores") == 0
    assert capsys.readouterr().out.splitlines() == [
        "scores",
        "cat 0.9, gnu 0.016, fox 0.015, eel 0.014, dog 0.013",
        "ant 0.9, gnu 0.016, fox 0.015, eel 0.014, dog 0.013",
    ]


async def test_outputs_as_csv_are_exact(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["x=0.1,1e-300,2,3", "n=9007199254740993,-1", 't=["a,b", "c"]']
    assert await run("infer", server.http_url, "Both", *words, "--format", "csv") == 0
    text = capsys.readouterr().out
    assert text == '"x[0]","x[1]",n,t\n'.replace('"', "") + '0.1,1e-300,9007199254740993,"a,b"\n2.0,3.0,-1,c\n'
    (folder / "again.csv").write_text(text)
    assert await infer(capsys, server, "Both", *words[1:], "x=again.csv:x[0],x[1]") == {
        "x": ([2, 2], [0.1, 1e-300, 2.0, 3.0]),
        "n": ([2], [9007199254740993, -1]),
        "t": ([2], ["a,b", "c"]),
    }


async def test_an_output_in_the_format_of_numpy(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("infer", server.http_url, "Both", "x=1,2", "n=1", "t=a", "--format", "npy") == 2
    assert "expected one output, got x, n, t; choose one with --output NAME" in capsys.readouterr().err
    assert await run("infer", server.http_url, "Both", "x=1,2", "n=1", "t=a", "--format", "npy", "--output", "t") == 2
    assert "the output is text" in capsys.readouterr().err
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, write_through=True))
    assert await run("infer", server.http_url, "Scores", "2", "--format", "npy", "--output", "scores") == 0
    sys.stdout.flush()
    array = np.load(io.BytesIO(file.getvalue()), allow_pickle=False)
    assert (array.dtype, array.shape, array[0, 2]) == (np.float32, (1, 7), np.float32(0.9))


async def test_a_large_array_is_its_range_on_a_terminal(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("infer", server.http_url, "Wide", "210") == 0
    assert len(capsys.readouterr().out.split()) > 210
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert await run("infer", server.http_url, "Wide", "210") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["y  FP32[1,2,105]", "smallest 1, largest 209, 1 NaN; --format json prints all"]
    assert await run("infer", server.http_url, "Wide", "200") == 0
    assert "199." in capsys.readouterr().out


HOUSES = "rooms,price,town,area\n2,9,Bath,50\n3,8,Hull,\n"


async def test_a_table_of_all_columns(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is all inputs without a flag; columns that the model lacks are left out, and empty cells are NaN."""
    (folder / "houses.csv").write_text(HOUSES)
    for words in (["houses.csv"], ["--data", "houses.csv"]):
        assert await run("infer", server.http_url, "Houses", *words) == 0
        captured = capsys.readouterr()
        assert captured.out.split() == ["price", "100", "nan"]
        notes = captured.err.splitlines()
        assert "houses.csv: columns that the model does not have: price" in notes
        assert "'houses.csv', line 3, column 'area': no value, sent as NaN" in notes
    assert await run("infer", server.http_url, "Houses", "houses.csv:rooms,town,area") == 0
    assert capsys.readouterr().out.split() == ["price", "100", "nan"]


async def test_a_row_of_all_columns(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Houses", "Bath,50,2") == 0
    assert capsys.readouterr().out.split() == ["price", "100"]
    assert await run("infer", server.http_url, "Houses", '"Bath, UK",50,3') == 0
    assert capsys.readouterr().out.split() == ["price", "150"]
    assert await run("infer", server.http_url, "Houses", "Bath,50") == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


async def test_a_word_for_each_input(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Houses", "Bath,York", "50,60", "2,3") == 0
    assert capsys.readouterr().out.split() == ["price", "100", "180"]
    assert await run("infer", server.http_url, "Houses", "Bath", "rooms=2", "50") == 2
    assert "or a value for each of 3 inputs, got 'Bath'" in capsys.readouterr().err


async def test_true_and_false_are_numbers_for_an_input_of_numbers(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "houses.csv").write_text("town,area,rooms\nBath,50,True\nYork,60,False\n")  # as pandas writes them
    assert await run("infer", server.http_url, "Houses", "houses.csv") == 0
    assert capsys.readouterr().out.split() == ["price", "50", "0"]
    assert await run("infer", server.http_url, "Houses", "town=Bath", "area=50", "rooms=true") == 0
    assert capsys.readouterr().out.split() == ["price", "50"]
    assert await run("infer", server.http_url, "Houses", "town=True", "area=50", "rooms=False") == 0
    assert capsys.readouterr().out.split() == ["price", "0"]
    found = await infer(capsys, server, "Both", "x=1,2", "n=True", "t=True")
    assert (found["n"], found["t"]) == (([1], [1]), ([1], ["True"]))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("rooms,town,surface", "'houses.csv' has no column 'area'; it has 'rooms', 'town', 'surface'"),
        ("rooms,town,areas", "'houses.csv' has no column 'area'; did you mean 'areas'?"),
        ("number,city,area", "'houses.csv' has no column 'town', 'rooms'; it has 'number', 'city', 'area'"),
    ],
)
async def test_a_column_is_missing(
    server: Server, folder: Path, header: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "houses.csv").write_text(f"{header}\n2,Bath,50\n")
    assert await run("infer", server.http_url, "Houses", "houses.csv") == 2
    assert capsys.readouterr().err == f"dragoman: {message}\n"


async def test_missing_inputs_are_listed_after_the_message(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Houses", "town=Bath", "area=50") == 2
    assert ".;" not in (text := capsys.readouterr().err)
    assert text.endswith("; not given: rooms=... (FP64[-1])\n")


async def test_scores_with_names_are_asked_for(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """On a table for a reader, unless outputs are named; programs get the outputs of the model's choice."""
    assert await run("infer", server.http_url, "Estimator", "5") == 0
    shown = capsys.readouterr().out
    assert "fox" in shown
    assert [line.split()[0] for line in shown.splitlines() if "0.9" in line] == ["fox"]
    assert await run("infer", server.http_url, "Estimator", "5", "--output", "class") == 0
    assert "0.9" not in capsys.readouterr().out
    assert [*await infer(capsys, server, "Estimator", "5")] == ["class"]
    assert await run("infer", server.http_url, "Estimator", "5", "--format", "csv") == 0
    assert capsys.readouterr().out.splitlines()[0] == "class"
