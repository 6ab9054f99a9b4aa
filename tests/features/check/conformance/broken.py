"""A server whose responses are changed on the way: one violation of each clause, and of some several."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from dragoman.formats import grpc_messages as m
from dragoman_check.conformance.http import HttpTarget, RecordedResponse

Change = Callable[[RecordedResponse], RecordedResponse]
MessageChange = Callable[[Any], Any]


class ChangedHttp(HttpTarget):
    """An HTTP target that applies `change` to each response."""

    change: Change | None = None

    def send(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> RecordedResponse:
        response = HttpTarget.send(self, method, path, body, headers)
        return self.change(response) if self.change else response

    @contextmanager
    def conversation(self, path: str) -> Iterator[Any]:
        with HttpTarget.conversation(self, path) as send:

            def send_changed(value: Any, is_last: Any) -> RecordedResponse:
                response = send(value, is_last)
                return self.change(response) if self.change else response

            yield send_changed


class ChangedChannel:
    """A gRPC channel that applies `change` to each response message, or returns one instead of an error."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.change: Callable[[bytes | None], bytes] | None = None

    def unary_unary(self, path: str) -> Any:
        send = self._channel.unary_unary(path)

        def call(request: bytes, **options: Any) -> bytes:
            try:
                response: bytes = send(request, **options)
            except Exception:
                if self.change is None:
                    raise
                return self.change(None)
            return self.change(response) if self.change else response

        return call

    def stream_stream(self, path: str) -> Any:
        send = self._channel.stream_stream(path)

        def call(requests: Any, **options: Any) -> Any:
            for response in send(requests, **options):
                yield self.change(response) if self.change else response

        return call


# --- changes of responses over HTTP -------------------------------------------------------------------------------


def status(code: int) -> Change:
    return lambda response: replace(response, status=code)


def accepted(response: RecordedResponse) -> RecordedResponse:
    """Return success where there was an error."""
    return RecordedResponse(200, {"content-type": "application/json"}, b"{}")


def no_error_object(response: RecordedResponse) -> RecordedResponse:
    return replace(response, body=b'{"detail": "wrong"}')


def edit(change: Callable[[Any], Any]) -> Change:
    """Return a change of JSON bodies, in place or by a new value."""

    def apply(response: RecordedResponse) -> RecordedResponse:
        try:
            value = json.loads(response.body)
        except ValueError:
            return response
        changed = change(value)
        return replace(response, body=json.dumps(value if changed is None else changed).encode())

    return apply


def _parent(value: Any, path: str) -> tuple[Any, Any]:
    *parents, last = [int(p) if p.lstrip("-").isdigit() else p for p in path.split(".")]
    for each in parents:
        value = value[each]
    return value, last


def put(path: str, new: Any) -> Change:
    """Return a change that sets an element, which must exist or be a new key."""

    def apply(value: Any) -> None:
        try:
            parent, last = _parent(value, path)
            if isinstance(parent, dict | list):
                parent[last] = new
        except (LookupError, TypeError):
            pass

    return edit(apply)


def drop(path: str) -> Change:
    def apply(value: Any) -> None:
        try:
            parent, last = _parent(value, path)
            del parent[last]
        except (LookupError, TypeError):
            pass

    return edit(apply)


def media_type(name: str) -> Change:
    return lambda response: replace(response, headers={**response.headers, "content-type": name})


def body(content: bytes) -> Change:
    return lambda response: replace(response, body=content)


def cut(count: int) -> Change:
    return lambda response: replace(response, body=response.body[:-count])


def lines(change: Callable[[list[Any]], Any]) -> Change:
    """Return a change of the list of JSON lines."""

    def apply(response: RecordedResponse) -> RecordedResponse:
        values = [json.loads(line) for line in response.body.splitlines()]
        change(values)
        return replace(response, body=b"".join(json.dumps(v).encode() + b"\n" for v in values))

    return apply


