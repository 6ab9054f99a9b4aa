"""Custom models of MLServer: classes derived from its MLModel."""

import importlib
import inspect
import os
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dragoman import plugins
from dragoman.core.calls import Handled, Infer, Inference, Request
from dragoman.core.datatypes import datatype
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import STATED_METADATA, ModelSpec
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman_mlserver import mlserver
from dragoman_mlserver.files import MERGED_MODULES, RUNTIME_PACKAGES
from dragoman_mlserver.handlers import Handler
from dragoman_mlserver.library import library_class, library_settings
from dragoman_mlserver.mlserver import metrics
from dragoman_mlserver.mlserver import model as mlserver_model
from dragoman_mlserver.mlserver import types as ours
from dragoman_mlserver.mlserver.cloudevents import EventHeaders
from dragoman_mlserver.mlserver.settings import ModelSettings
from dragoman_mlserver.mlserver.types.data import elements, output_tensor
from dragoman_mlserver.module_alias import ModuleAlias

A = TypeVar("A")


def to_inference_request(request: Request[Inference], types: ModuleType, events: EventHeaders) -> Any:
    """Return the request as an InferenceRequest of `types`: our module, or that of the installed package."""
    call = request.call
    assert isinstance(call, Infer)
    id_ = request.id or str(uuid.uuid4())
    headers = {**request.metadata, **events.request(id_)}
    parameters = types.Parameters(**{**call.parameters, "headers": headers})
    outputs = [_request_output(name, call.content_types.get(name), types) for name in call.outputs] or None
    inputs = [_request_input(name, tensor, types) for name, tensor in call.inputs.items()]
    return types.InferenceRequest(id=id_, parameters=parameters, inputs=inputs, outputs=outputs)


def to_inference(response: Any, events: Mapping[str, str] | None = None) -> Inference:
    """Return the outputs of an InferenceResponse, ours or the installed package's, with its headers and `events`.

    Raises InvalidOutput.
    """
    outputs = getattr(response, "outputs", None)
    if not isinstance(outputs, list):
        raise InvalidOutput(f"expected an InferenceResponse, got {type(response).__name__}")
    tensors: dict[str, Tensor] = {}
    for output in outputs:
        if output.name in tensors:
            raise InvalidOutput(f"output '{output.name}': expected unique names, got it twice")
        tensors[output.name] = output.to_tensor() if isinstance(output, ours.ResponseOutput) else _tensor_of(output)
    headers = getattr(response.parameters, "headers", None) or {}
    sent = {**{str(k): str(v) for k, v in headers.items()}, **(events or {})}
    return Inference(tensors, _parameters(response.parameters), sent)


def dragoman_error(error: Exception) -> Exception:
    """Return the Dragoman error for the status code of an MLServer error; any other exception unchanged."""
    status = getattr(error, "status_code", None)
    if isinstance(error, DragomanError) or not isinstance(status, int):
        return error
    if status == 404:
        return ModelNotFound(str(error))
    return InvalidInput(str(error)) if 400 <= status < 500 else ModelFailed(str(error))


def _request_input(name: str, tensor: Tensor, types: ModuleType) -> Any:
    if types is ours:
        return ours.RequestInput.from_tensor(name, tensor)
    return types.RequestInput(
        name=name,
        shape=list(tensor.shape),
        datatype=tensor.datatype.name,
        parameters=dict(tensor.parameters) or None,
        data=types.TensorData(elements(tensor)),
    )


def _request_output(name: str, content_type: str | None, types: ModuleType) -> Any:
    if content_type is None:
        return types.RequestOutput(name=name)
    return types.RequestOutput(name=name, parameters=types.Parameters(content_type=content_type))


def _tensor_of(output: Any) -> Tensor:
    """Return an output of the installed package, whose data are lists, as a tensor."""
    data, datatype = getattr(output.data, "root", output.data), getattr(output.datatype, "value", output.datatype)
    return output_tensor(f"output '{output.name}'", data, datatype, output.shape, _parameters(output.parameters))


def _parameters(parameters: Any) -> Parameters:
    """Return the parameters of a response or output without headers and without those that are None."""
    if parameters is None:
        return NONE
    if isinstance(parameters, ours.Parameters):
        return parameters.scalars() or NONE
    fields: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else parameters.model_dump()
    return {k: v for k, v in fields.items() if v is not None and k != "headers"} or NONE


