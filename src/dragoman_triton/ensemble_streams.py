"""A step of an ensemble that has several responses, each with the steps that follow from it."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from dragoman.core.errors import DragomanError
from dragoman.core.spec import ResponseStream
from dragoman.core.tensor import Tensor

Tensors = Mapping[str, Tensor]
# The tensors that follow from a response, and whether it is known to be the last one.
Branch = tuple["Future[dict[str, Tensor]]", bool]


class SplitStep:
    """Iterates over the tensors that follow from each response of a step, in the order of the responses.

    An error among the responses ends the step, as in Triton.
    follow: starts the steps after a response. They run while further responses arrive, for at most `limit` responses.
    """

    def __init__(
        self, stream: ResponseStream[Any], follow: Callable[[Tensors], "Future[dict[str, Tensor]]"], limit: int
    ) -> None:
        self._stream, self._follow = stream, follow
        self._slots = threading.Semaphore(limit)
        self._branches: queue.SimpleQueue[Branch | BaseException | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=copy_context().run, args=(self._run,), daemon=True).start()

    def _run(self) -> None:
        try:
            for response in self._stream:
                self._slots.acquire()
                if self._is_closed:
                    break
                if isinstance(response, DragomanError):
                    raise response
                self._branches.put((self._follow(response.outputs), response.is_last))
        except BaseException as error:
            self._branches.put(error)
        else:
            self._branches.put(None)

    def __iter__(self) -> Iterator[tuple[Tensors, bool]]:
        while (branch := self._branches.get()) is not None:
            if isinstance(branch, BaseException):
                raise branch
            work, is_last = branch
            tensors = work.result()
            self._slots.release()
            yield tensors, is_last

    def close(self) -> None:
        """Cancel the call of the step. Nothing of it is waited for."""
        self._is_closed = True
        self._stream.close()
        self._slots.release()