def events(change: Callable[[list[Any]], Any], done: bool = True) -> Change:
    """Return a change of the list of events of a stream, without `[DONE]`; others stay."""

    def apply(response: RecordedResponse) -> RecordedResponse:
        if response.media_type != "text/event-stream":
            return response
        values = response.json_events()
        change(values)
        data = [json.dumps(v) for v in values] + (["[DONE]"] if done and "[DONE]" in response.events() else [])
        return replace(response, body="".join(f"data: {each}\n\n" for each in data).encode())

    return apply


def alternate(path: str) -> Change:
    """Return a change that gives each response another value."""
    values = iter(["a", "b", "c", "d", "e"])
    return edit(lambda value: _set(value, path, next(values)))


def _set(value: Any, path: str, new: Any) -> None:
    parent, last = _parent(value, path)
    parent[last] = new


def last_response(**fields: Any) -> Change:
    """Return a change of the response in the last message of a turn over a WebSocket."""
    return lines(lambda messages: messages[-1].get("response", {}).update(fields))


def last_error(**fields: Any) -> Change:
    return lines(lambda messages: messages[-1].get("error", {}).update(fields))


def succeed(messages: list[Any]) -> None:
    """Let a turn that failed succeed."""
    if messages[-1]["type"] == "error":
        messages[-1] = {"type": "response.completed", "response": {"id": "resp_1", "error": None}}


# --- changes of gRPC messages -------------------------------------------------------------------------------------


def message(kind: Any, change: MessageChange | None) -> Callable[[bytes | None], bytes]:
    """Return a change of messages; without one, an empty message."""

    def apply(response: bytes | None) -> bytes:
        try:
            found = kind.FromString(response or b"")
        except DecodeError:  # of another method
            return response or b""
        if change is not None:
            change(found)
        serialized: bytes = (found if change is not None else kind()).SerializeToString()
        return serialized

    return apply


def set_field(name: str, value: Any) -> MessageChange:
    return lambda found: setattr(found, name, value)


def clear(name: str) -> MessageChange:
    return lambda found: found.ClearField(name)


@dataclass(frozen=True)
class GrpcChange:
    """A change of gRPC responses."""

    apply: Callable[[bytes | None], bytes]


def grpc(kind: str, change: MessageChange | None = None) -> GrpcChange:
    return GrpcChange(message(getattr(m, kind), change))


def _longer(found: Any) -> None:
    if found.raw_output_contents:
        found.raw_output_contents[0] += b"\x00"
    elif found.outputs:
        found.outputs[0].contents.fp64_contents.append(1.0)


def _rename_output(found: Any) -> None:
    if found.outputs:
        found.outputs[0].name = "other"


def _mixed(found: Any) -> None:
    if found.outputs:
        found.outputs[0].contents.int64_contents.append(1)
        found.raw_output_contents.append(b"\x00")


_INFER = "ModelInferResponse"
_accepted_call = grpc(_INFER)
_HEADER = "inference-header-content-length"


def _without_header(response: RecordedResponse) -> RecordedResponse:
    """Return the binary data where JSON should be."""
    return replace(response, headers={k: v for k, v in response.headers.items() if k != _HEADER})


def _same_statistics(value: Any) -> None:
    for one in value.get("model_stats", []):
        one["inference_count"] = 5


def _ignored_parameter(response: RecordedResponse) -> RecordedResponse:
    return replace(response, status=200, body=b'{"generated_text": "a", "details": {"finish_reason": "length"}}')


_REJECTED = [accepted, no_error_object]
_CODE_200 = [accepted]
_TGI_INVALID = [accepted, status(400), put("error_type", "other")]
_OPENAI_INVALID = [accepted, status(500), drop("error.message"), put("error", "text")]
_UB_INVALID = [accepted, status(500), put("error.type", "ModelError"), drop("error.message")]


def _each(names: Iterable[str], changes: list[Any]) -> dict[str, list[Any]]:
    return dict.fromkeys(names, changes)


def _first_rows() -> Change:
    """Return a change that gives binary requests other elements than the JSON requests before them."""
    numbers = itertools.count()
    return lambda response: put("outputs.1.data.0", 0.0 if next(numbers) < 3 else 5.0)(response)


