"""System and CUDA shared memory over REST and gRPC: registration, inputs, outputs, bounds, and what is refused."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import dragoman
from dragoman import BYTES, INT32, Infer, TensorSpec
from rest.rest_server import RestServer, inputs, serving

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="POSIX shared memory as files"),
]
FOLDER = Path("/dev/shm")
SETTINGS: dict[str, Any] = {"control_open": True, "grpc_port": 0}
X, Y = np.arange(4, dtype=np.int32), np.full(4, 10, np.int32)


class Sum(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("x", INT32, (4,)), TensorSpec("y", INT32, (4,)))
    outputs = (TensorSpec("sum", INT32, (4,)), TensorSpec("difference", INT32, (4,)))

    def infer(self, call: Infer) -> Any:
        x, y = (call.inputs[name].data for name in ("x", "y"))
        return {"sum": x + y, "difference": x - y}


class Waiting(Sum):
    """Responds once `proceed` is set; `started` tells that it has a request."""

    started, proceed = asyncio.Event(), asyncio.Event()

    async def infer(self, call: Infer) -> Any:
        self.started.set()
        await self.proceed.wait()
        return super().infer(call)


class Texts(dragoman.Model):
    placement = "inline"
    inputs = outputs = (TensorSpec("t", BYTES, (-1,)),)

    def infer(self, call: Infer) -> Any:
        return dict(call.inputs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(
        Sum, Waiting, Texts, shared_memory=True, max_body_bytes=1 << 16, trial_s=0, **SETTINGS
    ) as server:
        yield server


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a new object of shared memory of 64 bytes: x, then y, then zeros."""
    path = FOLDER / f"dragoman-test-{secrets.token_hex(4)}"
    path.write_bytes(X.tobytes() + Y.tobytes() + bytes(32))
    yield path
    path.unlink(missing_ok=True)


async def post(server: RestServer, path: str, body: Any = None, kind: str = "system") -> Any:
    return await server.request("POST", f"/v2/{kind}sharedmemory/{path}", body)


async def register(server: RestServer, memory: Path, name: str = "r", **more: Any) -> Any:
    await post(server, "unregister")
    return await post(server, f"region/{name}/register", {"key": f"/{memory.name}", "byte_size": 64, **more})


def in_region(size: int, offset: int = 0, region: str = "r") -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def request_of(x: Any = None, y: Any = None, **outputs: Any) -> dict[str, Any]:
    rows = [{"name": n, "shape": [4], "datatype": "INT32", **more} for n, more in (("x", x), ("y", y))]
    return inputs(*rows, **({"outputs": [{"name": n, "parameters": p} for n, p in outputs.items()]} if outputs else {}))


IN_X, IN_Y = {"parameters": in_region(16)}, {"parameters": in_region(16, 16)}


async def test_tensors_in_a_region(server: RestServer, memory: Path) -> None:
    assert (await register(server, memory)).body == b""
    status = await server.request("GET", "/v2/systemsharedmemory/status")
    assert status.json == [{"name": "r", "key": f"/{memory.name}", "offset": 0, "byte_size": 64}]
    response = await server.infer("Sum", request_of(IN_X, IN_Y, difference={}, sum=in_region(16, 32)))
    assert response.json["outputs"] == [
        {"name": "sum", "datatype": "INT32", "shape": [4]},
        {"name": "difference", "datatype": "INT32", "shape": [4], "data": [-10, -9, -8, -7]},
    ]
    assert np.frombuffer(memory.read_bytes()[32:48], np.int32).tolist() == [10, 11, 12, 13]
    assert memory.read_bytes()[48:] == bytes(16)
    assert (await post(server, "region/r/unregister")).status == 200
    assert (await server.request("GET", "/v2/systemsharedmemory/status")).json == []


