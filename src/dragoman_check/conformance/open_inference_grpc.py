"""Clauses of the Open Inference Protocol over gRPC."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dragoman_check.conformance.clauses import (
    ClauseFailed,
    ClauseList,
    Level,
    NotOffered,
    NotTried,
    Protocol,
    expect,
    fail,
)
from dragoman_check.conformance.http import KEY_HINT, HttpTarget
from dragoman_check.conformance.open_inference_rest import UNKNOWN
from dragoman_check.conformance.samples import DATATYPES, ELEMENT_SIZES, SampleTensor, TensorShape, sample_of
from dragoman_check.conformance.target import Target, TensorModel, find_tensor_model, with_request

try:
    from dragoman.formats import grpc_messages as m
    from dragoman_check.conformance import grpc_client as g
except ModuleNotFoundError:
    g = None  # type: ignore[assignment]

CLAUSES = ClauseList("grpc")
_add = CLAUSES.add


@dataclass(slots=True)
class GrpcContext:
    """The channel and a model, or the reason why there is none."""

    grpc: "g.GrpcTarget"
    http: HttpTarget
    found: TensorModel | str

    @property
    def model(self) -> TensorModel:
        return with_request(self.found)

    def request(self, raw: bool = True, **fields: Any) -> Any:
        return g.infer_request(self.model.name, self.model.samples, raw, **fields)

    def infer(self, request: Any) -> Any:
        """Return the response to an inference request. Raises ClauseFailed if it is rejected."""
        return self.call("ModelInfer", m.ModelInferResponse, request)

    def call(self, method: str, kind: Any, request: Any) -> Any:
        try:
            return self._send(method, kind, request)
        except g.CallRejected as error:
            if error.code == "PERMISSION_DENIED":
                raise NotTried(f"the server does not permit {method}: {error}") from error
            raise ClauseFailed(f"expected the status OK of {method}, got {error}") from error

    def optional(self, method: str, kind: Any, request: Any) -> Any:
        try:
            return self.call(method, kind, request)
        except ClauseFailed as error:
            if isinstance(error.__cause__, g.CallRejected) and error.__cause__.code == "UNIMPLEMENTED":
                raise NotOffered(f"{method} gets status UNIMPLEMENTED") from error
            raise

    def _send(self, method: str, kind: Any, request: Any) -> Any:
        """Return the response to a call. Raises NotTried if the server asks for a key, else CallRejected."""
        try:
            return self.grpc.call(method, kind, request)
        except g.CallRejected as error:
            if error.code == "UNAUTHENTICATED":
                raise NotTried(f"{method} gets status {error.code}: {KEY_HINT}") from error
            raise

    def expect_rejected(self, method: str, kind: Any, request: Any) -> str:
        """Return the code of a call that must fail. Raises ClauseFailed if it succeeds."""
        try:
            answer = self._send(method, kind, request)
        except g.CallRejected as error:
            return error.code
        return fail("a status other than OK", str(answer))


def _prepare(target: Target) -> GrpcContext:
    if g is None:
        raise NotTried("gRPC needs the package 'grpcio': pip install 'dragoman[grpc]'")
    if not target.grpc:
        raise NotTried("no gRPC address; give --grpc HOST:PORT")
    metadata = [(name.lower(), value) for name, value in target.http.headers.items()]
    client = g.GrpcTarget(g.open_channel(target), metadata, target.http.timeout_s, target.http.exchanges)
    try:
        client.call("ServerLive", m.ServerLiveResponse, m.ServerLiveRequest())
    except g.CallRejected as error:
        raise NotOffered(f"no Open Inference service at {target.grpc}: {error}") from error
    return GrpcContext(client, target.http, _find_model(target, client))


def _find_model(target: Target, client: "g.GrpcTarget") -> TensorModel | str:
    """Return the model that REST found, or one by gRPC alone if there is no REST."""
    model = find_tensor_model(target) if target.http.url else "name a model with --model NAME"
    if not isinstance(model, str):
        return model
    for name in target.models:
        try:
            answer = client.call("ModelMetadata", m.ModelMetadataResponse, m.ModelMetadataRequest(name=name))
        except g.CallRejected:
            continue
        samples = [sample_of(TensorShape(t.name, t.datatype, tuple(t.shape))) for t in answer.inputs]
        if samples:
            metadata = {
                "versions": list(answer.versions),
                "inputs": [_tensor(t) for t in answer.inputs],
                "outputs": [_tensor(t) for t in answer.outputs],
            }
            return TensorModel(name, metadata, samples)
    return model


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _check_outputs(answer: Any) -> None:
    """Check that each output has data of its shape, raw or typed. Raises ClauseFailed."""
    expect(answer.outputs, "at least one output", str(answer))
    raw = list(answer.raw_output_contents)
    expect(len(raw) in (0, len(answer.outputs)), f"{len(answer.outputs)} raw_output_contents", len(raw))
    for i, output in enumerate(answer.outputs):
        expect(output.datatype in DATATYPES, f"a datatype of the protocol in '{output.name}'", output.datatype)
        count, typed = math.prod(output.shape), g.contents_of(output)
        if raw:
            expect(not typed, f"no contents of '{output.name}' next to raw_output_contents", dict(typed))
            want = count * ELEMENT_SIZES.get(output.datatype, 0)
            fits = len(raw[i]) == want if want or output.datatype in ELEMENT_SIZES else len(raw[i]) >= 4 * count
            expect(fits, f"{want} bytes of '{output.name}'", len(raw[i]))
        else:
            want_typed = {g.contents_field(output.datatype): count} if count else {}
            expect(dict(typed) == want_typed, f"contents {want_typed} of '{output.name}'", dict(typed))


# --- health and metadata -----------------------------------------------------------------------------------------


@_add("server-live", "GRPC, Health, Server Live")
def _server_live(c: GrpcContext) -> None:
    """ServerLive of a running server returns live = true."""
    expect(c.call("ServerLive", m.ServerLiveResponse, m.ServerLiveRequest()).live, "live = true", "false")


@_add("server-ready", "GRPC, Health, Server Ready")
def _server_ready(c: GrpcContext) -> None:
    """ServerReady returns the status OK, and the readiness that REST reports."""
    ready = c.call("ServerReady", m.ServerReadyResponse, m.ServerReadyRequest()).ready
    if c.http.url:
        over_rest = c.http.get("/v2/health/ready").status == 200
        expect(ready == over_rest, f"ready = {over_rest}, as over REST", ready)


@_add("model-ready", "GRPC, Health, Model Ready")
def _model_ready(c: GrpcContext) -> None:
    """ModelReady of a model that answers requests returns ready = true."""
    request = m.ModelReadyRequest(name=c.model.name)
    expect(c.call("ModelReady", m.ModelReadyResponse, request).ready, "ready = true", "false")


@_add("model-ready-unknown", "GRPC, Health, Model Ready")
def _model_ready_unknown(c: GrpcContext) -> None:
    """ModelReady of an unknown model returns ready = false or a status other than OK."""
    try:
        answer = c.grpc.call("ModelReady", m.ModelReadyResponse, m.ModelReadyRequest(name=UNKNOWN))
    except g.CallRejected:
        return
    expect(not answer.ready, "ready = false", "true")


@_add("server-metadata", "GRPC, Metadata, Server Metadata")
def _server_metadata(c: GrpcContext) -> None:
    """ServerMetadata returns name and version of the server."""
    answer = c.call("ServerMetadata", m.ServerMetadataResponse, m.ServerMetadataRequest())
    expect(answer.name and answer.version, "name and version", str(answer))


@_add("model-metadata", "GRPC, Metadata, Model Metadata")
def _model_metadata(c: GrpcContext) -> None:
    """ModelMetadata returns the name, platform and tensors of a model, as REST does."""
    answer = c.call("ModelMetadata", m.ModelMetadataResponse, m.ModelMetadataRequest(name=c.model.name))
    expect(answer.name == c.model.name, f"the name '{c.model.name}'", answer.name)
    for key in ("inputs", "outputs"):
        tensors = [_tensor(t) for t in getattr(answer, key)]
        declared = c.model.metadata.get(key) or []
        want = [{k: t[k] for k in ("name", "datatype", "shape")} for t in declared]
        expect(tensors == want, f"the {key} {want} of the metadata over REST", tensors)


@_add("metadata-unknown-model", "GRPC, Metadata, Model Metadata")
def _metadata_unknown_model(c: GrpcContext) -> None:
    """ModelMetadata of an unknown model gets a status other than OK."""
    c.expect_rejected("ModelMetadata", m.ModelMetadataResponse, m.ModelMetadataRequest(name=UNKNOWN))


# --- inference ---------------------------------------------------------------------------------------------------


@_add("infer-raw", "GRPC, Inference, raw_input_contents")
def _infer_raw(c: GrpcContext) -> None:
    """ModelInfer takes raw_input_contents and returns outputs whose data fits shape and datatype."""
    answer = c.infer(c.request())
    _check_outputs(answer)
    expect(answer.model_name == c.model.name, f"model_name '{c.model.name}'", answer.model_name)


@_add("infer-contents", "GRPC, Inference, InferTensorContents")
def _infer_contents(c: GrpcContext) -> None:
    """ModelInfer takes contents in the field of the datatype and gives the same outputs as for raw contents."""
    if any(g.contents_field(sample.datatype) is None for sample in c.model.samples):
        raise NotTried("a datatype of the model has no typed contents")
    typed, raw = c.infer(c.request(raw=False)), c.infer(c.request())
    _check_outputs(typed)
    shapes = [[(o.name, o.datatype, list(o.shape)) for o in answer.outputs] for answer in (raw, typed)]
    expect(shapes[0] == shapes[1], f"outputs {shapes[0]}", shapes[1])


@_add("infer-metadata", "GRPC, Metadata, Model Metadata")
def _infer_metadata(c: GrpcContext) -> None:
    """Outputs have the names and datatypes that the metadata declares."""
    declared = sorted((spec.name, spec.datatype) for spec in c.model.outputs())
    outputs = sorted((o.name, o.datatype) for o in c.infer(c.request()).outputs)
    expect(outputs == declared, f"outputs {declared}", outputs)


@_add("infer-id", "GRPC, Inference, ModelInferRequest.id")
def _infer_id(c: GrpcContext) -> None:
    """The id of a request is returned in the response."""
    response_id = c.infer(c.request(id="dragoman-check-42")).id
    expect(response_id == "dragoman-check-42", "id 'dragoman-check-42'", response_id)


@_add("infer-version", "GRPC, Inference, ModelInferRequest.model_version")
def _infer_version(c: GrpcContext) -> None:
    """A requested version is used, and named in model_version."""
    version = c.infer(c.request(model_version=c.model.version)).model_version
    expect(version == c.model.version, f"model_version '{c.model.version}'", version)


@_add("infer-request-output", "GRPC, Inference, InferRequestedOutputTensor")
def _infer_request_output(c: GrpcContext) -> None:
    """Only requested outputs are returned."""
    name = c.model.outputs()[-1].name
    answer = c.infer(c.request(outputs=[{"name": name}]))
    _check_outputs(answer)
    expect([o.name for o in answer.outputs] == [name], f"the output '{name}'", [o.name for o in answer.outputs])


# --- errors ------------------------------------------------------------------------------------------------------


def _change(
    name: str, section: str, requirement: str, change: Callable[[GrpcContext, Any], None], level: Level = "must"
) -> None:
    """Add a clause: a request is rejected after the change."""

    def check(c: GrpcContext) -> None:
        request = c.request()
        change(c, request)
        c.expect_rejected("ModelInfer", m.ModelInferResponse, request)

    check.__doc__ = requirement
    _add(name, section, level)(check)


def _mix_contents(c: GrpcContext, request: Any) -> None:
    sample = c.model.samples[0]
    name = g.contents_field(sample.datatype)
    if name is None:
        raise NotTried(f"{sample.datatype} has no typed contents")
    values = [v.encode() if isinstance(v, str) else v for v in sample.values]
    getattr(request.inputs[0].contents, name).extend(values)


def _wrong_contents(c: GrpcContext, request: Any) -> None:
    sample = c.model.samples[0]
    del request.raw_input_contents[:]
    if sample.datatype == "INT64":
        request.inputs[0].contents.fp64_contents.extend([0.5] * len(sample.values))
    else:
        request.inputs[0].contents.int64_contents.extend([1] * len(sample.values))


def _remove_inputs(c: GrpcContext, request: Any) -> None:
    if not c.model.metadata.get("inputs"):
        raise NotTried("the metadata declares no inputs")
    del request.inputs[:]
    del request.raw_input_contents[:]


def _rename_input(c: GrpcContext, request: Any) -> None:
    if not c.model.metadata.get("inputs"):
        raise NotTried("the metadata declares no inputs")
    request.inputs[0].name = UNKNOWN


def _other_datatype(c: GrpcContext, request: Any) -> None:
    if not c.model.metadata.get("inputs"):
        raise NotTried("the metadata declares no inputs")
    sample = c.model.samples[0]
    if sample.datatype == "BYTES":
        raise NotTried("numbers can be converted to BYTES")
    other = SampleTensor(sample.name, "BYTES", sample.shape, ("text",) * len(sample.values))
    request.inputs[0].datatype = "BYTES"
    request.raw_input_contents[0] = other.as_bytes()


def _lengthen(request: Any) -> None:
    request.raw_input_contents[0] += b"\x00"


_RAW = "GRPC, Inference, raw_input_contents"
_change("error-raw-and-contents", _RAW, "contents next to raw_input_contents are rejected.", _mix_contents)
_change("error-raw-count", _RAW, "Fewer raw_input_contents than inputs are rejected.",
        lambda c, request: request.raw_input_contents.pop())  # fmt: skip
_change("error-raw-extra", _RAW, "More raw_input_contents than inputs are rejected.",
        lambda c, request: request.raw_input_contents.append(b"\x00"))  # fmt: skip
_change("error-raw-size", _RAW, "Raw contents of a size other than that of the shape are rejected.",
        lambda c, request: _lengthen(request))  # fmt: skip
_change("error-contents-field", "GRPC, Inference, InferTensorContents",
        "contents in a field of another datatype are rejected.", _wrong_contents)  # fmt: skip
_change("error-datatype", "Tensor Data Types", "A datatype that the protocol does not have is rejected.",
        lambda c, request: setattr(request.inputs[0], "datatype", "FP99"))  # fmt: skip
_change("error-other-datatype", "GRPC, Metadata, Model Metadata",
        "A datatype that cannot be converted to that of the metadata is rejected.", _other_datatype)  # fmt: skip
_change("error-empty-inputs", "GRPC, Metadata, Model Metadata",
        "A request without the inputs of the metadata is rejected, unless they are optional.",
        _remove_inputs, "should")  # fmt: skip
_change("error-unknown-input", "GRPC, Metadata, Model Metadata",
        "An input that the metadata does not declare is rejected.", _rename_input, "should")  # fmt: skip
_change("error-unknown-output", "GRPC, Inference, InferRequestedOutputTensor",
        "A requested output that does not exist is rejected.",
        lambda c, request: request.outputs.add(name=UNKNOWN))  # fmt: skip
_change("error-unknown-model", "GRPC, Inference", "Inference with an unknown model gets a status other than OK.",
        lambda c, request: setattr(request, "model_name", UNKNOWN))  # fmt: skip
_change("error-unknown-version", "GRPC, Inference", "Inference with an unknown version gets a status other than OK.",
        lambda c, request: setattr(request, "model_version", "987654321"))  # fmt: skip


@_add("error-codes", "google.rpc.Code", level="should")
def _error_codes(c: GrpcContext) -> None:
    """An unknown model gets NOT_FOUND, an invalid request INVALID_ARGUMENT."""
    request = c.request()
    request.model_name = UNKNOWN
    code = c.expect_rejected("ModelInfer", m.ModelInferResponse, request)
    expect(code == "NOT_FOUND", "NOT_FOUND for an unknown model", code)
    request = c.request()
    request.raw_input_contents[0] += b"\x00"
    code = c.expect_rejected("ModelInfer", m.ModelInferResponse, request)
    expect(code == "INVALID_ARGUMENT", "INVALID_ARGUMENT for raw contents of a wrong size", code)


# --- extensions --------------------------------------------------------------------------------------------------


@_add("stream-infer", "Triton extensions, ModelStreamInfer")
def _stream_infer(c: GrpcContext) -> None:
    """ModelStreamInfer answers each request of a stream with an infer_response."""
    requests = [c.request(id=str(i)) for i in range(3)]
    try:
        answers = list(c.grpc.stream("ModelStreamInfer", m.ModelStreamInferResponse, requests))
    except g.CallRejected as error:
        if error.code == "UNIMPLEMENTED":
            raise NotOffered("ModelStreamInfer gets status UNIMPLEMENTED") from error
        raise ClauseFailed(f"expected the status OK of ModelStreamInfer, got {error}") from error
    expect(not any(a.error_message for a in answers), "no error_message", [a.error_message for a in answers])
    ids = sorted({a.infer_response.id for a in answers})
    expect(ids == ["0", "1", "2"], "responses with the ids 0, 1, 2", ids)
    for answer in answers:
        if answer.infer_response.outputs:
            _check_outputs(answer.infer_response)


@_add("stream-error", "Triton extensions, ModelStreamInfer")
def _stream_error(c: GrpcContext) -> None:
    """An invalid request of a stream gets an error_message; the stream goes on."""
    wrong = c.request(id="wrong")
    wrong.model_name = UNKNOWN
    try:
        answers = list(c.grpc.stream("ModelStreamInfer", m.ModelStreamInferResponse, [wrong, c.request(id="right")]))
    except g.CallRejected as error:
        if error.code == "UNIMPLEMENTED":
            raise NotOffered("ModelStreamInfer gets status UNIMPLEMENTED") from error
        raise ClauseFailed(f"expected an error_message within the stream, got {error}") from error
    expect(any(a.error_message for a in answers), "an error_message", list(map(str, answers)))
    right = [a for a in answers if a.infer_response.id == "right" and a.infer_response.outputs]
    expect(right, "a response to the request after the invalid one", list(map(str, answers)))


@_add("statistics", "Triton extensions, Statistics")
def _statistics(c: GrpcContext) -> None:
    """ModelStatistics returns counts of a model, which rise with each inference."""

    def count() -> int:
        request = m.ModelMetadataRequest(name=c.model.name)  # the fields of ModelStatisticsRequest
        answer = c.optional("ModelStatistics", m.ModelStatisticsResponse, request)
        return sum(int(one.inference_count) for one in answer.model_stats if one.name == c.model.name)

    before = count()
    c.infer(c.request())
    after = count()
    expect(after > before, f"an inference_count above {before}", after)


@_add("configuration", "Triton extensions, Model configuration")
def _configuration(c: GrpcContext) -> None:
    """ModelConfig returns the configuration of a model with its tensors."""
    config = c.optional("ModelConfig", m.ModelConfigResponse, m.ModelConfigRequest(name=c.model.name)).config
    expect(config.name == c.model.name, f"the name '{c.model.name}'", config.name)
    want = [t["name"] for t in c.model.metadata.get("inputs") or []]
    expect([t.name for t in config.input] == want, f"the inputs {want}", [t.name for t in config.input])


@_add("repository-index", "Triton extensions, Model repository")
def _repository_index(c: GrpcContext) -> None:
    """RepositoryIndex lists models with name and state."""
    answer = c.optional("RepositoryIndex", m.RepositoryIndexResponse, m.RepositoryIndexRequest())
    names = [entry.name for entry in answer.models]
    expect(c.model.name in names, f"an entry of '{c.model.name}'", names)


PROTOCOL = Protocol(
    "open-inference-grpc", "Open Inference Protocol, gRPC", "Open Inference Protocol", _prepare, CLAUSES
)
