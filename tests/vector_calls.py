"""Calls of vector functions through an engine, shared by the tests of simulators and graphs."""

from typing import Any

import numpy as np

from dragoman import Tensor
from dragoman.core.calls import Request
from dragoman.engine.engine import Engine


def vector(*values: float) -> Tensor:
    return Tensor.of(np.array(values, np.float64))


async def call_model(engine: Engine, model: str, call: Any) -> Any:
    """Call a model and return its result."""
    return (await engine.call(Request(call, model))).answer
