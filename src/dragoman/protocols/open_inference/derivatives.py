"""Derivatives over the Open Inference Protocol: an inference request whose parameter `derivative` names one.

Not in the specification. `derivative` is `gradient`, `apply_jacobian` or `apply_hessian`; `output` and `input` (or
`input1` and `input2`) name tensors or count them from 0, which is the default; `config` is JSON text. The vectors
`sens` and `vec` come as inputs of these names. The answer is one output, called as the derivative.
"""

from collections.abc import Callable, Mapping
from typing import Any

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
from dragoman.core.tensor import Scalar, Tensor
from dragoman.core.vector_binding import config_in

# For each derivative: what it asks, the inputs that it is by, and the vectors that it needs.
_VERBS: Mapping[str, tuple[Callable[..., DerivativeCall], tuple[str, ...], tuple[str, ...]]] = {
    "gradient": (Gradient, ("input",), ("sens",)),
    "apply_jacobian": (ApplyJacobian, ("input",), ("vec",)),
    "apply_hessian": (ApplyHessian, ("input1", "input2"), ("sens", "vec")),
}


def derivative(request: Request[Inference]) -> Request[Tensor] | None:
    """The request for a derivative that an inference request is; None where it is none.

    Raises InvalidInput naming a parameter or vector that is missing or wrong.
    """
    call = request.call
    if not isinstance(call, Infer) or call.parameters.get("derivative") not in _VERBS:
        return None
    call = config_in(call) if "config" in call.parameters else call
    verb = str(call.parameters["derivative"])
    kind, by, vectors = _VERBS[verb]
    inputs = dict(call.inputs)
    given: dict[str, Any] = {key: _index(call.parameters.get(key, 0), key) for key in ("output", *by)}
    for name in vectors:
        if name not in inputs:
            raise InvalidInput(f"'{verb}' needs the vector '{name}'; expected an input of that name")
        given[name] = inputs.pop(name)
    asked: Any = structs.replace(request, call=kind(inputs=inputs, config=call.config, **given))
    found: Request[Tensor] = asked
    return found


def told(request: Request[Inference], response: Response[Tensor]) -> Response[Inference]:
    """The answer as that of an inference: one output, called as the derivative."""
    call: Any = request.call
    outputs = {str(call.parameters["derivative"]): response.answer}
    return Response(Inference(outputs), response.model, response.version)


def _index(value: Scalar, key: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInput(f"parameter '{key}': expected the name of a tensor or its place, got {value!r}")
    return value
