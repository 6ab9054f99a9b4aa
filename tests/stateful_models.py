"""Stateful models for the tests of sequences."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

import dragoman
from dragoman import INT64, Infer, SequenceOptions, TensorSpec
from dragoman.core.errors import InvalidInput


class Total(dragoman.Model):
    """The sum of the inputs of a sequence, its id, and the process that computed it."""

    inputs = (TensorSpec("x", INT64, (1,)),)
    outputs = (TensorSpec("total", INT64, (1,)), TensorSpec("process", INT64, (1,)))
    sequences = SequenceOptions()

    def infer(self, call: Infer) -> Any:
        x, state = int(call.inputs["x"].data[0]), call.sequence.state
        assert state is not None
        if x == -1:
            raise InvalidInput("expected no -1")
        if x == -2:
            os._exit(1)
        state["total"] = state.get("total", 0) + x
        return {"total": np.array([state["total"]]), "process": np.array([os.getpid()])}


class Rows(dragoman.Model):
    """As `Total`, in batches, with the number of rows of each. Calls wait for `gate`."""

    inputs = (TensorSpec("x", INT64, (-1, 1)),)
    outputs = (TensorSpec("total", INT64, (-1, 1)), TensorSpec("rows", INT64, (-1, 1)))
    sequences = SequenceOptions()
    batched = True
    placement = "inline"
    gate = asyncio.Event()

    async def infer(self, call: Infer) -> Any:
        await self.gate.wait()
        for step, row in zip(call.sequences, call.inputs["x"].data, strict=True):
            assert step.state is not None
            step.state.setdefault("inputs", []).append(int(row[0]))
        totals = [[sum((step.state or {})["inputs"])] for step in call.sequences]
        return {"total": np.array(totals), "rows": np.full((len(totals), 1), len(totals))}


class Countdown(dragoman.Model):
    """A stream of as many numbers as the sequence had requests."""

    inputs = (TensorSpec("x", INT64, (1,)),)
    outputs = (TensorSpec("n", INT64, (1,)),)
    sequences = SequenceOptions()
    placement = "inline"

    def infer(self, call: Infer) -> Iterator[Any]:
        state = call.sequence.state
        assert state is not None
        state["n"] = state.get("n", 0) + 1
        for n in range(state["n"], 0, -1):
            yield {"n": np.array([n])}
