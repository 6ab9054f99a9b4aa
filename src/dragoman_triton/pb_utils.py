"""The module `triton_python_backend_utils`, which models of Triton's Python backend import.

It also works in unit tests of such models: `sys.modules["triton_python_backend_utils"] = pb_utils`.
"""

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from typing import Any, Protocol

import numpy as np

from dragoman.core.datatypes import Array, datatype_of
from dragoman.core.documents import parse_json
from dragoman_triton.pb_metrics import Metric as Metric
from dragoman_triton.pb_metrics import MetricFamily as MetricFamily
from dragoman_triton.pb_tensor import NUMPY_TYPES, TYPES, as_elements
from dragoman_triton.pb_tensor import Tensor as Tensor
from dragoman_triton.pb_tensor import TritonModelException as TritonModelException

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class TritonError:
    """The error of a response: a message, and one of the codes below."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in range(8):
            raise TritonModelException(f"expected a code of TritonError, got {code!r}")
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


class PreferredMemory:
    """The memory in which a model wants the outputs of a call; only CPU memory is available."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type, self.preferred_device_id = preferred_memory_type, preferred_device_id


MemoryType = PreferredMemory


class InferenceResponse:
    """Output tensors or an error, and parameters of the response."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not all(isinstance(each, Tensor) for each in output_tensors):
            raise TritonModelException("output_tensors: expected a list of Tensor")
        self._output_tensors, self._error = list(output_tensors), error
        _check_parameters({} if parameters is None else parameters)
        self._parameters = json.dumps(dict(parameters or {}))

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return self._parameters


def _check_parameters(parameters: Any) -> None:
    """Raise TritonModelException for parameters of a response that clients cannot get."""
    if not isinstance(parameters, Mapping):
        raise TritonModelException(
            "Inference Response parameters must be a dictionary with str as the keys and bool/int/str as the values, "
            f"got {type(parameters)}"
        )
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")


class InferenceResponseSender:
    """Sends the responses of one request, in any thread.

    send: sends a response, None if there is none, and whether it is the last one.
    """

    def __init__(
        self,
        send: Callable[[InferenceResponse | None, bool], None],
        is_cancelled: Callable[[], bool],
        *,
        is_decoupled: bool,
    ) -> None:
        self._send, self.is_cancelled, self._is_decoupled = send, is_cancelled, is_decoupled
        self._is_closed, self._sent = False, 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not self._is_decoupled and response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if not self._is_decoupled and response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        self._sent += response is not None
        self._is_closed = bool(flags)
        self._send(response, self._is_closed)


class ModelCaller(Protocol):
    """Access of `InferenceRequest.exec` to the other models of the server."""

    def infer(self, request: "InferenceRequest", decoupled: bool) -> Any:
        """Return the response of another model, or with `decoupled` an iterator over its responses."""


class InferenceTrace:
    """The trace of a request.

    A model passes it to the requests that it sends, whose spans then belong to the same trace.
    """

    def __init__(self, context: Context | None = None) -> None:
        self.context = context


class InferenceRequest:
    """A request to this model, or one that this model sends to another (business logic scripting).

    server: what other models are called by; None where that is not possible.
    """

    server: ModelCaller | None = None

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | str | None = None,
    ) -> None:
        self.model_name, self.model_version = _as_text(model_name), model_version
        self._request_id, self._correlation_id = _as_text(request_id), correlation_id
        self._inputs, self._requested_output_names = list(inputs), [_as_text(each) for each in requested_output_names]
        self._flags, self._timeout, self._trace = flags, timeout, trace
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(dict(parameters or {}))
        self.sender: InferenceResponseSender | None = None  # these are set by the runtime
        self.uses_sender = False
        self.may_be_rescheduled = False
        self.is_rescheduled = False

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return self._parameters

    def trace(self) -> Any:
        return self._trace

    def requested_output_names(self) -> list[str]:
        return self._requested_output_names

    def preferred_memory(self) -> PreferredMemory:
        return PreferredMemory(TRITONSERVER_MEMORY_CPU)

    def get_response_sender(self) -> InferenceResponseSender:
        if self.sender is None:
            raise TritonModelException("only requests that the server has sent have a response sender")
        self.uses_sender = True
        return self.sender

    def is_cancelled(self) -> bool:
        return self.sender is not None and self.sender.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Say whether the request is executed again: only one of a model with `iterative_sequence` can be."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unsupported release flags: {flags}")
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not self.may_be_rescheduled:
            raise TritonModelException("rescheduling of requests is supported only with iterative_sequence: true")
        self.is_rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def exec(self, decoupled: bool = False) -> Any:
        """Call another model. Return its response, or an iterator over its responses if it is decoupled."""
        if self.server is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        return self.server.infer(self, decoupled)

    async def async_exec(self, decoupled: bool = False) -> Any:
        return await asyncio.to_thread(self.exec, decoupled)


def _as_text(name: str | bytes) -> str:
    """Return a name as text; models also pass the bytes of an input, which Triton accepts."""
    return name.decode() if isinstance(name, bytes) else str(name)


class ResponseIterator:
    """The responses of a decoupled model; the last one is empty."""

    def __init__(self, responses: Iterator[InferenceResponse]) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """Cancel the request."""


# --- functions -------------------------------------------------------------------------------------------


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled"))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the NumPy type of a name such as TYPE_FP32. Raises KeyError for TYPE_BF16, which NumPy lacks."""
    return NUMPY_TYPES[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    return NUMPY_TYPES[f"TYPE_{TYPES[data_type]}"]


def numpy_to_triton_type(data_type: Any) -> int:
    dtype = np.dtype(data_type)
    return TYPES.index("STRING" if dtype.kind in "SUO" else datatype_of(dtype).name)


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """Return the elements, each after its length in four bytes; () for an empty tensor."""
    if not input_tensor.size:
        return ()
    elements = as_elements(input_tensor).flat
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    elements, at = [], 0
    while at < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, at)
        elements.append(bytes(encoded_tensor[at + 4 : at + 4 + length]))
        at += 4 + length
    return np.fromiter(elements, object)


