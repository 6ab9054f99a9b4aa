"""Cache of values that depend on a config only, such as compiled functions."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import Config

T = TypeVar("T")

_MAX_CONFIGS = 32


class ConfigCache(Generic[T]):
    """Call `create(config)` once for each of the last 32 configs used, in one thread at a time.

    Exceptions of `create` are raised to the caller and not cached.
    """

    def __init__(self, create: Callable[[Config], T]) -> None:
        self._create = create
        self._values: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __call__(self, config: Config) -> T:
        key = config_key(config)
        with self._lock:
            if key not in self._values:
                self._values[key] = self._create(dict(config))
            self._values.move_to_end(key)
            if len(self._values) > _MAX_CONFIGS:
                self._values.popitem(last=False)
            return self._values[key]
