"""Copies of models in server processes: which models have them, and the calls that they answer."""

import asyncio
import logging
import os
import pickle
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dragoman import plugins
from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Describe,
    Gradient,
    Infer,
    ModelDescription,
    Request,
    Response,
    SignatureFor,
)
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.metrics import Family, FamilyCollector
from dragoman.core.spec import FileState, ModelSpec
from dragoman.core.usage import UsageCounts
from dragoman.engine.batch_counters import BatchCounters
from dragoman.engine.call_handler import CallHandler
from dragoman.engine.counters import CallCounters
from dragoman.engine.deployment import Deployment
from dragoman.engine.engine import Engine
from dragoman.system.process import has_open_device
from dragoman.workers.process import importable

A = TypeVar("A")
log = logging.getLogger("dragoman.processes")

_ARRAY_CALLS = frozenset({Infer, Gradient, ApplyJacobian, ApplyHessian, SignatureFor})
_GPU_DEVICES = "/dev/nvidia"

# A name and a version as requests have them; version "" is the default one.
Route = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A model version that server processes may compute.

    number: identifies its deployment in the engine.
    routes: the names and versions by which requests select it.
    """

    number: int
    spec: ModelSpec
    description: ModelDescription
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """Counts of a copy in a server process since its last report. number: see `ModelCopy`."""

    number: int
    calls: CallCounters
    batches: BatchCounters | None


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """The metrics of a server process.

    families: metrics of its transports, and gauges of its copies.
    copies: number of models that it computes.
    in_flight: number of calls that it computes.
    """

    families: tuple[Family, ...]
    resource_usage: Mapping[str, float]
    copies: int
    in_flight: int
    counts: Sequence[CopyCounts]


class CopiedModels:
    """The models of an engine that server processes compute too, in the engine's process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deployments: dict[int, Deployment] = {}
        self._next = 1
        self._reported: set[int] = set()

    def table(self) -> bytes:
        """Return the copies that server processes may have now, for `ModelCopies.set_table`."""
        registry = self._engine.registry
        present = registry.all()
        self._deployments = {n: d for n, d in self._deployments.items() if d in present}
        numbers = {deployment: number for number, deployment in self._deployments.items()}
        routes: dict[Deployment, list[Route]] = {}
        for deployment in present:
            routes[deployment] = [(deployment.spec.name, deployment.spec.version)]
        for deployment in registry.default_versions():
            if not registry.routing(deployment.spec.name).weights:
                routes[deployment].append((deployment.spec.name, ""))
        copies = []
        for deployment in present:
            if deployment.state != "READY":
                continue
            number = numbers.get(deployment) or self._add(deployment)
            reason = self._reason(deployment)
            self._report(number, deployment, reason)
            deployment.is_copied = not reason
            if not reason:
                copies.append(self._copy(number, deployment, tuple(dict.fromkeys(routes[deployment]))))
        return pickle.dumps(tuple(copies))

    def _add(self, deployment: Deployment) -> int:
        number, self._next = self._next, self._next + 1
        self._deployments[number] = deployment
        return number

    def _copy(self, number: int, deployment: Deployment, routes: tuple[Route, ...]) -> ModelCopy:
        spec = replace(importable(deployment.spec), placement=deployment.placement, siblings=None, worker_port=None)
        described = self._engine.begin(Request(Describe(), spec.name, spec.version))
        assert isinstance(described, Response), "the model is loaded"
        return ModelCopy(number, spec, described.answer, routes)

    def _reason(self, deployment: Deployment) -> str:
        """Return why only the engine computes a model; "" if server processes may too."""
        spec, loaded = deployment.spec, deployment.loaded
        calls_others = spec.name in self._engine.sibling_registry.users or plugins.runtime(spec.runtime).calls_models
        reasons = {
            "it runs in worker processes": deployment.placement not in ("inline", "thread"),
            "it has sequences": loaded.sequences is not None,
            "it generates texts or embeddings, or has handlers": not loaded.calls <= _ARRAY_CALLS,
            "it has a response cache": deployment.response_cache is not None,
            "it has a queue with priorities": spec.schedule is not None,
            "it is loaded on demand": deployment.loads_on_demand,
            "it calls other models": calls_others,
            "a GPU is in use": has_open_device(_GPU_DEVICES),
        }
        obstacle = next((reason for reason, applies in reasons.items() if applies), "")
        if not obstacle:
            try:
                pickle.dumps(importable(replace(spec, siblings=None, worker_port=None)))
            except ModelFailed:
                obstacle = "other processes cannot import it"
            except Exception:  # pickle raises anything
                obstacle = "its settings cannot be sent to other processes"
        return obstacle

    def _report(self, number: int, deployment: Deployment, reason: str) -> None:
        if reason and number not in self._reported:
            name = f"{deployment.spec.name} {deployment.spec.version}".rstrip()
            log.info("model '%s' is computed in one process, for all: %s", name, reason)
            self._reported = {*self._reported, number} & {*self._deployments}

    def add(self, counts: Iterable[CopyCounts]) -> None:
        """Add counts of a server process to those of the engine; counts of models that were unloaded are dropped."""
        for each in counts:
            deployment = self._deployments.get(each.number)
            if deployment is None:
                continue
            deployment.counters.add(each.calls)
            if each.batches is not None and deployment.batch_counters is not None:
                deployment.batch_counters.add(each.batches)


