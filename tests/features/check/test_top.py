"""`dragoman top`: rates and latencies of a running server, on a terminal, in a pipe and as JSON."""

import asyncio
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from cli.terminals import Terminal
from dragoman import FP64, Infer, Server, TensorSpec
from dragoman.cli import main
from dragoman_check.top.metrics import Scrape, increase, quantile
from dragoman_check.top.screen import Poller
from dragoman_check.top.view import View, lines
from e2e.server_process import wait_until
from text_server import ReverseModel

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Doubles(dragoman.Model):
    """Fails for negative numbers."""

    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("y", FP64, (-1,)),)
    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Any]:
        x = call.inputs["x"].data
        if (x < 0).any():
            raise RuntimeError("negative")
        return {"y": 2 * x}


class Sleeps(dragoman.Model):
    inputs = (TensorSpec("x", FP64, (-1,)),)
    placement = "process"

    def infer(self, call: Infer) -> dict[str, Any]:
        time.sleep(0.02)
        return {"y": call.inputs["x"].data}


class Waiting(Doubles):
    def load(self) -> None:
        raise dragoman.errors.NotReady("its database is down")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(Doubles, Sleeps, ReverseModel, http_port=0, grpc_port=-1) as server:
        yield server


async def run(*arguments: str) -> int:
    """Run a command in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, arguments)


async def calls(server: Server, seconds: float) -> None:
    """Call the models for a while, one call in three of `Doubles` fails."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for value in (1.0, 2.0, -1.0):
            with suppress(dragoman.errors.ModelFailed):
                await server.engine.infer("Doubles", {"x": np.array([value])})
        await server.engine.infer("Sleeps", {"x": np.ones(1)})


