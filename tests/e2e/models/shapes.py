"""Models with predictable responses."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import dragoman
from dragoman import BYTES, FP32, INT32, INT64, Infer, Inference, Model, TensorSpec


class SumDiff(Model):
    """Return the sum and the difference of two vectors."""

    inputs = (TensorSpec("INPUT0", INT32, (-1, 16)), TensorSpec("INPUT1", INT32, (-1, 16)))
    outputs = (TensorSpec("OUTPUT0", INT32, (-1, 16)), TensorSpec("OUTPUT1", INT32, (-1, 16)))
    platform = "test"
    placement = "thread"

    def infer(self, call: Infer) -> dict[str, Any]:
        a, b = (call.inputs[name].data for name in ("INPUT0", "INPUT1"))
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}


class Echo(Model):
    """Return the inputs and the parameters of the request."""

    placement = "thread"

    def infer(self, call: Infer) -> Inference:
        return Inference(call.inputs, call.parameters)


class Upper(Model):
    inputs = (TensorSpec("text", BYTES, (-1,)),)
    outputs = (TensorSpec("upper", BYTES, (-1,)), TensorSpec("length", INT64, (-1,)))
    placement = "thread"

    def infer(self, call: Infer) -> dict[str, Any]:
        texts = [element.decode() for element in call.inputs["text"].data]
        return {"upper": np.array([t.upper() for t in texts]), "length": np.array([len(t) for t in texts])}


class Scores(Model):
    """Return the input as the scores of four classes."""

    inputs = (TensorSpec("x", FP32, (-1, 4)),)
    outputs = (TensorSpec("scores", FP32, (-1, 4)),)
    placement = "thread"

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"scores": call.inputs["x"].data}


class Fixed(Scores):
    """The same for a model without a batch axis."""

    inputs = (TensorSpec("x", FP32, (1, 8, 1)),)
    outputs = (TensorSpec("scores", FP32, (1, 8, 1)),)


class Count(Model):
    """Stream the numbers below n; with a negative n, fail after -n responses."""

    inputs = (TensorSpec("n", INT32, (1,)),)
    outputs = (TensorSpec("i", INT32, (1,)),)

    def infer(self, call: Infer) -> Iterator[dict[str, Any]]:
        n = int(call.inputs["n"].data[0])
        for i in range(abs(n)):
            yield {"i": np.array([i], np.int32)}
        if n < 0:
            raise ValueError("no more fingers")


class Ticks(Model):
    """Yield for a minute; create a file when the call is cancelled."""

    inputs = (TensorSpec("file", BYTES, (1,)),)
    outputs = (TensorSpec("i", INT32, (1,)),)

    def example_inputs(self) -> dict[str, Any]:
        return {"file": np.array([os.devnull], object)}

    def infer(self, call: Infer) -> Iterator[dict[str, Any]]:
        path = call.inputs["file"].data[0].decode()
        try:
            for i in range(6000):
                yield {"i": np.array([i], np.int32)}
                time.sleep(0.01)
        finally:
            with open(path, "w") as file:
                file.write("closed")


class Sleep(Model):
    """Sleep for the given number of seconds."""

    inputs = (TensorSpec("x", dragoman.FP64, (1,)),)
    outputs = (TensorSpec("x", dragoman.FP64, (1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        time.sleep(float(call.inputs["x"].data[0]))
        return {"x": call.inputs["x"].data}
