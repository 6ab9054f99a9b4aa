"""`dragoman models`, `infer` and `chat` against servers: inputs, output, keys, and errors in one sentence."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from cli.terminals import Terminal
from dragoman import BOOL, BYTES, FP32, FP64, INT64, Infer, Server, TensorSpec
from dragoman.cli import main
from dragoman.cli.input_values import parse_inputs
from dragoman.core.calls import ReadStatistics, Request
from dragoman.core.signature import Signature
from text_server import ReverseModel

KEY = "a-key-of-twenty-characters"


class Rows(dragoman.Model):
    """Sums of rows and a label for each: two outputs of equal length."""

    placement = "inline"
    inputs = (TensorSpec("x", FP32, (-1, 4)),)
    outputs = (TensorSpec("sum", FP32, (-1,)), TensorSpec("label", BYTES, (-1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        sums = call.inputs["x"].data.sum(axis=1)
        return {"sum": sums, "label": np.array([b"big" if s > 5 else b"small\x1b[31m" for s in sums], object)}


class Echo(dragoman.Model):
    """Return the inputs, one of each kind."""

    placement = "inline"
    inputs = (
        TensorSpec("count", INT64, (-1,)),
        TensorSpec("matrix", FP64, (2, -1)),
        TensorSpec("text", BYTES, (-1,)),
        TensorSpec("free", FP32, (-1, -1), optional=True),
    )

    def infer(self, call: Infer) -> dict[str, Any]:
        return dict(call.inputs)


class Fails(Rows):
    def infer(self, call: Infer) -> dict[str, Any]:
        raise RuntimeError("out of ink")


def counter(n: int) -> Iterator[int]:
    yield from range(n)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    models = (Rows, Echo, Fails, counter, ReverseModel)
    async with Server(*models, http_port=0, grpc_port=0, api_key=KEY, placement="inline") as server:
        yield server


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_API_KEY", KEY)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def run(*arguments: str) -> int:
    """Run a command in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, arguments)


def outputs_in(text: str) -> dict[str, Any]:
    return {each["name"]: (each["datatype"], each["shape"], each["data"]) for each in json.loads(text)["outputs"]}


# --- models --------------------------------------------------------------------------------------------------


