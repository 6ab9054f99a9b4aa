"""Clauses of the extensions of the Open Inference Protocol over HTTP/REST, as Triton's documents define them."""

import json
import math
from collections.abc import Sequence
from typing import Any

from dragoman_check.conformance.clauses import ClauseList, NotOffered, NotTried, Protocol, expect, fail, field_of
from dragoman_check.conformance.http import RecordedResponse
from dragoman_check.conformance.open_inference_rest import PROTOCOL as REST
from dragoman_check.conformance.open_inference_rest import (
    UNKNOWN,
    RestContext,
    check_error,
    checked_response,
    checked_shape,
)
from dragoman_check.conformance.samples import ELEMENT_SIZES
from dragoman_check.conformance.target import Target

_HEADER = "inference-header-content-length"
_STATES = ("UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING")

CLAUSES = ClauseList("extension")
_add = CLAUSES.add


def _prepare(target: Target) -> RestContext:
    context: RestContext = REST.prepare(target)
    return context


def _is_listed(c: RestContext, extension: str) -> bool:
    answer = c.http.get("/v2")
    extensions = answer.json().get("extensions") if answer.status == 200 else None
    return isinstance(extensions, list) and extension in extensions


# --- binary tensors ----------------------------------------------------------------------------------------------


def _binary_request(c: RestContext, **changes: Any) -> tuple[dict[str, Any], bytes]:
    """Return the JSON part and the binary part of a request."""
    parts = [sample.as_bytes() for sample in c.model.samples]
    request = c.model.request(**changes)
    for one, part in zip(request["inputs"], parts, strict=True):
        del one["data"]
        one["parameters"] = {"binary_data_size": len(part)}
    return request, b"".join(parts)


def _send_binary(c: RestContext, request: Any, data: bytes, header: str | None = None) -> RecordedResponse:
    text = json.dumps(request).encode()
    headers = {"Content-Type": "application/octet-stream", _HEADER: header or str(len(text))}
    return c.http.send("POST", f"{c.model.path}/infer", text + data, headers)


def _require_binary(c: RestContext) -> None:
    """Raise NotOffered if the extension is not listed and a binary request is rejected."""
    if not _is_listed(c, "binary_tensor_data") and _send_binary(c, *_binary_request(c)).status != 200:
        raise NotOffered("'binary_tensor_data' is not in the extensions of GET v2")


def _binary_outputs(response: RecordedResponse) -> list[tuple[dict[str, Any], bytes | None]]:
    """Return each output with its bytes, or None where it is in JSON. Raises ClauseFailed if lengths disagree."""
    text = response.headers.get(_HEADER)
    if text is None:
        return [(output, None) for output in checked_response(response.json())]
    expect(text.isdigit() and int(text) <= len(response.body), f"a length in {_HEADER}", text)
    answer = RecordedResponse(200, {}, response.body[: int(text)]).json()
    rest = response.body[int(text) :]
    raw_outputs: list[tuple[dict[str, Any], bytes | None]] = []
    for output in field_of(answer, "outputs", list):
        parameters = output.get("parameters") if isinstance(output, dict) else None
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            raw_outputs.append((output, None))
            continue
        expect(type(size) is int and 0 <= size <= len(rest), "binary_data_size within the body", size)
        expect("data" not in output, "no 'data' next to binary_data_size", sorted(output))
        raw_outputs.append((output, rest[:size]))
        rest = rest[size:]
    expect(not rest, "no bytes after the last output", f"{len(rest)} bytes")
    return raw_outputs


def _check_binary(outputs: Sequence[tuple[dict[str, Any], bytes | None]]) -> None:
    for output, data in outputs:
        name, datatype = field_of(output, "name", str, "an output"), field_of(output, "datatype", str, "an output")
        if data is None:
            fail(f"binary data of '{name}'", "JSON")
        shape = checked_shape(output, f"output '{name}'")
        if datatype in ELEMENT_SIZES:
            want = math.prod(shape) * ELEMENT_SIZES[datatype]
            expect(len(data) == want, f"{want} bytes of '{name}'", len(data))
        else:
            expect(_count_texts(data) == math.prod(shape), f"{math.prod(shape)} elements of '{name}'", data)


def _count_texts(data: bytes) -> int:
    count = 0
    while data:
        size = int.from_bytes(data[:4], "little")
        expect(len(data) >= 4 + size, "an element within the data", data[:40])
        data, count = data[4 + size :], count + 1
    return count


