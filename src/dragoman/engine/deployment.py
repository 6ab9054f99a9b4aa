"""One model version that answers calls: admission, deadline, batching, worker pool, metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from types import CoroutineType
from typing import Any, TypeVar, cast

from dragoman import plugins
from dragoman.core.calls import Call, ClassLabels, Generate, Infer, Request, Response, SignatureFor
from dragoman.core.errors import DeadlineExceeded, InvalidOutput, ModelFailed, NotReady, NotSupported, Overloaded
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec, Placement, SiblingModels
from dragoman.core.text import Generation
from dragoman.engine.batch_counters import BatchCounters
from dragoman.engine.batching import Batcher, mergeable, rows
from dragoman.engine.binder import Binder
from dragoman.engine.counters import CallCounters
from dragoman.engine.generation_counters import GenerationUsage
from dragoman.engine.response_cache import CACHED_CALLS, ResponseCache
from dragoman.engine.warmup import warm_up
from dragoman.system.coroutines import Pending, begin, complete, ensure_task
from dragoman.workers.pool import Loaded, Pool, WrongPlacement

A = TypeVar("A")
log = logging.getLogger("dragoman.engine")


class Deployment:
    """A model version from LOADING over READY and UNLOADING to UNAVAILABLE; `reason` says why it is not ready."""

    def __init__(
        self, spec: ModelSpec, on_change: Callable[[], None], siblings: Callable[[str], SiblingModels] | None = None
    ) -> None:
        self.spec = spec
        self.state = "LOADING"
        self.reason = ""
        self.update_error = ""  # why newer files of the model are not served
        self.retries = False  # whether it could not be loaded yet, and is loaded again later
        self.placement: Placement = ""
        self.labels: Mapping[str, ClassLabels] = {}
        self.counters = CallCounters()
        self._on_change = on_change
        self._siblings = siblings
        self._pool: Pool | None = None
        self._loaded: Loaded | None = None
        self._batcher: Batcher | None = None
        self.response_cache: ResponseCache | None = None
        self._model_batch_size = 0  # rows per batch if only the model asks for batching
        self._binder: Binder
        self._compute: Callable[[Request[Any]], Any]  # the pool's own function if nothing has to be done before
        self._in_flight = 0
        self._drained: asyncio.Event | None = None  # set once no call is in flight, while draining

    # --- start and stop ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ModelFailed, or NotReady if it may load later; it is UNAVAILABLE then."""
        self.retries = False
        try:
            if self.spec.protocols:
                await asyncio.to_thread(_check_protocols, self.spec)
            if self.spec.labels:
                self.labels = await asyncio.to_thread(_read_labels, self.spec)
            pool, loaded = await self._load()
            binder = Binder(loaded, self.spec.name)
            if self.spec.warmup:
                await self._warm_up(pool, loaded, binder)
        except BaseException as error:
            self.state, self.reason = "UNAVAILABLE", str(error) or type(error).__name__
            self.retries = isinstance(error, NotReady)
            self._on_change()
            raise
        self._pool, self._loaded, self._binder = pool, loaded, binder
        self._batcher = self._make_batcher(pool, loaded)
        self._compute = pool.call if self._batcher is None else self._compute_in_batches
        if self.spec.response_cache_bytes:
            self._add_cache(self.spec.response_cache_bytes, loaded)
        self.state, self.reason = "READY", ""
        self._on_change()

    def _make_batcher(self, pool: Pool, loaded: Loaded) -> Batcher | None:
        """Return the batcher by the operator's settings, else by the model's; none for inline models without
        settings.
        """
        spec = self.spec
        if spec.max_batch_size > 1 and loaded.signature.batched:
            return Batcher(pool, spec.max_batch_size, spec.max_batch_wait_s, spec.batch_linger, spec.name)
        self._model_batch_size = 0 if spec.max_batch_size or self.placement == "inline" else loaded.merges
        if self._model_batch_size > 1 and loaded.signature.batched:
            return Batcher(pool, self._model_batch_size, 0.0, model=spec.name)
        return None

    def _add_cache(self, max_bytes: int, loaded: Loaded) -> None:
        if loaded.streams or not CACHED_CALLS & loaded.calls:
            log.warning("response cache not used, the model streams or generates text: model=%s", self.spec.name)
            return
        self.response_cache = ResponseCache(max_bytes, self._compute)
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
        self.placement = _first_placement(self.spec)
        try:
            return await self._start_pool(self.placement, self.spec)
        except WrongPlacement as error:
            self.placement = error.placement
        return await self._start_pool(self.placement, replace(self.spec, placement=self.placement))

    async def _start_pool(self, placement: Placement, spec: ModelSpec) -> tuple[Pool, Loaded]:
        if self._siblings is not None and placement in ("inline", "thread"):
            spec = replace(spec, siblings=self._siblings(spec.name))
        pool: Pool = plugins.find("pools", placement)(spec, self._on_change)
        try:
            return pool, await pool.start()
        except BaseException:
            await pool.close()
            raise

    async def _warm_up(self, pool: Pool, loaded: Loaded, binder: Binder) -> None:
        try:
            await warm_up(self.spec, pool, loaded, binder)
        except BaseException:
            await pool.close()
            raise

    async def drain(self) -> None:
        """Reject new calls and wait for those in flight."""
        if self.state == "READY":
            self.state = "UNLOADING"
            self._on_change()
        if self._in_flight:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    async def close(self) -> None:
        """Stop at once; calls in flight fail."""
        self.state = "UNAVAILABLE"
        self.reason = self.reason or "unloaded"
        if self._batcher is not None:
            await self._batcher.close()
        if self._pool is not None:
            await self._pool.close()
        self._on_change()

    # --- state -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state == "READY" and self._pool is not None and self._pool.ready

    @property
    def reported_state(self) -> str:
        """The state in the repository index: UNAVAILABLE if all workers of a model are down."""
        return "UNAVAILABLE" if self.state == "READY" and not self.ready else self.state

    @property
    def reported_reason(self) -> str:
        """Why the model is not ready, or not as it is on disk; "" if it is ready or its state explains it."""
        reason = self._pool.unavailable if self.state == "READY" and self._pool is not None else self.reason
        return reason or (f"update failed: {self.update_error}" if self.update_error else "")

    @property
    def platform(self) -> str:
        return self._loaded.platform if self._loaded is not None else self.spec.platform

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def answers(self, call: type[Call[Any]]) -> bool:
        """Return True if the loaded model answers this call type; `Call` itself stands for any."""
        return call is Call or (self._loaded is not None and call in self._loaded.calls)

    def scaled_spec(self, replicas: int) -> ModelSpec:
        """Return the spec with this number of replicas, unchanged if it has them. Raises NotReady, NotSupported."""
        if self._pool is None or self.state != "READY":
            raise self._not_ready()
        if replicas == self.replicas:
            return self.spec
        if not self._pool.is_replicated:
            raise NotSupported(
                f"model '{self.spec.name}' has one replica in the server's process, which answers all calls; expected "
                f"1 worker, got {replicas}; with `placement` process it may have several"
            )
        return replace(self.spec, replicas=replicas)

    @property
    def in_flight(self) -> int:
        """Number of calls that are queued or running."""
        return self._in_flight

    def measurements(self) -> Sequence[Family]:
        """Return the model's own metrics, if it is loaded."""
        return self._pool.measurements() if self._pool is not None else ()

    @property
    def batch_counters(self) -> BatchCounters | None:
        """The counters of batches, if calls are merged."""
        return None if self._batcher is None else self._batcher.counters

    @property
    def max_batch_size(self) -> int:
        """The largest batch in rows, 0 if calls are not merged."""
        return 0 if self._batcher is None else self._batcher.max_rows

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
            raise self._not_ready()
        return self._loaded

    def _not_ready(self) -> NotReady:
        return NotReady(f"model '{self.spec.name}' is not ready: {self.reason or self.state}")

    # --- calls -------------------------------------------------------------------------------------------------

    def begin(self, request: Request[A], *, nested: bool = False) -> Response[A] | Coroutine[Any, Any, Response[A]]:
        """Start a call: return its response, checked against the signature, or a coroutine if something has to wait.

        A `nested` call, made by another model during a call of its own, is accepted while the server drains too.
        """
        start_s = time.monotonic()
        try:
            deadline_s = self._admit(request, start_s, nested=nested)
            bound = self._binder.bind(request.call)
            if bound is not request.call or deadline_s is not request.deadline_s:
                request = _admit_call(request, bound, deadline_s)
            answer: Any = self._compute(request) if bound is not None else self._compute_with_config(request)
        except BaseException as error:
            self.counters.count(request.call, start_s, error)
            raise
        if type(answer) is CoroutineType:
            return begin(self._complete(answer, request, start_s))
        if type(answer) is Generation:
            return self._response(answer, request, start_s)  # type: ignore[arg-type]
        self.counters.count(request.call, start_s)
        return Response(answer, self.spec.name, self.spec.version)

    async def _complete(self, computing: Coroutine[Any, Any, A], request: Request[A], start_s: float) -> Response[A]:
        """Return the response once the pool has computed the answer."""
        self._in_flight += 1
        try:
            answer = await (computing if request.deadline_s is None else _before(request.deadline_s, computing))
        except BaseException as error:
            self.counters.count(request.call, start_s, error)
            raise
        finally:
            self._leave()
        return self._response(answer, request, start_s)

    def _response(self, answer: A, request: Request[A], start_s: float) -> Response[A]:
        usage = GenerationUsage.of(cast("Generation", answer)) if type(answer) is Generation else None
        self.counters.count(request.call, start_s, None, usage)
        return Response(answer, self.spec.name, self.spec.version)

    async def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        """Yield the responses to a call as they come. Closing the generator cancels the call."""
        start_s, error = time.monotonic(), None
        usage = GenerationUsage() if type(request.call) is Generate else None
        try:
            deadline_s = self._admit(request, start_s)
            bound = self._binder.bind(request.call)
            async with aclosing(self._chunks(_admit_call(request, bound, deadline_s), bound is not None)) as chunks:
                async for chunk in chunks:
                    if usage is not None:
                        usage.add(chunk)
                    yield Response(chunk, self.spec.name, self.spec.version)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.counters.count(request.call, start_s, error, usage)

    def _admit(self, request: Request[Any], now_s: float, *, nested: bool = False) -> float | None:
        """Return the deadline of a request. Raises NotReady, Overloaded, NotSupported, DeadlineExceeded."""
        loaded, call, spec = self._loaded, request.call, self.spec
        if loaded is None or (self.state != "READY" and not (nested and self.state == "UNLOADING")):
            raise self._not_ready()
        if 0 < spec.max_queue <= self._in_flight:
            raise Overloaded(f"Exceeds maximum queue size of {spec.max_queue} for model '{spec.name}'")
        if type(call) not in loaded.calls and type(call) is not SignatureFor:
            raise NotSupported(f"model '{spec.name}' does not support {type(call).__name__}")
        deadline_s = request.deadline_s
        if deadline_s is None:
            return now_s + spec.timeout_s if spec.timeout_s else None
        if deadline_s <= now_s:
            raise DeadlineExceeded("Request timeout expired")
        return deadline_s

    def _compute_in_batches(self, request: Request[Any]) -> Any:
        """Return the answer to a bound request, or a coroutine that computes it, perhaps merged with others."""
        if self._batcher is not None and self._is_batched(request):
            return self._batcher.call(request)
        assert self._pool is not None
        return self._pool.call(request)

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

    def _is_batched(self, request: Request[Any]) -> bool:
        """True if a call may be merged with others. A row limit that only the model set does not reject larger ones."""
        call = request.call
        if not isinstance(call, Infer) or not mergeable(call, request.metadata):
            return False
        return not self._model_batch_size or rows(call) <= self._model_batch_size

    async def _chunks(self, request: Request[A], is_bound: bool) -> AsyncGenerator[A, None]:
        """Yield the chunks of a stream, each before the deadline."""
        assert self._pool is not None
        self._in_flight += 1
        try:
            if not is_bound:
                request, _ = await self._binder.bind_configured(request, self._call_pool)
            async with aclosing(self._pool.stream(request)) as chunks:
                while True:
                    try:
                        async with asyncio.timeout(_remaining_s(request.deadline_s)):
                            chunk = await anext(chunks)
                    except StopAsyncIteration:
                        return
                    yield chunk
        except TimeoutError as error:
            raise DeadlineExceeded("Request timeout expired") from error
        finally:
            self._leave()

    def _leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._drained is not None:
            self._drained.set()


