"""Clauses of the Open Inference Protocol over HTTP/REST."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dragoman_check.conformance.clauses import ClauseList, Level, NotOffered, NotTried, Protocol, expect, fail, field_of
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.samples import DATATYPES, json_request
from dragoman_check.conformance.target import (
    Target,
    TensorModel,
    declared_tensors,
    find_tensor_model,
    with_metadata,
    with_request,
)

UNKNOWN = "dragoman-check-unknown"
_ELEMENTS: Mapping[str, tuple[type, ...]] = {"BOOL": (bool,), "BYTES": (str,)}
_FLOATS = ("FP16", "BF16", "FP32", "FP64")


@dataclass(slots=True)
class RestContext:
    """The server and a model, or the reason why there is none."""

    http: HttpTarget
    found: TensorModel | str

    @property
    def described_model(self) -> TensorModel:
        """Return a model that has metadata. Raises NotTried if there is none."""
        return with_metadata(self.found)

    @property
    def model(self) -> TensorModel:
        """Return a model that accepts its request. Raises NotTried if there is none."""
        return with_request(self.found)

    def infer(self, request: Any, version: str = "") -> RecordedResponse:
        path = f"/versions/{quote(version, safe='')}" if version else ""
        return self.http.post(f"{self.model.path}{path}/infer", request)

    def outputs(self, request: Any) -> list[dict[str, Any]]:
        """Return the outputs of a valid response to the request."""
        return checked_response(self.infer(request).ok().json())


def _prepare(target: Target) -> RestContext:
    if 200 not in (target.http.get("/v2/health/live").status, target.http.get("/v2").status):
        raise NotOffered("neither GET v2/health/live nor GET v2 gets status 200")
    return RestContext(target.http, find_tensor_model(target))


def checked_response(answer: Any) -> list[dict[str, Any]]:
    """Return the outputs of an inference response in JSON. Raises ClauseFailed if it is not valid."""
    field_of(answer, "model_name", str)
    outputs: list[dict[str, Any]] = field_of(answer, "outputs", list)
    for output in outputs:
        name = field_of(output, "name", str, "an output")
        what = f"output '{name}'"
        datatype, shape = field_of(output, "datatype", str, what), checked_shape(output, what)
        expect(datatype in DATATYPES, f"a datatype of the protocol in {what}", datatype)
        values = _flatten(field_of(output, "data", list, what))
        expect(len(values) == math.prod(shape), f"{math.prod(shape)} elements of {what} for shape {shape}", len(values))
        _check_elements(datatype, values, what)
    return outputs


def checked_shape(tensor: Mapping[str, Any], what: str) -> list[int]:
    shape: list[int] = field_of(tensor, "shape", list, what)
    valid = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 64 for n in shape)
    expect(valid, f"unsigned 64-bit integers in the shape of {what}", shape)
    return shape


def _check_elements(datatype: str, values: list[Any], what: str) -> None:
    if datatype in _FLOATS:
        wrong = [v for v in values if isinstance(v, bool | str)]
    else:
        kinds = _ELEMENTS.get(datatype, (int,))
        wrong = [v for v in values if not isinstance(v, kinds) or (isinstance(v, bool) and bool not in kinds)]
    expect(not wrong, f"elements of {what} in JSON for {datatype}", wrong[:3])


def _flatten(data: Any) -> list[Any]:
    return [v for each in data for v in _flatten(each)] if isinstance(data, list) else [data]


def check_error(response: RecordedResponse) -> None:
    """Check that a request failed with an error object. Raises ClauseFailed."""
    response.expect_rejected()
    error = field_of(response.json(), "error", str, "the error object")
    expect(error.strip(), "a message in 'error'", error)


CLAUSES = ClauseList("rest")
_add = CLAUSES.add


# --- health and metadata of the server ------------------------------------------------------------------------


@_add("server-live", "HTTP/REST, Health, Server Live")
def _server_live(c: RestContext) -> None:
    """GET v2/health/live of a running server gets status 200."""
    c.http.get("/v2/health/live").ok()


@_add("server-ready", "HTTP/REST, Health, Server Ready")
def _server_ready(c: RestContext) -> None:
    """GET v2/health/ready gets status 200 or 4xx."""
    response = c.http.get("/v2/health/ready")
    expect(response.status == 200 or 400 <= response.status < 500, "status 200 or 4xx", response.status)
    expect(response.status not in (404, 405), "a status of readiness", response.status)


@_add("health-body", "HTTP/REST, Health", level="should")
def _health_body(c: RestContext) -> None:
    """The bodies of health responses are empty."""
    for path in ("live", "ready"):
        body = c.http.get(f"/v2/health/{path}").body
        expect(not body, "an empty body", body)


@_add("server-metadata", "HTTP/REST, Server Metadata")
def _server_metadata(c: RestContext) -> None:
    """GET v2 returns name, version and extensions of the server."""
    answer = c.http.get("/v2").ok().json()
    field_of(answer, "name", str)
    field_of(answer, "version", str)
    extensions = field_of(answer, "extensions", list)
    expect(all(isinstance(each, str) for each in extensions), "strings in 'extensions'", extensions)


@_add("json-media-type", "HTTP/REST, Inference Request Examples", level="should")
def _json_media_type(c: RestContext) -> None:
    """Responses in JSON have the content type application/json."""
    response = c.http.get("/v2").ok()
    expect(response.media_type == "application/json", "content type application/json", response.media_type)


# --- health and metadata of models ------------------------------------------------------------------------------


@_add("model-ready", "HTTP/REST, Health, Model Ready")
def _model_ready(c: RestContext) -> None:
    """GET v2/models/{model}/ready of a model that answers requests gets status 200."""
    c.http.get(f"{c.described_model.path}/ready").ok()


@_add("model-ready-version", "HTTP/REST, Health, Model Ready")
def _model_ready_version(c: RestContext) -> None:
    """The readiness of a version that the metadata lists can be asked."""
    c.http.get(f"{c.described_model.path}/versions/{quote(c.described_model.version)}/ready").ok()


@_add("model-ready-unknown", "HTTP/REST, Health")
def _model_ready_unknown(c: RestContext) -> None:
    """The readiness of an unknown model is false: status 4xx."""
    c.http.get(f"/v2/models/{UNKNOWN}/ready").expect_rejected(400, 499)


@_add("model-metadata", "HTTP/REST, Model Metadata")
def _model_metadata(c: RestContext) -> None:
    """GET v2/models/{model} returns name, platform, inputs and outputs."""
    answer = c.http.get(c.described_model.path).ok().json()
    name = field_of(answer, "name", str)
    expect(name == c.described_model.name, f"the name '{c.described_model.name}'", name)
    field_of(answer, "platform", str)
    for key in ("inputs", "outputs"):
        for tensor in field_of(answer, key, list):
            field_of(tensor, "name", str, f"a tensor of '{key}'")


@_add("metadata-tensors", "HTTP/REST, Model Metadata Response JSON Object")
def _metadata_tensors(c: RestContext) -> None:
    """Tensors in metadata have a datatype of the protocol and a shape, with -1 for variable axes."""
    answer = c.http.get(c.described_model.path).ok().json()
    tensors = field_of(answer, "inputs", list) + field_of(answer, "outputs", list)
    if not tensors:
        raise NotTried("the metadata declares no tensors")
    for tensor in tensors:
        datatype = field_of(tensor, "datatype", str, "a tensor")
        expect(datatype in DATATYPES, "a datatype of the protocol", datatype)
        shape = field_of(tensor, "shape", list, "a tensor")
        expect(all(type(n) is int and n >= -1 for n in shape), "integers of at least -1 in 'shape'", shape)


@_add("metadata-versions", "HTTP/REST, Model Metadata Response JSON Object")
def _metadata_versions(c: RestContext) -> None:
    """'versions' of the metadata is a list of strings, each of which can be requested."""
    answer = c.http.get(c.described_model.path).ok().json()
    if "versions" not in answer or answer["versions"] == []:
        raise NotTried("the metadata lists no versions")
    for version in field_of(answer, "versions", list):
        expect(isinstance(version, str), "strings in 'versions'", version)
        metadata = c.http.get(f"{c.described_model.path}/versions/{quote(version)}").ok().json()
        expect(
            field_of(metadata, "name", str) == c.described_model.name, f"the name '{c.described_model.name}'", metadata
        )


@_add("metadata-unknown-model", "HTTP/REST, Model Metadata Response JSON Error Object")
def _metadata_unknown_model(c: RestContext) -> None:
    """Metadata of an unknown model gets an error status and an error object."""
    check_error(c.http.get(f"/v2/models/{UNKNOWN}"))


@_add("metadata-unknown-version", "HTTP/REST, Model Metadata Response JSON Error Object")
def _metadata_unknown_version(c: RestContext) -> None:
    """Metadata of an unknown version gets an error status and an error object."""
    check_error(c.http.get(f"{c.described_model.path}/versions/987654321"))


@_add("case-sensitive", "HTTP/REST")
def _case_sensitive(c: RestContext) -> None:
    """Strings are case-sensitive: a model's name in other letters is unknown."""
    other = c.described_model.path.rpartition("/")[0] + "/" + quote(c.described_model.name.swapcase(), safe="")
    if other == c.described_model.path:
        raise NotTried(f"'{c.described_model.name}' has no letters")
    c.http.get(other).expect_rejected(400, 499)


