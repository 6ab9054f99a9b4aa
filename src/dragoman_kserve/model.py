"""Custom models of KServe: V1 requests as JSON objects, V2 requests as InferRequest."""

import asyncio
import importlib
import inspect
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

import numpy as np

from dragoman.core.calls import Handle, Handled, Infer, Inference, Request
from dragoman.core.datatypes import datatype
from dragoman.core.errors import (
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    ModelNotFound,
    NotReady,
    NotSupported,
    WorkerLost,
    public_text,
)
from dragoman.core.foreign_code import is_interruption
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.formats import fast_json
from dragoman.formats.json_document import parse_json
from dragoman.formats.policy import Policy
from dragoman_kserve.cloud_events import (
    JSON_TYPE,
    STRUCTURED_TYPE,
    CloudEvent,
    binary_event,
    binary_payload,
    event_response,
    structured_event,
)
from dragoman_kserve.script import ScriptResult, run_script
from dragoman_kserve.tensors import elements, output_tensor, plain_parameters

log = logging.getLogger("dragoman.model")

_POLICY = Policy()
# Headers of a response that the server sets.
_OWN_HEADERS = re.compile(
    r"connection|keep-alive|te|trailer|upgrade|transfer-encoding|date|server|vary|content-(?!type).*|inference-header-.*"
)
# Media types of JSON; the last one is curl's default.
_JSON_TYPES = (
    JSON_TYPE,
    STRUCTURED_TYPE,
    "application/ld+json",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
)
# The Dragoman error for each exception of `kserve.errors`.
_ERRORS: Mapping[str, type[DragomanError]] = {
    "InvalidInput": InvalidInput,
    "ModelNotFound": ModelNotFound,
    "ModelNotReady": NotReady,
    "ServerNotReady": NotReady,
    "ServerNotLive": NotReady,
    "UnsupportedProtocol": NotSupported,
    "InferenceError": ModelFailed,
}
# The Dragoman error for the status of a predictor's response, of HTTP or by its name in gRPC.
_PREDICTOR_ERRORS: Mapping[int | str, type[DragomanError]] = {
    **dict.fromkeys((400, "INVALID_ARGUMENT"), InvalidInput),
    **dict.fromkeys((501, "UNIMPLEMENTED"), NotSupported),
    **dict.fromkeys((503, "UNAVAILABLE"), NotReady),
}


def load(spec: ModelSpec) -> Model:
    """Return the model that a script starts: its only one, or the one with the name of the spec.

    A uri `file.py:NAME` names the model, its class or a variable. Raises ModelFailed if there is none, or several.
    """
    result = run_script(spec)
    return KServeModel(spec, _only(spec, result), result.predictor)


def _only(spec: ModelSpec, result: ScriptResult) -> Any:
    started, variables = result.models, result.variables
    name = spec.uri.rpartition(":")[2] if ".py:" in spec.uri else spec.name
    named = [model for model in started if model.name == name]
    chosen = named or (started if name == spec.name else [])
    if not chosen:
        classes = [variables[name]] if name in variables else _classes(variables)
        chosen = [each(spec.name) if isinstance(each, type) else each for each in classes]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(str(getattr(each, "name", each)) for each in (*started, *chosen)) or "none"
    raise ModelFailed(f"'{spec.uri}': expected one model, or one called '{name}', got {names}")


def _classes(variables: Mapping[str, Any]) -> list[Any]:
    """Return the classes of models that a script without a ModelServer defines."""
    kserve = importlib.import_module("kserve")
    return [
        each
        for each in variables.values()
        if isinstance(each, type) and issubclass(each, kserve.Model) and each.__module__ == "__main__"
    ]


