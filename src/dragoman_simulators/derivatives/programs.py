"""Derivatives of the programs of a framework that a runtime has loaded from a file."""

from collections.abc import Sequence
from typing import Any

from dragoman_simulators.derivatives.derived import sample_point
from dragoman_simulators.derivatives.torch import ModuleFunction, TensorFunction
from dragoman_simulators.derivatives.verified import SAMPLING_INTERVAL, Verification, VerifiedDerivatives, check_verify


def differentiate_torch(
    forward: TensorFunction,
    inputs: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    outputs: Sequence[int],
    name: str,
    verify: Any,
) -> VerifiedDerivatives:
    """Return `forward` as a function of vectors with its derivatives, each tried here.

    inputs, dtypes: the shape and the torch.dtype of each tensor that `forward` takes.
    outputs: the number of elements of each tensor that it returns.
    name: the model's name, for messages.
    verify: which calls are verified: "always" (as None), "sampled" or "never".
    """
    check_verify(verify, "parameter 'verify'")
    function, interval = (
        ModuleFunction(forward, inputs, dtypes, outputs),
        SAMPLING_INTERVAL if verify == "sampled" else 1,
    )
    verification = Verification(name=name, enabled=verify != "never", interval=lambda config: interval)
    verified = VerifiedDerivatives(function, function, verification)
    verified.try_at(sample_point(function.input_sizes({})), {}, [*function.sources()])
    return verified