async def test_models(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("models", server.http_url) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["model", "versions", "platform", "state", "inputs", "outputs"]
    rows = next(line for line in out if line.startswith("Rows "))
    assert "x FP32[-1,4]" in rows
    assert rows.endswith("sum FP32[-1],")  # beside a model of more inputs than a line holds
    assert out[out.index(rows) + 1].split() == ["label", "BYTES[-1]"]
    assert await run("models", f"grpc://{server.grpc_url}", "--json") == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found.keys() == {"Rows", "Echo", "Fails", "counter", "ReverseModel"}
    assert found["Rows"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert found["Rows"]["ready"] is True


class Many(dragoman.Model):
    """Has more inputs than a line holds."""

    placement = "inline"
    inputs = tuple(TensorSpec(f"measurement_{i}", FP32, (-1, 1)) for i in range(12))
    outputs = (TensorSpec("y", FP32, (-1,)), TensorSpec("label", FP32, (-1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        return {spec.name: np.zeros(1, np.float32) for spec in self.outputs}


async def test_models_with_many_inputs_have_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Many, Rows, http_port=0, grpc_port=-1) as server:
        assert await run("models", server.http_url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    many = [line for line in lines if "measurement_" in line]
    assert len(many) > 4
    assert [line.split()[0] for line in lines[:2]] == ["model", "Many"]
    assert all(line.startswith(" ") for line in many[1:])
    assert " ".join(line[many[0].index("measurement_") :].split("  ")[0] for line in many) == ", ".join(
        f"measurement_{i} FP32[-1,1]" for i in range(12)
    )
    assert many[0].endswith("  y FP32[-1], label FP32[-1]")


async def test_keys_come_from_a_file_or_a_variable(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DRAGOMAN_API_KEY")
    for command, *more in (["models"], ["chat", "--message", "x"], ["status"]):
        assert await run(command, server.http_url, *more) == 2
        err = capsys.readouterr().err
        assert "give it with --key-file or $DRAGOMAN_API_KEY" in err
        assert len(err.splitlines()) == 1
    (folder / "key").write_text(KEY + "\n")
    assert await run("models", server.http_url, "--key-file", "key") == 0
    (folder / "key").write_text("")
    assert await run("models", server.http_url, "--key-file", "key") == 2
    assert await run("models", server.http_url, "--key-file", "none") == 2
    assert capsys.readouterr().err.splitlines() == [
        "dragoman: --key-file: expected one key in 'key'",
        "dragoman: --key-file: 'none' cannot be read: No such file or directory",
    ]


# --- infer ---------------------------------------------------------------------------------------------------


async def test_a_table_of_outputs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Rows", "1,2,3,4,0,0,0,0.5") == 0
    assert capsys.readouterr().out.splitlines() == ["sum  label", "10   big", "0.5  small\ufffd[31m"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize(
    "words",
    [
        ["x=1,2,3,4"],
        ["--", "-1,.5,+6.5,4"],
        ["[[1, 2, 3, 4]]"],
        ["x=x.npy"],
        ["x.csv"],
        ["x=header.csv"],
        ["--data", "x.json"],
        ["--data", "request.json"],
        ["--data", '{"x": [[1, 2, 3, 4]]}'],
        ["--data", "x.csv"],
        ["--data", "-"],
    ],
    ids=" ".join,
)
async def test_forms_of_inputs(
    server: Server,
    folder: Path,
    words: list[str],
    scheme: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(folder / "x.npy", np.array([1.0, 2, 3, 4]))  # FP64, for an FP32 model
    (folder / "x.csv").write_text("1,2,3,4\n")
    (folder / "header.csv").write_text("a,b,c,d\n1,2,3,4\n")
    (folder / "x.json").write_text("[[1, 2, 3, 4]]")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    (folder / "request.json").write_text(json.dumps({"inputs": [tensor]}))
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"x": [[1, 2, 3, 4]]}'))
    url = server.http_url if scheme == "http" else f"grpc://{server.grpc_url}"
    assert await run("infer", url, "Rows", "--json", "--output", "sum", *words) == 0
    assert outputs_in(capsys.readouterr().out) == {"sum": ("FP32", [1], [10.0])}


async def test_values_are_not_changed(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "all.csv").write_text("count,text\n9007199254740993,007\n-1,1.50\n")
    assert await run("infer", server.http_url, "Echo", "matrix=1.5,2.5", "--data", "all.csv", "--json") == 0
    assert outputs_in(capsys.readouterr().out) == {
        "count": ("INT64", [2], [9007199254740993, -1]),
        "matrix": ("FP64", [2, 1], [1.5, 2.5]),
        "text": ("BYTES", [2], ["007", "1.50"]),
    }
    (folder / "words.csv").write_text("hello\nworld\n")  # without a header
    words = ["count=1", "matrix=1,2,3,4", "text=words.csv", "free=1,2"]
    assert await run("infer", server.http_url, "Echo", *words[:3], "--json") == 0
    found = outputs_in(capsys.readouterr().out)
    assert found["text"] == ("BYTES", [2], ["hello", "world"])
    assert found["matrix"] == ("FP64", [2, 2], [1.0, 2.0, 3.0, 4.0])
    for text, expected in (("1.50", ["1.50"]), ("a,b", ["a,b"]), ('["a", "b"]', ["a", "b"]), ("a=b", ["a=b"])):
        assert await run("infer", server.http_url, "Echo", *words[:2], f"text={text}", "--json") == 0
        assert outputs_in(capsys.readouterr().out)["text"][2] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Rows", "y=1"], "the model has no input 'y'; expected x"),
        (["Echo", "coutn=1"], "the model has no input 'coutn'; did you mean 'count'?"),
        (["Echo", "1,2"], "a name of count, matrix, text, free, or a value for each of 4 inputs, got '1,2'"),
        (
            ["Echo", "count=1"],
            "; not given: matrix=... (FP64[2,-1]), text=... (BYTES[-1]), free=... (FP32[-1,-1])",
        ),
        (["Rows", "x=1", "x=2"], "input 'x' has two values"),
        (
            ["Rows", "one"],
            "input 'x': expected FP32 as 1,2,3, JSON, or a file (.npy, .json, .csv, .tsv, .parquet, .png, ",
        ),
        (["Rows", "1_0,2,3,4"], "input 'x': expected FP32 as 1,2,3"),
        (["Rows", "1,2,3,1e400"], "input 'x': expected a number within 1.8e308, got 1e400"),
        (["Rows", "x=.5,-1e400,3,4"], "input 'x': expected a number within 1.8e308, got -1e400"),
        (["Rows", "huge.csv"], "input 'x': 'huge.csv', line 1, column 1: expected a number within 1.8e308, got 1e400"),
        (["Rows", "--data", '{"x": [[1, 2, 3, 1e400]]}'], "expected a number within 1.8e308, got 1e400"),
        (["Rows", "none.csv"], "'none.csv' cannot be read: No such file or directory"),
        (["Rows", "@none.csv"], "'@none.csv' cannot be read: No such file or directory\n"),
        (["Rows", "@text.csv"], "'@text.csv' cannot be read: No such file or directory; did you mean text.csv, "),
        (["Rows", "--data", "@text.csv"], "did you mean text.csv, without @?"),
        (["Rows", "text.csv"], "input 'x': 'text.csv', line 2, column 2: expected FP32, got 'b'"),
        (["Rows", "underscore.csv"], "input 'x': 'underscore.csv', line 1, column 1: expected FP32, got '1_0'"),
        (["Rows", "ragged.csv"], "'ragged.csv', line 2: expected 2 columns as in line 1, got 1"),
        (["Rows", "bad.npy"], "'bad.npy' is not an array of numbers in NumPy's format"),
        (["Rows", "--data", "{"], "--data is not JSON"),
        (
            ["Rows", "--data", "rows.xlsx"],
            "--data: expected JSON, -, or a file (.npy, .json, .csv, .tsv, .parquet), got 'rows.xlsx'",
        ),
        (["Rows", "1,2,3"], "input 'x'"),
        (["Rows", "1,2,3,4", "--parameters", "[]"], "--parameters: expected an object, got '[]'"),
        (["Echo", "count=1.5", "matrix=1,2", "text=a"], "input 'count'"),
        (["nothing", "1"], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_wrong_inputs_are_one_sentence(
    server: Server, folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text.csv").write_text("1,2,3,4\n1,b,3,4\n")
    (folder / "underscore.csv").write_text("1_0,2,3,4\n")
    (folder / "huge.csv").write_text("1e400,2,3,4\n")
    (folder / "ragged.csv").write_text("1,2\n1\n")
    (folder / "bad.npy").write_text("x")
    assert await run("infer", server.http_url, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dragoman: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


async def test_numbers_that_are_not_finite(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Echo", "count=1", "matrix=nan,-.5,inf,-Infinity", "text=a") == 0
    assert "[[ nan -0.5]\n [ inf -inf]]" in capsys.readouterr().out


async def test_words_and_cells_are_parsed_alike(folder: Path) -> None:
    words = {"5.,-.5": [5.0, -0.5], "true,false": [True, False], "1,+2": [1, 2], "inf,1e3": [np.inf, 1e3]}
    for text, expected in words.items():
        (folder / "x.csv").write_text(text.replace(",", "\n"))
        for value in (text, "x.csv"):
            assert parse_inputs([value], None, Signature((TensorSpec("x", BOOL, (-1,)),), ())) == {"x": expected}


async def test_a_value_that_begins_with_a_hyphen(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        await run("infer", server.http_url, "Rows", "-1,2,3,4")
    assert "unrecognized arguments: -1,2,3,4; put -- before values that begin with -" in capsys.readouterr().err


async def test_without_inputs_the_signature_is_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Echo") == 2
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["input", "count", "INT64[-1]"],
        ["input", "matrix", "FP64[2,-1]"],
    ]
    assert out.endswith(f"dragoman infer {server.http_url} Echo count=... matrix=... text=... free=..., or --example\n")


async def test_an_example_and_a_stream(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Rows", "--example", "--json") == 0
    assert outputs_in(capsys.readouterr().out)["sum"] == ("FP32", [1], [4.0])
    assert await run("infer", f"grpc://{server.grpc_url}", "counter", "3", "--stream", "--json") == 0
    found = [outputs_in(line)["output-0"][2] for line in capsys.readouterr().out.splitlines()]
    assert found == [[0], [1], [2]]


class Wide(Rows):
    """Takes rows of many numbers, which no document has as an example."""

    inputs = (TensorSpec("x", FP32, (-1, 20_000)),)


class Photo(dragoman.Model):
    """Takes pictures of at least 64 x 64."""

    placement = "inline"
    inputs = (TensorSpec("x", FP32, (-1, 3, -1, -1)),)
    outputs = (TensorSpec("mean", FP32, (-1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        x = call.inputs["x"].data
        if x.shape[-1] < 64:
            raise RuntimeError("the picture is too small")
        return {"mean": x.mean(axis=(1, 2, 3))}


class Sampler(Photo):
    """Takes one rate, as its own example says."""

    inputs = (TensorSpec("rate", INT64, ()),)

    def infer(self, call: Infer) -> dict[str, Any]:
        if call.inputs["rate"].data != 16000:
            raise dragoman.errors.InvalidInput("expected 16000")
        return {"mean": np.ones(1, np.float32)}

    def example_inputs(self) -> dict[str, Any]:
        return {"rate": 16000}


class Boundless(Rows):
    """Takes more numbers than an example has."""

    inputs = (TensorSpec("x", FP32, (5_000, 5_000)),)


async def test_examples_are_those_that_the_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Wide, Photo, Sampler, http_port=0, grpc_port=0) as server:
        for name, shape, value in (("Wide", [1], 20_000), ("Photo", [1], 1), ("Sampler", [1], 1)):
            assert await run("infer", server.http_url, name, "--example", "--json") == 0, name
            (output, *_) = outputs_in(capsys.readouterr().out).values()
            assert output[1:] == (shape, [value])
        statistics = (await server.engine.call(Request(ReadStatistics()))).answer
        assert {each.name: (each.succeeded, each.failed) for each in statistics} == dict.fromkeys(
            ("Wide", "Photo", "Sampler"), (1, 0)
        )
        # gRPC has no document: the sizes are tried.
        assert await run("infer", f"grpc://{server.grpc_url}", "Photo", "--example", "--json") == 0
        assert outputs_in(capsys.readouterr().out)["mean"] == ("FP32", [1], [1.0])
        assert await run("infer", f"grpc://{server.grpc_url}", "Sampler", "--example") == 2
        assert "expected 16000" in capsys.readouterr().err


async def test_an_example_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Boundless, http_port=0, grpc_port=-1) as server:
        assert await run("infer", server.http_url, "Boundless", "--example") == 2
        error = capsys.readouterr().err
        assert "one of at most 4,194,304 elements can be made, got x FP32[5000,5000]" in error


async def test_a_model_that_fails(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Fails", "--example") == 1
    captured = capsys.readouterr()
    assert "out of ink" in captured.err
    assert captured.out == ""


# --- chat ----------------------------------------------------------------------------------------------------


async def test_one_message(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two three\n"))
    assert await run("chat", server.http_url) == 0
    captured = capsys.readouterr()
    plain = captured.out
    assert "three two" in plain
    assert captured.err == ""
    assert await run("chat", "ReverseModel", server.http_url, "--message", "one two three", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["content"] == plain.removesuffix("\n")
    assert (answer["model"], answer["finish_reason"]) == ("ReverseModel", "stop")
    assert answer["usage"]["completion_tokens"] > 2
    assert 0 < answer["first_token_s"] <= answer["total_s"]
    assert await run("chat", server.http_url, "--message", "a !fault b", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "!fault" in captured.err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert await run("chat", server.http_url) == 2


async def test_a_conversation_on_a_terminal(server: Server) -> None:
    command = [sys.executable, "-m", "dragoman", "chat", server.http_url, "--system", "alpha", "--no-history"]
    with Terminal(command, {"DRAGOMAN_API_KEY": KEY}) as terminal:
        await asyncio.to_thread(terminal.wait_for, "ReverseModel at http.*/help")
        terminal.send("beta gamma")
        await asyncio.to_thread(terminal.wait_for, r"gamma beta[^>]*alpha[^>]*\d+ tokens.*first after .* stop")
        terminal.send("delta")
        await asyncio.to_thread(terminal.wait_for, r"delta.*beta[^>]*alpha[^>]*stop")  # the whole conversation
        terminal.send("/reset")
        terminal.send("epsilon")
        await asyncio.to_thread(terminal.wait_for, r"epsilon\n[^>]*alpha[^>]*stop\n> $")
        answer = terminal.text.rpartition("> ")[0].rpartition("epsilon\n")[2]
        assert "delta" not in answer
        terminal.send("a !fault b")
        await asyncio.to_thread(terminal.wait_for, "dragoman: .*!fault")
        terminal.send("/nonsense")
        await asyncio.to_thread(terminal.wait_for, "unknown command /nonsense; /help lists them")
        terminal.send("/exit")
        assert await asyncio.to_thread(terminal.wait_for_exit) == 0


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read a request to its end, and return its head: closing a connection with unread bytes resets it, and the client
    may lose the answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    await reader.readexactly(int(length[1]) if length else 0)
    return head


async def truncated_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    event = json.dumps(
        {"choices": [{"delta": {"content": "Hel\x1b[2Jlo\u202e \u0645\u06cc\u200c\u062e"}, "finish_reason": None}]}
    )
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + f"data: {event}\n\n".encode())
    writer.close()


async def test_an_answer_that_ends_early_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    other = await asyncio.start_server(truncated_answer, "127.0.0.1", 0)
    async with other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        assert await run("chat", url, "m", "--message", "x") == 1
    captured = capsys.readouterr()
    assert captured.out == "Hel\ufffd[2Jlo\ufffd \u0645\u06cc\u200c\u062e\n"  # Persian needs its joiners
    assert captured.err == "dragoman: the answer ended before it was complete\n"


async def other_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\n[1, 2.5]")
    writer.close()


@pytest.mark.parametrize("command", ["models", "infer", "chat", "status"])
async def test_a_server_that_cannot_be_reached_or_is_another(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"infer": ["m", "1"], "chat": ["--message", "x"]}.get(command, [])
    other = await asyncio.start_server(other_server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    async with other:
        assert await run(command, url, *more) == 2
        err = capsys.readouterr().err
        assert err.startswith("dragoman: ")
        assert len(err.splitlines()) == 1
    assert await run(command, url, *more) == 2
    assert capsys.readouterr().err == f"dragoman: cannot reach {url}: Connection refused; is the server running?\n"
    assert await run(command, "ftp://x", *more) == 2
    assert capsys.readouterr().err == "dragoman: expected a URL such as http://HOST:PORT, got 'ftp://x'\n"


# --- servers that are not trusted ----------------------------------------------------------------------------


@asynccontextmanager
async def answering(status: str, body: str = "", header: str = "") -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield the URL of a server that gives every request one response, and the requests that it receives."""
    requests: list[bytes] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        fields = f"content-length: {len(body.encode())}\r\nconnection: close\r\n{header}"
        writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


@pytest.mark.parametrize("command", ["status", "chat", "models"])
async def test_a_key_is_sent_to_the_named_server_only(
    server: Server, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--message", "x"] if command == "chat" else []
    async with answering("200 OK", "{}") as (other, received):
        async with answering("307 Temporary Redirect", header=f"location: {other}/v2\r\n") as (url, _):
            assert await run(command, url, *more) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert f"'{other}/v2'" in error
        assert "redirect" in error
        monkeypatch.setenv("http_proxy", other)
        monkeypatch.delenv("no_proxy", raising=False)
        assert await run(command, server.http_url, *more) == 0
    assert received == []


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["status"], {"error": "gone\x1b[2J\x9b2J"}),
        (["chat"], {"error": {"message": "gone\x1b[2J\x9b2J"}}),
        (["chat"], {"data": [{"id": "a\x1b[2J\x9b2J"}, {"id": "b"}]}),
        (["infer", "m"], {"name": "m", "inputs": [{"name": "x\x1b[2J\x9b2J", "datatype": "FP32", "shape": [1]}]}),
    ],
    ids=["status", "chat", "models of chat", "inputs"],
)  # fmt: skip
async def test_texts_of_a_server_do_not_control_the_terminal(
    words: list[str], body: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status = "404 Not Found" if "error" in body else "200 OK"
    async with answering(status, json.dumps(body)) as (url, _):
        assert await run(words[0], url, *words[1:], *(["--message", "x"] if words == ["chat"] else [])) == 2
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "\ufffd[2J\ufffd2J" in shown
    assert not set(shown) & {"\x1b", "\x9b"}


async def test_json_of_a_model_does_not_control_the_terminal(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x9b2J\u202e\x7f\u00e9"
    assert await run("infer", server.http_url, "Echo", "count=1", "matrix=1,2", f"text={text}", "--json") == 0
    out = capsys.readouterr().out
    assert outputs_in(out)["text"][2] == [text]
    assert "\u00e9" in out
    assert not set(out) & {"\x9b", "\u202e", "\x7f"}


CLOSED_PIPES = """
import json, os, sys
from dragoman.cli import main

for arguments in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    print(status, file=sys.stderr)
"""


async def test_a_closed_pipe_ends_a_command_silently(server: Server) -> None:
    commands = [
        ["serve", "--help=all"],
        ["bench", "--help"],
        ["infer", server.http_url, "Rows", "1,2,3,4"],
        ["chat", server.http_url, "--message", "one two"],
        ["models", server.http_url],
    ]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLOSED_PIPES, json.dumps(commands), stderr=subprocess.PIPE, env=buffered
    )
    _, error = await process.communicate()
    assert [line for line in error.decode().splitlines() if "is not installed" not in line] == ["141"] * len(commands)
    assert process.returncode == 0  # nothing is left that the interpreter cannot write at its end


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (["--timeout-s", each], f"--timeout-s: expected seconds above 0, got {each}")
            for each in ("0", "nan", "inf")
        ),
        (["--key-file", "key"], "--key-file: expected a key of ASCII characters without spaces"),
        (["--ca", "none.pem"], "--ca: 'none.pem' cannot be read: No such file or directory"),
        (["--ca", "key"], "--ca: expected certificates (PEM) in 'key'"),
    ],
    ids=lambda value: value[-1].replace("\n", " ") if isinstance(value, list) else "",
)
async def test_wrong_arguments_of_a_connection_are_named(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "key").write_text("cl\u00e9")
    assert await run("status", "http://127.0.0.1:1", *words) == 2
    assert capsys.readouterr().err == f"dragoman: {message}\n"


async def test_a_status_of_another_form(capsys: pytest.CaptureFixture[str]) -> None:
    async with answering("200 OK", '{"ready": true, "models": [{}]}') as (url, _):
        assert await run("status", url) == 2
    assert capsys.readouterr().err == f"dragoman: {url} does not respond as a Dragoman server\n"


async def test_tokens_that_a_server_does_not_count_are_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]}
    async with answering("200 OK", f"data: {json.dumps(event)}\n\n") as (url, _):
        assert await run("chat", url, "m", "--message", "x", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["usage"] == {"prompt_tokens": None, "completion_tokens": None}
        assert (answer["tokens_per_s"], answer["finish_reason"]) == (None, "stop")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert await run("chat", url, "m", "--message", "x") == 0
    shown = capsys.readouterr().err
    assert "first after" in shown
    assert "token" not in shown


@pytest.mark.parametrize("choice", [5, {"delta": {"content": 5}}, {"delta": [1]}])
async def test_an_answer_of_another_form_is_one_sentence(choice: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with answering("200 OK", f"data: {json.dumps({'choices': [choice]})}\n\n") as (url, _):
        assert await run("chat", url, "m", "--message", "x") == 1
    assert capsys.readouterr().err.startswith("dragoman: the server's answer cannot be read: {")
