"""Steps of loading a model: reported by the code that loads it, observed by the server that displays them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class LoadStep(msgspec.Struct, frozen=True):
    """A step, such as "loading" or "compiling". size: bytes of the files that it reads; 0 if unknown."""

    name: str
    size: int = 0


Observer = Callable[[LoadStep], None]


class _Observation(msgspec.Struct):
    observer: Observer
    model: str
    last: LoadStep | None = None


_observation: ContextVar[_Observation | None] = ContextVar("load_step_observation", default=None)


def report_step(name: str, size: int = 0) -> None:
    """Report that a step begins; in the task or thread that loads the model, or one with a copy of its context."""
    observation = _observation.get()
    if observation is not None:
        observation.last = LoadStep(name, size)
        observation.observer(observation.last)


@contextmanager
def load_step(name: str) -> Iterator[None]:
    """Report a step that ends with the block: the step before it goes on then."""
    observation = _observation.get()
    before = observation.last if observation is not None else None
    report_step(name)
    try:
        yield
    finally:
        if before is not None:
            report_step(before.name, before.size)


def current_observer() -> Observer | None:
    """Return the observer of the model that is loaded here, None without one."""
    observation = _observation.get()
    return observation.observer if observation is not None else None


def loading_model() -> str:
    """Return the name of the model that is loaded here, "" if none is."""
    observation = _observation.get()
    return observation.model if observation is not None else ""


@contextmanager
def observe_steps(observer: Observer, model: str = "") -> Iterator[None]:
    """Call `observer` with each step that is reported within the block, which loads a model; in any thread."""
    token = _observation.set(_Observation(observer, model))
    try:
        yield
    finally:
        _observation.reset(token)
