"""What every command has: help with a search, JSON, completion, and a sentence for an output that cannot be written."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman import hooks
from dragoman.cli import main
from rest.rest_server import DEFAULTS
from text_server import ReverseModel

COMMANDS = (
    "serve", "init", "models", "infer", "status", "doctor", "keys", "digests", "completion",
    *sorted(name.replace("-", " ") for name in hooks.own_entries("commands")),
)  # fmt: skip


def print_help(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == status
    return capsys.readouterr().out if status == 0 else capsys.readouterr().err


def test_the_commands_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = print_help(capsys, "--help").partition("commands:")[2]
    lines = [line for line in text.splitlines() if line.startswith("    ") and line[4] != " "]
    assert [line.strip().partition("  ")[0] for line in lines] == [*COMMANDS]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_its_search(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the help is printed wherever it stands, and has no more than the arguments that contain a word."""
    text = print_help(capsys, *command.split(), "--help")
    assert text.startswith(f"usage: dragoman {command}")
    assert text == print_help(capsys, *command.split(), "-h")
    assert text == print_help(capsys, *command.split(), "--no-such-flag", "a", "b", "c", "d", "--help")
    word = "json" if command != "completion" else "SHELL"
    found = print_help(capsys, *command.split(), f"--help={word}")
    entries = [line for line in found.partition("\n\nEach flag")[0].splitlines() if line.startswith("  -")]
    assert all(word in found[found.index(line) :].lower() for line in entries)
    assert len(found) < len(text)
    assert "'qqq'" in print_help(capsys, *command.split(), "--help=qqq", status=2)


def test_the_search_shows_titles_and_whole_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_help(capsys, "bench", "--help=CLIENTS") == (
        "load:\n  --concurrency N,...   closed loops of N clients (default: 1,4,16)\n"
    )
    assert print_help(capsys, "keys", "--help=expires").count("\n") == 2


def test_optional_values_are_not_named_as_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_help(capsys, "infer", status=2).endswith("the following arguments are required: URL, NAME\n")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "completion"])  # its output is a script
def test_json_is_an_option_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n  --json" in print_help(capsys, *command.split(), "--help")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_every_command_and_its_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command.split()[-1] in script
    for flag in ("http-port", "dry-run", "expires-days", "concurrency", "with", "example"):
        assert flag in script, flag


def test_keys_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--file", str(tmp_path / "keys.toml"), "--json"]
    assert main(["keys", "create", "a", "--roles", "read", *words]) == 0
    created = json.loads(capsys.readouterr().out)
    assert len(created.pop("key")) > 20
    assert main(["keys", "list", *words]) == 0
    assert json.loads(capsys.readouterr().out) == [created]
    assert main(["keys", "delete", "a", *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": "a"}


FULL_DISK = """
import json, os, sys
from dragoman.cli import main

for arguments in json.loads(sys.argv[1]):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    print(status, file=sys.stderr)
"""
GRAPH = """\
nodes = { a = { builtin = "exp", dim = 2 } }
edges = []
"""


class Rows(dragoman.Model):
    """Sums of rows."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1, 2)),)
    outputs = (dragoman.TensorSpec("sum", dragoman.FP64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"sum": call.inputs["x"].data.sum(axis=1)}


def full_disk_commands(folder: Path, url: str) -> Iterator[list[str]]:
    """Yield a command line of each command that prints to standard output."""
    (folder / "graph.toml").write_text(GRAPH)
    (folder / "run.json").write_text('{"measurements": []}')
    keys = str(folder / "keys.toml")
    yield from ([], ["--help"], ["--version"], ["serve", "--help=all"], ["models", "--help"], ["completion", "bash"])
    yield from (["init", str(folder / "new")], ["doctor", str(folder), "--dry-run"], ["graph", str(folder)])
    yield from (["keys", "create", "a", "--file", keys], ["models", url], ["status", url], ["models", url, "--json"])
    yield from (["infer", url, "Rows", "1,2"], ["chat", url, "--message", "one two"])
    yield ["check", url, "--protocol", "umbridge"]
    yield ["bench", url, "Rows", "--concurrency", "1", "--seconds", "0.05", "--warmup-s", "0"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_ends_a_command_with_a_sentence(unbuffered: str, tmp_path: Path) -> None:
    with dragoman.Server(Rows, ReverseModel, **DEFAULTS) as server:
        commands = [*full_disk_commands(tmp_path, server.http_url)][: 8 if unbuffered else None]
        process = subprocess.run(
            [sys.executable, "-c", FULL_DISK, json.dumps(commands)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    lines = [line for line in process.stderr.splitlines() if "is not installed" not in line]  # of a missing feature
    sentence = "dragoman: the output cannot be written: No space left on device"
    usage = lines[: lines.index("2")]
    assert usage[0].startswith("usage: dragoman")  # of no command, on standard error
    assert lines[len(usage) :] == ["2", *[sentence, "1"] * (len(commands) - 1)]
    assert process.returncode == 0  # nothing is left that the interpreter cannot write at its end
    assert not (tmp_path / "keys.toml").exists()  # a key that could not be shown


@pytest.mark.parametrize("words", [["models", "ftp://x"], []], ids=["error", "usage"])
def test_a_full_disk_of_messages_is_a_failure(words: list[str]) -> None:
    """Check for a failure of the command, not of the interpreter that flushes its streams at its end (120)."""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dragoman", *words]
        process = subprocess.run(command, stderr=full, env=environment, check=False)
    assert process.returncode == 1
