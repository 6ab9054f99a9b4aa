"""API keys over gRPC, on its own port and on the one of HTTP."""

import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from access.access_models import Doubler, KeyFile, Tripler, bearer
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, serving

INFER = f"/{m.SERVICE}/ModelInfer"


def message(model: str = "Doubler") -> bytes:
    request = m.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.5)
    found: bytes = request.SerializeToString()
    return found


@pytest_asyncio.fixture(params=["grpc", "http"])
async def channel(server: RestServer, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    port = server.dragoman.grpc_port if request.param == "grpc" else server.port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def call(channel: Any, key: str | None, method: str = INFER, body: bytes | None = None) -> Any:
    """Return the status and the details or the response."""
    metadata = [] if key is None else [*bearer(key).items()]
    try:
        found = await channel.unary_unary(method)(message() if body is None else body, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code(), error
    return grpc.StatusCode.OK, found


async def test_a_call_needs_a_key(channel: Any, keys: KeyFile) -> None:
    status, found = await call(channel, keys.keys["user"])
    assert status is grpc.StatusCode.OK
    response = m.ModelInferResponse.FromString(found)
    assert [*response.raw_output_contents] == [struct.pack("<f", 3.0)]
    for key in (None, "wrong"):
        status, error = await call(channel, key)
        assert status is grpc.StatusCode.UNAUTHENTICATED
        assert "expected a header 'Authorization: Bearer <key>'" in error.details()


async def test_the_other_header_is_accepted(channel: Any, keys: KeyFile) -> None:
    await channel.unary_unary(INFER)(message(), metadata=[("x-api-key", keys.keys["user"])])


@pytest.mark.parametrize("first", ["right", "wrong"])
async def test_two_credentials_are_none(channel: Any, keys: KeyFile, first: str) -> None:
    """As over HTTP: a gateway that checks one entry and a server that uses another would accept anything."""
    both = [("authorization", f"Bearer {keys.keys['user']}"), ("authorization", "Bearer wrong")]
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await channel.unary_unary(INFER)(message(), metadata=both if first == "right" else both[::-1])
    assert found.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_open(channel: Any) -> None:
    for method, body in (
        (f"/{m.SERVICE}/ServerLive", b""),
        (f"/{m.SERVICE}/ModelReady", m.ModelReadyRequest(name="Doubler").SerializeToString()),
        ("/grpc.health.v1.Health/Check", b""),
    ):
        assert (await call(channel, None, method, body))[0] is grpc.StatusCode.OK


async def test_a_key_that_expires_is_rejected_on_open_connections(
    channel: Any, server: RestServer, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.add("short", expires_s=time.time() + 1000)
    server.dragoman.reload()
    ok, denied = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
    for later_s, status in ((0, ok), (0, ok), (1001, denied), (0, ok)):
        now_s = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now_s=now_s + later_s: now_s)
            assert (await call(channel, key))[0] is status


async def test_roles_and_models_hold(channel: Any, server: RestServer, keys: KeyFile) -> None:
    infer, bound = keys.add("infer", ["infer"]), keys.add("bound", ["infer", "read"], ["Doubler"])
    server.dragoman.reload()
    index, metadata = f"/{m.SERVICE}/RepositoryIndex", f"/{m.SERVICE}/ModelMetadata"
    about = m.ModelMetadataRequest(name="Tripler").SerializeToString()
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert (await call(channel, infer))[0] is grpc.StatusCode.OK
    assert (await call(channel, infer, metadata, about))[0] is denied
    assert (await call(channel, infer, index, b""))[0] is denied
    assert (await call(channel, bound))[0] is grpc.StatusCode.OK
    assert (await call(channel, bound, body=message("Tripler")))[0] is denied
    assert (await call(channel, bound, metadata, about))[0] is denied
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    talking = channel.stream_stream(reflection)(metadata=[*bearer(infer).items()])
    assert await talking.code() is denied


async def test_a_key_is_checked_again_after_a_change(channel: Any, server: RestServer, keys: KeyFile) -> None:
    late = keys.add("late")
    server.dragoman.reload()
    assert [(await call(channel, late))[0] for _ in range(3)] == [grpc.StatusCode.OK] * 3
    keys.delete("late")
    server.dragoman.reload()
    assert (await call(channel, late))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_each_message_of_a_stream_counts(channel: Any, server: RestServer, keys: KeyFile) -> None:
    slow = keys.add("slow", calls_per_s=0.01)
    server.dragoman.reload()
    metadata = [*bearer(slow).items(), ("triton_grpc_error", "true")]
    stream = channel.stream_stream(f"/{m.SERVICE}/ModelStreamInfer")(iter([message()] * 2), metadata=metadata)
    assert m.ModelStreamInferResponse.FromString(await stream.read()).error_message == ""
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await stream.read()
    assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, error = await call(channel, slow)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(error.trailing_metadata())
    assert 90 <= int(trailers["retry-after"]) <= 100


async def test_wrong_keys_are_limited(keys: KeyFile) -> None:
    settings: Any = {"grpc_port": 0, "api_keys": str(keys.path), "auth_failures_per_minute": 2}
    async with serving(Doubler, Tripler, **settings) as server:
        address = f"127.0.0.1:{server.dragoman.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            found = [(await call(channel, "wrong"))[0] for _ in range(3)]
            assert found == [grpc.StatusCode.UNAUTHENTICATED] * 2 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert (await call(channel, keys.keys["user"]))[0] is grpc.StatusCode.OK
            # One address has one limit, whatever the protocol.
            assert (await server.request("GET", "/v2", headers=bearer("wrong"))).status == 429
