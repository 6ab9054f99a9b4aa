"""A program that serves a model from Python: `script.py function --http-port N --grpc-port N [setting=value ...]`."""

import os
import sys
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import dragoman


@dragoman.model(name="area", batched=True)
def function(
    width: Annotated[NDArray[np.float64], dragoman.Shape(-1)],
    height: Annotated[NDArray[np.float64], dragoman.Shape(-1)],
) -> NDArray[np.float64]:
    return width * height


class Squares(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

    def load(self) -> None:
        self.power = 2

    def infer(self, call: dragoman.Infer) -> NDArray[np.float64]:
        squares: NDArray[np.float64] = call.inputs["x"].data ** self.power
        return squares


class IsolatedSquares(Squares):
    placement = "process"
    outputs = (*Squares.outputs, dragoman.TensorSpec("pid", dragoman.INT64, (1,)))  # type: ignore[assignment]

    def infer(self, call: dragoman.Infer) -> tuple[NDArray[np.float64], NDArray[np.int64]]:  # type: ignore[override]
        return super().infer(call), np.array([os.getpid()])


@dragoman.model(placement="process")
def isolated() -> int:
    return os.getpid()


if __name__ == "__main__":
    what, _, http_port, _, grpc_port, *further = sys.argv[1:]
    settings: dict[str, Any] = dict(text.split("=") for text in further)
    instance = Squares(dragoman.ModelSpec(name="Squares"))
    models = {"function": function, "class": Squares, "isolated": IsolatedSquares, "instance": instance}
    dragoman.serve(models[what], http_port=int(http_port), grpc_port=int(grpc_port), **settings)
