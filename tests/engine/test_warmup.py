"""Warm-up requests: the model answers them before it is ready."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman import errors
from dragoman.core.calls import Index, Load, Request
from dragoman.engine_setup import open_engine

MODEL = """
import os
import numpy as np
import dragoman
from dragoman import FP64, TensorSpec

class Model(dragoman.Model):
    placement = "{placement}"
    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("received", FP64, (-1,)),)

    def load(self):
        self.received = []

    def infer(self, call):
        x = call.inputs["x"].data
        if x[0] < 0:
            raise dragoman.errors.InvalidInput("expected x of at least 0")
        self.received.append(float(x[0]))
        with open("{log}", "a") as file:
            file.write(f"{{os.getpid()}} {{x[0]:g}}\\n")
        return {{"received": np.array(self.received)}}
"""


def body(x: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [x]}]}


def write_model(tmp_path: Path, warmup: object, placement: str = "inline", **settings: object) -> Path:
    folder = tmp_path / "m"
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL.format(placement=placement, log=tmp_path / "log"))
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "dragoman.toml").write_text(f'[model]\nwarmup = "warmup.json"\n{lines}')
    (folder / "warmup.json").write_text(warmup if isinstance(warmup, str) else json.dumps(warmup))
    return folder


@pytest.mark.parametrize("placement", ["inline", "thread"])
async def test_a_ready_model_has_answered_its_warmup_requests_in_order(tmp_path: Path, placement: str) -> None:
    folder = write_model(tmp_path, [body(1.0), body(2.0)], placement, max_batch_size=8)
    async with open_engine(folder) as engine:
        assert engine.ready()
        assert (await engine.infer("m", {"x": [3.0]}))["received"].tolist() == [1.0, 2.0, 3.0]


async def test_every_replica_answers_the_warmup_requests(tmp_path: Path) -> None:
    folder = write_model(tmp_path, body(7.0), "process", replicas=2)
    async with open_engine(folder) as engine:
        assert engine.ready()
        received = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
        assert [x for _, x in received] == ["7", "7"]
        assert len({pid for pid, _ in received}) == 2


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        ([body(1.0), body(-1.0)], "failed to load 'm', warm-up: request 2: expected x of at least 0"),
        ([{"inputs": [{"name": "y", "datatype": "FP64", "shape": [1], "data": [1]}]}], "warm-up: request 1: .*'y'"),
        ([body(1.0), {"inputs": 5}], "warm-up: request 2: the request is not an inference request"),
        ("[{", "warm-up: the file 'warmup.json' cannot be read"),
        ("", "warm-up: request 1: the request is not an inference request"),
    ],
)
async def test_a_failing_warmup_request_fails_the_load(tmp_path: Path, warmup: object, message: str) -> None:
    async with open_engine(write_model(tmp_path, warmup)) as engine:
        assert not engine.ready()
        with pytest.raises(errors.NotReady, match="is not ready: UNAVAILABLE; the reason is in the log"):
            await engine.infer("m", {"x": [3.0]})
        assert re.search(message, engine.deployments()[0].reason)


async def test_a_missing_warmup_file_fails_the_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path, [])
    (folder / "warmup.json").unlink()
    async with open_engine(folder) as engine:
        assert "cannot be read: No such file" in engine.deployments()[0].reason


async def test_a_failing_warmup_keeps_the_loaded_version(tmp_path: Path) -> None:
    folder = write_model(tmp_path, [body(1.0)])
    async with open_engine(folder, control_open=True) as engine:
        (folder / "warmup.json").write_text(json.dumps(body(-1.0)))
        with pytest.raises(errors.InvalidInput, match="warm-up: request 1"):
            await engine.call(Request(Load(""), "m"))
        assert [e.state for e in (await engine.call(Request(Index("")))).answer] == ["READY"]
        assert (await engine.infer("m", {"x": [3.0]}))["received"].tolist() == [1.0, 3.0]


async def test_warmup_of_a_model_without_inference(tmp_path: Path) -> None:
    folder = write_model(tmp_path, [body(1.0)])
    (folder / "model.py").write_text(
        "import dragoman\n\nclass Model(dragoman.Model):\n    def generate(self, call):\n        return 'text'\n"
    )
    async with open_engine(folder) as engine:
        assert "expected a model that supports inference requests" in engine.deployments()[0].reason


async def test_warmup_of_a_model_that_streams(tmp_path: Path) -> None:
    folder = write_model(tmp_path, [body(1.0), body(2.0)])
    text = (
        (folder / "model.py").read_text().replace("        return {", "        yield {'received': x}\n        yield {")
    )
    (folder / "model.py").write_text(text)
    async with open_engine(folder) as engine:
        assert engine.ready()
        assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()] == ["1", "2"]


async def test_an_error_among_the_responses_of_a_warmup_request_fails_the_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path, body(1.0))
    failing = "        yield dragoman.errors.ModelFailed('the second half is missing')\n        yield {"
    (folder / "model.py").write_text((folder / "model.py").read_text().replace("        return {", failing))
    async with open_engine(folder) as engine:
        assert not engine.ready()
        (deployment,) = engine.deployments()
        assert "request 1: the second half is missing" in deployment.reason


async def test_a_failing_warmup_ends_the_worker_processes(tmp_path: Path) -> None:
    async with open_engine(write_model(tmp_path, [body(1.0), body(-1.0)], "process")) as engine:
        assert not engine.ready()
        pid = (tmp_path / "log").read_text().split()[0]
        assert not Path(f"/proc/{pid}").exists()