@_add("binary-input", "Binary tensor data, request")
def _binary_input(c: RestContext) -> None:
    """Inputs may follow the JSON as binary data of binary_data_size bytes each."""
    _require_binary(c)
    checked_response(_send_binary(c, *_binary_request(c)).ok().json())


@_add("binary-output", "Binary tensor data, response")
def _binary_output(c: RestContext) -> None:
    """An output with the parameter binary_data is returned as bytes after the JSON."""
    _require_binary(c)
    names = [{"name": spec.name, "parameters": {"binary_data": True}} for spec in c.model.outputs()]
    response = c.infer(c.model.request(outputs=names)).ok()
    _check_binary(_binary_outputs(response))
    expect(response.media_type == "application/octet-stream", "application/octet-stream", response.media_type)


@_add("binary-data-output", "Binary tensor data, response")
def _binary_data_output(c: RestContext) -> None:
    """With the request parameter binary_data_output all outputs are binary."""
    _require_binary(c)
    _check_binary(_binary_outputs(_send_binary(c, *_binary_request(c, parameters={"binary_data_output": True})).ok()))


@_add("binary-equals-json", "Binary tensor data")
def _binary_equals_json(c: RestContext) -> None:
    """Binary and JSON inputs of equal values give equal outputs."""
    _require_binary(c)
    first, second = (c.outputs(c.model.request()) for _ in range(2))
    if first != second:
        raise NotTried("the model returns other values for the same request")
    binary = checked_response(_send_binary(c, *_binary_request(c)).ok().json())
    key = [(o["name"], o["shape"], o["data"]) for o in first]
    expect([(o["name"], o["shape"], o["data"]) for o in binary] == key, f"outputs {key}", binary)


@_add("binary-too-short", "Binary tensor data")
def _binary_too_short(c: RestContext) -> None:
    """A body with fewer bytes than binary_data_size is rejected."""
    _require_binary(c)
    request, data = _binary_request(c)
    check_error(_send_binary(c, request, data[:-1]))


@_add("binary-wrong-size", "Binary tensor data")
def _binary_wrong_size(c: RestContext) -> None:
    """Binary data of a size other than that of the shape is rejected."""
    _require_binary(c)
    request, data = _binary_request(c)
    request["inputs"][-1]["parameters"]["binary_data_size"] += 1
    check_error(_send_binary(c, request, data + b"\x00"))


@_add("binary-header", "Binary tensor data")
def _binary_header(c: RestContext) -> None:
    """A header Inference-Header-Content-Length beyond the body is rejected."""
    _require_binary(c)
    request, data = _binary_request(c)
    check_error(_send_binary(c, request, data, header="99999999"))


# --- classification ----------------------------------------------------------------------------------------------


@_add("classification", "Classification")
def _classification(c: RestContext) -> None:
    """The output parameter classification returns BYTES elements 'value:index[:label]'."""
    output = next((spec for spec in c.model.outputs() if spec.datatype in ELEMENT_SIZES), None)
    if output is None or not output.shape:
        raise NotTried("the model has no output of numbers with an axis")
    response = c.infer(c.model.request(outputs=[{"name": output.name, "parameters": {"classification": 1}}]))
    listed = _is_listed(c, "classification")
    if not listed and response.status != 200:
        raise NotOffered("'classification' is not in the extensions of GET v2")
    outputs = checked_response(response.ok().json())
    if not listed and [o["datatype"] for o in outputs] != ["BYTES"]:
        raise NotOffered("'classification' is not in the extensions of GET v2")
    expect([o["datatype"] for o in outputs] == ["BYTES"], "one output of BYTES", outputs)
    for text in outputs[0]["data"]:
        value, _, index = text.partition(":")
        try:
            float(value)
        except ValueError:
            fail("'value:index'", text)
        expect(index.partition(":")[0].isdigit(), "'value:index'", text)


# --- statistics and configuration --------------------------------------------------------------------------------


def _statistics(c: RestContext, path: str) -> dict[str, Any]:
    """Return the statistics of the model, of the version with most requests."""
    answer = c.http.get(path).expect_offered(f"GET {path}").json()
    entries = [s for s in field_of(answer, "model_stats", list) if field_of(s, "name", str) == c.model.name]
    expect(entries, f"statistics of '{c.model.name}'", answer)
    return max(entries, key=lambda one: int(field_of(one, "inference_count", (int, str), "statistics")))


@_add("statistics", "Statistics")
def _model_statistics(c: RestContext) -> None:
    """GET v2/models/{model}/stats returns counts and times of a model."""
    one = _statistics(c, f"{c.model.path}/stats")
    field_of(one, "version", str, "statistics")
    field_of(one, "execution_count", (int, str), "statistics")
    times = field_of(one, "inference_stats", dict, "statistics")
    for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
        duration = field_of(times, name, dict, "inference_stats")
        for key in ("count", "ns"):
            field_of(duration, key, (int, str), f"'{name}'")