def _admit_call(request: Request[A], bound: Any, deadline_s: float | None) -> Request[A]:
    """Return the request with its deadline, and its bound call unless that is None."""
    call = request.call if bound is None else bound
    return Request(call, request.model, request.version, request.id, deadline_s, request.metadata)


def _first_placement(spec: ModelSpec) -> Placement:
    """Return where a model is created first; it may then raise WrongPlacement before it is loaded."""
    if spec.placement:
        return spec.placement
    return "thread" if spec.target is not None else plugins.runtime(spec.runtime or "python").placement_for(spec)


def _read_labels(spec: ModelSpec) -> dict[str, ClassLabels]:
    """Return the class labels of the outputs. Raises ModelFailed if a file cannot be read."""
    labels = {}
    for output, path in spec.labels.items():
        file = Path(path)
        try:
            names = tuple(line.removesuffix("\r") for line in file.read_bytes().decode().split("\n"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelFailed(
                f"failed to load '{spec.name}', labels of output '{output}': '{file.name}' cannot be read: {reason}"
            ) from error
        labels[output] = ClassLabels(file.name, names)
    return labels


def _check_protocols(spec: ModelSpec) -> None:
    """Raise ModelFailed if the settings of a model for a protocol are invalid."""
    for name in spec.protocols:
        try:
            plugins.find("protocol_settings", name)(spec)
        except ModelFailed as error:
            raise ModelFailed(f"failed to load '{spec.name}', {error.message}") from error


async def _before(deadline_s: float, coroutine: Coroutine[Any, Any, A]) -> A:
    """Return the result of a coroutine, or raise DeadlineExceeded. A result that is there at once needs no timer."""
    begun = begin(coroutine)
    if not isinstance(begun, Pending):
        return begun
    with closing(begun):
        await ensure_task()
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await begun
        except TimeoutError as error:
            raise DeadlineExceeded("Request timeout expired") from error


def _remaining_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else deadline_s - time.monotonic()
