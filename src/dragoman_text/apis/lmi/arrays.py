"""Inference of arrays at LMI's paths, as JSON."""

from collections.abc import Callable, Mapping

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
from dragoman.protocols.parameters import build_request, json_body
from dragoman.protocols.wire import JSON_TYPE, Buffer, EngineCall, HttpRequest, HttpResponse, Policy
from dragoman_text.apis.lmi.request import media_type

_INPUT_KEYS = ("inputs", "instances", "data")  # names of the inputs in the requests of clients
_OUTPUT_KEY = "predictions"
_OTHER_TYPES = ("text/csv", "tensor/", "application/x-npy", "application/x-npz")  # of SageMaker and DJL


def parse_arrays_request(
    http: HttpRequest, model: ModelDescription, policy: Policy
) -> EngineCall[Inference, HttpResponse]:
    """Parse an inference request for a model. Raises InvalidInput naming the input."""
    kind = media_type(http)
    read = READERS.get(kind, _from_json)
    if kind.startswith(_OTHER_TYPES):
        raise InvalidInput(
            f"content type '{kind}' is not supported for arrays: expected application/json; "
            f"binary tensors are accepted at /v2/models/{model.name}/infer"
        )
    if not len(http.body):
        raise InvalidInput("the request body is empty")
    call = read(http, model, policy)
    request: Request[Inference] = build_request(call, http, policy, model.name)
    return EngineCall(request, lambda response: _format_predictions(response, model.name, policy))


# --- requests ----------------------------------------------------------------------------------------------


def _from_json(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    body = json_body(http.body, policy, parse_document)
    if not isinstance(body, dict):
        return Infer(single_tensor(body, model))
    names = {spec.name for spec in model.signature.inputs}
    if "model_name" not in names:
        body.pop("model_name", None)
    key = next((name for name in _INPUT_KEYS if name in body), None)
    if key is None:
        if body and body.keys() <= names:
            return Infer(named_tensors(body, model))
        result = ", ".join(f"'{name}'" for name in sorted(names)) or "the model's inputs"
        raise InvalidInput(f"expected an object with 'inputs', or with {result}; got {format_value(body)}")
    return Infer(parse_values(body[key], model, key), parameters=call_parameters(body))


def _from_text(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    return Infer(single_tensor(np.array([_text(http.body)], dtype=object), model))


def _from_bytes(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    spec = only_input(model)
    if spec.datatype is BYTES:
        return Infer(single_tensor(np.array([bytes(http.body)], dtype=object), model))
    return Infer({}, raw=bytes(http.body))


def _text(body: Buffer) -> str:
    try:
        return bytes(body).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the request body is not valid UTF-8: {error.reason}") from error


READERS: Mapping[str, Callable[[HttpRequest, ModelDescription, Policy], Infer]] = {
    "text/plain": _from_text,
    "application/octet-stream": _from_bytes,
}


# --- responses -----------------------------------------------------------------------------------------------


def _format_predictions(response: Response[Inference], model: str, policy: Policy) -> HttpResponse:
    outputs, instead = response.answer.outputs, f"use /v2/models/{model}/infer"
    values = {name: format_values(name, tensor, policy, instead) for name, tensor in outputs.items()}
    body = json_chunks({_OUTPUT_KEY: next(iter(values.values())) if len(values) == 1 else values})
    return HttpResponse(200, body, (JSON_TYPE,))
