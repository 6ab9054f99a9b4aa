"""Interface of text engines, implemented by our engine and by adapters of external ones."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

from dragoman.core.calls import Generate
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.options import type_words
from dragoman.core.text import Generation, Prompt, TokenSpan
from dragoman_text.generation.job import PromptRequest

Options = TypeVar("Options")
Choices = Mapping[str, tuple[str, ...]]


# Values of parameters that were true or false before, by name; they are taken for one release.
_FORMER: Mapping[str, Mapping[bool, str]] = {"sanitize_control_tokens": {False: "none", True: "all"}}


def check_options(
    kind: type[Options], parameters: Mapping[str, Any], least: Mapping[str, float], choices: Choices, subject: str
) -> Options:
    """Build options of a class whose fields all have defaults; a value must have the type of its default.

    least: minimum of numbers. choices: allowed strings. what: the engine, for messages. Raises ModelFailed for an
    unknown name or an invalid value.
    """
    defaults: Any = kind()
    names = list(defaults.__dataclass_fields__)
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in names:
            raise ModelFailed(f"unknown parameter '{name}'; {subject} knows {', '.join(names)}")
        if type(value) is bool and name in _FORMER:
            former, value = value, _FORMER[name][value]
            log.warning("parameter '%s': %s is now %r; it is taken for one release", name, str(former).lower(), value)
        expected: Any = type(getattr(defaults, name))
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not expected:
            raise ModelFailed(f"parameter '{name}': expected {type_words(expected)}, got {value!r}")
        if name in least and value < least[name]:
            raise ModelFailed(f"parameter '{name}': expected at least {least[name]}, got {value!r}")
        if name in choices and value not in choices[name]:
            raise ModelFailed(f"parameter '{name}': expected one of {', '.join(choices[name])}, got {value!r}")
        values[name] = value
    return kind(**values)


class TextEngine(Protocol):
    """Text engine of one model. `details`: metadata such as context length, dtype and end tokens."""

    @property
    def details(self) -> Mapping[str, Any]: ...

    @property
    def ended(self) -> str:
        """Why the engine has ended and can never answer again; "" while it runs."""

    @property
    def active(self) -> int:
        """Number of waiting and running prompts."""

    async def prepare(self, call: Generate) -> None:
        """Do the slow preparation of a call, compiling its grammar, for which `split_call` would block.

        Raises InvalidInput or Overloaded.
        """

    def split_call(self, call: Generate) -> list[PromptRequest]:
        """Validate and tokenize a call; return one request for each prompt. Thread-safe.

        Raises InvalidInput for a parameter that is invalid or not supported by this engine.
        """

    def generate(self, prompts: Sequence[PromptRequest]) -> ChunkStream[Generation]:
        """Return the chunks as they are generated, the first with information on the prompts.

        Raises Overloaded if the queue is full, WorkerLost if the engine has ended, and errors of the generation.
        """

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """Return the text of a prompt and its tokens with their character offsets."""

    def measurements(self) -> Iterable[Family]:
        """Return metrics of steps and queue. Thread-safe."""

    async def close(self) -> None:
        """Stop the engine; open calls fail with WorkerLost."""


E = TypeVar("E")
log = logging.getLogger("dragoman.generation")


class Waiter(Protocol):
    """Something on an event loop that waits for results."""

    def wake(self) -> None: ...


def start_thread(make: Callable[[], E], live: Callable[[E], None], name: str) -> threading.Thread:
    """Create an engine in a new thread, which then runs `live`. Raises the exception of `make`."""
    ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            engine = make()
        except BaseException as error:
            ready.put(error)
            return
        ready.put(None)
        live(engine)

    thread = threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
    thread.start()
    error = ready.get()
    if error is not None:
        raise error
    return thread


def notify(loop: asyncio.AbstractEventLoop, waiters: Collection[Waiter]) -> None:
    """Wake waiters on an event loop; thread-safe."""
    try:
        loop.call_soon_threadsafe(_wake, waiters)
    except RuntimeError:  # the loop is closed
        log.debug("event loop closed with %d waiters", len(waiters))


def _wake(waiters: Collection[Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()
