"""Health checks and reflection, TLS, and the client of Triton."""

import asyncio
import queue
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_fakes import TABLE, FakeEngine, infer_message, make_server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dragoman.formats import grpc_messages as m

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
async def target(server: Any) -> str:
    return f"127.0.0.1:{await server.start('127.0.0.1', 0)}"


# --- health ----------------------------------------------------------------------------------------------


def serialized_request(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", m.SERVICE])
async def test_health_follows_the_engine(engine: FakeEngine, target: str, service: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(serialized_request(service))).status == SERVING
        engine.set_ready(False)
        assert (await health.Check(serialized_request(service))).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(serialized_request("other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_of_all_services_is_listed(engine: FakeEngine, target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {"", m.SERVICE} <= set(listed)
        assert {each.status for each in listed.values()} == {SERVING}
        engine.set_ready(False)
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert listed[m.SERVICE].status == NOT_SERVING


async def test_health_is_watched_until_the_server_stops(engine: FakeEngine, server: Any, target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(serialized_request(""))
        other = health_pb2_grpc.HealthStub(channel).Watch(serialized_request("other"))
        assert (await watching.read()).status == SERVING
        assert (await other.read()).status == UNKNOWN
        for ready in (False, True):
            engine.set_ready(ready)
            assert (await watching.read()).status == (SERVING if ready else NOT_SERVING)
        await asyncio.wait_for(server.stop(600), 60)
        assert (await watching.read()).status == NOT_SERVING
        assert await watching.read() is grpc.aio.EOF


# --- reflection ------------------------------------------------------------------------------------------


async def test_reflection_lists_every_service(server: Any, target: str) -> None:
    def look() -> tuple[list[str], set[str], list[str]]:
        with grpc.insecure_channel(target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = list(database.get_services())
            file = database.FindFileContainingSymbol(m.SERVICE)
            health = database.FindFileContainingSymbol("grpc.health.v1.Health")
            return services, {r.name for r in file.service[0].method}, [s.name for s in health.service]

    services, methods, health = await asyncio.to_thread(look)
    reflection = [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]
    assert sorted(services) == ["grpc.health.v1.Health", *reflection, m.SERVICE, m.REPOSITORY_SERVICE]
    assert methods == {row.name for row in TABLE.methods}
    assert health == ["Health"]


# --- TLS -------------------------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write the files of a key and a self-signed certificate for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    key, chain = folder / "key.pem", folder / "chain.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([openssl, *options.split(), *extra], check=True, capture_output=True)
    return key, chain


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(engine: FakeEngine, mutual: bool, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    key, chain = (file.read_bytes() for file in files)
    server = make_server(engine, tls=(*files, mutual))
    target = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"

    async def infer(credentials: Any) -> Any:
        async with grpc.aio.secure_channel(target, credentials) as channel:
            call = channel.unary_unary(f"/{m.SERVICE}/ModelInfer")
            return m.ModelInferResponse.FromString(await call(infer_message().SerializeToString(), timeout=60))

    try:
        with_own = grpc.ssl_channel_credentials(chain, key, chain)
        assert (await infer(with_own)).model_name == "echo"
        without = grpc.ssl_channel_credentials(chain)
        if mutual:
            with pytest.raises(grpc.aio.AioRpcError):
                await infer(without)
        else:
            assert (await infer(without)).model_name == "echo"
    finally:
        await server.stop(0)


# --- Triton's client -------------------------------------------------------------------------------------


async def test_tritons_client(target: str) -> None:
    triton = pytest.importorskip("tritonclient.grpc.aio")
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = triton.InferInput("x", [2, 3], "FP32")
    given.set_data_from_numpy(data)
    async with triton.InferenceServerClient(target) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("echo")
        assert (await client.get_server_metadata()).name == "dragoman"
        assert [t.name for t in (await client.get_model_metadata("echo")).inputs] == ["x"]
        assert [e.state for e in (await client.get_model_repository_index()).models] == ["READY", "UNAVAILABLE"]
        await client.load_model("echo")
        await client.unload_model("echo")
        result = await client.infer("echo", [given], request_id="7")
        assert np.array_equal(result.as_numpy("x"), data)
        assert result.get_response().id == "7"
        with pytest.raises(Exception, match=r"\[StatusCode.NOT_FOUND\] Request for unknown model: 'nope'"):
            await client.infer("nope", [given])


async def test_tritons_client_streams(target: str) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    data = np.array([b"ab", b""], dtype=np.object_)
    given = triton.InferInput("x", [2], "BYTES")
    given.set_data_from_numpy(data)
    received: queue.Queue[Any] = queue.Queue()

    def talk() -> list[str]:
        with triton.InferenceServerClient(target) as client:
            client.start_stream(lambda result, error: received.put(what(result, error)))
            for model in ("echo", "nope", "echo"):
                client.async_stream_infer(model, [given], enable_empty_final_response=True)
            return [received.get(timeout=60) for _ in range(9)]

    def what(result: Any, error: Any) -> str:
        if error is not None:
            return str(error)
        if result.get_response().parameters["triton_final_response"].bool_param:
            return "end"
        return "piece" if result.as_numpy("x").tolist() == data.tolist() else "wrong"

    response = ["piece", "piece", "piece", "end"]
    assert await asyncio.to_thread(talk) == [*response, "Request for unknown model: 'nope' is not found", *response]
