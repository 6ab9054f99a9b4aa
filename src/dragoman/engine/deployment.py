"""One model version that answers calls: admission, deadline, batching, worker pool, metrics."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from types import CoroutineType
from typing import Any, TypeVar, cast

from msgspec import structs

from dragoman import plugins
from dragoman.core import error_texts
from dragoman.core.callers import Caller
from dragoman.core.calls import (
    Call,
    ClassLabels,
    Embedded,
    Generate,
    Infer,
    Inference,
    Request,
    Response,
    SignatureFor,
    Tensors,
)
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.dialect import OWN, Dialect
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    InvalidOutput,
    ModelFailed,
    NotReady,
    NotSupported,
    Overloaded,
)
from dragoman.core.fair_share import has_place, uncontended
from dragoman.core.metrics import Family, Sample, with_labels
from dragoman.core.model_digests import with_digests
from dragoman.core.schedule import MIN_DEADLINE_S, TIMEOUT, check_priority, requested_deadline_s, requested_timeout_s
from dragoman.core.scoring import Scored
from dragoman.core.spec import ModelSpec, Placement, SiblingModels
from dragoman.core.text import Generation
from dragoman.core.usage import UsageCounts, UsageMeter
from dragoman.core.vector_binding import missing_reason
from dragoman.engine.batch_counters import BatchCounters
from dragoman.engine.batching import Batcher
from dragoman.engine.binder import Binder, bound_request
from dragoman.engine.counters import CallCounters
from dragoman.engine.deadlines import WAITING, deadline_error, remaining_s, with_deadline
from dragoman.engine.generation_counters import GenerationUsage
from dragoman.engine.output_hints import OutputHints, share_rows
from dragoman.engine.placements import PreferredPlacements
from dragoman.engine.response_cache import CACHED_CALLS, ResponseCache, cache_families
from dragoman.engine.scheduled_batching import ScheduledBatcher
from dragoman.engine.sequence_pool import SequencePool, start_pool
from dragoman.engine.shipped import Shipped, read_shipped
from dragoman.engine.trial import NOT_TRIED, Trial, distributions, outputs_of, try_model
from dragoman.engine.warmup import LoadedReplicas, check_protocols, read_labels, warm_up
from dragoman.engine.worker_metrics import state_family
from dragoman.system.call_times import CallTimes, TokenUsage
from dragoman.system.coroutines import begin, complete, ensure_task
from dragoman.system.load_steps import LoadStep, observe_steps
from dragoman.system.threads import call_in_thread
from dragoman.workers.pool import Loaded, Pool, WrongPlacement, load_error

A = TypeVar("A")
log = logging.getLogger("dragoman.engine")
NOT_LOADED = "not loaded: the next request loads it"
TRIAL_FAILED = "ready, but the trial failed"

# What a model does, for error messages, where the class of the call has another name.
_CALL_NAMES = {"Embed": "embeddings", "Generate": "text generation", "Infer": "inference", "Tokenize": "tokenization"}

# Seconds after which clients of a model that is not ready may ask again, and the most while it loads.
_RETRY_S, _MAX_RETRY_S = 1.0, 10.0


class _NotLoaded(Exception):
    """The call has to load the model first."""


def dialect_of(spec: ModelSpec) -> Dialect | None:
    """Return the habits of the server that a model was written for; None for one of Dragoman's own."""
    if spec.dialect is not None or not plugins.has("runtimes", spec.runtime):
        return spec.dialect
    return plugins.runtime(spec.runtime).dialect