async def test_an_offset_of_the_region_counts(server: RestServer, memory: Path) -> None:
    await register(server, memory, offset=16, byte_size=16)
    response = await server.infer("Sum", request_of(IN_X, IN_X))
    assert response.json["outputs"][0]["data"] == [20] * 4


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
async def test_the_client_of_triton(server: RestServer, memory: Path, module: Any) -> None:
    await post(server, "unregister")
    port = server.port if module is triton_http else server.dragoman.grpc_port

    def run() -> Any:
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("r", f"/{memory.name}", 64)
            x, y = (module.InferInput(name, [4], "INT32") for name in ("x", "y"))
            x.set_shared_memory("r", 16)
            y.set_data_from_numpy(Y)
            total, difference = (module.InferRequestedOutput(name) for name in ("sum", "difference"))
            total.set_shared_memory("r", 16, 32)
            result = client.infer("Sum", [x, y], outputs=[total, difference])
            assert result.as_numpy("difference").tolist() == [-10, -9, -8, -7]
            regions = client.get_system_shared_memory_status()
            assert "r" in (regions.regions if module is triton_grpc else {each["name"] for each in regions})
            with pytest.raises(InferenceServerException, match="GPUs not supported"):
                client.register_cuda_shared_memory("c", b"\0" * 64, 0, 64)
            with pytest.raises(InferenceServerException, match="already in manager"):
                client.register_system_shared_memory("r", f"/{memory.name}", 64)
            client.unregister_system_shared_memory("r")
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
                client.infer("Sum", [x, y])

    await asyncio.to_thread(run)
    assert np.frombuffer(memory.read_bytes()[32:48], np.int32).tolist() == [10, 11, 12, 13]


def infer_into_region(server: RestServer, module: Any, *, shared_inputs: bool) -> None:
    """Call the model Waiting with a client of Triton; its output goes to bytes 32 to 48 of the region `r`."""
    port = server.port if module is triton_http else server.dragoman.grpc_port
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensors = [module.InferInput(name, [4], "INT32") for name in ("x", "y")]
        for tensor, offset, value in zip(tensors, (0, 16), (X, Y), strict=True):
            if shared_inputs:
                tensor.set_shared_memory("r", 16, offset)
            else:
                tensor.set_data_from_numpy(value)
        total = module.InferRequestedOutput("sum")
        total.set_shared_memory("r", 16, 32)
        client.infer("Waiting", tensors, outputs=[total])


async def start_waiting(server: RestServer, module: Any, *, shared_inputs: bool) -> asyncio.Task[None]:
    """Start `infer_into_region`; return when the model computes."""
    Waiting.started.clear()
    Waiting.proceed.clear()
    call = asyncio.to_thread(infer_into_region, server, module, shared_inputs=shared_inputs)
    request = asyncio.create_task(call)
    await Waiting.started.wait()
    return request


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
async def test_a_region_stays_while_requests_use_it(server: RestServer, memory: Path, module: Any) -> None:
    await register(server, memory)
    request = await start_waiting(server, module, shared_inputs=True)
    for _ in range(2):
        assert (await post(server, "unregister")).status == 200
    assert [each["name"] for each in (await server.request("GET", "/v2/systemsharedmemory/status")).json] == ["r"]
    assert "Unable to find shared memory region: 'r'" in (await server.infer("Sum", request_of(IN_X, IN_Y))).error
    Waiting.proceed.set()
    await request
    assert np.frombuffer(memory.read_bytes()[32:48], np.int32).tolist() == [10, 11, 12, 13]
    assert (await server.request("GET", "/v2/systemsharedmemory/status")).json == []


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
async def test_outputs_are_written_to_the_region_that_was_registered_at_their_request(
    server: RestServer, memory: Path, module: Any
) -> None:
    other = memory.with_name(f"{memory.name}-other")
    other.write_bytes(bytes(64))
    await register(server, memory)
    try:
        request = await start_waiting(server, module, shared_inputs=False)
        assert (await register(server, other)).status == 200
        Waiting.proceed.set()
        await request
        assert np.frombuffer(memory.read_bytes()[32:48], np.int32).tolist() == [10, 11, 12, 13]
        assert not any(other.read_bytes())
    finally:
        other.unlink()


