"""What `dragoman serve` shows while it starts: steps of loading, and first requests that run as printed."""

import asyncio
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dragoman
from cli.terminals import Terminal
from dragoman import Infer, Server, Tensor, TensorSpec
from dragoman.cli.first_requests import first_requests
from dragoman.cli.startup import startup_table
from dragoman.core.calls import Embed, Embedded
from e2e.server_process import MODELS, free_ports
from text_server import ReverseModel

TROUBLE = MODELS / "trouble.py"


@dragoman.vector_function(inputs={"x": 2}, placement="inline")
def energy(x: np.ndarray) -> np.ndarray:
    return np.atleast_1d(np.sum(x**2) / 2)


class Half(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("it's", dragoman.INT32, (-1, 2)),)

    def infer(self, call: Infer) -> dict[str, np.ndarray]:
        return {"y": call.inputs["it's"].data // 2}


async def run_command(command: str, **environment: str) -> str:
    """Run a printed command in a shell; return its output. Raises AssertionError if it fails."""
    command = command.replace("curl ", "curl -sS --fail-with-body ").replace(
        "dragoman ", f"{sys.executable} -m dragoman "
    )
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


async def test_the_first_request_for_each_kind_of_model_runs_as_printed() -> None:
    key = "a-key-of-twenty-characters"
    async with Server(ReverseModel, energy, Half, http_port=0, grpc_port=-1, api_key=key) as server:
        commands = list(first_requests(server))
        assert len(commands) == 4
        chat = next(command for command in commands if command.startswith("dragoman chat"))
        commands[commands.index(chat)] = f"{chat} --message Hello"
        outputs = [await run_command(command, DRAGOMAN_API_KEY=key) for command in commands]
    for part in ("/v1/chat/completions", "/Evaluate", "/v2/models/Half/infer"):
        assert sum(part in command for command in commands) == 1
    assert '"chat.completion"' in next(o for c, o in zip(commands, outputs, strict=True) if "/v1/chat" in c)
    assert '"output":[[0.0]]' in next(o for c, o in zip(commands, outputs, strict=True) if "/Evaluate" in c)
    assert '"data":[0,0]' in next(o for c, o in zip(commands, outputs, strict=True) if "/v2/models" in c)


class Encoder(Half):
    """Embeds texts; its tensors are not what a person tries first."""

    def embed(self, call: Embed) -> Embedded:
        return Embedded(Tensor.of(np.full((len(call.inputs), 2), 0.5, np.float32)), 1)


async def test_a_model_of_embeddings_is_tried_with_a_text() -> None:
    async with Server(Encoder, http_port=0, grpc_port=-1) as server:
        (command,) = first_requests(server)
        assert command == f"""curl {server.http_url}/v1/embeddings -d '{{"model": "Encoder", "input": "Hello"}}'"""
        assert '"embedding":[0.5,0.5]' in await run_command(command)
    async with Server(Encoder, http_port=0, grpc_port=-1, protocols="oip_rest") as server:
        (command,) = first_requests(server)
        assert "/v2/models/Encoder/infer" in command


class Picture(Half):
    """Takes pictures of at least 2 x 2, or none at all."""

    inputs = (TensorSpec("x", dragoman.FP32, (-1, 3, -1, -1)),)
    smallest = 2

    def infer(self, call: Infer) -> dict[str, np.ndarray]:
        x = call.inputs["x"].data
        if x.shape[-1] < self.smallest:
            raise RuntimeError("the picture is too small")
        return {"y": x.mean(axis=(1, 2, 3))}


class Large(Picture):
    smallest = 256


class Hopeless(Picture):
    smallest = 10_000


async def test_the_first_request_is_one_that_the_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Picture, http_port=0, grpc_port=-1) as server:
        (command,) = first_requests(server)
        assert '"shape": [1, 3, 2, 2]' in command
        assert '"data":[1.0]' in await run_command(command)
    async with Server(Large, http_port=0, grpc_port=-1) as server:
        (command,) = first_requests(server)
        assert command.endswith("infer " + f"{server.http_url} Large --example")
        assert await run_command(command) == "y\n1\n"
    async with Server(Hopeless, http_port=0, grpc_port=-1) as server:
        assert list(first_requests(server)) == []
        startup_table(server, 0.5)
    table = capsys.readouterr().err
    assert re.search(r"Hopeless +- +python_function +inline +ready, trial failed", table)
    assert "  Hopeless: answered no example: model 'Hopeless' failed: RuntimeError: the picture is too small" in table
    assert "ready in 0.50 s" in table


async def test_only_models_that_are_ready_and_protocols_that_are_served() -> None:
    class Broken(Half):
        def load(self) -> None:
            raise RuntimeError("no")

    async with Server(Broken, energy, http_port=0, grpc_port=-1, protocols="oip_rest") as server:
        (command,) = first_requests(server)
        assert "/v2/models/energy/infer" in command


