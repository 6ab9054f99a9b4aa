"""What may stand around a node: a bound on the calls that it gets at a time, and a memory of its evaluations."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dragoman.core.vector_answers import as_vectors
from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import ABILITIES, Config, Vector, VectorFunction, Vectors

_Key = tuple[str | bytes, ...]


class _Around(VectorFunction):
    """The function itself, but for the methods that a subclass sets."""

    def __init__(self, function: VectorFunction) -> None:
        self._function = function
        self.input_names, self.output_names = function.input_names, function.output_names
        self.vectorised = function.vectorised
        self.input_sizes = function.input_sizes  # type: ignore[method-assign]
        self.output_sizes = function.output_sizes  # type: ignore[method-assign]
        self.sources = function.sources  # type: ignore[method-assign]
        self.notes = function.notes  # type: ignore[method-assign]
        self.unavailable = function.unavailable  # type: ignore[method-assign]
        for ability in ABILITIES:
            setattr(self, ability, getattr(function, ability))

    def close(self) -> None:
        self._function.close()


class Limited(_Around):
    """A function of which at most so many calls are under way at a time; further ones wait."""

    def __init__(self, function: VectorFunction, most: int) -> None:
        super().__init__(function)
        self._free = threading.BoundedSemaphore(most)
        for ability in ABILITIES:
            setattr(self, ability, self._waiting(getattr(function, ability)))

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            with self._free:
                return method(*arguments)

        return ask


class Remembered(_Around):
    """A function whose last evaluations are kept, each by its inputs to the last bit and its config.

    Who asks for one that is under way waits for it. A sampler that asks for a density and then for its gradient at the
    same point has what comes before evaluated once. Faults are not kept.
    """

    def __init__(self, function: VectorFunction, count: int) -> None:
        super().__init__(function)
        self._count = count
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, Future[tuple[Vector, ...]]] = OrderedDict()
        self.evaluate = self._evaluate  # type: ignore[method-assign]

    def _evaluate(self, inputs: Vectors, config: Config) -> Any:
        if any(x.ndim > 1 for x in inputs):  # many points, of which some may be known: not worth the trouble
            return self._function.evaluate(inputs, config)
        key: _Key = (config_key(config), *(x.tobytes() for x in inputs))
        with self._lock:
            known = self._known.get(key)
            if known is None:
                mine: Future[tuple[Vector, ...]] = Future()
                self._known[key] = mine
                while len(self._known) > self._count:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
        return known.result() if known is not None else self._made(key, mine, inputs, config)

    def _made(
        self, key: _Key, mine: "Future[tuple[Vector, ...]]", inputs: Vectors, config: Config
    ) -> tuple[Vector, ...]:
        try:
            answer = self._function.evaluate(inputs, config)
            found = tuple(np.array(y) for y in as_vectors(answer, self.output_sizes(config)))
        except BaseException as fault:
            with self._lock:
                if self._known.get(key) is mine:
                    del self._known[key]
            mine.set_exception(fault)
            raise
        mine.set_result(found)
        return found
