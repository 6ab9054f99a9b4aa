"""Sum and difference of two vectors."""

from typing import Any

from dragoman import INT32, Infer, Model, TensorSpec


class Pair(Model):
    inputs = (TensorSpec("a", INT32, (-1, 2)), TensorSpec("b", INT32, (-1, 2)))
    outputs = (TensorSpec("sum", INT32, (-1, 2)), TensorSpec("difference", INT32, (-1, 2)))
    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Any]:
        a, b = call.inputs["a"].data, call.inputs["b"].data
        return {"sum": a + b, "difference": a - b}