def test_steps_of_loading_on_a_terminal(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    http_port, grpc_port = free_ports(2)
    paths = [f"{TROUBLE}:SlowToLoad", f"{TROUBLE}:Twice"]
    command = ["-m", "dragoman", "serve", *paths, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    with Terminal([sys.executable, *command], {"TEST_GATE": str(gate)}) as terminal:
        # With the bytes of its file.
        terminal.wait_for(r"1 of 2 models after \d+ s; SlowToLoad \(loading \d\S* k?B, \d+ s\)")
        gate.touch()
        terminal.wait_for("ready in .*Ctrl-C stops")
        table = terminal.text.rpartition("model ")[2]
    assert re.search(r"SlowToLoad .* process +ready", table)
    assert "\x1b[32m" in terminal.raw
    *rewritten, last = re.findall(r"\r\x1b\[J(.*?)(?=\r)", terminal.raw)
    # Which states a line shows depends on how fast the first model is: it is drawn again a few times a second.
    assert not [line for line in rewritten if not re.search(r"  [012] of 2 models after", line)]
    assert "  1 of 2 models" in "".join(rewritten)
    assert last == ""  # the line is erased before the table


class Waits:
    """Its pickle waits for a file when it is read."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"until [ -e {self.gate} ]; do sleep 0.05; done",)


def test_models_without_a_framework_are_loaded_first(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for number in range(5):  # more than are loaded at a time
        (tmp_path / f"a{number}.pkl").write_bytes(pickle.dumps(Waits(gate)))
    (tmp_path / "z.py").write_text("def z(x: float) -> float:\n    return x\n\n\nz.placement = 'inline'\n")
    flags = ["--allow-pickle", "--http-port", "0", "--grpc-port", "0"]
    command = [sys.executable, "-m", "dragoman", "serve", str(tmp_path), f"{tmp_path}/z.py:z", *flags]
    with Terminal(command) as terminal:
        terminal.wait_for(r"1 of 6 models after \d+ s; a")
        gate.touch()
        terminal.wait_for("started in .*5 of 6 models not ready")
    assert "(importing scikit-learn, " in terminal.text


class Adapted(dragoman.Model):
    """A model with an adapter that does not fit."""

    placement = "inline"

    def details(self) -> dict[str, object]:
        return {"skipped_adapters": {"wide": "expected a rank of at most 256, got 300"}}

    def infer(self, call: Infer) -> dict[str, np.ndarray]:
        return {"y": np.zeros(1)}


async def test_adapters_that_are_skipped_have_a_row_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Adapted, http_port=0, grpc_port=-1) as server:
        startup_table(server, 0.1)
    shown = capsys.readouterr().err
    assert re.search(r"Adapted:wide +- +- +- +skipped", shown)
    assert "Adapted:wide: expected a rank of at most 256, got 300" in shown
    assert re.search(r"Adapted +- .* ready", shown)


def test_a_single_model_that_fails_is_explained_once() -> None:
    command = ["-m", "dragoman", "serve", f"{TROUBLE}:Unloadable", "--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("failed to load 'Unloadable', RuntimeError: the weights are gone") == 1
    assert done.stderr.rstrip().endswith("\n  no model could be loaded: the server ends")
    for absent in ("stopping", "HTTP  ", "try  ", "Ctrl-C"):
        assert absent not in done.stderr


NOISY = """
import logging
import sys
import warnings

import dragoman


class {name}(dragoman.Model):
    def load(self):
        warnings.warn("old\\nformat", UserWarning)
        logging.getLogger("other.library").warning("slow")
        logging.getLogger("tensorflow").info("restoring")
        print("\\rloading: 10 %\\rloading: 100 %", file=sys.stderr)

    def infer(self, call):
        return dict(call.inputs)
"""


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_warnings_of_libraries_are_lines_of_the_log_with_the_model(placement: str, tmp_path: Path) -> None:
    paths = []
    names = ("First", "Second")
    for name in names:
        (tmp_path / f"{name.lower()}.py").write_text(NOISY.format(name=name).replace("\\\\", "\\"))
        paths.append(f"{tmp_path}/{name.lower()}.py:{name}")
    flags = ["--placement", placement, "--http-port", "0", "--grpc-port", "0"]
    with Terminal([sys.executable, "-m", "dragoman", "serve", *paths, *flags]) as terminal:
        terminal.wait_for("Ctrl-C stops")
        shown = terminal.text
    for name in names:
        assert re.search(rf"WARNING py\.warnings \[\d+\]: .*UserWarning: old\\nformat.* model={name}\n", shown)
        assert re.search(rf"WARNING other\.library \[\d+\]: slow model={name}\n", shown)
    assert "restoring" not in shown
