"""Models of two servers behind a proxy: they return the variable `SERVER_NAME` of the server that computed a call."""

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dragoman import BYTES, FP64, Infer, Model, TensorSpec
from dragoman.core.calls import Generate
from dragoman.core.text import Generation, Text


class Twice(Model):
    placement = "inline"
    inputs = (TensorSpec("x", FP64, (1,)),)
    outputs = (TensorSpec("y", FP64, (1,)), TensorSpec("server", BYTES, (1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": 2 * call.inputs["x"].data, "server": np.array([os.environ["SERVER_NAME"]], object)}


class Steps(Model):
    """Yield 0, and 1 once a file exists."""

    placement = "thread"
    inputs = (TensorSpec("file", BYTES, (1,)),)
    outputs = (TensorSpec("i", FP64, (1,)),)

    def example_inputs(self) -> dict[str, Any]:
        return {"file": np.array([os.devnull], object)}

    def infer(self, call: Infer) -> Iterator[dict[str, Any]]:
        yield {"i": np.array([0.0])}
        while not Path(call.inputs["file"].data[0].decode()).exists():
            time.sleep(0.01)
        yield {"i": np.array([1.0])}


class Named(Model):
    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        name = os.environ["SERVER_NAME"]
        yield Generation((Text(0, 0, name, (), 1, finish="eos_token", whole=name),))
