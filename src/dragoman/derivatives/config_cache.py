"""What is made once for each config, such as a compiled function, and kept as long as it is asked for."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import Config

T = TypeVar("T")

# How many configs of a function are kept made; the one that was not asked for longest goes first.
_CONFIGS = 32


class OfConfig(Generic[T]):
    """Made by `make` of a config, by one thread; what `make` raises is raised to who asks."""

    def __init__(self, make: Callable[[Config], T]) -> None:
        self._make = make
        self._made: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __call__(self, config: Config) -> T:
        key = config_key(config)
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(dict(config))
            self._made.move_to_end(key)
            if len(self._made) > _CONFIGS:
                self._made.popitem(last=False)
            return self._made[key]
