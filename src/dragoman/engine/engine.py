"""The entry for every call: server state, model lookup, control."""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from dragoman.core import calls
from dragoman.core.about import one_line
from dragoman.core.audit import AuditWriter, audited
from dragoman.core.calls import Call, ModelDescription, Request, Response
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import (
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelFailed,
    ModelNameMissing,
    ModelNotFound,
    NotReady,
    NotSupported,
    Unauthorized,
)
from dragoman.core.kinds import UNKNOWN
from dragoman.core.metrics import Family, FamilyCollector
from dragoman.core.model_digests import check_folder
from dragoman.core.record_calls import AppendRecord, DeleteRecord, KeepLoaded, ListLoaded, ReadRecord, SaveRecord
from dragoman.core.scoring import Score
from dragoman.core.services import Service, ServiceCall
from dragoman.core.signature import Signature
from dragoman.core.spec import SiblingModels, check_load_name, check_name
from dragoman.core.state_store import StateStore
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman.core.text_engine_calls import LoadAdapter, ResetPrefixCache, UnloadAdapter
from dragoman.core.usage import ReadUsage, UsageMeter
from dragoman.engine import counters
from dragoman.engine.control import LOADING_AT_ONCE, ModelControl
from dragoman.engine.deployment import Deployment
from dragoman.engine.folder_watch import FolderSync, FolderWatch
from dragoman.engine.gpus import Gpus
from dragoman.engine.loop_monitor import LoopMonitor
from dragoman.engine.on_demand import LoadedModels, LoadLimits, answer_about_loaded
from dragoman.engine.record_store import RecordStore
from dragoman.engine.registry import ModelRegistry
from dragoman.engine.repository import Repository, Source
from dragoman.engine.saved_models import SavedAdapter, SavedModels
from dragoman.engine.saved_weights import SavedWeights
from dragoman.engine.search import SkippedFile
from dragoman.engine.server_identity import ServerIdentity as ServerIdentity
from dragoman.engine.siblings import SiblingRegistry
from dragoman.engine.statistics import read_statistics
from dragoman.engine.version_routing import share_family
from dragoman.engine.worker_metrics import process_families
from dragoman.system.call_times import CallTimes
from dragoman.system.coroutines import begin, complete, ensure_task
from dragoman.system.process import GroupUsage
from dragoman.system.threads import call_in_thread

A = TypeVar("A")
# Calls of a model that was never loaded: it may answer any.
_ANY_CALL: frozenset[type[Call[Any]]] = frozenset(
    (
        *(calls.Infer, calls.SignatureFor, calls.Gradient, calls.ApplyJacobian, calls.ApplyHessian),
        *(calls.Generate, calls.Tokenize, calls.Embed, Score),
    )
)
# Calls that change the text engine of a model: what they do, and their fields for the audit log.
_ENGINE_CHANGES: Mapping[type[Call[Any]], tuple[str, Mapping[str, str]]] = {
    LoadAdapter: ("load adapter", {"adapter": "name", "path": "path"}),
    UnloadAdapter: ("unload adapter", {"adapter": "name"}),
    ResetPrefixCache: ("reset prefix cache", {}),
}
log = logging.getLogger("dragoman.engine")
# How long the event loop collects metrics before other work gets a turn.
_MEASURE_TURN_S = 0.0005
_FORGOTTEN_AT_ONCE = 1000
_SYNC_AGAIN_S = 1.0