# --- inference ---------------------------------------------------------------------------------------------------


@_add("infer", "HTTP/REST, Inference, Inference Response JSON Object")
def _infer(c: RestContext) -> None:
    """POST infer returns model_name and outputs whose data fits shape and datatype."""
    answer = c.infer(c.model.request()).ok().json()
    expect(checked_response(answer), "at least one output", answer)
    expect(answer["model_name"] == c.model.name, f"model_name '{c.model.name}'", answer["model_name"])


@_add("infer-metadata", "HTTP/REST, Model Metadata Response JSON Object")
def _infer_metadata(c: RestContext) -> None:
    """Outputs have the names, datatypes and shapes that the metadata declares."""
    declared = {spec.name: spec for spec in c.model.outputs()}
    outputs = c.outputs(c.model.request())
    missing = set(declared) - {output["name"] for output in outputs}
    expect(not missing, f"outputs {sorted(declared)}", [output["name"] for output in outputs])
    for output in outputs:
        spec = declared.get(output["name"])
        if spec is None:
            fail(f"outputs {sorted(declared)}", output["name"])
        expect(output["datatype"] == spec.datatype, f"{spec.datatype} of '{spec.name}'", output["datatype"])
        fits = len(output["shape"]) == len(spec.shape) and all(
            want in (-1, n) for want, n in zip(spec.shape, output["shape"], strict=True)
        )
        expect(fits, f"a shape of '{spec.name}' that fits {list(spec.shape)}", output["shape"])


