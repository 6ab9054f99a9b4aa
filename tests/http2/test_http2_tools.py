"""The tools of nghttp2 as judges: a load of many streams, and a client that pads, continues, ends with trailers."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from dragoman.formats import oip_messages as m

QUESTION = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0, 2.0, 3.0]}]}


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@pytest.fixture
async def server() -> AsyncIterator[dragoman.Server]:
    large = 1 << 16  # what --continuation sends does not fit into the default
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline", max_header_bytes=large) as server:
        yield server


async def run(tool: str, *arguments: str) -> str:
    """What the tool says; the test is skipped where there is none."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"asks with {tool}, of nghttp2")
    made = await asyncio.create_subprocess_exec(found, *arguments, stdout=-1, stderr=-1)
    async with asyncio.timeout(60):
        out, err = await made.communicate()
    assert not made.returncode, err.decode()
    return out.decode()


async def load(*arguments: str) -> dict[str, int]:
    """What h2load counted."""
    said = await run("h2load", *arguments)
    done = re.search(r"requests: .*", said)
    codes = re.search(r"status codes: .*", said)
    assert done is not None, said
    assert codes is not None, said
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", f"{done[0]}, {codes[0]}")}


def all_well(counted: dict[str, int], count: int) -> bool:
    return counted["succeeded"] == counted["2xx"] == count and not counted["failed"] + counted["errored"]


@pytest.fixture
def question(tmp_path: Path) -> str:
    file = tmp_path / "question.json"
    file.write_text(json.dumps(QUESTION))
    return str(file)


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 100), (1, 1000), (100, 10)])
async def test_many_streams_on_some_connections(
    server: dragoman.Server, question: str, connections: int, streams: int
) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    shape = ["-n", "3000", "-c", str(connections), "-m", str(streams)]
    assert all_well(await load(*shape, "-d", question, url), 3000)


async def test_more_streams_than_are_allowed(server: dragoman.Server, question: str) -> None:
    """The client heeds the limit that SETTINGS tell."""
    url = f"{server.http_url}/v2/models/double/infer"
    assert all_well(await load("-n", "5000", "-c", "2", "-m", "2500", "-d", question, url), 5000)


@pytest.mark.parametrize("window", ["16", "30"])
async def test_large_bodies_both_ways(server: dragoman.Server, tmp_path: Path, window: str) -> None:
    file = tmp_path / "large.json"
    numbers = np.round(np.random.default_rng(7).standard_normal(60_000), 6).tolist()
    file.write_text(json.dumps({"inputs": [QUESTION["inputs"][0] | {"shape": [60_000], "data": numbers}]}))
    url = f"{server.http_url}/v2/models/double/infer"
    shape = ["-n", "40", "-c", "2", "-m", "10", "-w", window, "-W", window]
    assert all_well(await load(*shape, "-d", str(file), url), 40)


async def test_calls_of_grpc(server: dragoman.Server, tmp_path: Path) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [3], "contents": {"fp64_contents": [1, 2, 3]}}
    message = m.ModelInferRequest(model_name="double", inputs=[tensor]).SerializeToString()
    file = tmp_path / "message"
    file.write_bytes(b"\0" + len(message).to_bytes(4) + message)
    for port in (server.grpc_port, server.http_ports[0]):
        url = f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
        shape = ["-n", "3000", "-c", "4", "-m", "50", "-H", "content-type: application/grpc", "-H", "te: trailers"]
        assert all_well(await load(*shape, "-d", str(file), url), 3000)


async def test_load_over_http_1(server: dragoman.Server, question: str) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    assert all_well(await load("--h1", "-n", "2000", "-c", "20", "-d", question, url), 2000)


@pytest.mark.parametrize(
    "said",
    [
        (),
        ("--padding=200",),
        ("--continuation",),
        ("--trailer=x-sum: 7",),
        ("--no-content-length",),
        ("--expect-continue",),
        ("--header-table-size=0",),
        ("--header-table-size=100", "--encoder-header-table-size=10"),
        ("--window-bits=1", "--connection-window-bits=16"),
        ("--max-concurrent-streams=1", "--peer-max-concurrent-streams=1"),
        ("--multiply=20",),
        ("--weight=1", "--no-dep"),
        ("--no-push", "--no-rfc7540-pri"),
        ("-H", f"x-long: {'x' * 9000}"),
    ],
    ids=lambda said: " ".join(said)[:40],
)
async def test_a_client_with_all_its_options(server: dragoman.Server, question: str, said: tuple[str, ...]) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    result = await run("nghttp", "-d", question, *said, url)
    times = 20 if "--multiply=20" in said else 1
    assert result.count('"data":[2.0,4.0,6.0]') == times


async def test_an_upgrade_is_passed_over(server: dragoman.Server) -> None:
    """HTTP/1.1 answers, so that client gives up; the server goes on."""
    result = await run("nghttp", "--upgrade", f"{server.http_url}/v2/health/live")
    assert "live" not in result
    assert "200" in await run("nghttp", "-nv", f"{server.http_url}/v2/health/live")


async def test_what_is_refused_has_its_status(server: dragoman.Server, question: str) -> None:
    result = await run("nghttp", "-v", "-d", question, f"{server.http_url}/v2/models/nobody/infer")
    assert ":status: 404" in result
    assert "nobody" in result
