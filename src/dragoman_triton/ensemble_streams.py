"""A step of an ensemble that has several responses, each with the steps that follow from it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import DragomanError
from dragoman.core.tensor import Tensor

Tensors = Mapping[str, Tensor]


async def split_step(
    responses: ChunkStream[Any],
    follow: Callable[[Tensors], Awaitable[dict[str, Tensor]]],
    limit: int,
) -> AsyncGenerator[tuple[dict[str, Tensor], bool], None]:
    """Yield the tensors that follow from each response of a step, in order, and whether it is known to be the last one.

    follow: computes the steps after a response. They run while further responses arrive, for at most `limit` responses.
    An error among the responses ends the step, as in Triton. Closing the generator ends the call of the step.
    """
    branches: asyncio.Queue[tuple[asyncio.Future[dict[str, Tensor]], bool] | None] = asyncio.Queue()
    slots = asyncio.Semaphore(limit)
    running: set[asyncio.Future[dict[str, Tensor]]] = set()

    async def read() -> None:
        try:
            async with aclosing(responses):
                async for response in responses:
                    await slots.acquire()
                    if isinstance(response, DragomanError):
                        raise response
                    work = asyncio.ensure_future(follow(response.outputs))
                    running.add(work)
                    branches.put_nowait((work, response.is_last))
        finally:
            branches.put_nowait(None)

    reading = asyncio.ensure_future(read())
    try:
        while (branch := await branches.get()) is not None:
            work, is_last = branch
            tensors = await work
            running.discard(work)
            slots.release()
            yield tensors, is_last
        await reading
    finally:
        reading.cancel()
        for work in running:
            work.cancel()
        await asyncio.gather(reading, *running, return_exceptions=True)
