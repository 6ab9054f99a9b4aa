"""Calls and answers cross the border to a custom model: to the requests that it knows, and back."""

import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dragoman.compat.mlserver import types as ours
from dragoman.compat.mlserver.types.data import elements, tensor_of
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound
from dragoman.core.tensor import NONE, Parameters, Tensor


def request_of(request: Request[Inference], types: ModuleType) -> Any:
    """The request as an InferenceRequest of `types`, which is our module or the real one."""
    call = request.call
    assert isinstance(call, Infer)
    told = {**call.parameters, **({"headers": dict(request.metadata)} if request.metadata else {})}
    outputs = [_wanted(name, call.content_types.get(name), types) for name in call.outputs] or None
    parameters = types.Parameters(**told) if told else None
    inputs = [_input(name, tensor, types) for name, tensor in call.inputs.items()]
    return types.InferenceRequest(
        id=request.id or str(uuid.uuid4()), parameters=parameters, inputs=inputs, outputs=outputs
    )


def inference_of(response: Any) -> Inference:
    """The answer in an InferenceResponse, ours or the real one's; InvalidOutput says what is wrong with it."""
    outputs = getattr(response, "outputs", None)
    if not isinstance(outputs, list):
        raise InvalidOutput(f"expected an InferenceResponse, got {type(response).__name__}")
    tensors: dict[str, Tensor] = {}
    for output in outputs:
        if output.name in tensors:
            raise InvalidOutput(f"output '{output.name}' is there twice")
        tensors[output.name] = output.to_tensor() if isinstance(output, ours.ResponseOutput) else _tensor(output)
    headers = getattr(response.parameters, "headers", None) or {}
    return Inference(tensors, _parameters(response.parameters), {str(k): str(v) for k, v in headers.items()})


def fault_of(fault: Exception) -> Exception:
    """The fault by whose it is: errors of MLServer carry a status, all others stay what they are."""
    status = getattr(fault, "status_code", None)
    if isinstance(fault, DragomanError) or not isinstance(status, int):
        return fault
    if status == 404:
        return ModelNotFound(str(fault))
    return InvalidInput(str(fault)) if 400 <= status < 500 else ModelFailed(str(fault))


def _input(name: str, tensor: Tensor, types: ModuleType) -> Any:
    if types is ours:
        return ours.RequestInput.from_tensor(name, tensor)
    return types.RequestInput(
        name=name,
        shape=list(tensor.shape),
        datatype=tensor.datatype.name,
        parameters=dict(tensor.parameters) or None,
        data=types.TensorData(elements(tensor)),
    )


def _wanted(name: str, content_type: str | None, types: ModuleType) -> Any:
    if content_type is None:
        return types.RequestOutput(name=name)
    return types.RequestOutput(name=name, parameters=types.Parameters(content_type=content_type))


def _tensor(output: Any) -> Tensor:
    """An output of the real package's, whose data are lists."""
    data, datatype = getattr(output.data, "root", output.data), getattr(output.datatype, "value", output.datatype)
    try:
        return tensor_of(data, datatype, output.shape, _parameters(output.parameters))
    except (TypeError, ValueError, OverflowError, InvalidInput) as fault:
        raise InvalidOutput(f"output '{output.name}' is no {datatype} {output.shape}: {fault}") from fault


def _parameters(parameters: Any) -> Parameters:
    """What parameters say, without those that are None."""
    if parameters is None:
        return NONE
    given: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else parameters.model_dump()
    return {k: v for k, v in given.items() if v is not None and k != "headers"} or NONE