@_add("infer-id", "HTTP/REST, Inference Request JSON Object")
def _infer_id(c: RestContext) -> None:
    """The id of a request is returned in the response."""
    answer = c.infer(c.model.request(id="dragoman-check-42")).ok().json()
    expect(field_of(answer, "id", str) == "dragoman-check-42", "id 'dragoman-check-42'", answer["id"])


@_add("infer-no-id", "HTTP/REST, Inference Response JSON Object", level="should")
def _infer_no_id(c: RestContext) -> None:
    """A request without an id gets a response without one."""
    answer = c.infer(c.model.request()).ok().json()
    expect(isinstance(answer, dict) and not answer.get("id"), "no id", answer.get("id"))


@_add("infer-version", "HTTP/REST, Inference")
def _infer_version(c: RestContext) -> None:
    """A version in the URL is used, and named in model_version."""
    version = c.model.version
    answer = c.infer(c.model.request(), version).ok().json()
    expect(field_of(answer, "model_version", str) == version, f"model_version '{version}'", answer["model_version"])


@_add("infer-nested-data", "HTTP/REST, Tensor Data")
def _infer_nested_data(c: RestContext) -> None:
    """Elements may be sent nested as well as flat."""
    if not any(len(sample.shape) > 1 for sample in c.model.samples):
        raise NotTried("no input has more than one axis")
    flat = c.outputs(json_request(c.model.samples))
    nested = c.outputs(json_request(c.model.samples, nested=True))
    shapes = [[(o["name"], o["datatype"], o["shape"]) for o in outputs] for outputs in (flat, nested)]
    expect(shapes[0] == shapes[1], f"outputs {shapes[0]}", shapes[1])


