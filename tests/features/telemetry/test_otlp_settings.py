"""OpenTelemetry's variables: protocols and endpoints of each signal, temporality, and a collector that is down."""

import logging
import sys
from typing import Any

import httpx2
import pytest

import dragoman
from dragoman.core.errors import InvalidInput
from e2e.otlp_receiver import DELTA, GrpcReceiver, exported, running_receiver
from e2e.server_process import free_ports, wait_until

HTTP = "http.server.request.duration"


def identity(x: float) -> float:
    return x


X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}


async def post_once(server: dragoman.Server) -> int:
    async with httpx2.AsyncClient(base_url=server.http_url) as client:
        return (await client.post("/v2/models/identity/infer", json=X)).status_code


async def test_delta_metrics_are_those_since_the_last_export(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_receiver() as receiver:
        for name, value in exported(receiver).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
        async with dragoman.Server(identity, http_port=0, grpc_port=-1) as server:
            for number in (1, 2):
                assert await post_once(server) == 200
                wait_until(lambda number=number: sum(map(count, receiver.metrics)) == number, "the request")  # type: ignore[misc]
        points = [point for each in receiver.metrics for point in each.get(HTTP, [])]
        assert {point.temporality for point in points} == {DELTA}
        assert sum(point.count for point in points) == 2
        assert all(sum(point.buckets) == point.count for point in points)


def count(export: dict[str, Any]) -> int:
    return sum(point.count for point in export.get(HTTP, []))


async def test_each_signal_may_have_its_own_protocol_and_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_receiver() as over_http, running_receiver(GrpcReceiver) as over_grpc:
        for name, value in exported(over_http).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", over_grpc.url)
        async with dragoman.Server(identity, http_port=0, grpc_port=-1) as server:
            assert await post_once(server) == 200
            logging.getLogger("mine").warning("a line")
        assert over_grpc.points(HTTP)
        assert (over_grpc.spans, over_http.metrics) == ([], [])
        assert over_http.spans
        assert [line.body for line in over_http.logs if line.logger == "mine"] == ["a line"]
        logging.getLogger("mine").warning("after the end")
        assert not [line for line in over_http.logs if "after" in line.body]


async def test_one_of_several_servers_exports_the_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_receiver() as receiver:
        for name, value in exported(receiver).items():
            monkeypatch.setenv(name, value)
        async with (
            dragoman.Server(identity, http_port=0, grpc_port=-1),
            dragoman.Server(identity, http_port=0, grpc_port=-1),
        ):
            logging.getLogger("mine").warning("a line")
            wait_until(lambda: receiver.logs, "the line")
        assert [line.body for line in receiver.logs if line.logger == "mine"] == ["a line"]


async def test_a_grpc_collector_that_is_down_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    async with dragoman.Server(identity, http_port=0, grpc_port=-1, tracing_endpoint=endpoint) as server:
        assert await post_once(server) == 200
        wait_until(lambda: "traces cannot be exported" in caplog.text, "the warning")
        metrics = server.engine.metric_sources[0]()
    dropped = {each.name: each.samples[0].value for each in metrics if each.name.startswith("dragoman_traces")}
    assert dropped == {"dragoman_traces_exported_total": 0, "dragoman_traces_dropped_total": 1}
    assert "UNAVAILABLE" in caplog.text
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING and "opentelemetry" in r.name] == []


async def test_an_unknown_protocol_or_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(InvalidInput, match="OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf or grpc"):
        async with dragoman.Server(identity, http_port=0, grpc_port=-1, tracing_endpoint="http://127.0.0.1:9"):
            pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(InvalidInput, match=r"pip install 'dragoman\[tracing-grpc\]'"):
        async with dragoman.Server(identity, http_port=0, grpc_port=-1, tracing_endpoint="http://127.0.0.1:9"):
            pass
