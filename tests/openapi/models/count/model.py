"""Streams its inputs twice."""

from collections.abc import Iterator, Mapping

from dragoman import Infer, Model, Tensor


class Count(Model):
    placement = "thread"

    def infer(self, call: Infer) -> Iterator[Mapping[str, Tensor]]:
        yield call.inputs
        yield call.inputs
