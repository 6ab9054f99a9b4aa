"""Derivatives over the Open Inference Protocol: an inference request whose parameter `derivative` names one.

Not in the specification. `derivative` is `gradient`, `apply_jacobian` or `apply_hessian`; `output` and `input` (or
`input1` and `input2`) are names of tensors or indices, 0 by default; `config` is JSON text. The vectors
`sens` and `vec` are inputs of these names. The response has one output, named like the derivative.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import structs

from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    DerivativeCall,
    Gradient,
    Infer,
    Inference,
    Request,
    Response,
)
from dragoman.core.errors import InvalidInput
from dragoman.core.schedule import requested_deadline_s
from dragoman.core.tensor import Scalar, Tensor
from dragoman.core.vector_binding import config_in

# For each derivative: its call, the parameters that select inputs, and the vectors that it needs.
_VERBS: Mapping[str, tuple[Callable[..., DerivativeCall], tuple[str, ...], tuple[str, ...]]] = {
    "gradient": (Gradient, ("input",), ("sens",)),
    "apply_jacobian": (ApplyJacobian, ("input",), ("vec",)),
    "apply_hessian": (ApplyHessian, ("input1", "input2"), ("sens", "vec")),
}


def derivative_request(request: Request[Inference]) -> Request[Tensor] | None:
    """Return the derivative request that an inference request stands for; None if it has no parameter `derivative`.

    Raises InvalidInput naming a parameter or vector that is missing or wrong.
    """
    call = request.call
    if not isinstance(call, Infer) or call.parameters.get("derivative") not in _VERBS:
        return None
    call = config_in(call) if "config" in call.parameters else call
    verb = str(call.parameters["derivative"])
    call_type, selectors, vectors = _VERBS[verb]
    inputs = dict(call.inputs)
    fields: dict[str, Any] = {key: _selector(call.parameters.get(key, 0), key) for key in ("output", *selectors)}
    for name in vectors:
        if name not in inputs:
            raise InvalidInput(f"'{verb}' needs the vector '{name}'; expected an input of that name")
        fields[name] = inputs.pop(name)
    # The call of a derivative does not have the parameters.
    deadline_s = requested_deadline_s(call.parameters, request.deadline_s, time.monotonic())
    derivative_call = call_type(inputs=inputs, config=call.config, **fields)
    derivative: Any = structs.replace(request, call=derivative_call, deadline_s=deadline_s)
    return cast("Request[Tensor]", derivative)


def inference_response(request: Request[Inference], response: Response[Tensor]) -> Response[Inference]:
    """Return the response of a derivative as one of an inference, with one output named like the derivative."""
    call: Any = request.call
    outputs = {str(call.parameters["derivative"]): response.answer}
    return Response(Inference(outputs), response.model, response.version)


def _selector(value: Scalar, key: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInput(f"parameter '{key}': expected the name of a tensor or its index, got {value!r}")
    return value
