"""Wrappers of the function of a node: a limit of concurrent calls, and a cache of evaluations."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import ABILITIES, Config, FunctionWrapper, Vector, VectorFunction, Vectors, as_vectors

_Key = tuple[str | bytes, ...]


class ConcurrencyLimit(FunctionWrapper):
    """Run at most `limit` calls at a time; further calls wait."""

    def __init__(self, function: VectorFunction, limit: int) -> None:
        super().__init__(function)
        self._semaphore = threading.BoundedSemaphore(limit)
        for ability in ABILITIES:
            setattr(self, ability, self._limit(getattr(function, ability)))

    def _limit(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._semaphore:
                return method(*arguments)

        return call


class EvaluationCache(FunctionWrapper):
    """Cache the last `size` evaluations by identical inputs and config.

    Concurrent calls with the same key wait for one evaluation. A density and its gradient at the same point thus
    evaluate the preceding nodes once. Errors are not cached.
    """

    def __init__(self, function: VectorFunction, size: int) -> None:
        super().__init__(function)
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, Future[tuple[Vector, ...]]] = OrderedDict()
        self.evaluate = self._evaluate  # type: ignore[method-assign]

    def _evaluate(self, inputs: Vectors, config: Config) -> Any:
        if any(x.ndim > 1 for x in inputs):  # rows of points are not cached
            return self._function.evaluate(inputs, config)
        key: _Key = (config_key(config), *(x.tobytes() for x in inputs))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                new: Future[tuple[Vector, ...]] = Future()
                self._entries[key] = new
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(key)
        return entry.result() if entry is not None else self._compute(key, new, inputs, config)

    def _compute(
        self, key: _Key, entry: "Future[tuple[Vector, ...]]", inputs: Vectors, config: Config
    ) -> tuple[Vector, ...]:
        try:
            result = self._function.evaluate(inputs, config)
            outputs = tuple(np.array(y) for y in as_vectors(result, self.output_sizes(config)))
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.set_exception(error)
            raise
        entry.set_result(outputs)
        return outputs