@_add("infer-request-output", "HTTP/REST, Request Output")
def _infer_request_output(c: RestContext) -> None:
    """Only requested outputs are returned."""
    name = c.model.outputs()[-1].name
    outputs = c.outputs(c.model.request(outputs=[{"name": name}]))
    names = [output["name"] for output in outputs]
    expect(names == [name], f"the output '{name}'", names)


@_add("infer-parameters", "HTTP/REST, Parameters", level="should")
def _infer_parameters(c: RestContext) -> None:
    """Parameters of a request may be strings, numbers and booleans."""
    c.outputs(c.model.request(parameters={"text": "a", "number": 1, "flag": True}))


# --- errors ------------------------------------------------------------------------------------------------------


def _error(name: str, section: str, subject: str, request: Any, level: Level = "must") -> None:
    """Add a clause: the subject is rejected."""

    def check(c: RestContext) -> None:
        check_error(c.infer(request(c.model)))

    check.__doc__ = f"{subject} is rejected with an error object."
    _add(name, section, level)(check)


_INFER_ERROR = "HTTP/REST, Inference Response JSON Error Object"
_REQUEST = "HTTP/REST, Inference Request JSON Object"
_INPUT = "HTTP/REST, Request Input"
_DATA = "HTTP/REST, Tensor Data"
_METADATA = "HTTP/REST, Model Metadata Response JSON Object"


def _fixed_axis(model: TensorModel) -> dict[str, Any]:
    """Return a request with a longer axis than the metadata allows."""
    for i, spec in enumerate(declared_tensors(model.metadata, "inputs")):
        for axis, length in enumerate(spec.shape):
            if length > 0 and i < len(model.samples) and len(model.samples[i].shape) > axis:
                request = model.request()
                one = request["inputs"][i]
                one["shape"][axis] += 1
                one["data"] = [one["data"][0]] * math.prod(one["shape"])
                return request
    raise NotTried("the metadata has no axis of fixed length")


def _other_datatype(model: TensorModel) -> dict[str, Any]:
    if not declared_tensors(model.metadata, "inputs"):
        raise NotTried("the metadata declares no inputs")
    is_text = model.samples[0].datatype == "BYTES"
    count = len(model.samples[0].values)
    return model.changed_input(datatype="FP32" if is_text else "BYTES", data=[0.5 if is_text else "text"] * count)


def _text_element(model: TensorModel) -> dict[str, Any]:
    for i, sample in enumerate(model.samples):
        if sample.datatype not in ("BYTES", "BOOL"):
            request = model.request()
            request["inputs"][i]["data"] = ["no number"] * len(sample.values)
            return request
    raise NotTried("no input has numbers")


def _unknown_input(model: TensorModel) -> dict[str, Any]:
    if not declared_tensors(model.metadata, "inputs"):
        raise NotTried("the metadata declares no inputs")
    return model.changed_input(name=UNKNOWN)


