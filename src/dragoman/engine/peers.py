"""How a model in the server's process asks the other models, from a thread of its own."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from dragoman.core.calls import ModelDescription, Request
from dragoman.core.errors import InvalidInput, ModelFailed, ModelNotFound, NotReady
from dragoman.engine.registry import Registry

A = TypeVar("A")


class Neighbourhood:
    """All models of a server, as they see each other. `changed` returns when the readiness of any may have changed;
    `gate` bounds how many models load at a time, and one that waits for another leaves its place to it."""

    def __init__(self, registry: Registry, changed: Callable[[], Awaitable[None]], gate: asyncio.Semaphore) -> None:
        self._registry = registry
        self._changed = changed
        self._gate = gate
        self._waits: dict[str, str] = {}  # which model waits for which
        self._tasks: set[asyncio.Task[Any]] = set()

    def of(self, name: str) -> "Neighbours":
        """The others, as the model of that name sees them. On the event loop."""
        return Neighbours(self, name, asyncio.get_running_loop())

    def close(self) -> None:
        """Nobody waits any more."""
        for task in self._tasks:
            task.cancel()

    def unavailable(self, name: str) -> str:
        try:
            deployment = self._registry.find(name)
        except ModelNotFound as fault:
            return fault.message
        return (
            ""
            if deployment.ready
            else f"model '{name}' is not ready: {deployment.told_reason or deployment.told_state}"
        )

    async def owned(self, work: Coroutine[Any, Any, A]) -> A:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def describe(self, name: str, asks: str) -> ModelDescription:
        self._waits[asks] = name
        chain = [asks, name]
        while chain[-1] in self._waits and chain[-1] != asks:
            chain.append(self._waits[chain[-1]])
        self._gate.release()
        try:
            if chain[-1] == asks:
                raise InvalidInput(f"models wait for each other: {' -> '.join(chain)}")
            return await self._described(name)
        finally:
            self._waits.pop(asks, None)  # two versions of a model may ask at the same time
            await self._gate.acquire()

    async def _described(self, name: str) -> ModelDescription:
        while True:
            deployment = self._registry.find(name)
            if deployment.is_loaded:
                told = deployment.loaded
                return ModelDescription(name, (), told.platform, told.signature, told.calls, told.details)
            if deployment.state == "UNAVAILABLE":
                raise NotReady(f"model '{name}' is not there: {deployment.reason}")
            await self._changed()

    async def call(self, request: Request[A]) -> A:
        deployment = self._registry.find(request.model, request.version)
        return (await deployment.call(request, nested=True)).answer


class Neighbours:
    """The server's other models, as one of them sees them: `dragoman.core.peers.Peers`."""

    def __init__(self, all_: Neighbourhood, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._all = all_
        self._name = name
        self._loop = loop
        self._thread = threading.get_ident()  # the event loop's

    def describe(self, name: str) -> ModelDescription:
        return self._waited(self._all.describe(name, self._name))

    def unavailable(self, name: str) -> str:
        return self._all.unavailable(name)

    def call(self, request: Request[A]) -> A:
        return self._waited(self._all.call(request))

    def _waited(self, work: Coroutine[Any, Any, A]) -> A:
        if threading.get_ident() == self._thread:
            work.close()
            raise ModelFailed(f"model '{self._name}' would wait for itself: it asks another model on the event loop")
        try:
            return asyncio.run_coroutine_threadsafe(self._all.owned(work), self._loop).result()
        except concurrent.futures.CancelledError as fault:
            raise NotReady(f"model '{self._name}' is stopped") from fault
