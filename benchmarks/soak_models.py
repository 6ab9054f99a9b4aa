"""Models of the soak test, simple enough for clients to compute the expected response."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

import dragoman
from dragoman.core.calls import Generate
from dragoman.core.spec import Placement
from dragoman.core.text import Generation, Text, Token
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors

COMPLETION_WORDS = 40


class Inline(dragoman.Model):
    """Return twice the numbers."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)
    placement: Placement = "inline"

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"y": 2 * call.inputs["x"].data}


class Thread(Inline):
    placement = "thread"


class Process(Inline):
    placement = "process"


class Counting(Inline):
    """Stream n responses with the numbers 0 to n - 1, where n is the first input; fail if n is 0."""

    async def infer(self, call: dragoman.Infer) -> AsyncIterator[dict[str, Any]]:  # type: ignore[override]
        count = int(call.inputs["x"].data[0])
        if not count:
            raise ValueError("nothing to count")
        for turn in range(count):
            await asyncio.sleep(0.001)
            yield {"y": np.array([float(turn)])}


class Simulator(VectorFunction):
    """Return twice the vector."""

    def input_sizes(self, config: Config) -> Sequence[int]:
        return (config.get("n", 4),)

    output_sizes = input_sizes

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return 2 * inputs[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return 2 * sens


class Repeater(dragoman.Model):
    """Generate the last word of the prompt repeatedly."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        word = f" {str(call.prompts[0]).split()[-1]}"
        for at in range(COMPLETION_WORDS):
            await asyncio.sleep(0.002)
            last = at == COMPLETION_WORDS - 1
            whole = word * COMPLETION_WORDS if last else ""
            yield Generation(
                (Text(0, 0, word, (Token(at, word, -0.1),), at + 1, "length" if last else "", whole=whole),)
            )
