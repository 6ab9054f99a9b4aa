"""Models that return the size of the batch in which their rows were computed."""

import time

import numpy as np

from dragoman import FP64, INT64, Infer, Inference, Model, Tensor, TensorSpec


class Rows(Model):
    """Return twice each number and the number of rows in the batch. Raises ValueError for negative numbers."""

    inputs = (TensorSpec("x", FP64, (-1, -1)),)
    outputs = (TensorSpec("y", FP64, (-1, -1)), TensorSpec("together", INT64, (-1,)))
    batched = True

    def infer(self, call: Infer) -> Inference:
        x = call.inputs["x"].data
        time.sleep(0.01)
        if (x < 0).any():
            raise ValueError("no negative numbers, please")
        outputs = {"y": Tensor.of(2 * x), "together": Tensor.of(np.full(len(x), len(x)))}
        return Inference(outputs, call.parameters)


class Other(Rows):
    """Return three times each number."""

    def infer(self, call: Infer) -> Inference:
        response = super().infer(call)
        return Inference({**response.outputs, "y": Tensor.of(3 * call.inputs["x"].data)}, response.parameters)