@_add("statistics-count", "Statistics")
def _statistics_count(c: RestContext) -> None:
    """inference_count rises with each inference."""
    before = int(_statistics(c, f"{c.model.path}/stats")["inference_count"])
    c.outputs(c.model.request())
    after = int(_statistics(c, f"{c.model.path}/stats")["inference_count"])
    expect(after > before, f"an inference_count above {before}", after)


@_add("statistics-all", "Statistics")
def _all_statistics(c: RestContext) -> None:
    """GET v2/models/stats returns the statistics of all models."""
    _statistics(c, "/v2/models/stats")


@_add("configuration", "Model configuration")
def _configuration(c: RestContext) -> None:
    """GET v2/models/{model}/config returns a model configuration with the model's tensors."""
    answer = c.http.get(f"{c.model.path}/config").expect_offered("GET config").json()
    expect(field_of(answer, "name", str) == c.model.name, f"the name '{c.model.name}'", answer["name"])
    field_of(answer, "max_batch_size", int)
    for key in ("input", "output"):
        tensors = field_of(answer, key, list)
        names = [field_of(t, "name", str, f"'{key}'") for t in tensors]
        declared = [t["name"] for t in c.model.metadata.get(f"{key}s") or []]
        expect(names == declared, f"the names {declared} in '{key}'", names)
        for tensor in tensors:
            datatype = field_of(tensor, "data_type", str, f"'{key}'")
            expect(datatype.startswith("TYPE_"), "a data_type TYPE_...", datatype)
            field_of(tensor, "dims", list, f"'{key}'")


# --- model repository --------------------------------------------------------------------------------------------


def _index(c: RestContext, request: dict[str, Any]) -> list[Any]:
    response = c.http.post("/v2/repository/index", request)
    answer = response.expect_offered("POST v2/repository/index").json()
    expect(isinstance(answer, list), "a list", answer)
    index: list[Any] = answer
    return index


@_add("repository-index", "Model repository, Index")
def _repository_index(c: RestContext) -> None:
    """POST v2/repository/index lists models with name, version, state and reason."""
    entries = _index(c, {})
    for entry in entries:
        field_of(entry, "name", str, "an entry")
        if entry.get("state"):
            expect(entry["state"] in _STATES, f"a state of {_STATES}", entry["state"])
    expect(c.model.name in [entry["name"] for entry in entries], f"an entry of '{c.model.name}'", entries)


@_add("repository-index-ready", "Model repository, Index")
def _repository_index_ready(c: RestContext) -> None:
    """With 'ready' true the index has only models that are ready."""
    entries = _index(c, {"ready": True})
    states = {entry.get("state") for entry in entries if isinstance(entry, dict)}
    expect(states <= {"READY"}, "only entries with state READY", sorted(map(str, states)))


@_add("repository-load", "Model repository, Load", changes_server=True)
def _repository_load(c: RestContext) -> None:
    """POST load of a model reloads it; the model is ready afterwards."""
    _index(c, {})
    c.http.post(f"/v2/repository/models/{c.model.path.rpartition('/')[2]}/load", {}).expect_offered("POST load")
    c.http.get(f"{c.model.path}/ready").ok()


@_add("repository-unload", "Model repository, Unload", changes_server=True)
def _repository_unload(c: RestContext) -> None:
    """POST unload makes a model unavailable; POST load brings it back."""
    _index(c, {})
    path = f"/v2/repository/models/{c.model.path.rpartition('/')[2]}"
    c.http.post(f"{path}/unload", {}).expect_offered("POST unload")
    try:
        c.http.get(f"{c.model.path}/ready").expect_rejected(400, 499)
        check_error(c.infer(c.model.request()))
    finally:
        c.http.post(f"{path}/load", {})
    c.http.get(f"{c.model.path}/ready").ok()


@_add("repository-load-unknown", "Model repository, Load", changes_server=True)
def _repository_load_unknown(c: RestContext) -> None:
    """POST load of an unknown model gets an error status and an error object."""
    _index(c, {})
    check_error(c.http.post(f"/v2/repository/models/{UNKNOWN}/load", {}))


PROTOCOL = Protocol(
    "open-inference-extensions",
    "Open Inference Protocol, extensions over HTTP/REST",
    "Triton protocol extensions",
    _prepare,
    CLAUSES,
)