_NO_SERVER = "only models that run in the process of the server can"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    raise TritonModelException(f"failed to load '{model_name}', {_NO_SERVER}")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    raise TritonModelException(f"failed to unload '{model_name}', {_NO_SERVER}")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    raise TritonModelException(f"the readiness of '{model_name}' is not known: {_NO_SERVER}")


class Logger:
    """Writes to the log of the server."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
    _log = logging.getLogger("dragoman.model")

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        cls._log.log(cls._LEVELS[level], "%s", message)

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        cls.log(message, cls.VERBOSE)


class ModelConfig:
    """The configuration that `auto_complete_config` completes. It cannot contradict `config.pbtxt`."""

    def __init__(self, model_config: Mapping[str, Any] | str) -> None:
        self._fields = parse_json(model_config) if isinstance(model_config, str) else dict(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._fields

    def set_max_batch_size(self, max_batch_size: int) -> None:
        given = self._fields.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(f"max_batch_size: expected {given} or more, as config.pbtxt has, got {max_batch_size}")
        self._fields["max_batch_size"] = given or max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._fields:
                raise ValueError(f"dynamic_batching: config.pbtxt has {other}")
        self._fields.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        unknown = set(transaction_policy_dict) - {"decoupled"}
        if unknown:
            raise ValueError(f"model_transaction_policy: expected decoupled, got {', '.join(sorted(unknown))}")
        given = self._fields.get("model_transaction_policy", {}).get("decoupled")
        if given is not None and given != bool(transaction_policy_dict.get("decoupled")):
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._fields.get('name', '')}', which is already set to '{given}'"
            )
        self._fields["model_transaction_policy"] = dict(transaction_policy_dict)

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, ("name", "data_type", "dims"))

    def _add(self, side: str, tensor: Mapping[str, Any], known: Sequence[str]) -> None:
        if missing := [name for name in ("name", "data_type", "dims") if name not in tensor]:
            raise ValueError(f"{side}: expected name, data_type and dims; missing {', '.join(missing)}")
        if unknown := sorted(set(tensor) - set(known)):
            raise ValueError(f"{side} '{tensor['name']}': unknown property {', '.join(unknown)}")
        tensors = self._fields.setdefault(side, [])
        existing = next((each for each in tensors if each["name"] == tensor["name"]), None)
        if existing is None:
            tensors.append({**tensor, "dims": list(tensor["dims"])})
            return
        if existing["data_type"] == "TYPE_INVALID":
            existing["data_type"] = tensor["data_type"]
        existing["dims"] = existing["dims"] or list(tensor["dims"])
        if existing["data_type"] != tensor["data_type"] or list(existing["dims"]) != list(tensor["dims"]):
            raise ValueError(f"{side} '{tensor['name']}': config.pbtxt has another data_type or other dims")
