"""Calls between models of one server, from the threads of a model."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from msgspec import structs

from dragoman.core.audit import audited
from dragoman.core.callers import ANYONE, Caller, current_caller
from dragoman.core.calls import Describe, ModelDescription, Request, Response
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.errors import InvalidInput, ModelFailed, ModelNotFound, NotReady
from dragoman.core.spec import ResponseStream
from dragoman.engine.control import ModelControl
from dragoman.engine.registry import ModelRegistry
from dragoman.system.call_times import current_call
from dragoman.system.coroutines import complete

A = TypeVar("A")
# Responses of a stream that a thread has not taken yet.
_MAX_WAITING_RESPONSES = 64
# Calls of other models by one call that are recorded.
_MAX_NESTED = 100


class SiblingRegistry:
    """Access of the models of a server to each other.

    changed: returns when the readiness of any may have changed. gate: limits how many models load concurrently; a model
    that waits for another releases its slot.
    """

    def __init__(
        self, registry: ModelRegistry, wait_for_change: Callable[[], Awaitable[None]], gate: asyncio.Semaphore
    ) -> None:
        self._registry = registry
        self._wait_for_change = wait_for_change
        self._gate = gate
        self._waits: dict[str, str] = {}  # for each model that waits, the model that it waits for
        self._tasks: set[asyncio.Task[Any]] = set()
        self.users: set[str] = set()  # models that have used others
        self.control: ModelControl  # set by the engine

    def of(self, name: str) -> "SiblingClient":
        """Return the client of the model of this name. Call it on the event loop."""
        return SiblingClient(self, name, asyncio.get_running_loop())

    def close(self) -> None:
        """Cancel the calls in flight."""
        for task in self._tasks:
            task.cancel()

    def unavailable(self, name: str, version: str = "") -> str:
        try:
            deployment = self._registry.find(name, version)
        except (ModelNotFound, NotReady) as error:
            return error.message
        if deployment.ready:
            return ""
        return f"model '{name}' is not ready: {deployment.reported_reason or deployment.reported_state}"

    async def run(self, work: Coroutine[Any, Any, A]) -> A:
        """Await the coroutine so that `close` cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def describe(self, name: str, caller: str) -> ModelDescription:
        """Return the description of a model once it is loaded. Raises InvalidInput if it waits for the caller."""
        self._waits[caller] = name
        chain = [caller, name]
        while chain[-1] in self._waits and chain[-1] != caller:
            chain.append(self._waits[chain[-1]])
        self._gate.release()
        try:
            if chain[-1] == caller:
                raise InvalidInput(f"models wait for each other: {' -> '.join(chain)}")
            return await self._wait_until_loaded(name)
        finally:
            self._waits.pop(caller, None)  # two versions of a model may wait at the same time
            await self._gate.acquire()

    async def _wait_until_loaded(self, name: str) -> ModelDescription:
        while True:
            deployment = self._registry.find(name)
            if deployment.is_loaded:
                loaded = deployment.loaded
                return ModelDescription(name, (), loaded.platform, loaded.signature, loaded.calls, loaded.details)
            if deployment.state == "UNAVAILABLE":
                raise NotReady(f"model '{name}' is not available: {deployment.reason}")
            if deployment.loads_on_demand:
                await deployment.wait_until_loaded(Request(Describe(), name), time.monotonic())
            else:
                await self._wait_for_change()

    async def change(
        self,
        action: str,
        caller: Caller,
        fields: Mapping[str, str],
        change: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Change the model that the fields name, with a line of the audit log."""
        with audited(action, caller, fields, partial(self._registry.state_of, fields["model"])):
            await change()

    def begin(self, request: Request[A]) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        return self._registry.route(request.model, request.version).begin(_nested(request), nested=True)

    async def call(self, request: Request[A]) -> A:
        return (await complete(self.begin(request))).answer

    def stream(self, request: Request[A]) -> ChunkStream[A]:
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[A], take: Take[A]) -> None:
        deployment = self._registry.route(request.model, request.version)
        await deployment.stream(_nested(request), nested=True).send_to(lambda response: take(response.answer))

    def streams(self, name: str) -> bool:
        try:
            deployment = self._registry.find(name)
        except (ModelNotFound, NotReady):
            return False
        return deployment.is_loaded and deployment.loaded.streams


def _nested(request: Request[A]) -> Request[A]:
    """Return a call by the model whose code runs in this context: it is recorded, in the name of the model's caller."""
    calling, caller = current_call.get(), current_caller.get()
    if caller is not ANYONE:
        request = structs.replace(request, caller=caller)
    if calling is not None:
        if calling.nested is None:
            calling.nested = []
        if len(calling.nested) < _MAX_NESTED:
            calling.nested.append(request.times)
    return request


class _StreamedResponses(Generic[A]):
    """The responses of a call, for a thread. The call waits while too many of them have not been taken."""

    def __init__(self, registry: SiblingRegistry, request: Request[A], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._taken = asyncio.Semaphore(_MAX_WAITING_RESPONSES)
        self._responses: queue.SimpleQueue[A | None] = queue.SimpleQueue()  # None: the call has ended
        self._work = asyncio.run_coroutine_threadsafe(registry.run(self._forward(registry.stream(request))), loop)
        self._work.add_done_callback(lambda _: self._responses.put(None))

    async def _forward(self, responses: ChunkStream[A]) -> None:
        await responses.send_to(self._take)

    async def _take(self, response: A) -> None:
        await self._taken.acquire()
        self._responses.put(response)

    def __iter__(self) -> Iterator[A]:
        return self

    def __next__(self) -> A:
        response = self._responses.get()
        if response is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._taken.release)
            return response
        self._responses.put(None)
        if self._work.cancelled():
            raise NotReady("the call was cancelled")
        if (error := self._work.exception()) is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        self._work.cancel()


class SiblingClient:
    """The `SiblingModels` of one model."""

    def __init__(self, registry: SiblingRegistry, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._name = name
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def describe(self, name: str) -> ModelDescription:
        self._registry.users.add(self._name)
        return self._run_on_loop(self._registry.describe(name, self._name))

    def unavailable(self, name: str, version: str = "") -> str:
        return self._registry.unavailable(name, version)

    def streams(self, name: str) -> bool:
        return self._registry.streams(name)

    @property
    def is_used(self) -> bool:
        """Whether the model has used others."""
        return self._name in self._registry.users

    def begin(self, request: Request[A]) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        self._registry.users.add(self._name)
        return self._registry.begin(request)

    def responses(self, request: Request[A]) -> ChunkStream[A]:
        self._registry.users.add(self._name)
        return self._registry.stream(request)

    def stream(self, request: Request[A]) -> ResponseStream[A]:
        self._registry.users.add(self._name)
        return _StreamedResponses(self._registry, request, self._loop)

    def load(self, name: str, config: str = "", files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self._change("load", name, lambda: self._registry.control.load(name, "", "", None, config, files))

    def unload(self, name: str) -> None:
        self._change("unload", name, lambda: self._registry.control.unload(name))

    def _change(self, action: str, name: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Change a model, and log that this model has done it."""
        fields = {"model": name, "by_model": self._name}
        self._run_on_loop(self._registry.change(action, current_caller.get(), fields, change))

    def call(self, request: Request[A]) -> A:
        self._registry.users.add(self._name)
        return self._run_on_loop(self._registry.call(request))

    def _run_on_loop(self, work: Coroutine[Any, Any, A]) -> A:
        if threading.get_ident() == self._loop_thread:
            work.close()
            raise ModelFailed(
                f"model '{self._name}' called another model on the event loop, which would wait for itself"
            )
        try:
            return asyncio.run_coroutine_threadsafe(self._registry.run(work), self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise NotReady(f"model '{self._name}' is unloading") from error