def _no_inputs(model: TensorModel) -> dict[str, Any]:
    if not declared_tensors(model.metadata, "inputs"):
        raise NotTried("the metadata declares no inputs")
    return {"inputs": []}


_error("error-malformed-json", _INFER_ERROR, "A body that is not JSON",
       lambda m: b'{"inputs": [')  # fmt: skip
_error("error-no-inputs", _REQUEST, "A request without 'inputs'", lambda m: {})
_error("error-empty-inputs", _METADATA, "A request without the inputs of the metadata, unless they are optional,",
       _no_inputs, "should")  # fmt: skip
_error("error-unknown-input", _METADATA, "An input that the metadata does not declare",
       _unknown_input, "should")  # fmt: skip
_error("error-unknown-output", "HTTP/REST, Request Output", "A requested output that does not exist",
       lambda m: m.request(outputs=[{"name": UNKNOWN}]))  # fmt: skip
_error("error-input-name", _INPUT, "An input without a name",
       lambda m: {"inputs": [{k: v for k, v in m.request()["inputs"][0].items() if k != "name"}]})  # fmt: skip
_error("error-input-data", _INPUT, "An input without data",
       lambda m: {"inputs": [{k: v for k, v in m.request()["inputs"][0].items() if k != "data"}]})  # fmt: skip
_error("error-datatype", "Tensor Data Types", "A datatype that the protocol does not have",
       lambda m: m.changed_input(datatype="FP99"))  # fmt: skip
_error("error-datatype-case", "HTTP/REST", "A datatype in lower case",
       lambda m: m.changed_input(datatype=m.samples[0].datatype.lower()))  # fmt: skip
_error("error-other-datatype", _METADATA, "A datatype that cannot be converted to that of the metadata",
       _other_datatype)  # fmt: skip
_error("error-element-count", _DATA, "Data with more elements than the shape",
       lambda m: m.changed_input(data=[*m.samples[0].values, m.samples[0].values[0]]))  # fmt: skip
_error("error-shape", _METADATA, "A shape that does not fit the metadata", _fixed_axis)
_error("error-negative-axis", _INPUT, "A negative number in a shape",
       lambda m: m.changed_input(shape=[-1] * len(m.samples[0].shape)))  # fmt: skip
_error("error-shape-overflow", _INPUT, "A shape whose product exceeds 64 bits",
       lambda m: m.changed_input(shape=[1 << 62, 4], data=[m.samples[0].values[0]]))  # fmt: skip
_error(
    "error-element-type",
    _DATA,
    "Text as an element of a tensor of numbers",
    _text_element,
)
_error(
    "error-id-type",
    _REQUEST,
    "An id that is not a string",
    lambda m: m.request(id=7),
    "should",
)


@_add("error-unknown-model", _INFER_ERROR)
def _error_unknown_model(c: RestContext) -> None:
    """Inference with an unknown model gets an error status and an error object."""
    check_error(c.http.post(f"/v2/models/{UNKNOWN}/infer", c.model.request()))


@_add("error-unknown-version", _INFER_ERROR)
def _error_unknown_version(c: RestContext) -> None:
    """Inference with an unknown version gets an error status and an error object."""
    check_error(c.infer(c.model.request(), "987654321"))


@_add("error-status", "HTTP/REST, Inference Response JSON Error Object", level="should")
def _error_status(c: RestContext) -> None:
    """An invalid request gets a status of the 4xx class, not of a failed server."""
    c.infer({}).expect_rejected(400, 499)


@_add("live-after-errors", "HTTP/REST, Health, Server Live")
def _live_after_errors(c: RestContext) -> None:
    """The server and the model answer after invalid requests."""
    c.infer(c.model.changed_input(shape=[1 << 62, 4], data=[1])).expect_rejected()
    c.http.get("/v2/health/live").ok()
    c.outputs(c.model.request())


PROTOCOL = Protocol(
    "open-inference-rest", "Open Inference Protocol, HTTP/REST", "Open Inference Protocol", _prepare, CLAUSES
)