class KServeModel(Model):
    """A model of KServe. A call runs `preprocess`, `predict` or `explain`, and `postprocess`."""

    takes_request = True
    platform = "kserve_model"

    def __init__(self, spec: ModelSpec, model: Any, predictor: Any) -> None:
        super().__init__(spec)
        self._kserve_model, self._predictor = model, predictor
        self._infer_type = importlib.import_module("kserve.protocol.infer_type")
        self._verb = importlib.import_module("kserve.model").InferenceVerb
        self._set_predictor = importlib.import_module("kserve.context").set_predictor_config
        self._signature = Signature(unchecked=True, open_inputs=True, open_outputs=True)
        self._engine: asyncio.Task[Any] | None = None
        self._engine_error = ""
        self.handlers = tuple(f"POST /v1/models/{spec.name}:{verb}" for verb in ("predict", "explain"))

    async def load(self) -> None:
        model = self._kserve_model
        if not model.ready:
            await _result(model.load())
        if not model.ready:
            raise ModelFailed(f"Model with name {self.spec.name} is not ready.")
        await _result(getattr(model, "start", lambda: None)())
        if getattr(model, "engine", False):
            self._engine = asyncio.ensure_future(self._run_engine())
        inputs, outputs = [
            _tensor_specs(await _result(getattr(model, name)())) for name in ("get_input_types", "get_output_types")
        ]
        self._signature = Signature(inputs, outputs, unchecked=True, open_inputs=True, open_outputs=True)

    def signature(self) -> Signature:
        return self._signature

    async def _run_engine(self) -> None:
        """Run the engine of the model, which may return once it has started."""
        try:
            await self._kserve_model.start_engine()
        except BaseException as error:
            if is_interruption(error):
                raise
            log.exception("model '%s': start_engine() raised", self.spec.name)
            self._engine_error = f"its engine has failed: {public_text(error)}"

    def unavailable(self) -> str:
        if self._engine_error:
            raise WorkerLost(self._engine_error)
        return "" if self._kserve_model.ready else f"Model with name {self.spec.name} is not ready."

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        payload = self._to_payload(request)
        result, headers = await self._call(payload, dict(request.metadata), self._verb.PREDICT)
        inference = to_inference(result)
        headers.pop("content-type", None)
        return Inference(inference.outputs, inference.parameters, headers)

    async def handle(self, request: Request[Handled]) -> AsyncIterator[Handled]:  # type: ignore[override]
        """Answer a V1 request: with one response, or with the chunks of an async iterator."""
        call: Any = request.call
        assert isinstance(call, Handle)
        headers = {"content-type": call.content_type, **request.metadata}
        verb = self._verb.EXPLAIN if call.handler.endswith(":explain") else self._verb.PREDICT
        payload, event = _v1_payload(call, headers)
        result, response_headers = await self._call(payload, headers, verb)
        if isinstance(result, AsyncIterator):
            async with aclosing(_chunks(result)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        response = _to_handled(result, response_headers)
        is_json = response.content_type == JSON_TYPE
        yield event_response(event, self.spec.name, response) if event is not None and is_json else response

    async def _call(self, payload: Any, headers: MutableMapping[str, str], verb: Any) -> tuple[Any, dict[str, str]]:
        """Return the result of the model and headers of the response."""
        self._set_predictor(self._predictor)
        try:
            result, response_headers = await self._kserve_model(payload, headers=headers, verb=verb)
        except Exception as error:
            raise dragoman_error(error) from error
        # A transformer also has those of the predictor's response.
        headers = {name.lower(): str(value) for name, value in response_headers.items()}
        return result, {name: value for name, value in headers.items() if not _OWN_HEADERS.fullmatch(name)}

    def _to_payload(self, request: Request[Inference]) -> Any:
        """Return the request as an InferRequest."""
        call = request.call
        assert isinstance(call, Infer)
        inputs = [self._to_input(name, tensor) for name, tensor in call.inputs.items()]
        outputs = [self._infer_type.RequestedOutput(name) for name in call.outputs] or None
        payload = self._infer_type.InferRequest(
            model_name=self.spec.name,
            infer_inputs=inputs,
            request_id=request.id or None,
            parameters=dict(call.parameters) or None,
            request_outputs=outputs,
            model_version=self.spec.version or None,
        )
        payload.from_grpc = any(isinstance(each, bytes) for tensor in inputs for each in _first_elements(tensor))
        return payload

    def _to_input(self, name: str, tensor: Tensor) -> Any:
        data, parameters = elements(tensor), dict(tensor.parameters)
        return self._infer_type.InferInput(name, list(tensor.shape), tensor.datatype.name, data, parameters)

    async def close(self) -> None:
        model = self._kserve_model
        getattr(model, "stop", lambda: None)()
        if self._engine is not None:
            await _result(model.stop_engine())
            self._engine.cancel()


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _first_elements(tensor: Any) -> list[Any]:
    return tensor.as_numpy().ravel()[:1].tolist() if tensor.datatype == "BYTES" else []


def _tensor_specs(tensors: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs or outputs that a model declares. Raises ModelFailed."""
    try:
        return tuple(TensorSpec(t["name"], datatype(t["datatype"]), tuple(t["shape"])) for t in tensors or ())
    except (KeyError, TypeError, InvalidInput) as error:
        raise ModelFailed(f"get_input_types, get_output_types: expected name, datatype and shape: {error}") from error


def dragoman_error(error: Exception) -> Exception:
    """Return the Dragoman error for an exception of a model of KServe; any other exception unchanged."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return _PREDICTOR_ERRORS.get(status, ModelFailed)(f"predictor: {error}")
    if callable(code := getattr(error, "code", None)) and callable(details := getattr(error, "details", None)):
        return _PREDICTOR_ERRORS.get(getattr(code(), "name", ""), ModelFailed)(f"predictor: {details()}")
    if isinstance(error, NotImplementedError):
        return NotSupported(str(error) or "the model does not implement this call")
    if isinstance(error, DragomanError):
        return error
    errors = importlib.import_module("kserve.errors")
    for name, kind in _ERRORS.items():
        if isinstance(error, getattr(errors, name)):
            return kind(str(error))
    return error


# --- V1 ------------------------------------------------------------------------------------------------------


def _v1_payload(call: Handle, headers: Mapping[str, str]) -> tuple[Any, CloudEvent | None]:
    """Return the JSON value of a body, and the event that is to be answered by one, if any.

    A body whose content type is not one of JSON is returned as bytes.
    """
    body, media_type = bytes(call.content), call.content_type.partition(";")[0].strip().lower()
    event = binary_event(headers)
    if event is not None:
        return binary_payload(event, body), event
    if media_type and media_type not in _JSON_TYPES:
        return body, None
    try:
        value = parse_json(body, _POLICY)
    except InvalidInput as error:
        raise InvalidInput(f"Unrecognized request format: {error.message}") from error
    event = structured_event(value)
    if event is None:
        return value, None
    return value["data"], event if media_type == STRUCTURED_TYPE else None


async def _chunks(result: AsyncIterator[Any]) -> AsyncGenerator[Handled, None]:
    """Yield the chunks of a streamed response. The iterator is closed when the caller stops."""
    try:
        async for each in result:
            if not isinstance(each, str | bytes | bytearray | memoryview):
                raise InvalidOutput(f"expected chunks that are text or bytes, got {type(each).__name__}")
            yield Handled(each.encode() if isinstance(each, str) else bytes(each), "", is_chunk=True)
    except Exception as error:
        raise dragoman_error(error) from error
    finally:
        if (close := getattr(result, "aclose", None)) is not None:
            await close()


def _to_handled(result: Any, headers: dict[str, str]) -> Handled:
    """Return the response for a result: JSON, or text or bytes as they are."""
    content_type = headers.pop("content-type", "")
    if isinstance(result, str):
        return Handled(result.encode(), content_type or "text/plain; charset=utf-8", metadata=headers)
    if isinstance(result, bytes):
        return Handled(result, content_type or "application/octet-stream", metadata=headers)
    if hasattr(result, "to_rest"):
        result, length = result.to_rest()
        if length is not None:
            raise InvalidOutput("expected outputs that are not binary in the response to a V1 request")
    try:
        content = fast_json.dumps(result, any_keys=True)
    except TypeError as error:
        raise InvalidOutput(
            f"expected a response that can be sent as JSON, got {type(result).__name__}: {error}"
        ) from error
    return Handled(content, metadata=headers)


# --- V2 responses ------------------------------------------------------------------------------------------------


def to_inference(response: Any) -> Inference:
    """Return the outputs of an InferResponse, or of a mapping with the same fields. Raises InvalidOutput."""
    outputs = response.get("outputs") if isinstance(response, Mapping) else getattr(response, "outputs", None)
    if outputs is None:
        raise InvalidOutput(f"expected an InferResponse for a V2 request, got {type(response).__name__}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in map(_to_tensor, outputs):
        if name in tensors:
            raise InvalidOutput(f"output '{name}': expected unique names, got it twice")
        tensors[name] = tensor
    parameters = response.get("parameters") if isinstance(response, Mapping) else response.parameters
    return Inference(tensors, plain_parameters(parameters))


def _to_tensor(output: Any) -> tuple[str, Tensor]:
    """Return the name and the data of an output. A list is converted exactly, unlike by `as_numpy`."""
    if isinstance(output, Mapping):
        name, kind, shape = output["name"], output["datatype"], output["shape"]
        data = output["data"] if "data" in output else next(iter(output["contents"].values()))
        parameters = plain_parameters(output.get("parameters"))
    else:
        name, kind, shape = output.name, output.datatype, output.shape
        data, parameters = output.data, plain_parameters(output.parameters)
        if data is None or (isinstance(data, list) and not data):
            data = output.as_numpy()  # of raw data
    if isinstance(data, np.ndarray) and data.dtype.kind in "US":
        data = data.astype(object)
    return name, output_tensor(f"output '{name}'", data, kind, list(shape), parameters)
