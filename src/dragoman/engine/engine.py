"""The one door: every call of every protocol goes through here, and every answer comes out."""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from dragoman._version import __version__
from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Index,
    IndexEntry,
    Infer,
    ListModels,
    Live,
    Load,
    ModelCall,
    ModelDescription,
    Ready,
    Request,
    Response,
    ServerDescription,
    Unload,
)
from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, ModelFailed, NotReady, Unauthorized
from dragoman.core.spec import check_name
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.engine.deployment import Deployment
from dragoman.engine.registry import Registry
from dragoman.engine.repository import Repository, Source

A = TypeVar("A")
log = logging.getLogger("dragoman.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How the server names itself, and the token that model control asks for ("" switches it off)."""

    name: str = "dragoman"
    version: str = __version__
    extensions: tuple[str, ...] = ()
    control_token: str = ""


class Engine:
    """Answers calls with the models of a repository.

    Use it as `async with Engine(repository) as engine`: models are loaded on entering (one that fails is
    UNAVAILABLE, the others serve) and closed on leaving. `started` tells whether all have been tried.
    """

    def __init__(self, repository: Repository, identity: Identity | None = None) -> None:
        self._repository = repository
        self._identity = identity or Identity()
        self._registry = Registry()
        self._unloaded: dict[str, IndexEntry] = {}
        self._draining = False
        self.started = False
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._change: asyncio.Event = asyncio.Event()

    # --- its life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load every model of the repository, some at the same time."""
        gate = asyncio.Semaphore(4)

        async def load(name: str, source: Source) -> None:
            async with gate:
                try:
                    await self._load(name, source)
                except DragomanError as fault:
                    log.error("%s", fault.message)

        try:
            await asyncio.gather(*(load(name, source) for name, source in self._repository.scan().items()))
        finally:
            self.started = True
            self._changed()

    async def drain(self) -> None:
        """Be not ready, take no more calls, and wait for those in flight."""
        self._draining = True
        self._changed()
        await asyncio.gather(*(d.drain() for d in self._registry.all()), *self._retiring)

    async def close(self) -> None:
        """Stop at once."""
        self._draining = True
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(d.close() for d in self._registry.all()))
        self._changed()

    # --- what it tells ---------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether every model is ready to answer; a server with no model is not."""
        models = self._registry.all()
        return not self._draining and bool(models) and all(d.ready for d in models)

    async def changed(self) -> None:
        """Returns when the readiness of anything may have changed."""
        await self._change.wait()

    def deployments(self) -> list[Deployment]:
        """Every model version, for a person to look at."""
        return self._registry.all()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    # --- calls -------------------------------------------------------------------------------------------------

    async def call(self, request: Request[A]) -> Response[A]:
        """The one answer to any call. Raises the errors of `dragoman.core.errors`."""
        if isinstance(request.call, ModelCall):
            deployment = self._find(request)
            answer = await deployment.call(request)
            return Response(answer, deployment.spec.name, deployment.spec.version)
        found: Any = await self._server_call(request)
        return Response(found, request.model, request.version)

    async def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        """The answers to a model's call as they come. Closing the generator cancels the call."""
        deployment = self._find(request)
        pieces = deployment.stream(request)
        try:
            async for piece in pieces:
                yield Response(piece, deployment.spec.name, deployment.spec.version)
        finally:
            await pieces.aclose()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Parameters = NONE,
    ) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Arrays in, arrays out, with no server at all. Raises as `call`."""
        tensors = {name: Tensor.of(value) for name, value in inputs.items()}
        call = Infer(tensors, tuple(outputs), parameters)
        response = await self.call(Request(call, model, version))
        return {name: tensor.data for name, tensor in response.answer.outputs.items()}

    def _find(self, request: Request[Any]) -> Deployment:
        if self._draining:
            raise NotReady("the server is shutting down")
        return self._registry.find(request.model, request.version)

    async def _server_call(self, request: Request[Any]) -> object:
        match request.call:
            case Live():
                return True
            case Ready():
                return self._ready(request)
            case Describe():
                return self._describe(request)
            case ListModels():
                return tuple(self._registry.names())
            case DescribeServer():
                me = self._identity
                return ServerDescription(me.name, me.version, me.extensions)
            case Index(token, ready):
                self._authorize(token)
                return self._index(ready)
            case Load(token):
                self._authorize(token)
                await self._reload(check_name(request.model))
                return None
            case Unload(token):
                self._authorize(token)
                await self._unload(check_name(request.model))
                return None
        raise NotImplementedError(type(request.call).__name__)

    def _ready(self, request: Request[Any]) -> bool:
        if not request.model:
            return self.ready()
        return not self._draining and self._registry.find(request.model, request.version).ready

    def _describe(self, request: Request[Any]) -> ModelDescription:
        deployment = self._registry.find(request.model, request.version)
        loaded = deployment.loaded
        versions = tuple(v for v in self._registry.versions(request.model) if v)
        return ModelDescription(request.model, versions, loaded.platform, loaded.signature)

    # --- model control ---------------------------------------------------------------------------------------

    def _authorize(self, token: str) -> None:
        wanted = self._identity.control_token
        if not wanted:
            raise Forbidden("model control is off; an operator enables it with --control-token")
        if not hmac.compare_digest(token.encode(), wanted.encode()):
            raise Unauthorized("This API is restricted, expecting header 'Authorization: Bearer <control token>'")

    def _index(self, ready: bool) -> tuple[IndexEntry, ...]:
        entries = [
            IndexEntry(
                d.spec.name, d.spec.version, d.state if d.ready or d.state != "READY" else "UNAVAILABLE", d.reason
            )
            for d in self._registry.all()
        ]
        served = set(self._registry.names())
        entries += [e for name, e in self._unloaded.items() if name not in served]
        return tuple(e for e in entries if not ready or e.state == "READY")

    async def _reload(self, name: str) -> None:
        source = self._repository.scan().get(name)
        if source is None:
            raise InvalidInput(f"failed to load '{name}', it is not in the repository")
        try:
            await self._load(name, source)
        except ModelFailed as fault:
            raise InvalidInput(fault.message) from fault

    async def _load(self, name: str, source: Source) -> None:
        """Load a model aside, then put it in place of what was there, which drains while the new one answers."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            versions = {spec.version: Deployment(spec, self._changed) for spec in source.specs()}
            first = name not in self._registry.names()
            if first:  # visible as LOADING
                self._registry.put(name, versions, source.default_version)
            try:
                await _start_all(list(versions.values()))
            except BaseException:
                if not first:
                    await asyncio.gather(*(d.close() for d in versions.values()))
                raise
            self._unloaded.pop(name, None)
            if not first:
                self._retire(self._registry.put(name, versions, source.default_version))
            self._changed()

    async def _unload(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            old = self._registry.take(name)
            self._unloaded[name] = IndexEntry(name, old[-1].spec.version, "UNAVAILABLE", "unloaded")
            self._retire(old)
            self._changed()

    def _retire(self, old: Sequence[Deployment]) -> None:
        async def retire(deployment: Deployment) -> None:
            try:
                await deployment.drain()
            finally:
                await deployment.close()

        for deployment in old:
            task = asyncio.get_running_loop().create_task(retire(deployment))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


async def _start_all(deployments: list[Deployment]) -> None:
    """Start every version; raises the first fault after all have been tried."""
    results = await asyncio.gather(*(d.start() for d in deployments), return_exceptions=True)
    faults = [r for r in results if isinstance(r, BaseException)]
    if faults:
        raise faults[0]
