"""Models that return their input, or compute with it, in every placement."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import dragoman
from dragoman import Infer, Model

BFloat16 = NDArray[ml_dtypes.bfloat16]


class Echo(Model):
    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data}


class Twice(Model):
    """Return x + x; with the parameter `factor`, x times the factor as FP32."""

    def infer(self, call: Infer) -> dict[str, Any]:
        x = call.inputs["x"].data
        factor = call.parameters.get("factor")
        return {"y": x + x if factor is None else x * np.float32(factor)}


class Bits(Model):
    """Return the bits of BF16 as integers, which is an error."""

    outputs = (dragoman.TensorSpec("y", dragoman.BF16),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": dragoman.Tensor(call.inputs["x"].data.view(np.uint16), dragoman.BF16)}


class InlineEcho(Echo):
    placement = "inline"


class ThreadEcho(Echo):
    placement = "thread"


class ProcessEcho(Echo):
    placement = "process"


class InlineTwice(Twice):
    placement = "inline"


class ThreadTwice(Twice):
    placement = "thread"


class ProcessTwice(Twice):
    placement = "process"


def _squared(x: BFloat16, scale: float = 1.0) -> BFloat16:
    product: BFloat16 = (x * x).astype(np.float64) * scale
    return product


@dragoman.model(placement="inline")
def inline_squared(x: BFloat16, scale: float = 1.0) -> BFloat16:
    return _squared(x, scale)


@dragoman.model(placement="thread")
def thread_squared(x: BFloat16, scale: float = 1.0) -> BFloat16:
    return _squared(x, scale)


@dragoman.model(placement="process")
def process_squared(x: BFloat16, scale: float = 1.0) -> BFloat16:
    return _squared(x, scale)
