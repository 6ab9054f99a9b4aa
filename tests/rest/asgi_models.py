"""Models of the application that a real ASGI server process runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

import dragoman
from dragoman import Infer


class Twice(dragoman.Model):
    placement = "process"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data * 2, "pid": np.array([os.getpid()])}


class Steps(dragoman.Model):
    """Sends 0, then 1 once the file `go` exists in the folder of its parameter; writes `closed` when it is closed."""

    placement = "inline"

    async def infer(self, call: Infer) -> AsyncIterator[dict[str, Any]]:
        folder = Path(str(call.parameters["folder"]))
        try:
            yield {"i": np.array([0])}
            while not (folder / "go").exists():
                await asyncio.sleep(0.01)
            yield {"i": np.array([1])}
        finally:
            (folder / "closed").touch()