class Deployment:
    """A model version from LOADING over READY and UNLOADING to UNAVAILABLE; `reason` says why it is not ready.

    With `load`, which returns once it is READY, it is UNLOADED at first, and calls load it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        on_change: Callable[[], None],
        siblings: Callable[[str], SiblingModels] | None = None,
        load: "Callable[[Deployment], Awaitable[None]] | None" = None,
        placements: PreferredPlacements | None = None,
        meter: UsageMeter | UsageCounts | None = None,
    ) -> None:
        self.spec = spec
        self._served_by = spec.name, spec.version
        self._dialect = dialect_of(spec) or OWN
        self._loaded: Loaded | None = None
        self.state = "LOADING" if load is None else "UNLOADED"
        self.reason = ""
        self.update_error = ""  # why newer files of the model are not served
        self.step = LoadStep("waiting")  # of loading
        self._loading_since_s = monotonic()
        self.retries = False  # whether it could not be loaded yet, and is loaded again later
        self.placement: Placement = ""
        self.labels: Mapping[str, ClassLabels] = {}
        self.description = ""
        self.examples: Mapping[str, Tensors] = {}  # that the model ships, by name
        self.distributions: frozenset[str] = frozenset()
        self.counters = CallCounters(meter)
        self.counters.expect((Infer,))  # a model that is not loaded may answer any, most likely these
        self._load_for_call = load
        self._placements = placements or PreferredPlacements()
        self._on_change = on_change
        self._siblings = siblings
        self._pool: Pool | None = None
        self._starting: Pool | None = None
        self._batcher: Batcher | None = None
        self._merger: Batcher | SequencePool | None = None  # merges calls into batches, also those of sequences
        self.response_cache: ResponseCache | None = None
        self._binder: Binder
        # The inputs of a request that the model has answered when it was loaded, and why it has answered none.
        self.example: Tensors | None = None
        self.trial_error = ""
        self._hints: OutputHints | None = None  # of a model whose file declares its outputs
        self._observes = False  # whether answers may change what is known of the model
        self.is_copied = False  # whether server processes compute it instead of this one
        self._compute: Callable[[Request[Any]], Any]  # the pool's own function if nothing has to be done before
        self.in_flight = 0  # calls that are queued or running
        self._in_flight_of: Counter[str] = Counter()  # by owner, of those of keys
        self._uncontended = uncontended(spec.max_queue) if spec.max_queue else math.inf
        self._idle: asyncio.Event | None = None  # set once no call is in flight, if something waits for that

    # --- start and stop ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ModelFailed, or NotReady if it may load later; it is UNAVAILABLE then."""
        self.retries, self.state, self._loading_since_s = False, "LOADING", monotonic()
        try:
            if self.spec.model_digests:
                await self._check_files()
            if self.spec.protocols:
                await call_in_thread(check_protocols, self.spec)
            if self.spec.labels:
                self.labels = await asyncio.to_thread(read_labels, self.spec)
            with observe_steps(partial(setattr, self, "step"), self.spec.name):
                pool, loaded = await self._load()
                binder = Binder(loaded, self.spec.name)
                trial, shipped = await self._try(pool, loaded, binder)
        except BaseException as error:
            self.state, self.reason = "UNAVAILABLE", str(error) or type(error).__name__
            self.retries = isinstance(error, NotReady)
            self._on_change()
            raise
        stated = {n: ClassLabels("", names) for n, names in loaded.labels.items()}
        self.labels = {**stated, **shipped.labels, **self.labels}
        self.description, self.examples = shipped.description, shipped.examples
        self._pool, self._loaded, self._binder, self.trial_error = pool, loaded, binder, trial.error
        self.example = trial.inputs or self.example
        if loaded.signature.outputs_are_hints:
            self._hints = OutputHints(self.spec.name)
        if trial.outputs is not None:
            self.distributions = distributions(trial.outputs)
            loaded = self._correct(trial.outputs, trial.inputs)
        self._observes = self._hints is not None or bool(self.trial_error)
        self.counters.expect(loaded.calls)
        self.counters.counts_rows = loaded.signature.batched
        self._batcher = self._make_batcher(pool, loaded)
        self._merger = pool if isinstance(pool, SequencePool) else self._batcher
        self._compute = pool.call if self._batcher is None else self._compute_in_batches
        if self.spec.response_cache_bytes:
            self._add_cache(self.spec.response_cache_bytes, loaded)
        self.state, self.reason = "READY", ""
        self._on_change()

    async def _check_files(self) -> None:
        """Check the files before any code of the model is imported, and pass their digests to all workers."""
        try:
            self.spec = await asyncio.to_thread(with_digests, self.spec)
        except ModelFailed as error:
            raise load_error(self.spec.name, error.message, error) from error

    async def _try(self, pool: Pool, loaded: Loaded, binder: Binder) -> tuple[Trial, Shipped]:
        """Answer the warm-up requests, else an example; return the first one that is answered, and what is shipped.

        Raises the errors of warm-up. A model that calls load again and again is tried until it has an example.
        """
        model = LoadedReplicas(self.spec, self.placement, pool, loaded, binder)
        try:
            if self.spec.warmup:
                first = await warm_up(model)
                trial = NOT_TRIED if first is None else Trial(first[0].inputs, outputs_of(first[1]))
            else:
                trial = NOT_TRIED if self.example is not None else await try_model(model)
            return trial, await self._read_shipped(loaded)
        except BaseException:
            await pool.close()
            raise

    async def _read_shipped(self, loaded: Loaded) -> Shipped:
        """Return what the files beside the model say of it, which an object in memory has none of."""
        if self.spec.target is not None:
            return Shipped(loaded.description)
        return await asyncio.to_thread(read_shipped, self.spec, loaded)

    def _correct(self, outputs: Tensors, inputs: Tensors | None = None) -> Loaded:
        """Correct the metadata by outputs that the model has returned, for these inputs; return what is loaded.

        A model whose outputs have other numbers of rows than its inputs is not batched.
        """
        assert self._loaded is not None
        loaded, signature = self._loaded, self._loaded.signature
        if self._hints is not None:
            signature = self._hints.correct(signature, outputs)
            if inputs is not None and signature.batched and not share_rows(inputs, outputs):
                log.warning("calls are not merged, outputs have other rows than inputs: model=%s", self.spec.name)
                signature = replace(signature, batched=False)
        if signature is not loaded.signature:
            self._loaded = structs.replace(loaded, signature=signature)
            self._binder = Binder(self._loaded, self.spec.name)
        return self._loaded

    def _make_batcher(self, pool: Pool, loaded: Loaded) -> Batcher | None:
        """Return the batcher by the operator's settings, else the model's: inline models need settings, and a row limit
        that only the model has does not reject larger calls.
        """
        spec = self.spec
        if loaded.sequences is not None:
            if spec.schedule is not None:
                log.warning("schedule not used, model is stateful: %s", spec.name)
            return None
        if spec.max_batch_size > 1 and not loaded.signature.batched:
            log.warning("max_batch_size not used, model does not say that its inputs are rows (batched): %s", spec.name)
        is_inline = self.placement == "inline"
        own_size = 0 if spec.max_batch_size or is_inline else loaded.merges
        size = (spec.max_batch_size or own_size) if loaded.signature.batched else 0
        arguments = (pool, max(1, size), spec.max_batch_wait_s, spec.batch_linger, spec.name)
        calls_others = self._siblings is not None and self._siblings(spec.name).is_used
        flags: Any = {"accepts_larger": own_size > 0, "by_owner": calls_others}
        if spec.schedule is not None:
            return ScheduledBatcher(*arguments, spec.schedule, **flags)
        return Batcher(*arguments, **flags, always_queues=is_inline) if size > 1 else None

    def _add_cache(self, max_bytes: int, loaded: Loaded) -> None:
        if loaded.streams or loaded.sequences is not None or not CACHED_CALLS & loaded.calls:
            log.warning("response cache not used, model streams, generates text or is stateful: %s", self.spec.name)
            return
        self.response_cache = ResponseCache(max_bytes, self._compute, is_shared=self.spec.share_caches)
        self._compute = self.response_cache.call

    async def _load(self) -> tuple[Pool, Loaded]:
        """Load the model where it is configured to run, else where its runtime or the model itself prefers."""
        if self.spec.working_directory == "own":
            if self.spec.placement not in ("", "process"):
                raise ModelFailed(
                    f"failed to load '{self.spec.name}', working_directory 'own': expected placement 'process', got "
                    f"'{self.spec.placement}'; threads of one process share its working directory"
                )
            self.placement = "process"
            return await self._start_pool(self.placement, replace(self.spec, placement="process"))
        self.placement = self._placements.first(self.spec)
        try:
            return await self._start_pool(self.placement, self.spec)
        except WrongPlacement as error:
            self.placement = error.placement
            self._placements.remember(self.spec, self.placement)
        return await self._start_pool(self.placement, replace(self.spec, placement=self.placement))

    async def _start_pool(self, placement: Placement, spec: ModelSpec) -> tuple[Pool, Loaded]:
        if self._siblings is not None and placement in ("inline", "thread"):
            spec = replace(spec, siblings=self._siblings(spec.name))

        spec = replace(spec, dialect=self._dialect)

        def set_starting(pool: Pool) -> None:
            self._starting = pool if spec.launch is not None else None

        return await start_pool(placement, spec, self._on_change, set_starting)

    async def drain(self) -> None:
        """Reject new calls and wait for those in flight."""
        if self.state == "READY":
            self.state = "UNLOADING"
            self._on_change()
        await self.wait_until_idle()

    async def wait_until_idle(self) -> None:
        """Return once no call is queued or running."""
        while self.in_flight:
            if self._idle is None or self._idle.is_set():
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Stop at once; calls in flight fail."""
        self.state = "UNAVAILABLE"
        self.reason = self.reason or "unloaded"
        self._load_for_call = None
        await self.unload()
        self._on_change()

    async def unload(self) -> None:
        """Free the model's resources; its metadata stay known."""
        if self._batcher is not None:
            await self._batcher.close()
        if self._pool is not None:
            await self._pool.close()

    # --- state -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        """Set the state, and with it `_accepted`, the types of calls for which `_admit` has nothing to check."""
        self._state, self._accepted = state, frozenset[type[Any]]()
        if state == "READY" and self._loaded is not None and not self.spec.timeout_s:
            self._accepted = self._loaded.calls

    @property
    def ready(self) -> bool:
        is_running = self.state == "READY" and self._pool is not None and self._pool.ready
        return is_running or (self.loads_on_demand and self.state in ("UNLOADED", "LOADING"))

    @property
    def loads_on_demand(self) -> bool:
        """Whether calls load the model."""
        return self._load_for_call is not None

    @property
    def reported_state(self) -> str:
        """The state in the repository index: UNAVAILABLE if all workers of a model are down."""
        return "READY" if self.ready else "UNAVAILABLE" if self.state == "READY" else self.state

    @property
    def reported_reason(self) -> str:
        """Why the model is not ready, or not as it is on disk; "" if it is ready or its state explains it."""
        running = self._pool if self.state == "READY" else None
        reason = self.reason if running is None else running.unavailable or running.waiting
        if self.loads_on_demand and self.state == "UNLOADED":
            reason = NOT_LOADED
        waiting = (self._starting and self._starting.waiting) or ("loading" if self.loads_on_demand else "")
        if self.state == "LOADING" and waiting:
            reason = f"{waiting}; the last attempt failed: {reason}" if reason else waiting
        if not reason and self.update_error:
            return f"update failed: {self.update_error}"
        return reason or (f"{TRIAL_FAILED}: {self.trial_error}" if self.trial_error and self.ready else "")

    @property
    def platform(self) -> str:
        return self._loaded.platform if self._loaded is not None else self.spec.platform

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def answers(self, call: type[Call[Any]]) -> bool:
        """Return True if the model answers this call type, or may once a call has loaded it. `Call` is any type."""
        return call is Call or (self.loads_on_demand if self._loaded is None else call in self._loaded.calls)

    def scaled_spec(self, replicas: int) -> ModelSpec:
        """Return the spec with this number of replicas, unchanged if it has them. Raises NotReady, NotSupported."""
        if self._pool is None or self.state != "READY":
            raise self.not_ready()
        if replicas == self.replicas:
            return self.spec
        if not self._pool.is_replicated:
            raise NotSupported(
                f"model '{self.spec.name}' has one replica in the server's process, which answers all calls; expected "
                f"1 worker, got {replicas}; with `placement` process it may have several"
            )
        return replace(self.spec, replicas=replicas)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(filter(None, (self._pool or self._starting,)))  # also while a launcher starts it

    @property
    def batch_counters(self) -> BatchCounters | None:
        return None if self._merger is None else self._merger.counters

    def families(self) -> Iterable[Family]:
        """Return the metrics of the model version: of its calls, batches, cache and workers, and its own."""
        labels, batches = {"model": self.spec.name, "version": self.spec.version}, self.batch_counters
        yield from self.counters.families(labels, 0 if batches is None else batches.executions.total)
        ready = Sample("dragoman_model_ready", labels, float(self.ready))
        yield Family(ready.name, "gauge", "1 if a model version can answer.", (ready,))
        replicas = Sample("dragoman_replicas", labels, self.replicas)
        yield Family(replicas.name, "gauge", "Replicas of a model version, if it is loaded.", (replicas,))
        if batches is not None:
            yield from batches.families(labels)
        if self.response_cache is not None and self._loaded is not None:
            yield from cache_families(self.response_cache, labels, self._loaded.calls)
        yield from self.gauges()

    def gauges(self) -> Iterable[Family]:
        """Return the metrics of this moment, of the calls and queues of this process, and those of the model itself."""
        labels = {"model": self.spec.name, "version": self.spec.version}
        in_flight = Sample("dragoman_calls_in_flight", labels, self.in_flight)
        yield Family(in_flight.name, "gauge", "Calls that are queued or running.", (in_flight,))
        if self.batch_counters is not None:
            queued = Sample("dragoman_queued_calls", labels, self.batch_counters.queued())
            yield Family(queued.name, "gauge", "Calls that wait for a batch.", (queued,))
        if not self.is_copied:
            limit = Sample("dragoman_calls_in_flight_limit", labels, self.spec.max_queue or inf)
            yield Family(limit.name, "gauge", "Calls that may be queued or running at most.", (limit,))
            yield state_family(self.pools, labels)
        for pool in self.pools:
            yield from with_labels(pool.measurements(), labels)

    @property
    def max_batch_size(self) -> int:
        """The largest batch in rows, 0 if calls are not merged."""
        return 0 if self._merger is None else self._merger.max_rows

    @property
    def replicas(self) -> int:
        return self.spec.replicas if self._pool is not None and self._pool.is_replicated else 1

    @property
    def handlers(self) -> tuple[str, ...]:
        """Paths of the model's custom handlers, if it is loaded."""
        return self._loaded.handlers if self._loaded is not None else ()

    @property
    def loaded(self) -> Loaded:
        """The properties of the loaded model. Raises NotReady before that."""
        if self._loaded is None:
            raise self.not_ready()
        return self._loaded

    def not_ready(self) -> NotReady:
        """Return the error for clients, who may not read `reported_reason`."""
        state = WAITING if any(p.waiting for p in self.pools) else self.state.replace("READY", "UNAVAILABLE")
        return NotReady(error_texts.not_ready(self.spec.name, state), self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a client may ask again: while the model loads, as long as it has been loading.

        Clients ask two or three times, so a constant second would not outlast the load of a large model.
        """
        if self.state != "LOADING":
            return _RETRY_S
        return min(max(monotonic() - self._loading_since_s, _RETRY_S), _MAX_RETRY_S)

    def _check_places(self, caller: Caller) -> None:
        """Raise Overloaded if no further call may wait, or none of this caller, who leaves places to others."""
        most = self.spec.max_queue
        if not most:
            return
        if self.in_flight >= most:
            raise Overloaded(f"Exceeds maximum queue size of {most} for model '{self.spec.name}'")
        if caller.owner and not has_place(self._in_flight_of[caller.owner], self.in_flight, most):
            raise Overloaded(
                f"Exceeds the part of key '{caller.name}' in the queue of {most} for model '{self.spec.name}'"
            )

    # --- calls -------------------------------------------------------------------------------------------------

    def begin(
        self, request: Request[A], *, nested: bool = False, arrived_s: float = 0.0
    ) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        """Start a call: return its response, checked against the signature, or a coroutine if something has to wait.

        A `nested` call, made by another model during a call of its own, is accepted while the server drains too. One
        that has loaded the model arrived at `arrived_s`.
        """
        start_s, times = arrived_s or monotonic(), request.times
        if times.arrived_s:  # the same request was sent before
            times = CallTimes()
            request = structs.replace(request, times=times)
        try:
            call, deadline_s = request.call, request.deadline_s
            if (
                type(call) not in self._accepted
                or deadline_s is not None
                or self.in_flight >= self._uncontended
                or (type(call) is Infer and call.parameters)
            ):
                deadline_s = self._admit(request, start_s, nested=nested)
            bound = self._binder.bind(call)
            if bound is not call or deadline_s is not request.deadline_s:
                request = bound_request(request, bound, deadline_s)
            times.served_by = self._served_by
            answer: Any = self._compute(request) if bound is not None else self._compute_with_config(request)
        except _NotLoaded:
            return begin(self._begin_when_loaded(request, start_s))
        except BaseException as error:
            times.arrived_s = times.started_s
            self.counters.count(request, start_s, error)
            if type(error) is DeadlineExceeded:
                raise self._with_timeout(error, request) from error
            raise
        if type(answer) is CoroutineType:
            times.arrived_s = start_s
            return begin(self._complete(answer, request, start_s))
        # What is computed at once was in no queue; its checks were part of parsing.
        times.arrived_s = times.started_s or start_s
        if type(answer) is Generation:
            return self._response(answer, request, start_s)  # type: ignore[arg-type]
        self.counters.count(request, start_s)
        if self._observes:
            self._observe(answer)
        return Response(answer, self.spec.name, self.spec.version)

    async def _begin_when_loaded(self, request: Request[A], start_s: float) -> Response[A]:
        try:
            request = await self.wait_until_loaded(request, start_s)
        except BaseException as error:
            self.counters.count(request, start_s, error)
            raise
        # Also if the model is replaced just now.
        return await complete(self.begin(request, nested=True, arrived_s=start_s))

    async def wait_until_loaded(self, request: Request[A], now_s: float) -> Request[A]:
        """Load the model; return the request with its deadline. Raises NotReady, Overloaded, DeadlineExceeded."""
        assert self._load_for_call is not None
        self._check_places(request.caller)
        deadline_s = self._requested_deadline(request, now_s)
        if deadline_s is None and self.spec.timeout_s:
            deadline_s = now_s + self.spec.timeout_s
        request = structs.replace(request, deadline_s=deadline_s)
        self._enter(request.caller)
        try:
            await ensure_task()
            async with asyncio.timeout(remaining_s(request.deadline_s)):
                await self._load_for_call(self)
        except TimeoutError as error:
            raise deadline_error(self._starting) from error
        finally:
            self._leave(request.caller)
        return request

    async def _complete(self, computing: Coroutine[Any, Any, A], request: Request[A], start_s: float) -> Response[A]:
        """Return the response once the pool has computed the answer."""
        self._enter(request.caller)
        try:
            deadline_s = request.deadline_s
            answer = await (computing if deadline_s is None else with_deadline(deadline_s, computing, self._pool))
        except BaseException as error:
            self.counters.count(request, start_s, error)
            if type(error) is DeadlineExceeded:
                raise self._with_timeout(error, request) from error
            raise
        finally:
            self._leave(request.caller)
        return self._response(answer, request, start_s)

    def _response(self, answer: A, request: Request[A], start_s: float) -> Response[A]:
        usage = GenerationUsage.of(cast("Generation", answer)) if type(answer) is Generation else None
        if type(answer) is Embedded:
            request.times.tokens = TokenUsage("embedding", input=cast("Embedded", answer).tokens)
        elif type(answer) is Scored:
            request.times.computed_tokens = cast("Scored", answer).tokens, 0
        self.counters.count(request, start_s, None, usage)
        if self._observes:
            self._observe(answer)
        return Response(answer, self.spec.name, self.spec.version)

    def _observe(self, answer: Any) -> None:
        """Correct the metadata by an answer, and forget a failed trial."""
        if self.trial_error and type(answer) in (Inference, Generation):
            log.info("answered a request after its trial had failed: model=%s", self.spec.name)
            self.trial_error, self._observes = "", self._hints is not None
            self._on_change()
        if self._hints is not None and type(answer) is Inference:
            self._correct(answer.outputs)

    def stream(self, request: Request[A], *, nested: bool = False) -> ChunkStream[Response[A]]:
        """Return the responses to a call as they come. nested: see `begin`."""
        return ChunkStream(partial(self._stream, request, nested))

    async def _stream(self, request: Request[A], nested: bool, take: Take[Response[A]]) -> None:
        start_s = monotonic()
        error: BaseException | None = None
        usage = GenerationUsage() if type(request.call) is Generate else None
        if request.times.arrived_s:  # as in `begin`
            request = structs.replace(request, times=CallTimes())
        times, (name, version) = request.times, self._served_by

        def take_chunk(chunk: Any) -> Awaitable[None] | None:
            nonlocal error
            if usage is not None:
                usage.add(chunk)
            elif isinstance(chunk, DragomanError):
                error = chunk
            if self._observes:
                self._observe(chunk)
            if not times.first_chunk_s:
                times.first_chunk_s = monotonic()
            return take(Response(chunk, name, version))

        try:
            if self.loads_on_demand and self.state != "READY":
                request = await self.wait_until_loaded(request, start_s)
            deadline_s = self._admit(request, start_s, nested=nested or self.loads_on_demand)
            bound = self._binder.bind(request.call)
            request = bound_request(request, bound, deadline_s)
            times.served_by, times.arrived_s = self._served_by, start_s
            self._enter(request.caller)
            try:
                if bound is None:
                    request, _ = await self._binder.bind_configured(request, self._call_pool)
                assert self._pool is not None
                sending = self._pool.stream(request).send_to(take_chunk)
                await (sending if deadline_s is None else with_deadline(deadline_s, sending, self._pool))
            finally:
                self._leave(request.caller)
        except BaseException as raised:
            error = raised
            if type(error) is DeadlineExceeded:
                raise self._with_timeout(error, request) from error
            raise
        finally:
            self.counters.count(request, start_s, error, usage)

    def _admit(self, request: Request[Any], now_s: float, *, nested: bool = False) -> float | None:
        """Return the deadline of a request.

        Raises NotReady, Overloaded, NotSupported, DeadlineExceeded, and InvalidInput for its timeout or priority.
        """
        loaded, call, spec = self._loaded, request.call, self.spec
        if loaded is None or (self.state != "READY" and not (nested and self.state == "UNLOADING")):
            raise self.not_ready() if self._load_for_call is None else _NotLoaded
        self._check_places(request.caller)
        if type(call) not in loaded.calls and type(call) is not SignatureFor:
            name = type(call).__name__
            runtime = plugins.runtime(spec.runtime) if plugins.has("runtimes", spec.runtime) else None
            hint = runtime.unsupported.get(name, "") if runtime else ""
            hint = hint or missing_reason(loaded.details, type(call))
            raise NotSupported(f"model '{spec.name}' does not support {_CALL_NAMES.get(name, name)}{hint}")
        deadline_s = self._requested_deadline(request, now_s)
        if deadline_s is None:
            return now_s + spec.timeout_s if spec.timeout_s else None
        if deadline_s <= now_s:
            raise deadline_error(None)
        return deadline_s

    def _requested_deadline(self, request: Request[Any], now_s: float) -> float | None:
        """Return the earlier of the transport's deadline and that of the parameter `timeout`, if it is one.

        Raises InvalidInput for an invalid timeout or priority.
        """
        call, meaning = request.call, self._dialect.timeout
        if type(call) is not Infer or not call.parameters or meaning == "none":
            return request.deadline_s
        check_priority(call.parameters)
        if meaning == "deadline":
            return requested_deadline_s(call.parameters, request.deadline_s, now_s)
        requested_timeout_s(call.parameters)  # which is invalid for every model
        return request.deadline_s

    def _with_timeout(self, error: DeadlineExceeded, request: Request[Any]) -> DeadlineExceeded:
        """Return the error of a deadline with the parameter `timeout` of the request, whose unit is often mistaken."""
        call = request.call
        if type(call) is not Infer or self._dialect.timeout != "deadline":
            return error
        timeout_s = requested_timeout_s(call.parameters)
        if timeout_s < MIN_DEADLINE_S:
            return error
        shown = f"the parameter 'timeout' of the request is {call.parameters[TIMEOUT]} microseconds"
        return DeadlineExceeded(f"{error.message}; {shown}")

    def _compute_in_batches(self, request: Request[Any]) -> Any:
        """Return the answer to a bound request, or a coroutine that computes it, perhaps merged with others."""
        assert self._pool is not None
        assert self._batcher is not None
        return self._batcher.begin(request) or self._pool.call(request)

    async def _call_pool(self, request: Request[Any]) -> Any:
        assert self._pool is not None
        return await complete(self._pool.call(request))

    async def _compute_with_config(self, request: Request[A]) -> A:
        """Return the answer of a model whose sizes depend on the config of the call, checked against those."""
        request, configured = await self._binder.bind_configured(request, self._call_pool)
        if isinstance(request.call, SignatureFor):
            return cast("A", configured.signature)
        answer = await complete(self._compute(request))
        try:
            configured.check(answer, request.call)
        except InvalidOutput:
            if self.response_cache is not None:
                self.response_cache.discard(request)
            raise
        return cast("A", answer)

    def _enter(self, caller: Caller) -> None:
        self.in_flight += 1
        if caller.owner:
            self._in_flight_of[caller.owner] += 1

    def _leave(self, caller: Caller) -> None:
        self.in_flight -= 1
        if caller.owner:
            self._in_flight_of[caller.owner] -= 1
            if not self._in_flight_of[caller.owner]:
                del self._in_flight_of[caller.owner]
        if not self.in_flight and self._idle is not None:
            self._idle.set()
