"""KServe's V1 protocol: `POST /v1/models/{model}:predict` with rows of values, and the readiness of models."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.calls import Describe, Infer, Inference, ModelDescription, Ready, Request, Response
from dragoman.core.errors import (
    InvalidInput,
    NotSupported,
)
from dragoman.core.sampling import format_value
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.formats.json_document import parse_document
from dragoman.formats.json_text import json_chunks
from dragoman.protocols.custom_handlers import handler_call, handler_stream
from dragoman.protocols.json_arrays import (
    call_parameters,
    columns_of,
    format_values,
    is_object_list,
    named_tensors,
    only_input,
    parse_tensor,
)
from dragoman.protocols.kserve_v1 import messages
from dragoman.protocols.parameters import build_request, json_body
from dragoman.protocols.wire import (
    JSON_TYPE,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
    Statuses,
    error_formatter,
    error_responses,
    message_response,
    read_readiness,
)

_FIELDS = ("instances", "inputs")
_VERBS = ("predict", "explain")
_ALLOW = (("allow", "GET, HEAD, OPTIONS"),)
_DEFAULT_SIGNATURE = "serving_default"  # of TensorFlow, whose API this protocol follows

_STATUS: Statuses = {NotSupported: 501}
format_error = error_formatter(_STATUS)


class KServeV1:
    """The endpoints."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def predict(self, http: HttpRequest) -> PreliminaryCall[ModelDescription]:
        """Run an inference or an explanation.

        The model is described first: it answers the body itself, or its signature decides how rows are parsed.
        """
        name, colon, verb = http.params["name"].rpartition(":")
        if not colon or verb not in _VERBS:
            raise HttpError(405, "method POST is not allowed here; expected a path that ends in ':predict'", _ALLOW)
        path = f"/v1/models/{name}:{verb}"

        def infer(response: Response[ModelDescription]) -> EngineCall[Any, HttpResponse] | HttpStream[Any]:
            if f"POST {path}" in response.answer.handlers:
                call = handler_call(http, self._policy, name, path=path)
                return handler_stream(msgspec.structs.replace(call, request=_with_event(call.request, http)))
            if verb == "explain":
                raise NotSupported("this model does not support explanations; expected ':predict'")
            rows = parse_predict_request(http, response.answer, self._policy)
            request = build_request(rows, HttpRequest("POST", http.path, {}, http.headers, b""), self._policy, name)
            return EngineCall(request, lambda r: self._format_predictions(r, name))

        return PreliminaryCall(Request(Describe(), name), infer)

    def _format_predictions(self, response: Response[Inference], model: str) -> HttpResponse:
        outputs, instead = response.answer.outputs, f"use /v2/models/{model}/infer"
        values = {name: format_values(name, tensor, self._policy, instead) for name, tensor in outputs.items()}
        predictions = next(iter(values.values())) if len(values) == 1 else _rows(values, outputs, instead)
        return HttpResponse(200, json_chunks({"predictions": predictions}), (JSON_TYPE,))

    def alive(self, _http: HttpRequest) -> EngineCall[bool, HttpResponse]:
        """The health check at the root of the server. The protocol's client reads the body."""

        def format_response(response: Response[bool]) -> HttpResponse:
            if response.answer:
                return message_response(messages.Status("alive"))
            return message_response(messages.Status("not ready"), 503)

        return EngineCall(Request(Ready()), format_response)

    def ready(self, http: HttpRequest) -> EngineCall[bool, HttpResponse] | HttpResponse:
        return read_readiness(http.params["name"])


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    endpoints = KServeV1(policy)
    routes = (
        Route(
            "POST",
            "/v1/models/{name}",
            endpoints.predict,
            role="infer",
            calls_handlers=True,
            operation=messages.PREDICT,
        ),
        Route("GET", "/v1/models/{name}", endpoints.ready, role="read", operation=messages.READY),
        Route("GET", "/", endpoints.alive, health=True, operation=messages.ALIVE),
    )
    errors = error_responses(_STATUS)
    return HttpProtocol("KServe V1", routes, format_error, errors=errors)


def _with_event(request: Request[Any], http: HttpRequest) -> Request[Any]:
    """Return a request whose model also gets the attributes of a CloudEvent, which are headers."""
    attributes = {name: value for name, value in http.headers.items() if name.startswith("ce-")}
    return msgspec.structs.replace(request, metadata={**request.metadata, **attributes}) if attributes else request


# --- requests ------------------------------------------------------------------------------------------------


def parse_predict_request(http: HttpRequest, model: ModelDescription, policy: Policy) -> Infer:
    """Parse the rows in `instances`, or the columns in `inputs`. Raises InvalidInput, or NotSupported for a model
    without inference."""
    if Infer not in model.calls:
        raise NotSupported(f"model '{model.name}' does not support inference; it is served by the text APIs")
    body = json_body(http.body, policy, parse_document)
    fields = [name for name in _FIELDS if isinstance(body, dict) and name in body]
    if len(fields) != 1:
        raise InvalidInput(f"expected an object with either 'instances' or 'inputs', got {format_value(body)}")
    if body.get("signature_name", _DEFAULT_SIGNATURE) != _DEFAULT_SIGNATURE:
        raise InvalidInput(
            f"'signature_name': expected '{_DEFAULT_SIGNATURE}', got {format_value(body['signature_name'])}"
        )
    parse = _parse_instances if fields == ["instances"] else _parse_columns
    return Infer(parse(body[fields[0]], model), parameters=call_parameters(body))


def _parse_instances(value: Any, model: ModelDescription) -> Mapping[str, Tensor]:
    if isinstance(value, dict | str | int | float | None):
        raise InvalidInput(f"'instances': expected a list of rows, got {format_value(value)}")
    if is_object_list(value):
        return named_tensors(columns_of(value, model, "instances"), model, _as_column)
    return _parse_only(value, model, "instances")


def _parse_columns(value: Any, model: ModelDescription) -> Mapping[str, Tensor]:
    return named_tensors(value, model, _as_column) if isinstance(value, dict) else _parse_only(value, model, "inputs")


def _parse_only(value: Any, model: ModelDescription, field: str) -> Mapping[str, Tensor]:
    spec = only_input(model, field)
    return {spec.name: parse_tensor(value, spec, spec.name)}


def _as_column(tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    """Return a vector of one value for each row as a matrix of one column if that is the shape of the input."""
    shape = spec.shape if spec is not None else None
    is_column = shape is not None and len(shape) == 2 and shape[1] in (1, -1) and tensor.data.ndim == 1
    return Tensor(tensor.data.reshape(-1, 1), tensor.datatype) if is_column else tensor


def _rows(values: Mapping[str, Any], outputs: Mapping[str, Tensor], instead: str) -> list[dict[str, Any]]:
    """Return one object for each row, with a value for each output. Raises NotSupported for unequal lengths."""
    if len({tensor.shape[:1] for tensor in outputs.values()} | {()}) != 2:
        raise NotSupported(f"the outputs {', '.join(outputs)} have different numbers of rows; {instead}")
    texts = {name: value for name, value in values.items() if isinstance(value, list)}
    columns = [texts[name] if name in texts else numpy_numbers(tensor).tolist() for name, tensor in outputs.items()]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]
