"""Custom models of MLServer: classes derived from its MLModel."""

import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dragoman import plugins
from dragoman.compat import install
from dragoman.compat.conversion import dragoman_error, to_inference, to_inference_request
from dragoman.compat.mlserver import metrics, types
from dragoman.compat.mlserver import model as mlserver_model
from dragoman.compat.mlserver.settings import ModelSettings
from dragoman.core.calls import Handled, Inference, Request
from dragoman.core.datatypes import datatype
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.mlserver.handlers import Handler


def load(spec: ModelSpec) -> Model:
    """Return the model of the class at `spec.uri`; a class or function for Dragoman is loaded by the python runtime."""
    install.install()
    found = _class(spec)
    if not isinstance(found, type) or issubclass(found, Model) or not hasattr(found, "predict_stream"):
        own = dict(spec.parameters.get("model_settings", {}).get("parameters") or {})
        flat = {**own, **(own.pop("extra", None) or {})}
        return plugins.runtime("python").load(replace(spec, target=found, parameters=flat))
    return MLServerModel(spec, found)


class MLServerModel(Model):
    """An MLServer model: `predict` answers a call, `predict_stream` a streaming call.

    The inputs and outputs in its settings are metadata and choose codecs; they are not enforced, because such models
    accept more than they declare. A batch of calls is one request.
    """

    takes_request = True

    def __init__(self, spec: ModelSpec, kind: type[Any]) -> None:
        super().__init__(spec)
        given = spec.parameters.get("model_settings", {})
        settings, self._types = _settings(kind, given, str(spec.parameters.get("source", "")))
        self._mlserver_model = kind(settings)
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
            unchecked=True,
        )

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        self._set_running_model()
        try:
            return to_inference(
                await _await_if_needed(self._mlserver_model.predict(to_inference_request(request, self._types)))
            )
        except Exception as error:
            raise dragoman_error(error) from error

    async def _stream(self, request: Request[Inference]) -> AsyncIterator[Inference]:
        self._set_running_model()
        try:
            async with aclosing(
                self._mlserver_model.predict_stream(_single(to_inference_request(request, self._types)))
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


def _class(spec: ModelSpec) -> Any:
    """Return the class of `implementation`. A process of the model alone imports it by its module name, as MLServer
    does."""
    source = spec.parameters.get("source")
    if source is None or spec.placement in ("inline", "thread"):
        return plugins.resolve(spec.uri)  # beside other models, whose modules may have the same names
    sys.path.insert(0, str(Path(source).parent))
    return plugins.resolve(":".join(spec.parameters["model_settings"]["implementation"].rsplit(".", 1)))


def _settings(kind: type[Any], given: Mapping[str, Any], source: str) -> tuple[Any, ModuleType]:
    """Return the settings of a model and the module of types for its class: ours, or those of the real package."""
    resolved = _resolve_uri(given, Path(source).parent)
    if issubclass(kind, mlserver_model.MLModel):
        return ModelSettings.from_fields(resolved, source), types
    settings: Any = importlib.import_module("mlserver.settings").ModelSettings(**resolved)
    settings._source = source
    return settings, importlib.import_module("mlserver.types")


def _resolve_uri(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a relative `parameters.uri` absolute if its file exists beside the settings: the model opens it as it is."""
    parameters = dict(given.get("parameters") or {})
    uri = parameters.get("uri")
    if not uri:
        parameters["uri"] = str(folder)
    elif not os.path.exists(uri) and (folder / uri).exists():
        parameters["uri"] = str(folder / uri)
    return {**given, "parameters": parameters}


def _overridden(kind: type[Any], method: str) -> bool:
    base = next((k for k in reversed(kind.__mro__) if method in vars(k)), object)
    return getattr(kind, method) is not vars(base).get(method)


def _tensor_specs(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, datatype(str(t.datatype)), tuple(t.shape)) for t in tensors or ())


def _custom_handlers(model: Any) -> list[tuple[Any, Any]]:
    """Return the methods with paths of their own, marked by our decorator or that of the real package."""
    mark = "__custom_handler__"
    methods = (getattr(model, name) for name in dir(type(model)) if hasattr(getattr(type(model), name), mark))
    return [(getattr(method, mark), method) for method in methods]


async def _await_if_needed(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _single(request: Any) -> AsyncIterator[Any]:
    yield request
