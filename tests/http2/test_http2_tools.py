"""h2load and nghttp of nghttp2: many streams; padding, CONTINUATION and trailers."""

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
from dragoman.formats import grpc_messages as m

REQUEST = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0, 2.0, 3.0]}]}


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@pytest.fixture
async def server() -> AsyncIterator[dragoman.Server]:
    large = 1 << 16  # what --continuation sends does not fit into the default
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline", max_header_bytes=large) as server:
        yield server


async def run(tool: str, *arguments: str) -> str:
    """Return the output of the tool; skip the test if it is not installed."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"asks with {tool}, of nghttp2")
    act_once = await asyncio.create_subprocess_exec(found, *arguments, stdout=-1, stderr=-1)
    async with asyncio.timeout(60):
        out, err = await act_once.communicate()
    assert not act_once.returncode, err.decode()
    return out.decode()


async def load(*arguments: str) -> dict[str, int]:
    """Return the counts of h2load."""
    output = await run("h2load", *arguments)
    done = re.search(r"requests: .*", output)
    codes = re.search(r"status codes: .*", output)
    assert done is not None, output
    assert codes is not None, output
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", f"{done[0]}, {codes[0]}")}


def all_succeeded(counted: dict[str, int], count: int) -> bool:
    return counted["succeeded"] == counted["2xx"] == count and not counted["failed"] + counted["errored"]


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    file = tmp_path / "question.json"
    file.write_text(json.dumps(REQUEST))
    return str(file)


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 100), (1, 1000), (100, 10)])
async def test_many_streams_on_several_connections(
    server: dragoman.Server, request_file: str, connections: int, streams: int
) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    shape = ["-n", "3000", "-c", str(connections), "-m", str(streams)]
    assert all_succeeded(await load(*shape, "-d", request_file, url), 3000)


async def test_more_streams_than_the_limit(server: dragoman.Server, request_file: str) -> None:
    """The client respects the limit announced in SETTINGS."""
    url = f"{server.http_url}/v2/models/double/infer"
    assert all_succeeded(await load("-n", "5000", "-c", "2", "-m", "2500", "-d", request_file, url), 5000)


@pytest.mark.parametrize("window", ["16", "30"])
async def test_large_requests_and_responses(server: dragoman.Server, tmp_path: Path, window: str) -> None:
    file = tmp_path / "large.json"
    numbers = np.round(np.random.default_rng(7).standard_normal(60_000), 6).tolist()
    file.write_text(json.dumps({"inputs": [REQUEST["inputs"][0] | {"shape": [60_000], "data": numbers}]}))
    url = f"{server.http_url}/v2/models/double/infer"
    shape = ["-n", "40", "-c", "2", "-m", "10", "-w", window, "-W", window]
    assert all_succeeded(await load(*shape, "-d", str(file), url), 40)


async def test_grpc_calls(server: dragoman.Server, tmp_path: Path) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [3], "contents": {"fp64_contents": [1, 2, 3]}}
    message = m.ModelInferRequest(model_name="double", inputs=[tensor]).SerializeToString()
    file = tmp_path / "message"
    file.write_bytes(b"\0" + len(message).to_bytes(4) + message)
    for port in (server.grpc_port, server.http_ports[0]):
        url = f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer"
        shape = ["-n", "3000", "-c", "4", "-m", "50", "-H", "content-type: application/grpc", "-H", "te: trailers"]
        assert all_succeeded(await load(*shape, "-d", str(file), url), 3000)


async def test_load_over_http_1(server: dragoman.Server, request_file: str) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    assert all_succeeded(await load("--h1", "-n", "2000", "-c", "20", "-d", request_file, url), 2000)


@pytest.mark.parametrize(
    "options",
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
    ids=lambda options: " ".join(options)[:40],
)
async def test_options_of_nghttp(server: dragoman.Server, request_file: str, options: tuple[str, ...]) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    result = await run("nghttp", "-d", request_file, *options, url)
    times = 20 if "--multiply=20" in options else 1
    assert result.count('"data":[2.0,4.0,6.0]') == times


async def test_an_upgrade_is_ignored(server: dragoman.Server) -> None:
    """The response is HTTP/1.1, so that client stops; the server is not affected."""
    result = await run("nghttp", "--upgrade", f"{server.http_url}/v2/health/live")
    assert "live" not in result
    assert "200" in await run("nghttp", "-nv", f"{server.http_url}/v2/health/live")


async def test_rejected_requests_have_a_status(server: dragoman.Server, request_file: str) -> None:
    result = await run("nghttp", "-v", "-d", request_file, f"{server.http_url}/v2/models/nobody/infer")
    assert ":status: 404" in result
    assert "nobody" in result