class ModelCopies:
    """A `CallHandler` that answers calls with the copies of this process, and others through `engine`."""

    is_remote = True

    def __init__(self, engine: CallHandler) -> None:
        self._engine = engine
        self.ready = engine.ready
        self.wait_for_change = engine.wait_for_change
        self._copies: dict[int, ModelCopy] = {}
        self._deployments: dict[int, Deployment] = {}  # that have loaded
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._retiring: dict[Deployment, asyncio.Task[None]] = {}
        self._deployed: dict[Route, Deployment] = {}
        self._described: dict[Route, ModelDescription] = {}

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        call = request.call
        if type(call) in _ARRAY_CALLS:
            deployment = self._deployed.get((request.model, request.version))
            if deployment is not None:
                return deployment.begin(request)
        elif type(call) is Describe and (request.models is None or request.model in request.models):
            description: Any = self._described.get((request.model, request.version))
            if description is not None:
                return Response(description, request.model, request.version)
        return self._engine.begin(request)

    async def call(self, request: Request[A]) -> Response[A]:
        response = self.begin(request)
        return response if isinstance(response, Response) else await response

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        if type(request.call) in _ARRAY_CALLS:
            deployment = self._deployed.get((request.model, request.version))
            if deployment is not None:
                return deployment.stream(request)
        return self._engine.stream(request)

    def deployments(self) -> Set[Deployment]:
        """Return the copies that have loaded."""
        return {*self._deployments.values()}

    # --- which models --------------------------------------------------------------------------------------

    def set_table(self, table: bytes) -> None:
        """Compute no other models than these from now on, and load those that are missing."""
        copies: tuple[ModelCopy, ...] = pickle.loads(table)  # noqa: S301 - of the engine's process
        self._copies = {copy.number: copy for copy in copies}
        for number in self._loading.keys() - self._copies.keys():
            self._loading.pop(number).cancel()
        gone = [self._deployments.pop(number) for number in self._deployments.keys() - self._copies.keys()]
        for number, copy in self._copies.items():
            if number not in self._loading and number not in self._deployments:
                self._loading[number] = asyncio.create_task(self._load(copy))
        self._route()
        for deployment in gone:
            self._retiring[deployment] = asyncio.create_task(self._retire(deployment))

    def _route(self) -> None:
        loaded = [self._copies[number] for number in self._deployments]
        self._deployed = {route: self._deployments[copy.number] for copy in loaded for route in copy.routes}
        self._described = {route: copy.description for copy in loaded for route in copy.routes}

    async def _load(self, copy: ModelCopy) -> None:
        """Load a copy. If that fails, or its files have changed since the engine loaded it, the engine computes it."""
        deployment = Deployment(copy.spec, lambda: None, meter=UsageCounts())
        try:
            await asyncio.to_thread(_check_files, copy.spec)
            await deployment.start()
            await asyncio.to_thread(_check_files, copy.spec)
        except DragomanError as error:
            log.warning("%s; the server's process computes it for this one", error.message)
            await deployment.close()
            return
        except BaseException:
            await deployment.close()
            raise
        self._deployments[copy.number] = deployment
        self._loading.pop(copy.number)
        self._route()

    async def _retire(self, deployment: Deployment) -> None:
        """Close a deployment once its calls in flight have ended."""
        try:
            await deployment.drain()
        finally:
            await deployment.close()
            del self._retiring[deployment]

    async def close(self) -> None:
        """Close the copies; their calls in flight fail with NotReady."""
        tasks = [*self._loading.values(), *self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(deployment.close() for deployment in self._deployments.values()))

    # --- metrics ---------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of models that this process computes."""
        return len(self._deployments)

    @property
    def in_flight(self) -> int:
        """Number of calls that this process computes."""
        return sum(deployment.in_flight for deployment in (*self._deployments.values(), *self._retiring))

    def take_counts(self) -> list[CopyCounts]:
        """Return what was counted since the last time."""
        return [
            CopyCounts(n, d.counters.take(), None if d.batch_counters is None else d.batch_counters.take())
            for n, d in self._deployments.items()
        ]

    def gauges(self) -> tuple[Family, ...]:
        """Return calls in flight, and the metrics of the models themselves."""
        collector = FamilyCollector()
        for deployment in self._deployments.values():
            collector.add(deployment.gauges())
        return collector.families()


def _check_files(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file of a model has changed since the engine found it. Blocks."""
    for file in spec.files:
        if _state(file[0]) != file:
            name = os.path.basename(file[0])
            raise ModelFailed(f"model '{spec.name}': its file '{name}' has changed since it was loaded")


def _state(path: str) -> FileState | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return path, stat.st_ino, stat.st_size, stat.st_mtime_ns