_THEIRS = "mlserver"
_OURS = mlserver.__name__


def install() -> None:
    """Add the finder of `mlserver` and its submodules; an installed package takes precedence."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package in RUNTIME_PACKAGES:
            if module not in ("", *RUNTIME_PACKAGES[package]) or PathFinder.find_spec(package) is not None:
                return None
            return ModuleSpec(fullname, ModuleAlias(f"{_OURS}.runtimes"), is_package=not module)
        rest = fullname.removeprefix(f"{_OURS}.")
        if rest not in MERGED_MODULES:  # as by `from mlserver.types import dataplane`
            top, _, rest = fullname.partition(".")
            if top != _THEIRS or not (sys.modules.get(top) is mlserver if rest else PathFinder.find_spec(top) is None):
                return None  # also for submodules that the installed package lacks
        name = f"{_OURS}.{MERGED_MODULES.get(rest, rest)}".rstrip(".")
        found = find_spec(name)
        if found is None:
            return None
        return ModuleSpec(fullname, ModuleAlias(name), is_package=found.submodule_search_locations is not None)


def load(spec: ModelSpec) -> Model:
    """Return the model of the class at `spec.uri`; a class or function for Dragoman is loaded by the python runtime."""
    install()
    if "library" in spec.parameters:
        return LibraryModel(spec, library_class(spec), library_settings(spec))
    model_class = _class(spec)
    if (
        not isinstance(model_class, type)
        or issubclass(model_class, Model)
        or not hasattr(model_class, "predict_stream")
    ):
        own = dict(spec.parameters.get("model_settings", {}).get("parameters") or {})
        extra = own.pop("extra", None) or {}
        return plugins.runtime("python").load(replace(spec, target=model_class, parameters=own | extra))
    return MLServerModel(spec, model_class)


class MLServerModel(Model):
    """An MLServer model: `predict` answers a call, `predict_stream` a streaming call.

    The inputs and outputs in its settings are metadata and choose codecs; they are not enforced, because such models
    accept more than they declare. A batch of calls is one request.
    """

    takes_request = True
    merges = 0

    def __init__(self, spec: ModelSpec, kind: type[Any], model_settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(spec)
        model_settings = spec.parameters.get("model_settings", {}) if model_settings is None else model_settings
        settings, self._types = _settings(kind, model_settings, str(spec.parameters.get("source", "")))
        self._mlserver_model = kind(settings)
        self._events = EventHeaders(spec.name, str(spec.parameters.get("server_name", spec.name)))
        self._handlers = {
            f"{route.rest_method.upper()} {route.rest_path}": Handler(method, route.rest_path)
            for route, method in _custom_handlers(self._mlserver_model)
        }
        self.handlers = tuple(self._handlers)
        self._streams = _overridden(kind, "predict_stream")
        if self._streams:
            self.infer_stream = self._stream
            if not _overridden(kind, "predict"):
                self.infer = self._stream  # type: ignore[method-assign, assignment]

    async def load(self) -> None:
        self._set_running_model()
        loaded = await _await_if_needed(self._mlserver_model.load())
        if loaded is False:
            raise ModelFailed(f"{type(self._mlserver_model).__name__}.load() gave False")
        self._mlserver_model.ready = True

    def signature(self) -> Signature:
        return Signature(
            inputs=_tensor_specs(self._mlserver_model.inputs),
            outputs=_tensor_specs(self._mlserver_model.outputs),
            open_inputs=True,
            open_outputs=True,
            batched=self.spec.max_batch_size > 1,
            content_type=self._content_type(),
            unchecked=True,
        )

    def details(self) -> Mapping[str, Any]:
        if "model_settings" not in self.spec.parameters:  # not from a folder of MLServer
            return {}
        settings = self._mlserver_model.settings
        return {STATED_METADATA: {"platform": settings.platform or "", "versions": list(settings.versions or ())}}

    def _content_type(self) -> str:
        parameters = self._mlserver_model.settings.parameters
        return getattr(parameters, "content_type", None) or ""

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        self._set_running_model()
        payload = to_inference_request(request, self._types, self._events)
        # A model that decodes its request may change it, but not its id.
        events = self._events.response(payload.id)
        try:
            return to_inference(await _await_if_needed(self._mlserver_model.predict(payload)), events)
        except Exception as error:
            raise dragoman_error(error) from error

    async def _stream(self, request: Request[Inference]) -> AsyncIterator[Inference]:
        self._set_running_model()
        try:
            async with aclosing(
                self._mlserver_model.predict_stream(_single(to_inference_request(request, self._types, self._events)))
            ) as answers:
                async for answer in answers:
                    yield to_inference(answer)
        except Exception as error:
            raise dragoman_error(error) from error

    async def handle(self, request: Request[Handled]) -> Handled:  # type: ignore[override]
        call: Any = request.call
        self._set_running_model()
        try:
            return await self._handlers[call.handler].answer(request)
        except Exception as error:
            raise dragoman_error(error) from error

    def _set_running_model(self) -> None:
        """Attribute the metrics that the code logs from now on to this model."""
        metrics.set_running_model(self.spec.name, self.spec.version)

    async def close(self) -> None:
        self._mlserver_model.ready = False
        await _await_if_needed(self._mlserver_model.unload())


class LibraryModel(MLServerModel):
    """A model of one of MLServer's classes for libraries, which never waits: it may run in a thread."""

    def __init__(self, spec: ModelSpec, kind: type[Any], model_settings: Mapping[str, Any]) -> None:
        super().__init__(spec, kind, model_settings)
        self.platform = str(spec.parameters["library"])

    def load(self) -> None:  # type: ignore[override]
        _complete(super().load())

    def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        return _complete(super().infer(request))

    def handle(self, request: Request[Handled]) -> Handled:  # type: ignore[override]
        return _complete(super().handle(request))


