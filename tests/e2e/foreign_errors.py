"""Every kind of exception that foreign code may raise, as source for the models of tests, which run in processes."""

from collections.abc import Mapping
from typing import Any

SOURCE = '''
import asyncio
import concurrent.futures


class Panic(BaseException):
    """As a panic of a library that is written in Rust with PyO3."""


class Unprintable(Exception):
    def __str__(self):
        raise KeyboardInterrupt("its text cannot be read")


ERRORS = (
    lambda: asyncio.CancelledError(),
    lambda: concurrent.futures.CancelledError(),
    lambda: KeyboardInterrupt(),
    lambda: SystemExit(3),
    lambda: GeneratorExit(),
    lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("one")]),
    lambda: StopIteration(1),
    lambda: StopAsyncIteration(1),
    lambda: Panic("called `Option::unwrap()` on a `None` value"),
    lambda: RecursionError("too deep"),
    lambda: MemoryError(),
    lambda: TimeoutError(),
    lambda: Unprintable(),
)


def twice(number):
    """Return twice a number; one that is an index raises that error."""
    number = int(number)
    if number < len(ERRORS):
        raise ERRORS[number]()
    return 2 * number
'''
_variables: dict[str, Any] = {"__name__": __name__}
exec(SOURCE, _variables)
ERRORS = _variables["ERRORS"]
NAMES: Mapping[int, str] = {number: type(make()).__name__ for number, make in enumerate(ERRORS)}
RIGHT = 21