async def test_figures_are_those_since_the_last_refresh(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("chat", server.http_url, "ReverseModel", "--message", "one two") == 0
    capsys.readouterr()
    await calls(server, 0.2)  # before the first refresh
    load = asyncio.create_task(calls(server, 3))
    await asyncio.sleep(0.2)
    assert await run("top", server.http_url, "--once", "--json", "--interval", "1") == 0
    await load
    found = json.loads(capsys.readouterr().out)
    doubles, sleeps, text = found["models"]
    assert [each["name"] for each in found["models"]] == ["Doubles", "Sleeps", "ReverseModel"]
    assert 0 < sleeps["calls_per_s"] <= 50  # each takes 20 ms
    assert doubles["errors_per_s"] == pytest.approx(doubles["calls_per_s"] / 3, rel=0.2)
    assert 10 <= sleeps["p50_ms"] <= sleeps["p99_ms"]
    assert doubles["p50_ms"] < 10
    assert text["tokens_per_s"] == 0
    assert (text["calls_per_s"], text["p50_ms"]) == (0, None)
    assert found["calls_per_s"] == pytest.approx(sum(each["calls_per_s"] for each in found["models"]), rel=1e-3)
    assert {each["model"] for each in found["workers"]} == {"Sleeps"}
    assert found["memory_bytes"] > 1e6
    assert found["ready"] is True
    assert await run("top", server.http_url, "--once", "--json", "--interval", "0.1") == 0
    assert json.loads(capsys.readouterr().out)["calls_per_s"] == 0


async def test_its_own_requests_are_not_counted(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> float:
        return Scrape(capsys.readouterr().out, 0).sum("dragoman_requests_total")

    async def scrape() -> float:
        def get() -> None:
            from urllib.request import urlopen

            with urlopen(f"{server.http_url}/console/metrics") as response:
                print(response.read().decode())

        await asyncio.to_thread(get)
        return count()

    before = await scrape()
    assert await run("top", server.http_url, "--once", "--interval", "0.1") == 0
    capsys.readouterr()
    assert await scrape() == before


async def test_a_table_in_a_pipe_has_no_control_codes(server: Server) -> None:
    command = [sys.executable, "-m", "dragoman", "top", server.http_url, "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = [await asyncio.to_thread(process.stdout.readline) for _ in range(30)]  # several refreshes
        process.terminate()
    text = "".join(shown)
    assert "\x1b" not in text
    assert text.count(f"{server.http_url}  ready  ") > 1
    assert next(line.split() for line in shown if line.startswith("model ")) == [
        "model", "state", "calls/s*", "err/s", "p50", "p99", "flight", "tokens/s",
    ]  # fmt: skip
    assert any(line.startswith("worker process ") and " idle " in line for line in shown)


async def test_keys_on_a_terminal(server: Server) -> None:
    command = [sys.executable, "-m", "dragoman", "top", server.http_url, "--interval", "0.2"]
    with Terminal(command) as terminal:
        fcntl.ioctl(terminal.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))

        async def press(keys: str, expected: str) -> str:
            """Press keys, and return the first screen that has a text."""
            start = len(terminal.raw)
            os.write(terminal.handle, keys.encode())

            def find() -> str:
                screens = terminal.raw[start:].split("\x1b[H")[1:-1]  # the last one may be incomplete
                return next((each for each in screens if expected in each), "")

            return await asyncio.to_thread(wait_until, find, expected)

        screen = await press("", "calls/s*")
        assert "\x1b[?1049h" in terminal.raw
        assert all(len(line) <= 60 for line in plain(screen).splitlines())
        assert "tokens/s" not in plain(screen).splitlines()[3] or "p50" not in plain(screen)  # no room for all columns
        assert names(await press("n", "model*")) == ["Doubles", "ReverseModel", "Sleeps"]
        assert names(await press("nw", "model*")) == ["Sleeps", "ReverseModel", "Doubles"]
        assert "worker process" not in plain(await press("", "model*"))
        assert names(await press("/ub", "filter: ub_")) == ["Doubles"]
        assert names(await press("\r", "filter 'ub'")) == ["Doubles"]
        assert len(names(await press("/\x1b", "q quit"))) == 3
        os.write(terminal.handle, b"q")
        assert await asyncio.to_thread(terminal.wait_for_exit) == 0
        await asyncio.to_thread(wait_until, lambda: terminal.raw.endswith("\x1b[?25h\x1b[?1049l"), "the screen is left")


def plain(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "")


def names(screen: str) -> list[str]:
    known = ("Doubles", "Sleeps", "ReverseModel")
    return [line.split()[0] for line in plain(screen).splitlines() if line.startswith(known)]


async def test_models_that_are_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server(Waiting, Doubles, http_port=0, grpc_port=-1, web_pages=False) as server:
        assert await run("top", server.http_url, "--once", "--interval", "0.1", "--sort", "name") == 1
        shown = capsys.readouterr().out
        assert "not ready" in shown.splitlines()[0]
        assert [line.split()[:2] for line in shown.splitlines()[4:6]] == [
            ["Doubles", "ready"],
            ["Waiting", "unavailable"],
        ]
        assert await run("top", server.http_url, "--once", "--interval", "0.1", "--filter", "zzz") == 1
        assert "no model contains 'zzz'" in capsys.readouterr().out


async def test_a_server_that_stops_is_tried_again(tmp_path: Path) -> None:
    async with Server(Doubles, http_port=0, grpc_port=-1) as server:
        port = int(server.http_url.rpartition(":")[2])
        command = [sys.executable, "-m", "dragoman", "top", server.http_url, "--interval", "0.2"]
        terminal = Terminal(command)
        await asyncio.to_thread(terminal.wait_for, "Doubles +ready")
    with terminal:
        await asyncio.to_thread(terminal.wait_for, "Connection refused.*trying again")
        async with Server(Doubles, http_port=port, grpc_port=-1):
            start = len(terminal.text)
            await asyncio.to_thread(wait_until, lambda: "q quit" in terminal.text[start:], "another refresh")
            terminal.popen.send_signal(signal.SIGINT)  # Ctrl-C
            assert await asyncio.to_thread(terminal.wait_for_exit) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1: Connection refused; is the server running?"),
        (["grpc://127.0.0.1:1"], "expected a URL of HTTP, got 'grpc://127.0.0.1:1'"),
        (["--interval", "0"], "--interval: expected seconds from 0.1 to 3600, got 0"),
    ],
    ids=["refused", "grpc", "interval"],
)
async def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("top", *words, "--once") == 2
    assert capsys.readouterr().err == f"dragoman: {message}\n"


# --- figures ---------------------------------------------------------------------------------------------------------

HISTOGRAM = """\
# HELP d of calls
d_bucket{model="a\\"b",le="0.1"} %d
d_bucket{model="a\\"b",le="1.0"} %d
d_bucket{model="a\\"b",le="+Inf"} %d
d_bucket{model="c",le="+Inf"} 5
calls_total{model="a\\"b",outcome="ok"} %d
calls_total{model="a\\"b",outcome="failed"} 1
"""