def _complete(coroutine: Coroutine[Any, Any, A]) -> A:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("the model waits for the event loop")


def _class(spec: ModelSpec) -> Any:
    """Return the class of `implementation`. A process of the model alone imports it by its module name, as MLServer
    does."""
    source = spec.parameters.get("source")
    if source is None or spec.placement in ("inline", "thread"):
        return plugins.resolve(spec.uri)  # beside other models, whose modules may have the same names
    sys.path.insert(0, str(Path(source).parent))
    return plugins.resolve(":".join(spec.parameters["model_settings"]["implementation"].rsplit(".", 1)))


def _settings(kind: type[Any], model_settings: Mapping[str, Any], source: str) -> tuple[Any, ModuleType]:
    """Return the settings of a model and the module of types for its class: ours, or those of the real package."""
    resolved = _resolve_uri(model_settings, Path(source).parent)
    if issubclass(kind, mlserver_model.MLModel):
        return ModelSettings.from_fields(resolved, source), ours
    settings: Any = importlib.import_module("mlserver.settings").ModelSettings(**resolved)
    settings._source = source
    return settings, importlib.import_module("mlserver.types")


def _resolve_uri(model_settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a relative `parameters.uri` absolute if its file exists beside the settings: the model opens it as it is."""
    parameters = dict(model_settings.get("parameters") or {})
    uri = parameters.get("uri")
    if not uri:
        parameters["uri"] = str(folder)
    elif not os.path.exists(uri) and (folder / uri).exists():
        parameters["uri"] = str(folder / uri)
    return {**model_settings, "parameters": parameters}


def _overridden(kind: type[Any], method: str) -> bool:
    base = next((k for k in reversed(kind.__mro__) if method in vars(k)), object)
    return getattr(kind, method) is not vars(base).get(method)


def _tensor_specs(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            t.name,
            datatype(str(getattr(t.datatype, "value", t.datatype))),
            tuple(t.shape),
            content_type=getattr(t.parameters, "content_type", None) or "",
        )
        for t in tensors or ()
    )


def _custom_handlers(model: Any) -> list[tuple[Any, Any]]:
    """Return the methods with paths of their own, marked by our decorator or that of the real package."""
    mark = "__custom_handler__"
    methods = (getattr(model, name) for name in dir(type(model)) if hasattr(getattr(type(model), name), mark))
    return [(getattr(method, mark), method) for method in methods]


async def _await_if_needed(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _single(request: Any) -> AsyncIterator[Any]:
    yield request