async def test_texts_in_a_region(server: RestServer, memory: Path) -> None:
    raw = bytes(serialize_byte_tensor(np.array([b"ab", b"\xff"], object)).item())
    memory.write_bytes(raw.ljust(64, b"\0"))
    await register(server, memory)
    body = inputs({"name": "t", "shape": [2], "datatype": "BYTES", "parameters": in_region(len(raw))})
    body["outputs"] = [{"name": "t", "parameters": in_region(len(raw), 32)}]
    assert (await server.infer("Texts", body)).json["outputs"] == [{"name": "t", "datatype": "BYTES", "shape": [2]}]
    assert memory.read_bytes()[32 : 32 + len(raw)] == raw


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (request_of(IN_X, {"parameters": in_region(16, 64)}), "Invalid offset for shared memory region: 'r'"),
        (request_of(IN_X, {"parameters": in_region(16, 56)}), "Invalid offset + byte size for shared memory region"),
        (request_of(IN_X, {"parameters": in_region(12)}), "input 'y'"),
        (request_of(IN_X, {"parameters": in_region(16, 1 << 63)}), "Invalid offset for shared memory region: 'r'"),
        (request_of(IN_X, IN_Y, sum=in_region(1 << 63, 16)), "Integer overflow detected"),
        (
            request_of(IN_X, {"parameters": in_region(-1)}),
            "'shared_memory_byte_size' expects a number of bytes",
        ),
        (request_of(IN_X, {"parameters": in_region(16, True)}), "'shared_memory_offset' expects a number of bytes"),
        (request_of(IN_X, {"parameters": in_region(16, 0, "s")}), "Unable to find shared memory region: 's'"),
        (
            request_of(IN_X, {"parameters": {**in_region(16), "shared_memory_ofset": 8}}),
            "unknown parameter 'shared_memory_ofset'; did you mean 'shared_memory_offset'?",
        ),
        (request_of(IN_X, {"parameters": {"shared_memory_region": 3}}), "expects the name of a region, got 3"),
        (request_of(IN_X, {**IN_Y, "data": [1] * 4}), "Input must set only one of the following fields"),
        (request_of(IN_X, IN_Y, sum=in_region(12)), "(12 bytes) should be at least 16 bytes to hold the results"),
        (request_of(IN_X, IN_Y, sum=in_region(16, 60)), "Invalid offset + byte size"),
        (
            request_of(IN_X, IN_Y, sum={**in_region(16), "classification": 1}),
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
async def test_invalid_places(server: RestServer, memory: Path, body: Any, message: str) -> None:
    await register(server, memory)
    response = await server.infer("Sum", body)
    assert response.status in (400, 404)
    assert message in response.error


async def test_unknown_fields_of_a_region(server: RestServer, memory: Path) -> None:
    """A misspelt offset would read other bytes."""
    response = await register(server, memory, ofset=16)
    assert response.status == 400
    assert "unknown field 'ofset'" in response.error


async def test_no_bytes_of_the_object_beyond_the_region(server: RestServer, memory: Path) -> None:
    await register(server, memory, byte_size=24)
    for body in (request_of(IN_X, IN_Y), request_of(IN_X, IN_X, sum=in_region(16, 16))):
        error = (await server.infer("Sum", body)).error
        assert "Invalid offset + byte size for shared memory region: 'r'" in error
    assert memory.read_bytes()[32:] == bytes(32)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_objects_of_other_users_are_not_opened(server: RestServer, memory: Path) -> None:
    os.chown(memory, 65534, 65534)
    assert (await register(server, memory)).error == f"Unable to open shared memory region: '/{memory.name}'"


async def test_a_client_that_shrinks_its_memory_gets_errors(server: RestServer, memory: Path) -> None:
    await register(server, memory)
    os.truncate(memory, 32)
    to_region = await server.infer("Sum", request_of(IN_X, IN_Y, sum=in_region(16, 32)))
    assert (to_region.status, memory.stat().st_size) == (400, 32)
    os.truncate(memory, 8)
    assert "Invalid offset + byte size" in (await server.infer("Sum", request_of(IN_X, IN_Y))).error


async def test_a_request_may_not_read_more_than_a_body(server: RestServer, memory: Path) -> None:
    os.truncate(memory, 40_000)
    await register(server, memory, byte_size=40_000)
    place = {"parameters": in_region(40_000)}
    rows = [{"name": name, "shape": [10_000], "datatype": "INT32", **place} for name in ("x", "y")]
    assert "expected at most 65536 bytes, got 80000" in (await server.infer("Sum", inputs(*rows))).error


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("//", "invalid shm key '//'"),
        ("/..", "invalid shm key"),
        ("/../etc/passwd", "invalid shm key"),
        ("a/b", "invalid shm key"),
        ("/triton_python_backend_shm_region_1", "reserved prefix 'triton_python_backend_shm_region_'"),
        ("/dragoman-test-missing", "Unable to open shared memory region: '/dragoman-test-missing'"),
    ],
)
async def test_keys_that_are_refused(server: RestServer, key: str, message: str) -> None:
    response = await post(server, "region/k/register", {"key": key, "byte_size": 4})
    assert response.status == 400
    assert message in response.error


