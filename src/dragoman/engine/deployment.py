"""One version of one model that answers calls: admission, deadline, batching, and its pool."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

from dragoman import plugins
from dragoman.core.binding import bind
from dragoman.core.calls import Call, Infer, Inference, Request, SignatureFor
from dragoman.core.errors import DeadlineExceeded, ModelFailed, NotReady, NotSupported, Overloaded
from dragoman.core.metrics import Family
from dragoman.core.peers import Peers
from dragoman.core.spec import ModelSpec, Placement
from dragoman.engine.batching import Batcher, mergeable, rows
from dragoman.engine.placing import first_placement
from dragoman.engine.tally import Tally
from dragoman.engine.vector_calls import VectorCalls
from dragoman.system import eager
from dragoman.workers.pool import Elsewhere, Loaded, Pool

A = TypeVar("A")


class Deployment:
    """A model version from LOADING over READY and UNLOADING to UNAVAILABLE; `reason` says why it is not ready."""

    def __init__(
        self, spec: ModelSpec, changed: Callable[[], None], peers: Callable[[str], Peers] | None = None
    ) -> None:
        self.spec = spec
        self.state = "LOADING"
        self.reason = ""
        self.retries = False  # whether it could not be loaded yet, and is loaded again later
        self.place: Placement = ""
        self.tally = Tally()
        self._changed = changed
        self._peers = peers
        self._pool: Pool | None = None
        self._loaded: Loaded | None = None
        self._batcher: Batcher | None = None
        self._merges = 0  # to how many rows, where only the model wants it
        self._vectors: VectorCalls
        self._sized_by_config = False  # whether what it takes and gives may depend on the config of a call
        self._now: Mapping[type[Call[Any]], Callable[[Request[Any]], Any]] = {}  # what answers without waiting
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- its life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ModelFailed, or NotReady where that may work later, and is UNAVAILABLE then."""
        self.retries = False
        try:
            if self.spec.protocols:
                await asyncio.to_thread(_check_protocols, self.spec)
            self._pool, self._loaded = await self._placed()
        except BaseException as fault:
            self.state, self.reason = "UNAVAILABLE", str(fault) or type(fault).__name__
            self.retries = isinstance(fault, NotReady)
            self._changed()
            raise
        self._batcher = self._made_batcher(self._pool, self._loaded)
        self._vectors = VectorCalls(self._loaded, self.spec.name)
        self._sized_by_config = SignatureFor in self._loaded.calls
        self._now = self._pool.now if self._batcher is None else {}
        self.state, self.reason = "READY", ""
        self._changed()

    def _made_batcher(self, pool: Pool, loaded: Loaded) -> Batcher | None:
        """What merges calls: as the operator says, else as the model wants, to which merging inline brings nothing."""
        spec = self.spec
        if spec.max_batch_size > 1 and loaded.signature.batched:
            return Batcher(pool, spec.max_batch_size, spec.max_batch_wait_s, spec.batch_linger)
        self._merges = 0 if spec.max_batch_size or self.place == "inline" else loaded.merges
        return Batcher(pool, self._merges, 0.0) if self._merges > 1 and loaded.signature.batched else None

    async def _placed(self) -> tuple[Pool, Loaded]:
        if self.spec.working_directory == "own":
            return await self._pooled(self._separated(), replace(self.spec, placement="process"))
        self.place = first_placement(self.spec)
        try:
            return await self._pooled(self.place, self.spec)
        except Elsewhere as wish:
            self.place = wish.placement
        return await self._pooled(self.place, replace(self.spec, placement=self.place))

    def _separated(self) -> Placement:
        """The placement of a model whose replicas each have a working directory. Raises ModelFailed."""
        if self.spec.placement not in ("", "process"):
            raise ModelFailed(
                f"failed to load '{self.spec.name}', working_directory 'own': expected placement 'process', got "
                f"'{self.spec.placement}'; threads of one process share its working directory"
            )
        self.place = "process"
        return self.place

    async def _pooled(self, placement: Placement, spec: ModelSpec) -> tuple[Pool, Loaded]:
        if self._peers is not None and placement in ("inline", "thread"):
            spec = replace(spec, peers=self._peers(spec.name))
        pool: Pool = plugins.find("pools", placement)(spec, self._changed)
        try:
            return pool, await pool.start()
        except BaseException:
            await pool.close()
            raise

    async def drain(self) -> None:
        """Take no more calls and wait for those in flight."""
        self._now = {}
        if self.state == "READY":
            self.state = "UNLOADING"
            self._changed()
        await self._idle.wait()

    async def close(self) -> None:
        """Stop at once; calls in flight fail."""
        self._now = {}
        self.state = "UNAVAILABLE"
        self.reason = self.reason or "unloaded"
        if self._batcher is not None:
            await self._batcher.close()
        if self._pool is not None:
            await self._pool.close()
        self._changed()

    # --- what it tells ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state == "READY" and self._pool is not None and self._pool.ready

    @property
    def told_state(self) -> str:
        """The state as the repository index tells it: a model all of whose workers are down is UNAVAILABLE."""
        return "UNAVAILABLE" if self.state == "READY" and not self.ready else self.state

    @property
    def told_reason(self) -> str:
        """Why it is not ready, "" while it is, or where there is no more to say than its state."""
        return self._pool.unavailable if self.state == "READY" and self._pool is not None else self.reason

    @property
    def platform(self) -> str:
        return self._loaded.platform if self._loaded is not None else self.spec.platform

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def answers(self, call: type[Call[Any]]) -> bool:
        """Whether the model, as far as it is loaded, answers this type of call; any answers `Call` itself."""
        return call is Call or (self._loaded is not None and call in self._loaded.calls)

    def scaled(self, replicas: int) -> ModelSpec:
        """The spec with so many replicas, the very same where they are there. Raises NotReady, or NotSupported."""
        if self._pool is None or self.state != "READY":
            raise self._not_ready()
        if replicas == (self.spec.replicas if self._pool.replicated else 1):
            return self.spec
        if not self._pool.replicated:
            raise NotSupported(
                f"model '{self.spec.name}' has one replica in the server's process, which answers all calls; expected "
                f"1 worker, got {replicas}; with `placement` process it may have several"
            )
        return replace(self.spec, replicas=replicas)

    @property
    def in_flight(self) -> int:
        """How many calls wait or are computed."""
        return self._in_flight

    def measurements(self) -> Sequence[Family]:
        """What the model measures of itself, as far as it is loaded."""
        return self._pool.measurements() if self._pool is not None else ()

    @property
    def handlers(self) -> tuple[str, ...]:
        """Paths of the model's own, as far as it is loaded."""
        return self._loaded.handlers if self._loaded is not None else ()

    @property
    def loaded(self) -> Loaded:
        """What the model told; NotReady before it is loaded."""
        if self._loaded is None:
            raise self._not_ready()
        return self._loaded

    def _not_ready(self) -> NotReady:
        return NotReady(f"model '{self.spec.name}' is not ready: {self.reason or self.state}")

    # --- calls -------------------------------------------------------------------------------------------------

    def now(self, request: Request[A]) -> A | None:
        """The answer of `call`, where nobody has to wait for it and nothing else is under way; None elsewhere."""
        call: Any = request.call
        loaded = self._loaded
        deadline_s = request.deadline_s
        bound: Any
        step = self._now.get(type(call))
        if step is None or self._in_flight or loaded is None:
            return None
        if deadline_s is not None and deadline_s <= time.monotonic():
            return None
        if type(call) is Infer and call.positional is None and not self._sized_by_config:
            bound = bind(call, loaded.signature, self.spec.name)
        elif (bound := self._vectors.bound_now(call)) is None:
            return None
        if bound is not call:
            request = Request(bound, request.model, request.version, request.id, deadline_s, request.metadata)
        answer: A = step(request)
        return answer

    async def call(self, request: Request[A], *, inside: bool = False) -> A:
        """The one answer to a model's call, checked against the signature.

        One from `inside`, by a model that is answering a call itself, is taken while the server drains too.
        """
        request, pool = self._admit(request, inside=inside)
        self._enter()
        try:
            if request.deadline_s is None:
                return await self._answer(request, pool)
            return await _within(request.deadline_s, self._answer(request, pool))
        except TimeoutError as fault:
            raise DeadlineExceeded("Request timeout expired") from fault
        finally:
            self._leave()

    def _answer(self, request: Request[A], pool: Pool) -> Coroutine[Any, Any, A]:
        """The way of an answer, with no step in between that not every call needs."""
        if self._vectors.depends(request.call):
            return self._configured(request, pool, self._vectors)
        return self._computed(request, pool) if self._batcher is not None else pool.call(request)

    async def _configured(self, request: Request[A], pool: Pool, vectors: VectorCalls) -> A:
        """The answer of a model whose sizes depend on the call's config, checked against those."""
        sized = await vectors.sized(request, pool.call)
        if isinstance(request.call, SignatureFor):
            signature: Any = sized.signature
            return cast("A", signature)
        bound = vectors.bound(request.call, sized)
        answer = await self._computed(replace(request, call=bound), pool)
        sized.check(answer, bound)
        return answer

    async def _computed(self, request: Request[A], pool: Pool) -> A:
        if self._merged(request):
            assert self._batcher is not None
            batched: Any = self._batcher.call(cast("Request[Inference]", request))
            answer: A = await batched
            return answer
        return await pool.call(request)

    def _merged(self, request: Request[Any]) -> bool:
        """Whether a call may go together with others; a limit that nobody set refuses none that is larger."""
        call = request.call
        if self._batcher is None or not isinstance(call, Infer) or not mergeable(call, request.metadata):
            return False
        return not self._merges or rows(call) <= self._merges

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        """The answers to a model's call as they come."""
        request, pool = self._admit(request)
        self._enter()
        vectors = self._vectors
        pieces = self._streamed(request, pool, vectors) if vectors.depends(request.call) else pool.stream(request)
        try:
            while True:
                try:
                    async with asyncio.timeout(_left_s(request.deadline_s)):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                yield piece
        except TimeoutError as fault:
            raise DeadlineExceeded("Request timeout expired") from fault
        finally:
            await pieces.aclose()
            self._leave()

    async def _streamed(self, request: Request[A], pool: Pool, vectors: VectorCalls) -> AsyncGenerator[A, None]:
        """The answers of a model whose sizes depend on the call's config."""
        request = replace(request, call=vectors.bound(request.call, await vectors.sized(request, pool.call)))
        async with aclosing(pool.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    def _admit(self, request: Request[A], *, inside: bool = False) -> tuple[Request[A], Pool]:
        """The request, bound to the signature and with its deadline, or the reason why it cannot be taken."""
        loaded = self.loaded
        if (self.state != "READY" and not (inside and self.state == "UNLOADING")) or self._pool is None:
            raise self._not_ready()
        if 0 < self.spec.max_queue <= self._in_flight:
            raise Overloaded(f"Exceeds maximum queue size of {self.spec.max_queue} for model '{self.spec.name}'")
        call: Any = request.call
        if type(call) not in loaded.calls and not isinstance(call, SignatureFor):
            raise NotSupported(f"model '{self.spec.name}' does not support {type(call).__name__}")
        deadline_s = request.deadline_s
        if deadline_s is None and self.spec.timeout_s:
            deadline_s = time.monotonic() + self.spec.timeout_s
        bound = self._bound(call, loaded)
        if bound is not call or deadline_s is not request.deadline_s:
            same = request.model, request.version, request.id
            return Request(bound, *same, deadline_s, request.metadata), self._pool
        return request, self._pool

    def _bound(self, call: Any, loaded: Loaded) -> Any:
        """The call, checked against the signature, where that does not depend on the call."""
        if type(call) is Infer and call.positional is None and not self._sized_by_config:
            return bind(call, loaded.signature, self.spec.name)
        bound = self._vectors.bound_now(call)
        return self._vectors.opened(call) if bound is None else bound

    def _enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()


def _check_protocols(spec: ModelSpec) -> None:
    """Raises ModelFailed where what the operator says of a model to a protocol makes no sense."""
    for name in spec.protocols:
        try:
            plugins.find("protocol_settings", name)(spec)
        except ModelFailed as fault:
            raise ModelFailed(f"failed to load '{spec.name}', {fault.message}") from fault


async def _within(deadline_s: float, answering: Coroutine[Any, Any, A]) -> A:
    """The answer, or TimeoutError; one that is there at once needs no timer."""
    begun = eager.begun(answering)
    if not isinstance(begun, eager.Waiting):
        return begun
    await eager.in_task()
    async with asyncio.timeout(deadline_s - time.monotonic()):
        return await eager.resumed(answering, begun)


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else deadline_s - time.monotonic()
