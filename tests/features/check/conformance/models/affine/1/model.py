"""y = 2 x + 1, and the number of columns of each row."""

from typing import Any

import numpy as np

import dragoman
from dragoman import FP32, INT64, TensorSpec


class Affine(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("x", FP32, (-1, 3)),)
    outputs = (TensorSpec("columns", INT64, (-1,)), TensorSpec("y", FP32, (-1, 3)))

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        x = call.inputs["x"].data
        return {"columns": np.full(len(x), x.shape[1], np.int64), "y": 2 * x + np.float32(1)}