async def test_only_plain_files_are_opened(server: RestServer, memory: Path, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(bytes(64))
    for make in (lambda p: p.symlink_to(target), os.mkfifo, Path.mkdir):
        path = FOLDER / f"{memory.name}-{secrets.token_hex(2)}"
        make(path)
        try:
            response = await post(server, "region/k/register", {"key": path.name, "byte_size": 4})
            assert f"Unable to open shared memory region: '{path.name}'" in response.error
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"byte_size": 4}, "Shared memory register request has no 'key' field"),
        ({"key": "/k"}, "Shared memory register request has no 'byte_size' field"),
        ({"key": 3, "byte_size": 4}, "the request is not valid"),
    ],
)
async def test_invalid_registrations(server: RestServer, body: Any, message: str) -> None:
    assert message in (await post(server, "region/k/register", body)).error


@pytest.mark.parametrize("more", [{"byte_size": 65}, {"byte_size": 60, "offset": 8}, {"byte_size": 0}, {"offset": -1}])
async def test_regions_beyond_the_object(server: RestServer, memory: Path, more: dict[str, Any]) -> None:
    assert (await register(server, memory, **more)).error == "failed to register shared memory region 'r': invalid args"


async def test_regions_of_no_bytes_over_grpc(server: RestServer, memory: Path) -> None:
    def run() -> None:
        address, error = (
            f"127.0.0.1:{server.dragoman.grpc_port}",
            "failed to register shared memory region 'e': invalid",
        )
        with triton_grpc.InferenceServerClient(address) as client, pytest.raises(InferenceServerException, match=error):
            client.register_system_shared_memory("e", memory.name, 0)

    await asyncio.to_thread(run)


async def test_a_bounded_number_of_regions(server: RestServer, memory: Path) -> None:
    await post(server, "unregister")
    for number in range(64):
        assert (await post(server, f"region/{number}/register", {"key": memory.name, "byte_size": 4})).status == 200
    assert "at most 64 regions" in (await post(server, "region/x/register", {"key": memory.name, "byte_size": 4})).error
    await post(server, "unregister")


async def test_status_of_unknown_regions(server: RestServer, memory: Path) -> None:
    await register(server, memory)
    unknown = await server.request("GET", "/v2/systemsharedmemory/region/u/status")
    assert (unknown.status, unknown.error) == (404, "Unable to find system shared memory region: 'u'")
    other = await server.request("GET", "/v2/cudasharedmemory/region/r/status")
    assert other.error == "The region named 'r' is registered as system shared memory, not CUDA shared memory"
    assert (await server.request("GET", "/v2/cudasharedmemory/status")).json == []
    assert (await post(server, "region/r/unregister", kind="cuda")).status == 200


async def test_it_is_off_by_default(memory: Path) -> None:
    async with serving(Sum, **SETTINGS) as server:
        for path in ("region/r/register", "unregister"):
            response = await post(server, path, {"key": memory.name, "byte_size": 64})
            assert "Client shared memory is disabled" in response.error
        assert (await server.request("GET", "/v2/systemsharedmemory/status")).json == []
        for body in (request_of(IN_X, IN_Y), request_of({"data": [1] * 4}, {"data": [1] * 4}, sum=in_region(16))):
            assert "Client shared memory is disabled" in (await server.infer("Sum", body)).error


async def test_registration_needs_the_control_token(memory: Path) -> None:
    async with serving(Sum, shared_memory=True, control_token="secret") as server:
        response = await post(server, "region/r/register", {"key": memory.name, "byte_size": 64})
        assert response.status == 401
        assert (await server.infer("Sum", request_of(IN_X, IN_Y))).status == 404


async def test_one_process_has_the_regions() -> None:
    with pytest.raises(dragoman.errors.InvalidInput, match="'shared_memory': expected processes 1, got 2"):
        async with serving(Sum, shared_memory=True, processes=2):
            pass
