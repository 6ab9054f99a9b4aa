"""What ends the caller itself, and what is an error of the code that it runs."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput, ModelFailed, error_text, public_text
from dragoman.core.foreign_code import is_interruption, public_error
from e2e.foreign_errors import ERRORS, NAMES

caught_kinds: list[bool] = []


def fail(number: int) -> None:
    raise ERRORS[number]()


def caught(error: BaseException) -> None:
    caught_kinds.append(is_interruption(error))
    raise error


@pytest.fixture(autouse=True)
def nothing_caught() -> None:
    caught_kinds.clear()


def test_errors_of_other_code_are_no_interruptions() -> None:
    for number in NAMES:
        try:
            fail(number)
        except BaseException as error:
            caught_kinds.append(is_interruption(error))
    assert caught_kinds == [False] * len(NAMES)


async def test_errors_of_other_code_in_a_task_are_no_interruptions() -> None:
    async def fail_later(number: int) -> None:
        await asyncio.sleep(0)
        fail(number)

    for number in NAMES:
        try:
            await fail_later(number)
        except BaseException as error:
            caught_kinds.append(is_interruption(error))
    assert caught_kinds == [False] * len(NAMES)


async def test_the_cancellation_of_the_task_is_an_interruption() -> None:
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            caught(error)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caught_kinds == [True]


def test_the_end_of_a_generator_is_an_interruption() -> None:
    def generate() -> Generator[int, None, None]:
        try:
            yield from range(9)
            yield 1
        except BaseException as error:
            caught(error)

    for count in (1, 10):  # in an inner generator, and here
        generator = generate()
        for _ in range(count):
            next(generator)
        generator.close()
    assert caught_kinds == [True, True]


async def test_the_end_of_an_async_generator_or_a_coroutine_is_an_interruption() -> None:
    async def generate() -> AsyncGenerator[int, None]:
        try:
            yield 1
        except BaseException as error:
            caught(error)

    generator = generate()
    await anext(generator)
    await generator.aclose()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            caught(error)

    coroutine = wait()
    coroutine.send(None)
    coroutine.close()
    assert caught_kinds == [True, True]


def test_a_generator_that_raises_generator_exit_is_no_interruption() -> None:
    def inner() -> Generator[int, None, None]:
        yield 1
        raise GeneratorExit

    def outer() -> Generator[int, None, None]:
        try:
            yield from inner()
        except BaseException as error:
            caught(error)

    generator = outer()
    next(generator)
    with pytest.raises(GeneratorExit):
        next(generator)
    assert caught_kinds == [False]


def test_the_error_for_the_caller() -> None:
    own: Any = InvalidInput("x")
    assert public_error(own, "it failed") is own
    for number, name in NAMES.items():
        error = public_error(ERRORS[number](), "it failed")
        assert type(error) is ModelFailed
        assert error.message.startswith(f"it failed: {name}: ")


def test_the_text_of_an_exception_without_one() -> None:
    unprintable = ERRORS[-1]()
    assert error_text(unprintable) == "its text cannot be read (KeyboardInterrupt)"
    assert public_text(unprintable) == "Unprintable: its text cannot be read (KeyboardInterrupt)"
