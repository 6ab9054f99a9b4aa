"""Calls between models of one server, from the threads of a model."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from dragoman.core.calls import ModelDescription, Request
from dragoman.core.errors import InvalidInput, ModelFailed, ModelNotFound, NotReady
from dragoman.engine.registry import ModelRegistry
from dragoman.system.coroutines import complete

A = TypeVar("A")


class SiblingRegistry:
    """All models of a server, as its models call them.

    `changed` returns when the readiness of any may have changed. `gate` limits how many models load at a time; a
    model that waits for another releases its slot.
    """

    def __init__(
        self, registry: ModelRegistry, changed: Callable[[], Awaitable[None]], gate: asyncio.Semaphore
    ) -> None:
        self._registry = registry
        self._changed = changed
        self._gate = gate
        self._waits: dict[str, str] = {}  # which model waits for which
        self._tasks: set[asyncio.Task[Any]] = set()

    def of(self, name: str) -> "SiblingClient":
        """Return the client of the model of this name. Call it on the event loop."""
        return SiblingClient(self, name, asyncio.get_running_loop())

    def close(self) -> None:
        """Cancel the calls in flight."""
        for task in self._tasks:
            task.cancel()

    def unavailable(self, name: str) -> str:
        try:
            deployment = self._registry.find(name)
        except ModelNotFound as error:
            return error.message
        return (
            ""
            if deployment.ready
            else f"model '{name}' is not ready: {deployment.reported_reason or deployment.reported_state}"
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
        return (await complete(deployment.begin(request, nested=True))).answer


class SiblingClient:
    """The `SiblingModels` of one model."""

    def __init__(self, all_: SiblingRegistry, name: str, loop: asyncio.AbstractEventLoop) -> None:
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
        except concurrent.futures.CancelledError as error:
            raise NotReady(f"model '{self._name}' is stopped") from error
