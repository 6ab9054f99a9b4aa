"""The one answer of a call, brought to whoever waits for it on the event loop."""

import asyncio
from typing import Any


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None, last: bool = True) -> None:
    """Give it the value, or the error where there is one; nobody may be waiting any more."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
