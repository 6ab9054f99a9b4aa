"""Custom models of MLServer: a class derived from its MLModel, as a model here."""

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
from dragoman.compat.mlserver import model as ours
from dragoman.compat.mlserver.settings import ModelSettings
from dragoman.core.calls import Handled, Inference, Request
from dragoman.core.datatypes import datatype
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.mlserver.handlers import Handler


def load(spec: ModelSpec) -> Model:
    """The model of the class at `spec.uri`; a class or function of our own kind is run as the python runtime does."""
    install.install()
    found = _class(spec)
    if not isinstance(found, type) or issubclass(found, Model) or not hasattr(found, "predict_stream"):
        own = dict(spec.parameters.get("model_settings", {}).get("parameters") or {})
        flat = {**own, **(own.pop("extra", None) or {})}
        return plugins.runtime("python").load(replace(spec, target=found, parameters=flat))
    return MLServerModel(spec, found)


class MLServerModel(Model):
    """Its `predict` answers a call, and its `predict_stream` one that asks for a stream.

    What its settings tell of inputs and outputs goes into metadata and chooses codecs; it is not enforced, as these
    models take more than they tell. A batch of calls is one request, as `max_batch_size` means it to be.
    """

    takes_request = True

    def __init__(self, spec: ModelSpec, kind: type[Any]) -> None:
        super().__init__(spec)
        given = spec.parameters.get("model_settings", {})
        settings, self._types = _settings(kind, given, str(spec.parameters.get("source", "")))
        self._theirs = kind(settings)
        self._handlers = {
            f"{at.rest_method.upper()} {at.rest_path}": Handler(run, at.rest_path) for at, run in _custom(self._theirs)
        }
        self.handlers = tuple(self._handlers)
        self._streams = _overridden(kind, "predict_stream")
        if self._streams:
            self.infer_stream = self._stream
            if not _overridden(kind, "predict"):
                self.infer = self._stream  # type: ignore[method-assign, assignment]

    async def load(self) -> None:
        self._runs()
        loaded = await _awaited(self._theirs.load())
        if loaded is False:
            raise ModelFailed(f"{type(self._theirs).__name__}.load() gave False")
        self._theirs.ready = True

    def signature(self) -> Signature:
        return Signature(
            inputs=_tensor_specs(self._theirs.inputs),
            outputs=_tensor_specs(self._theirs.outputs),
            open_inputs=True,
            open_outputs=True,
            batched=self.spec.max_batch_size > 1,
            unchecked=True,
        )

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        self._runs()
        try:
            return to_inference(await _awaited(self._theirs.predict(to_inference_request(request, self._types))))
        except Exception as error:
            raise dragoman_error(error) from error

    async def _stream(self, request: Request[Inference]) -> AsyncIterator[Inference]:
        self._runs()
        try:
            async with aclosing(
                self._theirs.predict_stream(_once(to_inference_request(request, self._types)))
            ) as answers:
                async for answer in answers:
                    yield to_inference(answer)
        except Exception as error:
            raise dragoman_error(error) from error

    async def handle(self, request: Request[Handled]) -> Handled:  # type: ignore[override]
        call: Any = request.call
        self._runs()
        try:
            return await self._handlers[call.handler].answer(request)
        except Exception as error:
            raise dragoman_error(error) from error

    def _runs(self) -> None:
        """Whose metrics are those that the code logs from here on."""
        metrics.set_running_model(self.spec.name, self.spec.version)

    async def close(self) -> None:
        self._theirs.ready = False
        await _awaited(self._theirs.unload())


def _class(spec: ModelSpec) -> Any:
    """What `implementation` names. A process of the model's own imports it by its name there, as their server does."""
    source = spec.parameters.get("source")
    if source is None or spec.placement in ("inline", "thread"):
        return plugins.resolve(spec.uri)  # beside other models, whose modules may have the same names
    sys.path.insert(0, str(Path(source).parent))
    return plugins.resolve(":".join(spec.parameters["model_settings"]["implementation"].rsplit(".", 1)))


def _settings(kind: type[Any], given: Mapping[str, Any], source: str) -> tuple[Any, ModuleType]:
    """The settings of a model, and the module of types, that its class knows: ours or those of the real package."""
    found = _found_uri(given, Path(source).parent)
    if issubclass(kind, ours.MLModel):
        return ModelSettings.from_fields(found, source), types
    theirs: Any = importlib.import_module("mlserver.settings").ModelSettings(**found)
    theirs._source = source
    return theirs, importlib.import_module("mlserver.types")


def _found_uri(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Their code opens `parameters.uri` as it is: one that is not there, but is beside the settings, is meant so."""
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


def _custom(model: Any) -> list[tuple[Any, Any]]:
    """The methods that answer at paths of their own, marked by our decorator or the real package's."""
    mark = "__custom_handler__"
    methods = (getattr(model, name) for name in dir(type(model)) if hasattr(getattr(type(model), name), mark))
    return [(getattr(method, mark), method) for method in methods]


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request
