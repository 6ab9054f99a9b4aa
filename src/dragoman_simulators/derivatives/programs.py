"""Derivatives of the programs of a framework that a runtime has loaded from a file."""

from collections.abc import Sequence
from typing import Any

from dragoman_simulators.derivatives.derived import sample_point
from dragoman_simulators.derivatives.torch import ModuleFunction, TensorFunction
from dragoman_simulators.derivatives.verified import Verification, VerifiedDerivatives


def differentiate_torch(
    forward: TensorFunction,
    inputs: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    outputs: Sequence[int],
    name: str,
    is_verified: bool,
) -> VerifiedDerivatives:
    """Return `forward` as a function of vectors with its derivatives, each tried here and verified in each call.

    inputs, dtypes: the shape and the torch.dtype of each tensor that `forward` takes.
    outputs: the number of elements of each tensor that it returns.
    name: the model's name, for messages.
    """
    function = ModuleFunction(forward, inputs, dtypes, outputs)
    verified = VerifiedDerivatives(function, function, Verification(name=name, enabled=is_verified))
    verified.try_at(sample_point(function.input_sizes({})), {}, [*function.sources()])
    return verified
