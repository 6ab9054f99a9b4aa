"""Calls of a Python backend model to the server: inference of other models, loading, unloading and their readiness."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from dragoman import plugins
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import (
    AlreadyLoaded,
    CancelledByModel,
    DragomanError,
    InvalidInput,
    ModelFailed,
    ModelNotFound,
    NotImplementedByModel,
    NotReady,
    NotSupported,
    UnknownFailure,
)
from dragoman.core.schedule import TIMEOUT
from dragoman.core.spec import ResponseStream, SiblingModels
from dragoman.core.tensor import Scalar, Tensor
from dragoman.formats.config_override import parse_overrides
from dragoman.formats.policy import Policy
from dragoman_triton import pb_utils

# By the code of an error. An error of a call of another model has the code of the first class that it is.
ERRORS: Mapping[int, type[DragomanError]] = {
    pb_utils.TritonError.NOT_FOUND: ModelNotFound,
    pb_utils.TritonError.ALREADY_EXISTS: AlreadyLoaded,
    pb_utils.TritonError.INVALID_ARG: InvalidInput,
    pb_utils.TritonError.UNAVAILABLE: NotReady,
    pb_utils.TritonError.UNSUPPORTED: NotImplementedByModel,
    pb_utils.TritonError.CANCELLED: CancelledByModel,
    pb_utils.TritonError.UNKNOWN: UnknownFailure,
}
# The deadline of the requests that the running `execute` answers, if all have one.
deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
MODULES = ("triton_python_backend_utils", "c_python_backend_utils")
_ALLOWED = Policy(allow_config_override=True, allow_file_override="code")
_importing = threading.Lock()


class ServerAccess:
    """What a model in the server's process may do: the functions of `pb_utils` that need the server.

    is_executing: other models can be called; from `initialize` and `finalize` they cannot, as in Triton.
    """

    def __init__(self, name: str, siblings: SiblingModels) -> None:
        self._name, self._siblings = name, siblings
        self.is_executing = False

    def infer(self, request: pb_utils.InferenceRequest, decoupled: bool) -> Any:
        """Return the response of another model, or an iterator over its responses. Errors are responses, as in Triton.

        Raises TritonModelException outside of `execute`.
        """
        if not self.is_executing:
            raise pb_utils.TritonModelException("BLS is only supported during the 'execute' function.")
        trace, end_s = request.trace(), deadline.get()  # the context of a trace has no deadline
        if isinstance(trace, pb_utils.InferenceTrace) and trace.context is not None:
            return trace.context.copy().run(self._infer, request, decoupled, end_s)
        return self._infer(request, decoupled, end_s)

    def _infer(self, request: pb_utils.InferenceRequest, decoupled: bool, end_s: float | None) -> Any:
        try:
            if request.model_name == self._name:
                raise ModelFailed(f"model '{self._name}' called itself, which would wait for its own instance")
            if not decoupled:
                return _response(self._siblings.call(_to_call(request, end_s)))
            is_stream = self._siblings.streams(request.model_name)
            return _Responses(self._siblings.stream(_to_call(request, end_s)), has_empty_end=is_stream)
        except DragomanError as error:
            response = _error_response(error)
            return iter((response,)) if decoupled else response

    def load_model(self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model of the repository, or load it again. Raises TritonModelException.

        With `config`, the JSON text of a configuration, and `files` (`file:1/model.onnx`: content) until the next load.
        They need no permission, unlike those of clients, because the operator chose to serve this code.
        """
        self._change(model_name, is_loading=True, overrides={**(files or {}), "config": config})

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model. One that is not loaded is left alone, as in Triton."""
        self._change(model_name, is_loading=False)

    def _change(self, model_name: str, *, is_loading: bool, overrides: Mapping[str, Any] | None = None) -> None:
        verb = "load" if is_loading else "unload"
        if model_name == self._name:
            raise pb_utils.TritonModelException(f"failed to {verb} '{model_name}', a model cannot {verb} itself")
        try:
            if is_loading:
                self._siblings.load(model_name, *parse_overrides(model_name, overrides or {}, _ALLOWED))
            else:
                self._siblings.unload(model_name)
        except ModelNotFound as error:
            if is_loading:
                raise pb_utils.TritonModelException(error.message) from error
        except DragomanError as error:
            raise pb_utils.TritonModelException(error.message) from error

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        return not self._siblings.unavailable(model_name, model_version)


class _Responses(pb_utils.ResponseIterator):
    """The responses of a call. Those of a decoupled model end with an empty one, unless it has marked the last one."""

    def __init__(self, stream: ResponseStream[Any], *, has_empty_end: bool) -> None:
        self._stream = stream
        self._is_cancelled = False
        super().__init__(self._iterate(has_empty_end))

    def _iterate(self, has_empty_end: bool) -> Iterator[pb_utils.InferenceResponse]:
        try:
            for answer in self._stream:
                is_error = isinstance(answer, DragomanError)
                yield _error_response(answer) if is_error else _response(answer)
                has_empty_end = has_empty_end and (is_error or not answer.is_last)
        except DragomanError as error:
            yield self._cancelled_response() if self._is_cancelled else _error_response(error)
            return
        if has_empty_end:
            yield self._cancelled_response() if self._is_cancelled else pb_utils.InferenceResponse()

    def _cancelled_response(self) -> pb_utils.InferenceResponse:
        error = pb_utils.TritonError("request has been cancelled", pb_utils.TritonError.CANCELLED)
        return pb_utils.InferenceResponse(error=error)

    def cancel(self) -> None:
        """Cancel the request; the next response is an error of the code CANCELLED."""
        self._is_cancelled = True
        self._stream.close()


def _response(answer: Inference) -> pb_utils.InferenceResponse:
    tensors = [pb_utils.Tensor(name, tensor.data) for name, tensor in answer.outputs.items()]
    return pb_utils.InferenceResponse(tensors, parameters=answer.parameters)


def _error_response(error: DragomanError) -> pb_utils.InferenceResponse:
    kinds = {**ERRORS, pb_utils.TritonError.UNSUPPORTED: NotSupported}
    code = next((code for code, kind in kinds.items() if isinstance(error, kind)), pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message, code))


def _to_call(request: pb_utils.InferenceRequest, end_s: float | None) -> Request[Inference]:
    parameters: dict[str, Scalar] = json.loads(request.parameters())
    if request.correlation_id():
        parameters["sequence_id"] = request.correlation_id()
        parameters["sequence_start"] = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        parameters["sequence_end"] = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    if request.timeout() > 0:
        parameters[TIMEOUT] = request.timeout()
    inputs = {tensor.name(): Tensor.of(tensor.elements()) for tensor in request.inputs()}
    call = Infer(inputs, tuple(request.requested_output_names()), parameters)
    version = "" if request.model_version < 0 else str(request.model_version)
    return Request(call, request.model_name, version, request.request_id(), end_s)


# --- the module that models import -----------------------------------------------------------------------


def import_with_access(path: Path, access: ServerAccess) -> ModuleType:
    """Import the file of a model, whose `pb_utils` has access to the server in all of the model's threads."""
    module = _module(access)
    with _importing:
        sys.modules.update(dict.fromkeys(MODULES, module))
        try:
            imported: ModuleType = plugins.import_file(path)
        finally:
            sys.modules.update(dict.fromkeys(MODULES, pb_utils))
    return imported


def _module(access: ServerAccess) -> ModuleType:
    """Return a copy of `pb_utils` whose functions use the server on behalf of one model."""
    module = ModuleType(MODULES[0], pb_utils.__doc__)
    vars(module).update({name: value for name, value in vars(pb_utils).items() if not name.startswith("_")})
    names = ("load_model", "unload_model", "is_model_ready")
    vars(module).update({name: getattr(access, name) for name in names}, InferenceRequest=request_class(access))
    return module


def request_class(access: ServerAccess) -> type[pb_utils.InferenceRequest]:
    """Return the class of requests that a model with access to the server sends and gets."""
    return type("InferenceRequest", (pb_utils.InferenceRequest,), {"server": access})
