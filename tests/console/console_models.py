"""Models that the tests of the console serve."""

from pathlib import Path
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


class Mirror(dragoman.Model):
    """Mirrors pictures; the mean of each channel tells what was sent."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("picture", dragoman.UINT8, (-1, -1, -1, 3)),)
    outputs = (
        dragoman.TensorSpec("mirrored", dragoman.UINT8, (-1, -1, -1, 3)),
        dragoman.TensorSpec("mean", dragoman.FP64, (3,)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        pictures = np.asarray(call.inputs["picture"].data)
        return {"mirrored": pictures[:, :, ::-1], "mean": pictures.mean(axis=(0, 1, 2))}


class Planes(dragoman.Model):
    """Takes pictures of 2 by 2 as planes of floats, returns them as they are."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("planes", dragoman.FP32, (-1, 3, 2, 2)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"planes": call.inputs["planes"], "values": call.inputs["planes"].data.reshape(-1)}


class Sizes(dragoman.Model):
    """The sizes of the elements of a BYTES input: of text, or of a file."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("file", dragoman.BYTES, (-1,)),)
    outputs = (dragoman.TensorSpec("size", dragoman.INT64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"size": np.array([len(each) for each in call.inputs["file"].data])}


class Detector(dragoman.Model):
    """Takes pictures whose sides are multiples of 32, as detectors of objects do; its metadata do not say so."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("images", dragoman.FP32, (-1, 3, -1, -1)),)
    outputs = (dragoman.TensorSpec("sides", dragoman.INT64, (-1, 2)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        count, _, height, width = call.inputs["images"].data.shape
        if height % 32 or width % 32:
            raise ValueError(f"expected multiples of 32, got {height} and {width}")
        return {"sides": np.array([[height, width]] * count)}


class Echo(dragoman.Model):
    """Returns text as it is."""

    placement = "inline"
    inputs = outputs = (dragoman.TensorSpec("text", dragoman.BYTES, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return dict(call.inputs)


class Wage(dragoman.Model):
    """Inputs that are columns of a table."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("hours", dragoman.FP64, (-1,)), dragoman.TensorSpec("rate", dragoman.FP64, (-1,)))
    outputs = (dragoman.TensorSpec("wage", dragoman.FP64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"wage": call.inputs["hours"].data * call.inputs["rate"].data}


@dragoman.vector_function(inputs={"x": 2}, derivatives="complex step")
def decay(x: NDArray[Any]) -> NDArray[Any]:
    """A curve of 40 points by its amplitude and rate."""
    value: NDArray[Any] = x[0] * np.exp(-x[1] * np.linspace(0, 1, 40))
    return value


class Wrong(dragoman.VectorFunction):
    """The square of a number, with half of its gradient."""

    def input_sizes(self, config: Any) -> list[int]:
        return [1]

    def output_sizes(self, config: Any) -> list[int]:
        return [1]

    def evaluate(self, inputs: Any, config: Any) -> list[NDArray[Any]]:
        return [inputs[0] ** 2]

    def gradient(self, output: int, input: int, inputs: Any, sens: Any, config: Any) -> NDArray[Any]:  # noqa: A002
        value: NDArray[Any] = sens * inputs[0]
        return value


HOSTILE = "<img src=x onerror=alert(1)>"
INPUT = f"{HOSTILE}'\"$(id)`id`"


class Hostile(dragoman.Model):
    """Markup in each name that a model chooses, and in its output."""

    placement = "inline"
    inputs = (dragoman.TensorSpec(INPUT, dragoman.BYTES, (1,)),)
    outputs = (dragoman.TensorSpec(f"{HOSTILE}'\"", dragoman.BYTES, (1,)),)
    platform = HOSTILE

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        if call.inputs[INPUT].data[0] == b"fail":
            raise dragoman.errors.InvalidInput(f"</p><script>document.title = 'x'</script>{HOSTILE}")
        return {f"{HOSTILE}'\"": np.array([f"</pre><script>document.title = 'x'</script>{HOSTILE}".encode()], object)}


GRAPH = """
edges = ["speed -> square -> energy.0", "weight -> energy.1"]
[nodes]
speed = { builtin = "exp" }
square = { builtin = "scale", factor = 2.0 }
weight = { builtin = "sin" }
energy = { builtin = "sum" }
[inputs]
m = { to = ["speed", "weight"], size = 2 }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "time" data_type: TYPE_FP64 dims: [ -1 ] }, { name: "price" data_type: TYPE_FP64 dims: [ -1 ] } ]
output [ { name: "total" data_type: TYPE_FP64 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "Wage" model_version: -1
    input_map { key: "hours" value: "time" } input_map { key: "rate" value: "price" }
    output_map { key: "wage" value: "gross" } },
  { model_name: "Wage" model_version: -1
    input_map { key: "hours" value: "gross" } input_map { key: "rate" value: "price" }
    output_map { key: "wage" value: "total" } }
] }
"""


def write_graphs(folder: Path) -> list[str]:
    """Write a graph and an ensemble; return their paths."""
    (folder / "kinetics.graph.toml").write_text(GRAPH)
    (folder / "payroll" / "1").mkdir(parents=True)
    (folder / "payroll" / "config.pbtxt").write_text(ENSEMBLE)
    return [str(folder / "kinetics.graph.toml"), str(folder / "payroll")]
