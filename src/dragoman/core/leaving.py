"""Whether anybody still waits for what a thread computes: for work in several steps that may stop between them."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

A = TypeVar("A")
C = TypeVar("C")

_LEFT: ContextVar[threading.Event | None] = ContextVar("left", default=None)


def until_left(left: threading.Event, method: Callable[[C], A], call: C) -> A:
    """What the method gives for the call; while it runs in this thread, `left` tells it that nobody waits any more."""
    token = _LEFT.set(left)
    try:
        return method(call)
    finally:
        _LEFT.reset(token)


def watch() -> Callable[[], bool]:
    """Tells, in any thread, whether whoever waited for what this thread computes now has left."""
    left = _LEFT.get()
    return left.is_set if left is not None else bool