# By the id of a clause: changes, each of which violates it.
BROKEN: Mapping[str, list[Any]] = {
    "rest-server-live": [status(503)],
    "rest-server-ready": [status(500), status(404)],
    "rest-health-body": [body(b'{"live": true}')],
    "rest-server-metadata": [drop("name"), put("version", 1), put("extensions", [1]), body(b"{")],
    "rest-json-media-type": [media_type("text/plain")],
    "rest-model-ready": [status(400)],
    "rest-model-ready-version": [status(404)],
    "rest-model-ready-unknown": [status(200), status(500)],
    "rest-model-metadata": [put("name", "other"), drop("platform"), drop("outputs"), status(404)],
    "rest-metadata-tensors": [
        put("inputs.0.datatype", "fp32"),
        put("outputs.0.shape", ["3"]),
        put("inputs.0.shape", [-2]),
    ],
    "rest-metadata-versions": [put("versions", [1]), put("versions", "1"), put("name", "other")],
    "rest-metadata-unknown-model": _REJECTED,
    "rest-metadata-unknown-version": _REJECTED,
    "rest-case-sensitive": [status(200)],
    "rest-infer": [
        drop("model_name"),
        put("model_name", "other"),
        put("outputs", []),
        drop("outputs.0.shape"),
        put("outputs.1.data", [1]),
        put("outputs.0.data", ["1"]),
        put("outputs.1.data", [True] * 3),
        put("outputs.0.shape", [-1]),
        put("outputs.0.datatype", "int64"),
        body(b'{"outputs": [NaN]}'),
    ],
    "rest-infer-metadata": [
        put("outputs.0.name", "other"),
        put("outputs.0.datatype", "INT32"),
        put("outputs.1.shape", [3, 1]),
        drop("outputs.1"),
    ],
    "rest-infer-id": [drop("id"), put("id", "other"), put("id", 42)],
    "rest-infer-no-id": [put("id", "generated")],
    "rest-infer-version": [put("model_version", "2"), drop("model_version"), put("model_version", 1)],
    "rest-infer-nested-data": [status(400), alternate("outputs.0.name")],
    "rest-infer-request-output": [
        edit(lambda v: v["outputs"].append(v["outputs"][0] | {"name": "more"})),
        put("outputs", []),
    ],
    "rest-infer-parameters": [status(400)],
    **_each(
        (
            "rest-error-malformed-json",
            "rest-error-no-inputs",
            "rest-error-empty-inputs",
            "rest-error-unknown-input",
            "rest-error-unknown-output",
            "rest-error-input-name",
            "rest-error-input-data",
            "rest-error-datatype",
            "rest-error-datatype-case",
            "rest-error-other-datatype",
            "rest-error-element-count",
            "rest-error-shape",
            "rest-error-negative-axis",
            "rest-error-shape-overflow",
            "rest-error-element-type",
            "rest-error-id-type",
            "rest-error-unknown-model",
            "rest-error-unknown-version",
        ),
        _REJECTED,
    ),
    "rest-error-status": [status(500), accepted],
    "rest-live-after-errors": [status(503), accepted],
    "extension-binary-input": [put("outputs.0.data", [])],
    "extension-binary-output": [cut(1), media_type("application/json"), _without_header],
    "extension-binary-data-output": [cut(1), _without_header],
    "extension-binary-equals-json": [
        _first_rows(),
    ],
    "extension-binary-too-short": _REJECTED,
    "extension-binary-wrong-size": _REJECTED,
    "extension-binary-header": _REJECTED,
    "extension-classification": [
        put("outputs.0.data", ["2"]),
        put("outputs.0.data", ["a:0"]),
        put("outputs.0.datatype", "INT64"),
    ],
    "extension-statistics": [
        drop("model_stats.0.inference_stats.queue"),
        put("model_stats", []),
        drop("model_stats.0.version"),
    ],
    "extension-statistics-count": [edit(_same_statistics)],
    "extension-statistics-all": [put("model_stats", []), status(500)],
    "extension-configuration": [
        put("name", "other"),
        put("input", []),
        put("input.0.data_type", "FP32"),
        drop("max_batch_size"),
        drop("output.0.dims"),
    ],
    "extension-repository-index": [put("0.state", "ready"), body(b"{}"), drop("0"), drop("0.name")],
    "extension-repository-index-ready": [put("0.state", "LOADING")],
    "extension-repository-load": [status(500)],
    "extension-repository-unload": [status(500), status(200)],
    "extension-repository-load-unknown": _REJECTED,
    "grpc-server-live": [grpc("ServerLiveResponse")],
    "grpc-server-ready": [grpc("ServerReadyResponse")],
    "grpc-model-ready": [grpc("ModelReadyResponse")],
    "grpc-model-ready-unknown": [grpc("ModelReadyResponse", set_field("ready", True))],
    "grpc-server-metadata": [grpc("ServerMetadataResponse", clear("name"))],
    "grpc-model-metadata": [
        grpc("ModelMetadataResponse", set_field("name", "other")),
        grpc("ModelMetadataResponse", clear("inputs")),
    ],
    "grpc-metadata-unknown-model": [grpc("ModelMetadataResponse")],
    "grpc-infer-raw": [
        grpc(_INFER, _longer),
        grpc(_INFER, clear("outputs")),
        grpc(_INFER, set_field("model_name", "other")),
        grpc(_INFER, _mixed),
    ],
    "grpc-infer-contents": [grpc(_INFER, _longer)],
    "grpc-infer-metadata": [grpc(_INFER, _rename_output)],
    "grpc-infer-id": [grpc(_INFER, clear("id"))],
    "grpc-infer-version": [grpc(_INFER, set_field("model_version", "2"))],
    "grpc-infer-request-output": [grpc(_INFER, _rename_output)],
    **_each(
        (
            "grpc-error-raw-and-contents",
            "grpc-error-raw-count",
            "grpc-error-raw-extra",
            "grpc-error-raw-size",
            "grpc-error-contents-field",
            "grpc-error-datatype",
            "grpc-error-other-datatype",
            "grpc-error-empty-inputs",
            "grpc-error-unknown-input",
            "grpc-error-unknown-output",
            "grpc-error-unknown-model",
            "grpc-error-unknown-version",
            "grpc-error-codes",
        ),
        [_accepted_call],
    ),
    "grpc-stream-infer": [
        grpc("ModelStreamInferResponse", set_field("error_message", "wrong")),
        grpc("ModelStreamInferResponse", lambda found: found.infer_response.ClearField("id")),
    ],
    "grpc-stream-error": [
        grpc("ModelStreamInferResponse", clear("error_message")),
        grpc("ModelStreamInferResponse", clear("infer_response")),
    ],
    "grpc-statistics": [grpc("ModelStatisticsResponse", clear("model_stats"))],
    "grpc-configuration": [
        grpc("ModelConfigResponse", clear("config")),
        grpc("ModelConfigResponse", lambda found: found.config.ClearField("input")),
    ],
    "grpc-repository-index": [grpc("RepositoryIndexResponse", clear("models"))],
    "generate-text": [drop("text_output"), put("model_name", "other"), status(500)],
    "generate-details": [
        drop("details"),
        put("details.finish_reason", "stop"),
        put("details.logprobs", []),
        drop("details.logprobs.0.special"),
        put("details.logprobs.0.logprob", 0.5),
    ],
    "generate-max-tokens": [
        put("details.finish_reason", "eos_token"),
        edit(lambda v: v["details"].update(logprobs=[{}, {}])),
    ],
    "generate-stream": [
        media_type("application/json"),
        events(lambda e: e[0].pop("text_output")),
        events(lambda e: e[-1].pop("model_name")),
    ],
    "generate-stream-text": [events(lambda e: e[0].update(text_output="other"))],
    **_each(
        (
            "generate-error-no-text",
            "generate-error-text-type",
            "generate-error-unknown-model",
            "generate-error-malformed-json",
        ),
        _REJECTED,
    ),
    "umbridge-info": [put("protocolVersion", 2), drop("models"), put("models", [])],
    "umbridge-model-info": [drop("support.Gradient"), put("support.Evaluate", "yes")],
    "umbridge-input-sizes": [drop("inputSizes"), put("inputSizes", ["2"])],
    "umbridge-output-sizes": [drop("outputSizes"), put("outputSizes", [-1])],
    "umbridge-config-optional": [status(400)],
    "umbridge-no-content-type": [status(415)],
    "umbridge-evaluate": [
        put("output", [[1.0]]),
        put("output", [[1.0, None]]),
        put("output", [[1.0, 2.0], [1.0]]),
        status(500),
    ],
    "umbridge-gradient": [put("output", [1.0]), put("output", ["1", "2"])],
    "umbridge-apply-jacobian": [put("output", [1.0, 2.0, 3.0])],
    "umbridge-apply-hessian": [put("output", [[1.0, 2.0]])],
    "umbridge-adjoint": [put("output", [7.0, 1.0])],
    "umbridge-directional-derivative": [
        edit(lambda v: v.update(output=[9.0, 9.0]) if isinstance(v.get("output", [[]])[0], float) else None),
    ],
    "umbridge-unknown-model": _UB_INVALID,
    "umbridge-unsupported-feature": [
        edit(lambda v: v["support"].update(Gradient=False) if "support" in v else None),  # but Gradient answers
    ],
    **_each(
        (
            "umbridge-number-of-inputs",
            "umbridge-input-length",
            "umbridge-input-type",
            "umbridge-gradient-inwrt",
            "umbridge-gradient-outwrt",
            "umbridge-applyjacobian-inwrt",
            "umbridge-applyjacobian-outwrt",
            "umbridge-applyhessian-inwrt1",
            "umbridge-applyhessian-inwrt2",
            "umbridge-applyhessian-outwrt",
            "umbridge-gradient-sens",
            "umbridge-applyjacobian-vec",
            "umbridge-applyhessian-sens",
            "umbridge-applyhessian-vec",
        ),
        [put("error.type", "ModelError"), drop("error.message"), put("error", "text")],
    ),
    "batches-file": [
        status(500),
        put("bytes", 1),
        put("purpose", "x"),
        put("filename", "x"),
        drop("id"),
        put("data", []),
        put("deleted", False),
    ],
    "batches-unknown-file": [status(400), accepted, no_error_object],
    "batches-purpose": [*_REJECTED, status(500)],
    "batches-results": [
        status(500),
        put("status", "failed"),
        put("request_counts", {}),
        put("output_file_id", None),
        put("error_file_id", None),
        put("custom_id", "a"),
    ],
    "batches-invalid-line": [put("status", "completed"), put("errors", None), put("errors", {"data": [{"line": 1}]})],
    "batches-unknown-input": [*_REJECTED, status(500)],
    "batches-unknown-batch": [status(400), accepted, no_error_object],
    "batches-list": [
        status(500),
        put("object", "page"),
        drop("data"),
        drop("has_more"),
        put("data", [{"object": "x"}]),
    ],
    "v1-ready": [put("name", "other"), put("ready", False), drop("ready")],
    "v1-predict": [put("predictions", []), drop("predictions"), status(500)],
    "v1-unknown-model": [status(400), accepted, no_error_object],
    "v1-no-instances": _REJECTED,
    "v1-instances-type": _REJECTED,
    "v1-malformed-json": [*_REJECTED, status(500)],
    "openai-models": [put("object", "models"), drop("data.0.owned_by"), put("data.0.created", "now")],
    "openai-model": [put("id", "other"), put("object", "card")],
    "openai-model-unknown": _OPENAI_INVALID,
    "openai-chat": [
        put("object", "chat"),
        drop("choices.0.message"),
        put("choices.0.message.role", "user"),
        put("usage.total_tokens", 0),
        put("choices.0.finish_reason", None),
        put("choices", []),
        put("model", 7),
        put("choices.0.index", 1),
    ],
    "openai-chat-max-tokens": [
        edit(lambda v: v.update(usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})),
    ],
    "openai-chat-n": [drop("choices.1"), put("choices.1.index", 0)],
    "openai-chat-logprobs": [
        put("choices.0.logprobs", None),
        put("choices.0.logprobs.content.0.logprob", 0.5),
        put("choices.0.logprobs.content.0.top_logprobs", []),
    ],
    "openai-chat-stream": [
        events(lambda e: e[0].update(object="chat.completion")),
        events(lambda e: e[-1]["choices"][0].update(finish_reason=None)),
        events(lambda e: e[1].update(id="other")),
        events(lambda e: None, done=False),
        media_type("application/json"),
        events(lambda e: e[0]["choices"][0]["delta"].pop("role")),
        events(lambda e: e[0]["choices"][0].update(finish_reason="stop")),
    ],
    "openai-chat-stream-text": [events(lambda e: e[-2]["choices"][0]["delta"].update(content="more"))],
    "openai-chat-stream-usage": [events(lambda e: e.pop()), events(lambda e: e[-1].pop("usage"))],
    "openai-completion": [
        drop("choices.0.text"),
        put("object", "chat.completion"),
        drop("usage"),
        put("created", "now"),
    ],
    "openai-completion-prompts": [drop("choices.1")],
    "openai-completion-stop": [put("choices.0.text", "one two"), put("choices.0.finish_reason", "length")],
    "openai-completion-echo": [put("choices.0.text", "only the completion")],
    "openai-completion-stream": [events(lambda e: e[0]["choices"][0].pop("text")), events(lambda e: None, done=False)],
    "openai-embeddings": [drop("data.1"), put("data.0.embedding", [1.0]), put("data.1.index", 0)],
    **_each(
        (
            "openai-error-unknown-model",
            "openai-error-no-messages",
            "openai-error-temperature",
            "openai-error-malformed-json",
        ),
        _OPENAI_INVALID,
    ),
    "responses-basic-response": [
        drop("presence_penalty"),
        put("service_tier", None),
        put("parallel_tool_calls", 1),
        drop("text.format"),
        drop("metadata"),
        put("object", "chat"),
        put("output", []),
        put("status", "failed"),
        put("usage.total_tokens", "1"),
        drop("output.0.id"),
        put("output.0.role", "robot"),
        put("output.0.status", "done"),
        drop("output.0.content.0.annotations"),
        status(500),
    ],
    "responses-assistant-phase": [status(400), drop("frequency_penalty")],
    "responses-response-output-phase-schema": [put("output.0.phase", "draft"), status(400)],
    "responses-streaming-response": [
        events(lambda e: e.pop()),
        events(lambda e: e.pop(1)),
        events(lambda e: e[0].update(type="response.begun")),
        events(lambda e: e[4].update(delta="other")),
        events(lambda e: e[-1]["response"].pop("frequency_penalty")),
        events(lambda e: None, done=False),
        media_type("text/plain"),
    ],
    "responses-system-prompt": [status(400), put("output", [])],
    "responses-tool-calling": [
        put("output", [{"type": "reasoning", "id": "rs_1"}]),
        put("output.0.name", "other"),
        drop("output.0.call_id"),
    ],
    "responses-image-input": [status(500), put("output", [])],
    "responses-multi-turn": [status(400), put("output", [])],
    "responses-compact-response": [
        put("object", "response"),
        put("output", []),
        drop("output.0.encrypted_content"),
        drop("usage"),
        status(500),
    ],
    "responses-compact-missing-model": [accepted, status(500)],
    "responses-websocket-response": [
        lines(lambda v: v.pop()),
        lines(lambda v: v.pop(0)),
        lines(lambda v: v[4].update(delta="other")),
        last_response(output=[]),
    ],
    "responses-websocket-sequential-responses": [last_response(id="resp_1"), last_response(status="failed")],
    "responses-websocket-continuation": [last_response(previous_response_id=None)],
    "responses-websocket-reconnect-store-false-recovery": [last_error(code="other"), last_response(output=[])],
    "responses-websocket-previous-response-not-found": [last_error(code=None), last_error(code="x"), lines(succeed)],
    "responses-websocket-failed-continuation-evicts-cache": [last_error(code="other"), lines(succeed)],
    "responses-websocket-compact-new-chain": [put("object", "response"), last_response(output=[])],
    "tgi-health": [status(503)],
    "tgi-info": [drop("model_id"), put("max_total_tokens", "64"), drop("version")],
    "tgi-generate": [drop("generated_text"), body(b"[]"), status(500)],
    "tgi-details": [
        drop("details"),
        put("details.finish_reason", "stop"),
        drop("details.seed"),
        drop("details.prefill"),
        put("details.tokens", []),
        drop("details.tokens.0.special"),
        put("details.tokens.0.logprob", 1.0),
    ],
    "tgi-max-new-tokens": [put("details.generated_tokens", 5)],
    "tgi-decoder-input-details": [put("details.prefill", []), drop("details.prefill.0.id")],
    "tgi-return-full-text": [put("generated_text", "only the completion")],
    "tgi-seed": [put("details.seed", 8), alternate("generated_text")],
    "tgi-stop": [put("details.finish_reason", "length")],
    "tgi-compatible-root": [edit(lambda v: v[0] if isinstance(v, list) else v), media_type("text/plain")],
    "tgi-stream": [events(lambda e: e[0].pop("index")), events(lambda e: e[0]["token"].pop("special")), body(b"")],
    "tgi-stream-last-event": [
        events(lambda e: e[-1].update(details=None)),
        events(lambda e: e[0].update(generated_text="a")),
    ],
    "tgi-stream-text": [events(lambda e: e[0]["token"].update(text="other"))],
    "tgi-tokenize": [drop("0.start"), body(b"[]"), put("0.stop", 99)],
    **_each(
        (
            "tgi-error-temperature",
            "tgi-error-top-p",
            "tgi-error-max-new-tokens",
            "tgi-error-empty-inputs",
        ),
        _TGI_INVALID,
    ),
    "tgi-error-malformed": [accepted, status(500)],
    "lmi-ping": [status(503)],
    "lmi-generate": [drop("generated_text"), media_type("text/plain"), status(424)],
    "lmi-stream-default": [body(b'{"token": {}}\n{"token": {}}\n')],
    "lmi-no-details": [put("details", {})],
    "lmi-details": [
        drop("details.finish_reason"),
        put("details.inputs", ""),
        put("details.tokens", []),
        drop("details.tokens.0.log_prob"),
        put("details.finish_reason", "stop"),
        drop("details.generated_tokens"),
    ],
    "lmi-max-new-tokens": [put("details.generated_tokens", 5)],
    "lmi-return-full-text": [put("generated_text", "only the completion")],
    "lmi-greedy": [alternate("generated_text")],
    "lmi-seed": [alternate("generated_text")],
    "lmi-stop-sequences": [
        put("details.finish_reason", "length"),
        put("generated_text", "all of it and more and more"),
    ],
    "lmi-stream": [media_type("application/json"), lines(lambda v: v[0].pop("token")), body(b"")],
    "lmi-stream-last-line": [lines(lambda v: v[-1].pop("details")), lines(lambda v: v[0].update(generated_text="a"))],
    "lmi-stream-text": [lines(lambda v: v[0]["token"].update(text="other"))],
    "lmi-error-no-inputs": [accepted, status(400), drop("code"), put("code", 400)],
    "lmi-error-inputs-type": [accepted, drop("error")],
    "lmi-error-parameters-type": [accepted, drop("code")],
    "lmi-error-parameter-value": [accepted, _ignored_parameter],
    "lmi-error-malformed-json": [accepted],
}
