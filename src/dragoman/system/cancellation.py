"""Cooperative cancellation for model code that runs in a thread."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

A = TypeVar("A")
C = TypeVar("C")

_CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


def run_cancellable(cancelled: threading.Event, method: Callable[[C], A], call: C) -> A:
    """Return `method(call)`; inside it `cancellation_check()` reports `cancelled`."""
    token = _CANCELLED.set(cancelled)
    try:
        return method(call)
    finally:
        _CANCELLED.reset(token)


def cancellation_check() -> Callable[[], bool]:
    """Return a function, for any thread, that is true once the caller of the current call no longer waits."""
    cancelled = _CANCELLED.get()
    return cancelled.is_set if cancelled is not None else bool
