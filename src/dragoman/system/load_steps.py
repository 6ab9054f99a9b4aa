"""Steps of loading a model: reported by the code that loads it, observed by the server that displays them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadStep:
    """A step, such as "loading" or "compiling". size: bytes of the files that it reads; 0 if unknown."""

    name: str
    size: int = 0


Observer = Callable[[LoadStep], None]
_observer: ContextVar[Observer | None] = ContextVar("load_step_observer", default=None)


def report_step(name: str, size: int = 0) -> None:
    """Report that a step begins; in the task or thread that loads the model, or one with a copy of its context."""
    report = _observer.get()
    if report is not None:
        report(LoadStep(name, size))


def current_observer() -> Observer | None:
    """Return the observer of the model that is loaded here, None without one."""
    return _observer.get()


@contextmanager
def observe_steps(observer: Observer) -> Iterator[None]:
    """Call `observer` with each step that is reported within the block; in any thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
