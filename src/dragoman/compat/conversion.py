"""Convert requests and responses between Dragoman and the types of `mlserver`, ours or the installed package's."""

import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dragoman.compat.mlserver import types as ours
from dragoman.compat.mlserver.types.data import elements, output_tensor
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound
from dragoman.core.tensor import NONE, Parameters, Tensor


def to_inference_request(request: Request[Inference], types: ModuleType) -> Any:
    """Return the request as an InferenceRequest of `types`: our module, or that of the installed package."""
    call = request.call
    assert isinstance(call, Infer)
    fields = {**call.parameters, **({"headers": dict(request.metadata)} if request.metadata else {})}
    outputs = [_request_output(name, call.content_types.get(name), types) for name in call.outputs] or None
    parameters = types.Parameters(**fields) if fields else None
    inputs = [_request_input(name, tensor, types) for name, tensor in call.inputs.items()]
    return types.InferenceRequest(
        id=request.id or str(uuid.uuid4()), parameters=parameters, inputs=inputs, outputs=outputs
    )


def to_inference(response: Any) -> Inference:
    """Return the outputs of an InferenceResponse, ours or the installed package's. Raises InvalidOutput."""
    outputs = getattr(response, "outputs", None)
    if not isinstance(outputs, list):
        raise InvalidOutput(f"expected an InferenceResponse, got {type(response).__name__}")
    tensors: dict[str, Tensor] = {}
    for output in outputs:
        if output.name in tensors:
            raise InvalidOutput(f"output '{output.name}': expected unique names, got it twice")
        tensors[output.name] = output.to_tensor() if isinstance(output, ours.ResponseOutput) else _tensor_of(output)
    headers = getattr(response.parameters, "headers", None) or {}
    return Inference(tensors, _parameters(response.parameters), {str(k): str(v) for k, v in headers.items()})


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
    fields: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else parameters.model_dump()
    return {k: v for k, v in fields.items() if v is not None and k != "headers"} or NONE
