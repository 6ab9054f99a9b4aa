"""Inference of arrays at LMI's paths, as JSON and CSV."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dragoman.core.calls import Infer, Inference, ModelDescription, Request, Response
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value
from dragoman.formats.json_document import parse_document
from dragoman.formats.json_text import json_chunks
from dragoman.protocols.json_arrays import (
    call_parameters,
    format_values,
    named_tensors,
    only_input,
    parse_values,
    single_tensor,
)
from dragoman.protocols.parameters import build_request, ignored_header, json_body, reject_unknown
from dragoman.protocols.wire import JSON_TYPE, Buffer, EngineCall, HttpRequest, HttpResponse, Policy
from dragoman_text.apis.lmi.csv_arrays import CSV, format_csv, parse_csv_inputs
from dragoman_text.apis.lmi.request import media_type, other_model

_INPUT_KEYS = ("inputs", "instances", "data")  # names of the inputs in the requests of clients
_FIELDS = (*_INPUT_KEYS, "parameters", "model_name")
_OUTPUT_KEY = "predictions"
_FILE_TYPES = ("image/", "audio/", "video/", "multipart/")
_OTHER_TYPES = ("tensor/", "application/x-npy", "application/x-npz", *_FILE_TYPES)  # of SageMaker and DJL, and files

_Parsed = tuple[Infer, Sequence[str]]


def parse_arrays_request(
    http: HttpRequest, model: ModelDescription, policy: Policy
) -> EngineCall[Inference, HttpResponse]:
    """Parse an inference request for a model. Raises InvalidInput naming the input."""
    kind = media_type(http)
    read = READERS.get(kind, _from_json)
    if kind.startswith(_OTHER_TYPES):
        raise InvalidInput(
            f"content type '{kind}' is not supported for arrays: expected application/json or {CSV}; "
            f"binary tensors are accepted at /v2/models/{model.name}/infer, "
            "and 'dragoman infer' sends tables, pictures and sounds from files"
        )
    if not len(http.body):
        raise InvalidInput("the request body is empty")
    call, unused = read(http, model, policy)
    request: Request[Inference] = build_request(call, http, policy, model.name)
    if _accepts_csv(http.headers.get("accept", "")):
        header = (("content-type", CSV), *ignored_header(unused))
        return EngineCall(request, lambda r: HttpResponse(200, (format_csv(r.answer.outputs),), header))
    return EngineCall(request, lambda response: _format_predictions(response, model.name, policy, unused))


def _accepts_csv(accept: str) -> bool:
    """Return whether CSV is the first type that is accepted of those that there are; any type is JSON."""
    kinds = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    return next((each for each in kinds if each in (CSV, "application/json", "application/*", "*/*")), "") == CSV


# --- requests: the call, and the names of fields without effect ----------------------------------------------


def _from_json(http: HttpRequest, model: ModelDescription, policy: Policy) -> _Parsed:
    body = json_body(http.body, policy, parse_document)
    if not isinstance(body, dict):
        return Infer(parse_values(body, model, "inputs")), []
    names = {spec.name for spec in model.signature.inputs}
    unused: list[str] = []
    if "model_name" not in names:
        unused = other_model(body, model.name, policy)
        body.pop("model_name", None)
    key = next((name for name in _INPUT_KEYS if name in body), None)
    if key is None:
        if body and body.keys() <= names:
            return Infer(named_tensors(body, model)), unused
        result = ", ".join(f"'{name}'" for name in sorted(names)) or "the model's inputs"
        raise InvalidInput(f"expected an object with 'inputs', or with {result}; got {format_value(body)}")
    unknown = [name for name in body if name not in (key, "parameters")]
    reject_unknown(unknown, _FIELDS, policy)
    return Infer(parse_values(body[key], model, key), parameters=call_parameters(body)), [*unknown, *unused]


def _from_text(http: HttpRequest, model: ModelDescription, policy: Policy) -> _Parsed:
    return Infer(single_tensor(np.array([_text(http.body)], dtype=object), model)), []


def _from_bytes(http: HttpRequest, model: ModelDescription, policy: Policy) -> _Parsed:
    spec = only_input(model)
    if spec.datatype is BYTES:
        return Infer(single_tensor(np.array([bytes(http.body)], dtype=object), model)), []
    return Infer({}, raw=bytes(http.body)), []


def _text(body: Buffer) -> str:
    try:
        return bytes(body).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the request body is not valid UTF-8: {error.reason}") from error


def _from_csv(http: HttpRequest, model: ModelDescription, policy: Policy) -> _Parsed:
    return Infer(parse_csv_inputs(_text(http.body).removeprefix("\ufeff"), model, policy)), []


READERS: Mapping[str, Callable[[HttpRequest, ModelDescription, Policy], _Parsed]] = {
    "text/plain": _from_text,
    CSV: _from_csv,
    "application/octet-stream": _from_bytes,
}


# --- responses -----------------------------------------------------------------------------------------------


def _format_predictions(
    response: Response[Inference], model: str, policy: Policy, unused: Sequence[str]
) -> HttpResponse:
    outputs, instead = response.answer.outputs, f"use /v2/models/{model}/infer"
    values = {name: format_values(name, tensor, policy, instead) for name, tensor in outputs.items()}
    body = json_chunks({_OUTPUT_KEY: next(iter(values.values())) if len(values) == 1 else values})
    return HttpResponse(200, body, (JSON_TYPE, *ignored_header(unused)))
