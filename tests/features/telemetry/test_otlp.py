"""Spans of text models, metrics and log lines that a collector receives over HTTP and over gRPC."""

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import httpx2
import pytest

import dragoman
from dragoman.formats import grpc_messages as m
from e2e.otlp_receiver import CUMULATIVE, SERVER, GrpcReceiver, OtlpReceiver, Point, Span, exported, running_receiver
from e2e.server_process import wait_until
from text_server import ReverseModel


class Tensors(dragoman.Model):
    """Returns its input; 13 fails."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    placement = "thread"

    def infer(self, call: dragoman.Infer) -> Any:
        if call.inputs["x"].data[0] == 13:
            raise ValueError("unlucky")
        logging.getLogger("author").warning("computing %d", call.inputs["x"].data[0])
        return {"y": call.inputs["x"].data}


class Counted(ReverseModel):
    """Of a name that no other test uses."""


class Served(NamedTuple):
    """A running server."""

    server: dragoman.Server

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        with httpx2.Client(base_url=self.server.http_url, timeout=60) as client:
            return client.request(method, path, json=body, headers=headers)

    def infer(self, value: float, headers: dict[str, str] | None = None) -> int:
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [value]}]}
        return self.request("POST", "/v2/models/Tensors/infer", body, headers).status_code


HTTP = "http.server.request.duration"
_ids = iter(range(1, 1000))


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    with running_receiver(GrpcReceiver if request.param == "grpc" else OtlpReceiver) as found:
        yield found


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in exported(receiver).items():
            patch.setenv(name, value)
        with dragoman.Server(Tensors, ReverseModel, Counted, http_port=0, grpc_port=0) as server:
            yield Served(server)


def parent() -> tuple[str, dict[str, str]]:
    """Return a trace id, and the header of a request that is traced."""
    trace_id = f"{next(_ids):032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}


def post(server: Served, path: str, body: Any) -> tuple[int, str, str]:
    """Send a traced request; return status and body of the response, and the id of the trace."""
    trace_id, headers = parent()
    response = server.request("POST", path, body, headers)
    return response.status_code, response.text, trace_id


def text_span(receiver: OtlpReceiver, trace_id: str) -> Span:
    """Return the span of a call of a text model, after checking where it is."""
    spans = receiver.trace(trace_id, 4)
    (span,) = [span for span in spans if any(name.startswith("gen_ai.") for name in span.attributes)]
    assert span.parent_id == spans[0].span_id
    assert spans[0].kind == SERVER
    assert {each.name for each in spans if each.parent_id == span.span_id} <= {"queue", "batch", "compute"}
    return span


def test_spans_of_a_chat(server: Served, receiver: OtlpReceiver) -> None:
    body = {
        "model": "ReverseModel", "max_tokens": 2, "temperature": 0.5, "top_p": 0.75, "n": 2,
        "messages": [{"role": "user", "content": "one two three"}],
    }  # fmt: skip
    status, _, trace_id = post(server, "/v1/chat/completions", body)
    assert status == 200
    span = text_span(receiver, trace_id)
    assert span.name == "chat ReverseModel"
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dragoman",
        "gen_ai.request.model": "ReverseModel",
        "gen_ai.response.model": "ReverseModel",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert not span.is_error


def test_spans_of_a_stream(server: Served, receiver: OtlpReceiver) -> None:
    body = {"model": "ReverseModel", "prompt": "one two three", "max_tokens": 9, "stream": True}
    status, answer, trace_id = post(server, "/v1/completions", body)
    assert (status, "[DONE]" in answer) == (200, True)
    span = text_span(receiver, trace_id)
    assert span.name == "text_completion ReverseModel"
    first_s = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_s <= (span.end - span.start) / 1e9
    assert {name: span.attributes[name] for name in span.attributes if "usage" in name or "response" in name} == {
        "gen_ai.response.model": "ReverseModel",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert span.attributes["gen_ai.request.stream"] is True


def test_spans_of_embeddings_and_of_a_failure(server: Served, receiver: OtlpReceiver) -> None:
    status, _, trace_id = post(server, "/v1/embeddings", {"model": "ReverseModel", "input": ["one two", "three"]})
    assert status == 200
    span = text_span(receiver, trace_id)
    assert (span.name, span.attributes["gen_ai.usage.input_tokens"]) == ("embeddings ReverseModel", 3)
    assert not {name for name in span.attributes if "output" in name or "finish" in name}
    body = {"model": "ReverseModel", "prompt": "one !fault three", "stream": True}
    status, _, trace_id = post(server, "/v1/completions", body)
    attributes = text_span(receiver, trace_id).attributes
    assert attributes["gen_ai.usage.output_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_metrics_of_text_models(server: Served, receiver: OtlpReceiver) -> None:
    body = {"model": "Counted", "prompt": "a b c d e", "max_tokens": 4, "stream": True}
    for _ in range(3):
        assert server.request("POST", "/v1/completions", body).status_code == 200
    of = {"gen_ai_response_model": "Counted", "gen_ai_operation_name": "text_completion"}

    def points(name: str, **more: str) -> list[Point]:
        return receiver.points(name, **of, **more)

    tokens, first = "gen_ai.client.token.usage", "gen_ai.server.time_to_first_token"
    durations = {}
    for name in (first, "gen_ai.server.time_per_output_token", "gen_ai.server.request.duration"):
        wait_until(lambda name=name: points(name)[0].count == 3, name)  # type: ignore[misc]
        (durations[name],) = points(name)
    assert {(point.unit, sum(point.buckets), point.temporality) for point in durations.values()} == {
        ("s", 3, CUMULATIVE)
    }
    assert durations[first].bounds[:3] == [0.001, 0.005, 0.01]
    assert 0 < durations[first].sum < durations["gen_ai.server.request.duration"].sum
    for kind, number in (("input", 15), ("output", 12)):
        (usage,) = points(tokens, gen_ai_token_type=kind)
        assert (usage.count, usage.sum, usage.unit, usage.bounds[:3]) == (3, number, "{token}", [1, 4, 16])
        (used,) = points(f"gen_ai.client.inference.usage.{kind}_tokens", gen_ai_token_modality="text")
        assert used.sum == number


def test_metrics_and_spans_of_tensors_over_rest_and_grpc(server: Served, receiver: OtlpReceiver) -> None:
    assert [server.infer(value) for value in (1, 13, 2)] == [200, 500, 200]
    route = {"http_route": "/v2/models/{model}/infer", "http_request_method": "POST", "url_scheme": "http"}
    wait_until(lambda: receiver.points(HTTP, **route), "the route")
    wait_until(lambda: sum(p.count for p in receiver.points(HTTP, **route)) == 3, "three requests")
    good, bad = sorted(
        receiver.points(HTTP, **route),
        key=lambda p: p.attributes["http.response.status_code"],
    )
    assert (good.count, bad.count) == (2, 1)
    assert (good.attributes["http.response.status_code"], bad.attributes["http.response.status_code"]) == (200, 500)
    assert bad.attributes["error.type"] == "500"
    assert "error.type" not in good.attributes
    assert (good.unit, good.bounds[0], good.bounds[-1], sum(good.buckets)) == ("s", 0.005, 10.0, 2)
    assert 0 < good.sum < 10

    with grpc.insecure_channel(server.server.grpc_url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        unknown = channel.unary_unary("/inference.GRPCInferenceService/Made-up")
        message = m.ModelInferRequest(model_name="Tensors")
        message.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(1.0)
        trace_id, headers = parent()
        call(message.SerializeToString(), metadata=[*headers.items()])
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                unknown(b"")
    method = "inference.GRPCInferenceService/ModelInfer"
    (point,) = receiver.points("rpc.server.call.duration", rpc_method=method)
    assert (point.count, point.unit, point.attributes["rpc.system.name"]) == (1, "s", "grpc")
    assert point.attributes["rpc.response.status_code"] == "OK"
    (point,) = receiver.points("rpc.server.call.duration", rpc_method="_OTHER")
    wait_until(lambda: receiver.points("rpc.server.call.duration", rpc_method="_OTHER")[0].count == 2, "both")
    span = receiver.trace(trace_id, 4)[0]
    assert (span.name, span.attributes["rpc.response.status_code"]) == (method, "OK")
    assert not [name for each in receiver.trace(trace_id, 4) for name in each.attributes if name.startswith("gen_ai")]


def test_methods_and_paths_that_clients_make_up_are_one_time_series(server: Served, receiver: OtlpReceiver) -> None:
    for number in range(5):
        server.request(f"MADE{number}", f"/made/up/{number}")
    wait_until(
        lambda: sum(p.count for p in receiver.points(HTTP, http_request_method="_OTHER")) == 5,
        "the requests",
    )
    points = receiver.metrics[-1][HTTP]
    assert not [value for point in points for value in point.attributes.values() if "made" in str(value).lower()]


def test_log_lines_have_the_ids_of_their_request(server: Served, receiver: OtlpReceiver) -> None:
    trace_id, headers = parent()
    before_ns = time.time_ns()
    server.infer(77, {**headers, "x-request-id": "order-17"})
    line = receiver.line("computing 77")
    assert (line.logger, line.severity, line.trace_id) == ("author", 13, trace_id)
    assert line.span_id == receiver.trace(trace_id, 4)[0].span_id
    assert line.attributes["dragoman.request.id"] == "order-17"
    assert before_ns - 1e6 < line.time < time.time_ns() + 1e6
    server.infer(13)
    failed = wait_until(
        lambda: next((e for e in receiver.logs if "exception.type" in e.attributes), None), "a traceback"
    )
    assert failed is not None
    assert failed.attributes["exception.type"] == "ValueError"
    assert "unlucky" in failed.attributes["exception.stacktrace"]
    assert failed.severity == 17


def test_resource_and_headers(server: Served, receiver: OtlpReceiver) -> None:
    server.infer(1)
    receiver.points(HTTP)
    resource = receiver.resources[-1]
    assert resource["service.name"] == "dragoman"
    assert len(resource["service.instance.id"]) == 32
    assert receiver.headers[-1]["x-collector-key"] == "tulip"
    text = server.request("GET", "/metrics").text
    for signal in ("traces", "metrics", "logs"):
        assert f"dragoman_{signal}_dropped_total 0" in text