class Engine:
    """Answers calls with the models of a repository.

    `async with Engine(repository) as engine` loads the models (one that fails is UNAVAILABLE, the others serve)
    and closes them. `started` is true once all have been tried. `sources` is the result of a repository scan, if
    there was one. With `watch_quiet_s` models are loaded, replaced and unloaded as their files on disk change, once
    these have not changed for that many seconds. With `on_demand` calls load the models, within these limits. Protocols
    can keep `max_records` values between requests. `store` keeps state over restarts; `close` closes it. `meter` counts
    what keys use; None if nothing does. `audit` keeps the audit log, None if nothing does; who makes it closes it.
    """

    is_remote = False

    def __init__(
        self,
        repository: Repository,
        identity: ServerIdentity | None = None,
        sources: Mapping[str, Source] | None = None,
        *,
        watch_quiet_s: float | None = None,
        on_demand: LoadLimits | None = None,
        max_records: int = 1000,
        saved_weights: SavedWeights | None = None,
        store: StateStore | None = None,
        meter: UsageMeter | None = None,
        audit: AuditWriter | None = None,
    ) -> None:
        self._identity = identity or ServerIdentity()
        self.store = store or StateStore()
        self.services: Mapping[str, Service] = {}  # by name, for `ServiceCall`
        self.meter = meter
        self.audit = audit
        self._records = RecordStore(max_records, table=self.store.table("records") if max_records else None)
        self.registry = ModelRegistry(self._identity.dialect)
        gate = asyncio.Semaphore(LOADING_AT_ONCE)
        self.sibling_registry = SiblingRegistry(self.registry, self.wait_for_change, gate)
        self._repository = repository
        self._loaded_models = LoadedModels(on_demand) if on_demand is not None else None
        self._unloads_idle = on_demand is not None and on_demand.idle_s > 0
        self._control = ModelControl(
            repository,
            self.registry,
            self._notify_change,
            self.sibling_registry.of,
            gate,
            sources,
            loads_new_models=self._identity.loads_new_models,
            loaded_models=self._loaded_models,
            saved_weights=saved_weights,
            saved_models=SavedModels(self.store),
            meter=meter,
        )
        self.sibling_registry.control = self._control
        self._sync = FolderSync(repository, self._control)
        self._watch_quiet_s = watch_quiet_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metric_sources: list[Callable[[], Iterable[Family]]] = []  # of transports, for `Measure`
        self._loop_monitor = LoopMonitor()
        self._groups = GroupUsage()
        self._gpus = Gpus()
        self._draining = False
        self._is_leaving = False
        self.started = False
        self._change: asyncio.Event = asyncio.Event()

    # --- start and stop ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load every model of the repository, some concurrently."""
        self._start_task(self._loop_monitor.run())
        if self._watch_quiet_s is not None:
            self._start_task(FolderWatch(self._repository.paths, self._watch_quiet_s, self._sync.run).run())
        if self._loaded_models is not None and self._unloads_idle:
            self._start_task(self._loaded_models.unload_idle())
        try:
            await self._control.start(loads_all=self._identity.load_at_start)
            await self._restore_adapters()
        finally:
            self.started = True
            self._notify_change()

    def report_not_ready(self) -> None:
        """Report the server and each model as not ready, but answer calls: the server stops soon."""
        self._is_leaving = True
        self._notify_change()

    def sync(self) -> None:
        """Start to load, replace and unload models that have changed on disk."""
        if self.started and not self._stops:
            self._start_task(self._sync_all())

    async def _sync_all(self) -> None:
        while await self._sync.run():  # noqa: ASYNC110 - a change on disk waits while its model is loaded
            await asyncio.sleep(_SYNC_AGAIN_S)

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Report not ready, reject new calls, and wait for those in flight."""
        self._draining = True
        self._notify_change()
        await self._stop_tasks()
        await self._control.drain()

    async def close(self) -> None:
        """Stop at once."""
        self._draining = True
        self.sibling_registry.close()
        await self._stop_tasks()
        await self._control.close()
        if self.meter is not None:
            self.meter.close()
        await asyncio.to_thread(self.store.close)
        self._notify_change()

    # --- state -----------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return True if every model is ready, and there is one unless the server starts without.

        A model that calls load does not count: a client's call must not make the server unready.
        """
        models = self.registry.all()
        enough = bool(models) or (self.started and not self._identity.load_at_start)
        return not self._stops and enough and all(d.ready for d in models if not d.loads_on_demand)

    @property
    def _stops(self) -> bool:
        return self._draining or self._is_leaving

    async def wait_for_change(self) -> None:
        """Return when the readiness of anything may have changed."""
        await self._change.wait()

    def deployments(self) -> list[Deployment]:
        """Return every model version."""
        return self.registry.all()

    def skipped_files(self) -> Sequence[SkippedFile]:
        """Return files in model folders that look like models and are not served."""
        return self._repository.skipped

    def siblings(self, name: str) -> SiblingModels:
        """Return access to the models for threads of a model of this name. Call it on the event loop."""
        return self.sibling_registry.of(name)

    def _notify_change(self) -> None:
        for name in [*self.sibling_registry.users]:  # an answer may depend on models that were replaced
            for deployment in self.registry.by_version(name).values():
                if deployment.response_cache is not None:
                    deployment.response_cache.clear()
        self._change.set()
        self._change = asyncio.Event()

    # --- calls -------------------------------------------------------------------------------------------------

    def begin(self, request: Request[A]) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        """Start a call: return its response, or an awaitable of it if something has to wait.

        Raises the errors of `dragoman.core.errors`, as awaiting does. Await it in the task that called `begin`.
        """
        if not isinstance(request.call, calls.ModelCall):
            return begin(self._server_response(request))
        if type(request.call) is calls.Handle:
            request = self.registry.resolve_handler(request)
            self._model_of(request, calls.Handle)
        elif type(request.call) in _ENGINE_CHANGES:
            return begin(self._change_engine(request))
        if request.model and not self._draining:
            try:
                deployment = self.registry.route(request.model, request.version)
            except ModelNotFound as error:
                request = self.registry.resolve_adapter(request, error)
                deployment = self.registry.route(request.model)
            try:
                return deployment.begin(request)
            except NotSupported as error:
                raise self.registry.with_able_models(error, request) from None
        return self._find(request).begin(request)

    async def call(self, request: Request[A]) -> Response[A]:
        """Return the one response to a call. Cancelling it cancels the call."""
        return await complete(self.begin(request))

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        """Return the responses to a model call as they come."""
        try:
            request = self.registry.resolve_handler(request) if type(request.call) is calls.Handle else request
            deployment = self._find(request)
        except ModelNotFound as error:
            deployment = self._find(request := self.registry.resolve_adapter(request, error))
        return deployment.stream(request)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Parameters = NONE,
    ) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Run a model on arrays and return its output arrays. Raises as `call`."""
        tensors = {name: Tensor.of(value) for name, value in inputs.items()}
        call = calls.Infer(tensors, tuple(outputs), parameters)
        response = await self.call(Request(call, model, version))
        return {name: tensor.data for name, tensor in response.answer.outputs.items()}

    def _find(self, request: Request[Any]) -> Deployment:
        if self._draining:
            raise NotReady("the server is shutting down")
        return self.registry.route(self._model_of(request, type(request.call)), request.version)

    def _model_of(self, request: Request[Any], able: type[Call[Any]]) -> str:
        """Return the name of the model that a request means. Raises Forbidden if the caller may not use it."""
        name = request.model or self._only_model(able, request.models)
        if request.models is not None and name not in request.models:
            raise Forbidden(f"this key may not use model '{name}'")
        return name

    def _choose_call_type(self, able: type[Call[Any]], otherwise: type[Call[Any]]) -> type[Call[Any]]:
        """Return which of two call types a request without a model name means."""
        default = self._identity.default_model
        if default and self.registry.find(default).is_loaded:
            return able if self.registry.find(default).answers(able) else otherwise
        return able if any(d.answers(able) for d in self.registry.all()) else otherwise

    def _only_model(self, able: type[Call[Any]], allowed: frozenset[str] | None) -> str:
        """Return the model of calls without a model name: the default, or the only allowed one that answers them."""
        names = sorted({d.spec.name for d in self.registry.all() if d.answers(able)})
        names = [name for name in names if allowed is None or name in allowed]
        default = self._identity.default_model
        if default and (len(names) != 1 or not self.registry.find(default).is_loaded):
            return default
        loading = [d.retry_after_s for d in self.registry.all() if d.state == "LOADING"]
        if not names and loading:
            raise NotReady("no model that can answer is loaded yet", max(loading))
        if len(names) != 1:
            there = f"one of {', '.join(names)}" if names else "a model that can answer, and there is none"
            raise ModelNameMissing(f"the request names no model; expected {there}")
        return names[0]

    async def _server_response(self, request: Request[Any]) -> Response[Any]:
        match request.call:
            case calls.Authorize() | calls.Index() | calls.Load() | calls.ScaleModel() | calls.Unload() as call:
                self._authorize(call.token)
                answer = await self._control_call(request)
            case calls.ConcurrentCalls(requests):
                answer = await self._call_all(requests, request.times)
            case calls.Describe():
                answer = await self._describe(request, request.call)
            case calls.DescribeModels(after_start):
                while after_start and not self._start_is_over:
                    await self.wait_for_change()
                answered = (d for d in self.registry.default_versions() if d.is_loaded or d.loads_on_demand)
                answer = tuple(map(self.description, answered))
            case calls.Measure():
                answer = await self._measurements()
            case ServiceCall() as call:
                await ensure_task()
                answer = await self._service(call).answer(request)
            case _:
                answer = self._state(request)
        return Response(answer, request.model, request.version)

    def _service(self, call: ServiceCall[Any]) -> Service:
        found = self.services.get(call.service)
        if found is None:
            raise NotSupported(f"{call.service} need a server of one process: expected --processes 1")
        return found

    def _state(self, request: Request[Any]) -> object:
        """Return the answer to a call about the server or its models."""
        match request.call:
            case calls.Live():
                return True
            case calls.Ready(may_be_unknown):
                return self._ready(request, may_be_unknown=may_be_unknown)
            case calls.ListModels():
                return tuple(self.registry.names())
            case calls.DescribeServer():
                problems = [self.store.problem, "" if self.audit is None else self.audit.problem]
                return self._identity.describe(tuple(filter(None, problems)))
            case calls.InFlight(able):
                return sum(d.in_flight for d in self.registry.all() if any(map(d.answers, able)))
            case KeepLoaded() | ListLoaded() as call:
                return answer_about_loaded(call, request.model, self.registry, self._loaded_models)
            case DeleteRecord() as call:
                if not self._records.has(call):
                    return False
                with audited("delete", request.caller, {"record": call.id}):
                    return self._records.answer(call)
            case SaveRecord() | AppendRecord() | ReadRecord() as call:
                return self._records.answer(call)
            case calls.MayControl(token):
                return self._identity.control_open or self._is_control_token(token)
            case calls.States(token):
                return self._control.states(has_reasons=self._shows_reasons(token))
            case ReadUsage() as call:
                if self.meter is None:
                    raise NotSupported("usage is counted by key: expected a server with --api-keys or --jwt-jwks")
                return self.meter.rows(call)
            case calls.ReadStatistics():
                return read_statistics(self.registry, request.model, request.version)
        raise NotImplementedError(type(request.call).__name__)

    async def _control_call(self, request: Request[Any]) -> object:
        name, version, call = request.model, request.version, request.call
        match call:
            case calls.Index(_, ready):
                return self._control.index(ready=ready)
            case calls.Load(_, url, weights, config, files):
                is_loaded = bool(self.registry.versions(name))
                action = "weights" if weights is not None and not version else "reload" if is_loaded else "load"
                sent = {"url": url or None, "version_weights": weights, "files": len(files) or None}
                with self._audited(action, request, **sent, config=bool(config) or None):
                    await self._control.load(check_load_name(name), version, url, weights, config, files)
            case calls.ScaleModel(_, replicas):
                with self._audited("scale", request, replicas=replicas):
                    await self._control.scale(check_name(name), version, replicas)
            case calls.Unload(_, may_be_unknown):
                with self._audited("unload", request):
                    await self._control.unload(check_name(name), version, may_be_unknown=may_be_unknown)
        return None

    def _audited(self, action: str, request: Request[Any], **fields: object) -> AbstractContextManager[None]:
        """Log the change of a model that the block makes, or its failure, with the versions before and after."""
        named = {"model": request.model, "version": request.version or None, **fields}
        return audited(action, request.caller, named, partial(self.registry.state_of, request.model))

    async def _change_engine(self, request: Request[A]) -> Response[A]:
        """Answer a call that changes the text engine of a model."""
        call: Any = request.call
        action, names = _ENGINE_CHANGES[type(call)]
        with self._audited(action, request, **{name: getattr(call, field) for name, field in names.items()}):
            deployment = self._find(request)
            await _check_adapter(call, deployment)
            response = await complete(deployment.begin(request))
        if isinstance(call, LoadAdapter | UnloadAdapter):
            model, saved = deployment.spec.name, self._control.saved_models
            adapter = SavedAdapter(call.path, call.pinned) if isinstance(call, LoadAdapter) else None
            saved.change(model, adapters={**saved.of(model).adapters, call.name: adapter})
            change = f"adapter '{call.name}' {'loaded' if adapter else 'unloaded'}"
            await saved.flush(model, change, "change its folder of adapters")
        return response

    async def _restore_adapters(self) -> None:
        """Load and unload the LoRA adapters of models as clients did before a restart."""
        saved = self._control.saved_models
        for model in saved.names():
            for name, adapter in saved.of(model).adapters.items():
                call: LoadAdapter | UnloadAdapter = UnloadAdapter(name)
                if adapter is not None:
                    call = LoadAdapter(name, adapter.path, replaces=True, pinned=adapter.pinned)
                try:
                    if self.registry.find(model).is_loaded:  # else its reason is in the index
                        await _check_adapter(call, self.registry.find(model))
                        await complete(self.registry.find(model).begin(Request(call, model)))
                except DragomanError as error:
                    log.error("model '%s': adapter '%s' is not restored: %s", model, name, error.message)

    async def _call_all(self, requests: Sequence[Request[Any]], times: CallTimes) -> tuple[Response[Any], ...]:
        await ensure_task()
        tasks = [asyncio.ensure_future(self.call(request)) for request in self.registry.name_versions(requests)]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            times.cover(request.times for request in requests)

    def _ready(self, request: Request[Any], *, may_be_unknown: bool) -> bool:
        if not request.model:
            return self.ready()
        if may_be_unknown:
            versions = self.registry.versions(request.model)
            if not versions or (request.version and request.version not in versions):
                return False
        return not self._stops and self.registry.find(request.model, request.version).ready

    async def _describe(self, request: Request[Any], call: calls.Describe) -> ModelDescription:
        """Return the metadata of a model; one that was never loaded is loaded for it."""
        call_type: type[Call[Any]] = call.able or Call
        if call.otherwise is not None and not request.model:
            call_type = self._choose_call_type(call_type, call.otherwise)
        deployment = self.registry.find(self._model_of(request, call_type), request.version)
        if deployment.loads_on_demand and not (deployment.state == "READY" if call.load else deployment.is_loaded):
            await deployment.wait_until_loaded(request, time.monotonic())
        return self.description(deployment)

    def description(self, deployment: Deployment) -> ModelDescription:
        """Return the metadata of a model version; without a signature if it was never loaded. Raises NotReady."""
        spec = deployment.spec
        versions = tuple(v for v in self.registry.versions(spec.name) if v)
        if not deployment.is_loaded and deployment.loads_on_demand:
            known: dict[str, Any] = {"path": spec.uri, "kind": UNKNOWN, "description": one_line(spec.description)}
            return ModelDescription(spec.name, versions, spec.platform, Signature(), _ANY_CALL, **known)
        loaded = deployment.loaded
        return ModelDescription(
            spec.name,
            versions,
            loaded.platform,
            loaded.signature,
            loaded.calls,
            loaded.details,
            protocols=spec.protocols,
            path=spec.uri,
            max_batch_size=deployment.max_batch_size,
            max_batch_wait_s=spec.max_batch_wait_s,
            replicas=deployment.replicas,
            streams=loaded.streams,
            caches=deployment.response_cache is not None,
            labels=deployment.labels,
            sequences=loaded.sequences,
            handlers=loaded.handlers,
            example=deployment.example,
            answered_no_example=bool(deployment.trial_error),
            kind=loaded.kind,
            description=deployment.description,
            examples=deployment.examples,
            distributions=deployment.distributions,
        )

    @property
    def _start_is_over(self) -> bool:
        """True if every model has been tried at the start, or the server is shutting down."""
        return self.started or self._draining

    async def _measurements(self) -> tuple[Family, ...]:
        """Return all metrics. Other work of the event loop gets its turn between the models, which may be thousands."""
        await asyncio.sleep(0)  # metrics are formatted in a thread, as are all responses that are not there at once
        collector, began_s = FamilyCollector(), time.monotonic()
        for deployment in self.registry.all():
            collector.add(deployment.families())
            if time.monotonic() - began_s > _MEASURE_TURN_S:
                await asyncio.sleep(0)
                began_s = time.monotonic()
        collector.add(await call_in_thread(counters.prometheus_families))
        collector.add(await call_in_thread(self._gpus.families))
        workers = [
            ({"model": d.spec.name, "version": d.spec.version}, pool.process_ids())
            for d in self.registry.all()
            for pool in d.pools
        ]
        if any(processes for _, processes in workers):
            collector.add(process_families(workers, await call_in_thread(self._groups.read)))
        parts = (self._control, self.store, self.audit, self._loaded_models, self._loop_monitor)
        for source in (
            *(part.families for part in parts if part is not None),
            lambda: share_family(self.registry.weighted_versions()),
            lambda: counters.server_families(self._identity.version),
            *self.metric_sources,
        ):
            await asyncio.sleep(0)
            collector.add(source())
        families = collector.families()
        # To free the collector of 1,000 models at once takes 10 ms.
        for _ in collector.forget(_FORGOTTEN_AT_ONCE):
            await asyncio.sleep(0)
        return families

    def _authorize(self, token: str) -> None:
        if not self._identity.control_token and not self._identity.control_open:
            raise Forbidden("model control is off; an operator enables it with --control-token")
        if self._identity.control_token and not self._is_control_token(token):
            raise Unauthorized("This API is restricted, expecting header 'Authorization: Bearer <control token>'")

    def _shows_reasons(self, token: str | None) -> bool:
        return token is None or self._identity.has_open_reasons or self._is_control_token(token)

    def _is_control_token(self, token: str) -> bool:
        expected = self._identity.control_token.encode()
        return bool(expected) and hmac.compare_digest(token.encode(), expected)


async def _check_adapter(call: object, deployment: Deployment) -> None:
    """Raise InvalidInput if a call loads an adapter whose files are not as the operator's list of digests says."""
    if isinstance(call, LoadAdapter) and deployment.spec.model_digests:
        try:
            await asyncio.to_thread(check_folder, call.path, deployment.spec.model_digests)
        except ModelFailed as error:
            raise InvalidInput(f"failed to load adapter '{call.name}', {error.message}") from error
