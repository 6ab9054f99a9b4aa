"""gRPC with reflection only, like generic tools and load balancers."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from e2e.conftest import SHAPES
from e2e.server_process import TIMEOUT_S, ServerProcess, running_server, wait_until

SERVICE = "inference.GRPCInferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def channel(shapes: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(shapes.grpc_url) as channel:
        yield channel


# --- reflection ------------------------------------------------------------------------------------------


def test_reflection_lists_and_describes(channel: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(
        database.get_services()
    )
    service = DescriptorPool(database).FindServiceByName(SERVICE)
    assert {"ServerLive", "ModelMetadata", "ModelInfer", "ModelStreamInfer"} <= set(service.methods_by_name)
    assert service.methods_by_name["ModelStreamInfer"].server_streaming


def test_inference_with_messages_from_reflection(channel: Any) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName(SERVICE).methods_by_name["ModelInfer"]
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    request: Any = request_type(model_name="SumDiff", id="r")
    for name in ("INPUT0", "INPUT1"):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        tensor.contents.int_contents.extend(range(16))
    call = channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    response = call(request, timeout=TIMEOUT_S, metadata=[("dragoman-output-contents", "typed")])
    assert response.id == "r"
    assert list(response.outputs[0].contents.int_contents) == [2 * i for i in range(16)]

    del request.inputs[:]
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(np.arange(16, dtype="<i4").tobytes())
    raw = call(request, timeout=TIMEOUT_S).raw_output_contents[0]
    assert np.frombuffer(raw, "<i4").tolist() == [2 * i for i in range(16)]

    with pytest.raises(grpc.RpcError) as caught:
        call(request_type(model_name="missing"), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_malformed_messages_are_rejected(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff\xff\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- health ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_check(channel: Any, service: str) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status == SERVING


def test_health_of_an_unknown_service(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_health_watch_sees_the_shutdown() -> None:
    with (
        running_server(SHAPES[0], "--placement", "thread") as process,
        grpc.insecure_channel(process.grpc_url) as channel,
    ):
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

        def watch() -> None:
            try:
                for response in watching:
                    seen.put(response.status)
            except grpc.RpcError:
                seen.put(-1)

        thread = threading.Thread(target=watch)
        thread.start()
        assert seen.get(timeout=TIMEOUT_S) == SERVING
        process.terminate()
        assert seen.get(timeout=TIMEOUT_S) == NOT_SERVING
        assert process.wait_for_exit() == 0
        thread.join(TIMEOUT_S)
        wait_until(lambda: not thread.is_alive(), "the end of the watch")
