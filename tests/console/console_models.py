"""Models that the tests of the console serve."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import dragoman
from dragoman import Generate, Generation, Text, Token


class Table(dragoman.Model):
    """Sums of the rows of a table, and a count beyond the integers of a double."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("rows", dragoman.FP32, (-1, 3)),)
    outputs = (dragoman.TensorSpec("sum", dragoman.FP64, (-1,)), dragoman.TensorSpec("count", dragoman.INT64, (1,)))

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        rows = np.asarray(call.inputs["rows"].data, np.float64)
        return {"sum": rows.sum(axis=1), "count": np.array([2**53 + len(rows)])}


@dragoman.vector_function(inputs={"x": 2}, derivatives="complex step")
def energy(x: NDArray[Any], *, scale: float = 1.0) -> NDArray[Any]:
    value: NDArray[Any] = scale * (x[0] ** 2 + 3 * x[1])[None]
    return value


class Parrot(dragoman.Model):
    """Repeats a message as one token. Markup in it must stay text."""

    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        chat: Any = call.prompts[0]
        words = str(chat.messages[-1]["content"])
        return Generation((Text(0, 0, words, (Token(1, words, -0.5),), 1, "eos_token", whole=words),))