async def test_quantiles_are_those_of_prometheus() -> None:
    before, after = Scrape(HISTOGRAM % (10, 10, 10, 4), 0), Scrape(HISTOGRAM % (10, 14, 15, 9), 1)
    labels = {"model": 'a"b'}
    assert increase(before, after, "calls_total", labels) == 5
    assert increase(before, after, "calls_total", labels, without={"outcome": "ok"}) == 0
    assert after.sum("calls_total", without={"outcome": "ok"}) == 1
    assert quantile(0.5, before, after, "d", labels) == pytest.approx(0.1 + 0.9 * 2.5 / 4)
    assert quantile(0.99, before, after, "d", labels) == 1.0  # in the last bucket: its lower bound
    assert quantile(0.5, after, after, "d", labels) is None
    again = Scrape(HISTOGRAM % (2, 2, 2, 3), 2)  # the server has started anew
    assert increase(after, again, "calls_total", labels) == 4
    assert quantile(0.5, after, again, "d", labels) == pytest.approx(0.05)


def model(name: str, **values: Any) -> dict[str, Any]:
    fields = {"calls_per_s": 0.0, "errors_per_s": 0.0, "p50_ms": None, "p99_ms": None, "queued": 3, "in_flight": 0}
    return {"name": name, "version": "", "state": "ready", "reason": "", "tokens_per_s": 7.0, **fields, **values}


async def test_lines_are_as_wide_and_as_many_as_the_terminal() -> None:
    found: dict[str, Any] = {
        "url": "http://127.0.0.1:8080", "ready": True, "cpu_percent": 12.0, "memory_bytes": 1, "answer_ms": 1.0,
        "calls_per_s": 1234.0, "errors_per_s": 0.0, "tokens_per_s": None, "workers": [],
        "models": [model(f"a-model-with-a-long-name-{i}\x1b", calls_per_s=float(i)) for i in range(50)],
    }  # fmt: skip
    for columns in (20, 40, 60, 80, 200):
        shown = [text for text, _ in lines(found, View(), columns, 24)]
        assert len(shown) < 24
        assert max(map(len, shown)) <= columns
        assert "\x1b" not in "".join(shown)
        assert shown[-1].startswith("models 1 to ")
    assert "1,234 calls/s" in shown[1]
    assert all(title in shown[3] for title in ("queue", "tokens/s", "p50", "p99", "flight"))
    assert [line.split()[0][-3:] for line in shown[4:6]] == ["49\ufffd", "48\ufffd"]
    view = View(scroll=1000)
    assert [text for text, _ in lines(found, view, 80, 24)][-1].endswith(" to 50 of 50")
    assert view.scroll < 50


async def test_a_narrow_terminal_keeps_the_figures_of_workers() -> None:
    worker = {
        "host": "",
        "process": "worker process 8008",
        "state": "busy",
        "reason": "",
        "in_flight": 3,
        "mean_ms": 1.5,
    }
    found: dict[str, Any] = {
        "url": "http://127.0.0.1:8080", "ready": True, "cpu_percent": 12.0, "memory_bytes": 67, "answer_ms": 7.34,
        "calls_per_s": 340.0, "errors_per_s": 0.0, "tokens_per_s": None, "models": [model("celsius")],
        "workers": [{**worker, "model": "celsius"}, {**worker, "model": "a-model-with-a-long-name", "host": "node1"}],
    }  # fmt: skip
    for columns in (40, 60, 80):
        shown = [text for text, _ in lines(found, View(), columns, 24)]
        assert max(map(len, shown)) <= columns
        figures = "; ".join(shown[1:4])
        assert "; server process: CPU 12 %, 67 B; status in 7.34 ms" in figures
        titles = next(line for line in shown if line.startswith("worker"))
        assert titles.endswith("time/call")
        rows = shown[shown.index(titles) + 1 :]
        assert [row.split()[-2:] for row in rows] == [["1.5", "ms"]] * 2
        assert all("busy" in row for row in rows)
    wide = [text for text, _ in lines(found, View(), 80, 24)]
    assert wide[0].startswith("http://127.0.0.1:8080  ready  ")


async def test_figures_that_cannot_be_read_do_not_end_the_display() -> None:
    def read() -> dict[str, Any]:
        if poller.count:
            poller.stop()
            return {"ready": True}
        raise KeyError("host")

    poller = Poller(read, 0.01)
    poller.start()
    poller.join(20)
    assert (poller.count, poller.found) == (2, {"ready": True})
