"""Models that fail on request."""

import ctypes
import importlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dragoman import BYTES, FP64, Infer, Inference, Model, Tensor, TensorSpec


class Twice(Model):
    """Return twice the numbers and the process id, with a short delay, so that many calls are in flight."""

    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("y", FP64, (-1,)),)

    def infer(self, call: Infer) -> Inference:
        time.sleep(0.002)
        return Inference({"y": Tensor.of(2 * call.inputs["x"].data)}, {"pid": os.getpid()})


class Raises(Twice):
    def infer(self, call: Infer) -> Inference:
        raise ValueError(f"cannot do {call.inputs['x'].data[0]:g}")


class Exits(Twice):
    """Exit the process for a negative number."""

    def infer(self, call: Infer) -> Inference:
        if call.inputs["x"].data[0] < 0:
            os._exit(1)
        return super().infer(call)


class Segfaults(Twice):
    """Read from address 0 for a negative number."""

    def infer(self, call: Infer) -> Inference:
        if call.inputs["x"].data[0] < 0:
            ctypes.string_at(0)
        return super().infer(call)


class Stuck(Twice):
    """Create the file in the parameter `begun`, and never return."""

    def infer(self, call: Infer) -> Inference:
        Path(str(call.parameters["begun"])).touch()
        while True:
            time.sleep(60)


class Unloadable(Twice):
    def load(self) -> None:
        raise RuntimeError("the weights are gone")


class SlowToLoad(Twice):
    """Load until the file `TEST_GATE` exists; create a second file when loading begins."""

    def load(self) -> None:
        gate = Path(os.environ["TEST_GATE"])
        gate.with_suffix(".begun").touch()
        while not gate.exists():
            time.sleep(0.02)


class ComputesInLoad(Twice):
    """Load without end, in calls of PyTorch that hold no Python lock; create a file when the first has returned."""

    def load(self) -> None:
        torch = importlib.import_module("torch")
        matrix = torch.ones(1000, 1000)
        while True:
            torch.mm(matrix, matrix)
            Path(os.environ["TEST_GATE"]).with_suffix(".begun").touch()


class NotANumber(Twice):
    def infer(self, call: Infer) -> Inference:
        return Inference({"y": Tensor.of(np.full(call.inputs["x"].data.shape, np.nan))})


class Gate(Model):
    """Create the file `begun` in a folder; return once the file `go` exists."""

    inputs = (TensorSpec("x", BYTES, (1,)),)
    outputs = (TensorSpec("y", FP64, (1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        folder = Path(call.inputs["x"].data[0].decode())
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return {"y": np.array([1.0])}


class ExitsInLoad(Twice):
    def load(self) -> None:
        os._exit(3)
