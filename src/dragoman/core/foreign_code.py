"""Errors of code of others: models, codecs, templates, tokenizers, plug-ins, which may raise anything.

Such code raises more than `Exception`: `sys.exit()`, the CancelledError of a request of its own, a group of exceptions,
a panic of a library in Rust. A loop that runs it catches BaseException, answers its caller and goes on:

    try:
        result = await model.infer(call)
    except BaseException as error:
        if is_interruption(error):
            raise
        raise public_error(error, f"model '{name}' failed") from error

A function that never waits and is no generator cannot be interrupted, and needs no `is_interruption`.
"""

import asyncio

from dragoman.core.errors import DragomanError, ModelFailed, public_text


class ClientDisconnected(asyncio.CancelledError):
    """The client of a response is gone. Writers of responses raise it: it ends a call as its cancellation does."""


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception that was just caught ends the caller itself, rather than being raised by other code.

    That is the cancellation of this task, the end of its client, or GeneratorExit in a generator or coroutine that is
    closed: it is raised in the frame that catches it, with which its traceback begins.
    """
    if isinstance(error, ClientDisconnected):
        return True
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without an event loop
            return False
        return task is not None and task.cancelling() > 0
    if isinstance(error, GeneratorExit):
        return error.__traceback__ is None or error.__traceback__.tb_next is None
    return False


def public_error(error: BaseException, failure: str) -> DragomanError:
    """Return the error for the caller: one of ours as it is, any other as ModelFailed with `failure`, type and text."""
    return error if isinstance(error, DragomanError) else ModelFailed(f"{failure}: {public_text(error)}")
