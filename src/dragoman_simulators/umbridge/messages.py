"""Messages of UM-Bridge, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from dragoman.protocols.wire import JSON, ErrorResponses, Operation

Vector = Sequence[float]
Index = Annotated[int, msgspec.Meta(ge=0)]


class ModelRequest(msgspec.Struct):
    """The model and its options; its sizes and values may depend on them."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    config: Mapping[str, Any] | None = None


class EvaluateRequest(ModelRequest, kw_only=True):
    """The point of evaluation: one vector for each input."""

    input: Sequence[Vector]


class DerivativeRequest(EvaluateRequest, kw_only=True):
    """`outWrt` is the index of the output that is differentiated."""

    outWrt: Index  # noqa: N815 - as on the wire


class GradientRequest(DerivativeRequest, kw_only=True):
    """`sens` is a vector of the size of the output, `inWrt` the index of the input."""

    inWrt: Index  # noqa: N815
    sens: Vector


class JacobianRequest(DerivativeRequest, kw_only=True):
    """`vec` is a vector of the size of the input with the index `inWrt`."""

    inWrt: Index  # noqa: N815
    vec: Vector


class HessianRequest(DerivativeRequest, kw_only=True):
    """`sens` has the size of the output, `vec` that of the input with the index `inWrt2`."""

    inWrt1: Index  # noqa: N815
    inWrt2: Index  # noqa: N815
    sens: Vector
    vec: Vector


class SimulatorNames(msgspec.Struct):
    """Version of the protocol, and the names of the models that are functions of vectors."""

    protocolVersion: float  # noqa: N815
    models: Sequence[str]


class Support(msgspec.Struct):
    """Whether a model supports Evaluate, Gradient, ApplyJacobian and ApplyHessian."""

    support: Mapping[str, bool]


class InputSizes(msgspec.Struct):
    inputSizes: Sequence[int]  # noqa: N815


class OutputSizes(msgspec.Struct):
    outputSizes: Sequence[int]  # noqa: N815


class Evaluation(msgspec.Struct):
    """One vector for each output."""

    output: Sequence[Vector]


class Derivative(msgspec.Struct):
    output: Vector


class UmBridgeError(msgspec.Struct):
    type: str
    message: str


class UmBridgeErrorMessage(msgspec.Struct):
    error: UmBridgeError


def errors(statuses: Sequence[int]) -> ErrorResponses:
    """Return the description of errors with these statuses."""
    return ErrorResponses(frozenset(statuses), {JSON: UmBridgeErrorMessage})


INFO = Operation("List the models", {200: {JSON: SimulatorNames}})
MODEL_INFO = Operation("Describe what a model supports", {200: {JSON: Support}}, {JSON: ModelRequest})
INPUT_SIZES = Operation("Read the sizes of the inputs", {200: {JSON: InputSizes}}, {JSON: ModelRequest})
OUTPUT_SIZES = Operation("Read the sizes of the outputs", {200: {JSON: OutputSizes}}, {JSON: ModelRequest})
EVALUATE = Operation("Evaluate a model", {200: {JSON: Evaluation}}, {JSON: EvaluateRequest})
DERIVATIVES = {
    "Gradient": Operation("Compute sens times the Jacobian", {200: {JSON: Derivative}}, {JSON: GradientRequest}),
    "ApplyJacobian": Operation("Compute the Jacobian times vec", {200: {JSON: Derivative}}, {JSON: JacobianRequest}),
    "ApplyHessian": Operation(
        "Compute the Hessian of sens times the output, times vec", {200: {JSON: Derivative}}, {JSON: HessianRequest}
    ),
}
