"""Functions of vectors that wait for remote or sibling models."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dragoman.core.calls import ApplyHessian, ApplyJacobian, Gradient, Infer, SignatureFor
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor
from dragoman.core.vectors import Vector, VectorFunction
from dragoman.runtimes.vector_model import VectorModel
from dragoman.system.cancellation import run_cancellable
from dragoman.system.threads import DaemonThreads

A = TypeVar("A")
C = TypeVar("C")


class WaitingModel(VectorModel):
    """A VectorFunction with up to `concurrency` simultaneous calls: its methods are `async`, and each waits in a
    thread."""

    def __init__(
        self, spec: ModelSpec, function: VectorFunction, concurrency: int, placement: Placement = "inline"
    ) -> None:
        super().__init__(spec, function, placement)
        self._threads = DaemonThreads(concurrency, f"{type(self).__name__}-{spec.name}")

    def close(self) -> Any:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    async def _evaluate(self, call: Infer) -> dict[str, Tensor]:  # type: ignore[override]
        return await self._waited(super()._evaluate, call)

    async def _gradient(self, call: Gradient) -> Vector:  # type: ignore[override]
        return await self._waited(super()._gradient, call)

    async def _apply_jacobian(self, call: ApplyJacobian) -> Vector:  # type: ignore[override]
        return await self._waited(super()._apply_jacobian, call)

    async def _apply_hessian(self, call: ApplyHessian) -> Vector:  # type: ignore[override]
        return await self._waited(super()._apply_hessian, call)

    async def signature_for(self, call: SignatureFor) -> Signature:  # type: ignore[override]
        return await self._waited(super().signature_for, call)

    async def _waited(self, method: Callable[[C], A], call: C) -> A:
        left = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run_cancellable, left, method, call)
        except asyncio.CancelledError:
            left.set()  # a graph asks nobody else then
            raise
