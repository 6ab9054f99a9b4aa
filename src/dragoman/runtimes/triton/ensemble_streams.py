"""A step of an ensemble that has several responses, each with the steps that follow from it."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context

from dragoman.core.calls import Inference
from dragoman.core.spec import ResponseStream
from dragoman.core.tensor import Tensor

Tensors = Mapping[str, Tensor]


class SplitStep:
    """Iterates over the tensors that follow from each response of a step, in the order of the responses.

    follow: starts the steps after a response. They run while further responses arrive, for at most `limit` responses.
    """

    def __init__(
        self, stream: ResponseStream[Inference], follow: Callable[[Tensors], "Future[dict[str, Tensor]]"], limit: int
    ) -> None:
        self._stream, self._follow = stream, follow
        self._slots = threading.Semaphore(limit)
        self._branches: queue.SimpleQueue[Future[dict[str, Tensor]] | BaseException | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=copy_context().run, args=(self._run,), daemon=True).start()

    def _run(self) -> None:
        try:
            for response in self._stream:
                self._slots.acquire()
                if self._is_closed:
                    break
                self._branches.put(self._follow(response.outputs))
        except BaseException as error:
            self._branches.put(error)
        else:
            self._branches.put(None)

    def __iter__(self) -> Iterator[Tensors]:
        while (branch := self._branches.get()) is not None:
            if isinstance(branch, BaseException):
                raise branch
            tensors = branch.result()
            self._slots.release()
            yield tensors

    def close(self) -> None:
        """Cancel the call of the step. Nothing of it is waited for."""
        self._is_closed = True
        self._stream.close()
        self._slots.release()
