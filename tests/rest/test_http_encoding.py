"""gzip and deflate in requests and responses, and malicious compressed bodies."""

import gzip
import mmap
import random
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http.aio as triton
from tritonclient.utils import InferenceServerException

import dragoman
from dragoman import Infer, Tensor, TensorSpec
from dragoman.protocols.wire import HttpError
from dragoman.system.shared_memory import LARGE, allocate, find_buffer
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.encoding import compress, decompress, preferred_encoding
from dragoman.transports.executor import MessageExecutor
from rest.rest_server import (
    Identity,
    RawResponse,
    RestServer,
    binary,
    blobs,
    encode_body,
    inputs,
    outputs,
    serving,
    tensor,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("on_uvloop")]
EXECUTOR = MessageExecutor(BodyMemory(0))
ROWS = np.arange(1000, dtype=np.int32)
BIG = inputs(tensor("x", [1000], "INT32", ROWS.tolist()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving() as server:
        yield server


def bare_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "gzip, deflate": lambda body: zlib.compress(gzip.compress(body)),
    "identity, gzip": gzip.compress,
}


def unpacked(response: RawResponse) -> RawResponse:
    unpackers: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
    return RawResponse(
        response.status, response.headers, unpackers[response.headers["content-encoding"]](response.body)
    )


# --- in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PACKERS))
async def test_compressed_bodies(server: RestServer, name: str) -> None:
    for body in (inputs(tensor()), BIG):
        response = await server.infer("Identity", PACKERS[name](encode_body(body)), {"Content-Encoding": name})
        assert next(outputs(response))["data"] == list(body["inputs"][0]["data"])


async def test_raw_deflate_is_accepted(server: RestServer) -> None:
    body = bare_deflate(encode_body(BIG))
    assert (await server.infer("Identity", body, {"Content-Encoding": "deflate"})).status == 200


async def test_gzip_with_several_members(server: RestServer) -> None:
    text = encode_body(BIG)
    body = b"".join(gzip.compress(text[i : i + 100]) for i in range(0, len(text), 100))
    assert (await server.infer("Identity", body, {"Content-Encoding": "gzip"})).status == 200


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_compressed_binary_tensors(server: RestServer, name: str) -> None:
    value = {"name": "x", "shape": [1000], "datatype": "INT32", "parameters": {"binary_data_size": ROWS.nbytes}}
    body, headers = binary(inputs(value, parameters={"binary_data_output": True}), ROWS.tobytes())
    headers |= {"Content-Encoding": name, "Accept-Encoding": name}
    response = await server.infer("Identity", PACKERS[name](body), headers)
    head, found = blobs(unpacked(response))  # the header counts bytes before they are packed
    assert head["outputs"] == [value]
    assert found == [ROWS.tobytes()]


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_bodies_that_do_not_match_their_encoding(server: RestServer, name: str) -> None:
    good = PACKERS[name](encode_body(BIG))
    for bad in (b"nonsense", good[:-1], good[: len(good) // 2], good + b"?", good[:20] + b"\0" * 20 + good[40:]):
        response = await server.infer("Identity", bad, {"Content-Encoding": name})
        assert response.status == 400
        assert f"the body is not valid {name}" in response.error


async def test_empty_bodies_are_not_decompressed(server: RestServer) -> None:
    response = await server.infer("Identity", b"", {"Content-Encoding": "gzip"})
    assert response.status == 400
    assert "empty" in response.error


@pytest.mark.parametrize("name", ["gzip", "deflate", "gzip, deflate"])
async def test_t61_a_decompressed_body_over_the_limit(name: str) -> None:
    async with serving(max_body_bytes=1 << 20) as server:
        bomb = PACKERS[name](b" " * ((1 << 20) + 1))
        response = await server.infer("Identity", bomb, {"Content-Encoding": name})
        assert response.status == 413
        assert response.error == "the decompressed body is larger than the limit of 1048576 bytes"
        fine = PACKERS[name](encode_body(BIG).ljust(1 << 20))
        assert (await server.infer("Identity", fine, {"Content-Encoding": name})).status == 200


async def test_a_body_compressed_more_than_twice_is_rejected(server: RestServer) -> None:
    body = encode_body(BIG)
    for _ in range(3):
        body = gzip.compress(body)
    response = await server.infer("Identity", body, {"Content-Encoding": "gzip, gzip, gzip"})
    assert response.status == 415
    assert "of 3 layers is not supported" in response.error


async def test_gzip_with_many_members_is_rejected_early() -> None:
    start_s = time.process_time()
    with pytest.raises(HttpError, match="not valid gzip"):
        await decompress(gzip.compress(b"") * 200_000, "gzip", 1 << 26, EXECUTOR)
    assert time.process_time() - start_s < 2


# --- out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_responses_are_compressed_if_accepted(server: RestServer, name: str) -> None:
    response = await server.infer("Identity", BIG, {"Accept-Encoding": name})
    assert response.headers["vary"] == "accept-encoding"
    assert len(response.body) < 3000
    assert next(outputs(unpacked(response)))["data"] == ROWS.tolist()


async def test_large_responses_are_compressed_in_chunks() -> None:
    body = random.Random(0).randbytes((4 << 20) + 1)
    chunks = await compress([body[:7], memoryview(body)[7:], b""], "gzip", EXECUTOR)
    assert gzip.decompress(b"".join(chunks)) == body
    assert 4 <= len(chunks) < 10
    assert max(map(len, chunks)) < 2 << 20


async def test_small_responses_are_not_compressed(server: RestServer) -> None:
    response = await server.infer("Identity", inputs(tensor()), {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in response.headers
    assert "vary" not in response.headers


async def test_long_responses_have_vary_accept_encoding(server: RestServer) -> None:
    response = await server.infer("Identity", BIG)
    assert response.headers["vary"] == "accept-encoding"
    assert "content-encoding" not in response.headers


class Wide(dragoman.Model):
    """Many inputs, so that the metadata are long."""

    placement = "inline"
    inputs = tuple(TensorSpec(f"input_{n}", dragoman.FP32, (-1, 3)) for n in range(30))

    def infer(self, call: Infer) -> Mapping[str, Tensor]:
        return call.inputs


async def test_triton_accepts_gzip_for_inference_only() -> None:
    """Its asyncio client decompresses only responses to `infer`."""
    names = [f"m{n}" for n in range(20)]
    copies = [type(name, (Identity,), {}) for name in names]
    async with serving(Wide, Identity, *copies, control_token="sesame") as server:
        headers = {"Accept-Encoding": "gzip, deflate", "Authorization": "Bearer sesame"}
        async with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            index = await client.get_model_repository_index(headers=headers)
            assert {entry["name"] for entry in index} == {"Wide", "Identity", *names}
            metadata = await client.get_model_metadata("Wide", headers=headers)
            assert len(metadata["inputs"]) == 30
            with pytest.raises(InferenceServerException, match="n" * 1400):
                await client.get_model_metadata("n" * 2000, headers=headers)
            tensor = triton.InferInput("x", [1000], "INT32")
            tensor.set_data_from_numpy(ROWS)
            with pytest.raises(InferenceServerException, match="n" * 1400):
                await client.infer("n" * 2000, [tensor], headers=headers)
            for packing in ("gzip", "deflate"):
                response = await client.infer("Identity", [tensor], response_compression_algorithm=packing)
                assert response.as_numpy("x").tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2/models/Wide", None),
        ("POST", f"/v2/models/{'n' * 2000}/infer", BIG),
        ("POST", f"/v2/models/{'n' * 2000}/infer", inputs(tensor())),
        ("POST", "/v2/models/Wide/infer", inputs(tensor("y" * 2000, [1], "INT32", [1]))),
    ],
)
async def test_only_inference_responses_are_compressed(method: str, path: str, body: Any) -> None:
    async with serving(Wide) as server:
        response = await server.request(method, path, body, {"Accept-Encoding": "gzip"})
        assert len(response.body) > 1024
        assert not {"content-encoding", "vary"} & {*response.headers}


async def test_compression_can_be_disabled() -> None:
    async with serving(compress_responses=False) as server:
        response = await server.infer("Identity", BIG, {"Accept-Encoding": "gzip"})
        assert "content-encoding" not in response.headers
        assert response.status == 200


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("GZIP", "gzip"),
        ("deflate", "deflate"),
        ("deflate, gzip", "gzip"),
        ("gzip;q=0.1, deflate;q=0.2", "deflate"),
        ("gzip; q=0.2, deflate;q=0.2", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0, deflate;q=0", None),
        ("gzip;q=0, *", "deflate"),
        ("*", "gzip"),
        ("*;q=0", None),
        ("br, zstd", None),
        ("br;q=1, gzip;q=0.1", "gzip"),
        ("identity, gzip;q=0.5", None),
        ("identity;q=0.5, gzip;q=0.6", "gzip"),
        ("identity, gzip", "gzip"),
        ("gzip;q=nonsense", None),
        ("gzip;q=", None),
        ("gzip;q=nan", None),
        (",,;;,", None),
    ],
)
async def test_quality_values(header: str, name: str | None) -> None:
    assert preferred_encoding(header) == name


@pytest.mark.parametrize("size", [1, 1 << 15, (32 << 20) + 1])
async def test_bodies_of_all_sizes_are_decompressed(size: int) -> None:
    """Larger bodies are decompressed into a preallocated buffer."""
    body = (random.Random(0).randbytes(9973) * (size // 9973 + 1))[:size]
    for pack in (gzip.compress, zlib.compress, bare_deflate):
        packed, name = pack(body), "gzip" if pack is gzip.compress else "deflate"
        found = await decompress(packed, name, size, EXECUTOR)
        assert found == body
        if size > LARGE:  # its last tensors need no copy
            assert (np.frombuffer(found, np.uint8).ctypes.data + size) % 64 == 0
        with pytest.raises(HttpError, match=f"larger than the limit of {size - 1} bytes"):
            await decompress(packed, name, size - 1, EXECUTOR)


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="Linux only")
async def test_memory_of_a_compressed_body_is_freed_on_the_way() -> None:
    body = random.Random(0).randbytes(1 << 20) * 40
    packed = gzip.compress(body, 0)
    memory = allocate(len(packed))
    memory[:] = packed
    found = find_buffer(memory)
    assert found is not None
    assert Path(found[0].path).stat().st_blocks * 512 > len(body)
    assert await decompress(memory, "gzip", len(body), EXECUTOR) == body
    assert Path(found[0].path).stat().st_blocks * 512 < 5 << 20


MEMORY_AFTER_BODY = """
import asyncio, gzip, random, re, time
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.encoding import decompress
from dragoman.transports.executor import MessageExecutor

def memory_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

body = gzip.compress(bytes(random.Random(0).choices(b"0123456789", k=1 << 20)) * 60, 1)
executor = MessageExecutor(BodyMemory(0))
before = memory_mib()
size = len(asyncio.run(decompress(body, "gzip", 64 << 20, executor)))
end_s = time.monotonic() + 60  # the thread may keep its result for a moment
while memory_mib() - before >= 16 and time.monotonic() < end_s:
    time.sleep(0.01)
print(size >> 20, memory_mib() - before)
"""


async def test_memory_of_a_large_body_is_returned_to_the_system() -> None:
    """A buffer that grows leaves blocks of half its size in the heap."""
    size, kept_mib = subprocess.check_output([sys.executable, "-c", MEMORY_AFTER_BODY]).split()
    assert int(size) == 60
    assert float(kept_mib) < 16


async def test_memory_for_a_body_is_allocated_up_to_the_limit() -> None:
    body, limit = gzip.compress(random.Random(0).randbytes(1 << 20), 1), 32 << 20
    decompressed = await decompress(body, "gzip", limit, EXECUTOR)
    found = find_buffer(memoryview(decompressed))
    assert found is not None
    assert limit <= len(found[0]) < 2 * limit
