"""A request for inference as it was written, whichever way it was read."""

from collections.abc import Mapping, Sequence

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor

# Null is as good as nothing: clients whose types know more parameters than they send write them so.
JsonParameters = dict[str, str | bool | int | float | None]


def told_parameters(parameters: JsonParameters | None) -> dict[str, Scalar]:
    """The parameters that are not null. InvalidInput names an integer that no wire could carry back."""
    if not parameters:
        return {}
    for key, value in parameters.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise InvalidInput(f"parameter '{key}': expected an integer of 64 bits, got one of {value.bit_length()}")
    return {k: v for k, v in parameters.items() if v is not None}


class Requested(msgspec.Struct):
    """An output that a request asks for."""

    name: str
    parameters: JsonParameters | None = None


class RequestBody(msgspec.Struct, frozen=True):
    """A request; `id` is None where it has none."""

    inputs: Mapping[str, Tensor]
    outputs: Sequence[Requested]
    parameters: dict[str, Scalar]
    id: str | None
