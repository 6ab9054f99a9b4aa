"""Run calls on one loaded model, whose methods are functions, generators or `async`."""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from dragoman import plugins
from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Call,
    Embed,
    Generate,
    Gradient,
    Handle,
    Infer,
    Request,
    SignatureFor,
    Tokenize,
)
from dragoman.core.error_text import MAX_CHARACTERS, public_message, public_text
from dragoman.core.errors import DeadlineExceeded, DragomanError, InvalidOutput, ModelFailed, NotReady, NotSupported
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement
from dragoman.workers.background import run_here, run_in_thread
from dragoman.workers.outcome import as_it_is, derivative, embedded, generation, inference
from dragoman.workers.pool import Loaded, WrongPlacement
from dragoman.workers.shortage import failure

log = logging.getLogger("dragoman.model")

Kind = Literal["value", "generator", "coroutine", "async generator"]

# The method for each call, and the function that makes the response from its result.
_VERBS: Mapping[type[Call[Any]], tuple[str, Callable[[Any, Any, Signature], Any]]] = {
    Infer: ("infer", inference),
    SignatureFor: ("signature_for", as_it_is),
    Gradient: ("gradient", derivative),
    ApplyJacobian: ("apply_jacobian", derivative),
    ApplyHessian: ("apply_hessian", derivative),
    Generate: ("generate", generation),
    Tokenize: ("tokenize", as_it_is),
    Embed: ("embed", embedded),
    Handle: ("handle", as_it_is),
}

# Exceptions of a model that must not end its thread or the event loop, such as sys.exit() in a request.
_FAULTS = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)


def kind_of(method: Callable[..., Any]) -> Kind:
    if inspect.isasyncgenfunction(method):
        return "async generator"
    if inspect.iscoroutinefunction(method):
        return "coroutine"
    return "generator" if inspect.isgeneratorfunction(method) else "value"


class Executor:
    """One loaded model. The kind of each method (function, generator, `async`) is determined once."""

    def __init__(self, model: Model, spec: ModelSpec) -> None:
        self.model = model
        self.name = spec.name
        self.loaded = _describe(model, spec)
        # What holds whatever the config of a call: the sizes are checked by whoever looked them up.
        self._unsized = _unsized(self.loaded.signature) if SignatureFor in self.loaded.calls else None
        self._kinds = {call: kind_of(getattr(model, method)) for call, (method, _) in _VERBS.items()}
        plain = [call for call in self.loaded.calls if self._kinds[call] == "value"]
        self._steps = {call: self._step(call) for call in plain}

    @classmethod
    async def load(cls, spec: ModelSpec, place: Placement, *, in_thread: bool = True) -> "Executor":
        """Make and load the model. Raises ModelFailed, NotReady where it may load later, or WrongPlacement before it is
        loaded in the wrong place.

        In a thread the event loop stays free; without, the model is loaded in the thread that it will run in. One that
        nobody waits for any more is closed once it is loaded.
        """
        run: Callable[..., Awaitable[Any]] = run_in_thread if in_thread else run_here
        try:
            made: Executor | Model = await run(_loaded, cls, spec, place, discard=_close)
            if isinstance(made, Model):
                await made.load()  # a coroutine
                made = await run(cls, made, spec, discard=_close)
            assert isinstance(made, Executor)
            return made
        except WrongPlacement:
            raise
        except NotReady as fault:
            raise NotReady(f"failed to load '{spec.name}', {fault.message}") from fault
        except DragomanError as fault:
            raise failure(fault)(f"failed to load '{spec.name}', {fault.message}") from fault
        except _FAULTS as fault:
            _unless_ours(fault)
            log.exception("model '%s' could not be loaded", spec.name)
            raise failure(fault)(f"failed to load '{spec.name}', {_told(fault)}") from fault

    @property
    def asynchronous(self) -> bool:
        """Whether any call runs `async` code, which needs the event loop."""
        able = [self._kinds[call] for call in self.loaded.calls]
        return any(kind in ("coroutine", "async generator") for kind in able)

    def measurements(self) -> Sequence[Family]:
        """Return the metrics of the model; none if it raises."""
        try:
            return tuple(self.model.measurements())
        except Exception:
            log.exception("model '%s' measurements() raised", self.name)
            return ()

    def unavailable(self) -> str:
        """Return why the model cannot answer now; "" while it can, or if it raises."""
        try:
            return self.model.unavailable()
        except Exception:
            log.exception("model '%s': unavailable() raised", self.name)
            return ""

    async def close(self) -> None:
        try:
            result = self.model.close()
            if inspect.isawaitable(result):
                await result
        except _FAULTS as fault:
            _unless_ours(fault)
            log.exception("model '%s' failed to close", self.name)

    # --- for plain methods and generators, in any thread -------------------------------------------------

    def one(self, request: Request[Any]) -> Any:
        """Return the response. Raises NotSupported if a generator yields none or several chunks."""
        step = self._steps.get(type(request.call))
        if step is not None:
            if request.deadline_s is not None:
                _check_deadline(request)
            return step(request)
        with closing(self.pieces(request)) as pieces:
            return self._only(list(islice(pieces, 2)))

    def pieces(self, request: Request[Any]) -> Generator[Any, None, None]:
        """Yield the chunks of the response. Closing it closes the model's generator."""
        if self._kind(request) == "value":
            yield self.one(request)
            return
        try:
            with closing(self._method(request)(self._asked(request))) as source:
                for piece in source:
                    yield self._finish(piece, request)
        except _FAULTS as fault:
            raise self._failed(fault, request) from fault

    # --- for every kind, on the event loop ---------------------------------------------------------------

    async def one_async(self, request: Request[Any]) -> Any:
        """As `one`, for any kind of method."""
        kind = self._kind(request)
        if kind == "value":
            return self.one(request)
        if kind == "coroutine":
            try:
                return self._finish(await self._method(request)(self._asked(request)), request)
            except _FAULTS as fault:
                _unless_ours(fault)
                raise self._failed(fault, request) from fault
        first_two = []
        async with aclosing(self.pieces_async(request)) as pieces:
            async for piece in pieces:
                first_two.append(piece)
                if len(first_two) > 1:
                    break
        return self._only(first_two)

    async def pieces_async(self, request: Request[Any]) -> AsyncGenerator[Any, None]:
        """As `pieces`, for any kind of method. Other tasks get a turn between two chunks."""
        kind = self._kind(request)
        streaming = _streaming(self.model) if isinstance(request.call, Infer) else None
        if kind == "coroutine" and streaming is None:
            yield await self.one_async(request)
        elif kind in ("coroutine", "async generator"):
            try:
                async with aclosing((streaming or self._method(request))(self._asked(request))) as source:
                    async for piece in source:
                        yield self._finish(piece, request)
            except _FAULTS as fault:
                _unless_ours(fault)
                raise self._failed(fault, request) from fault
        else:
            with closing(self.pieces(request)) as pieces:
                for piece in pieces:
                    yield piece
                    await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------------

    def _kind(self, request: Request[Any]) -> Kind:
        _check_deadline(request)
        call = type(request.call)
        if call not in self.loaded.calls:
            raise NotSupported(f"model '{self.name}' does not support {call.__name__}")
        return self._kinds[call]

    def _step(self, call: type[Call[Any]]) -> Callable[[Request[Any]], Any]:
        name, finish = _VERBS[call]
        method, takes_request = getattr(self.model, name), self.model.takes_request
        signature, unsized = self.loaded.signature, self._unsized

        def answer(request: Request[Any]) -> Any:
            asked = request.call
            try:
                result = method(request if takes_request else asked)
                return finish(result, asked, unsized if unsized and getattr(asked, "config", None) else signature)
            except _FAULTS as fault:
                raise self._failed(fault, request) from fault

        return answer

    def _method(self, request: Request[Any]) -> Callable[[Any], Any]:
        method: Callable[[Any], Any] = getattr(self.model, _VERBS[type(request.call)][0])
        return method

    def _asked(self, request: Request[Any]) -> Any:
        return request if self.model.takes_request else request.call

    def _finish(self, result: Any, request: Request[Any]) -> Any:
        signature = self.loaded.signature
        if self._unsized is not None and getattr(request.call, "config", None):
            signature = self._unsized
        return _VERBS[type(request.call)][1](result, request.call, signature)

    def _only(self, pieces: list[Any]) -> Any:
        if len(pieces) != 1:
            count = "no answer" if not pieces else "several answers"
            raise NotSupported(f"model '{self.name}' gives {count} to this call; ask for a stream")
        return pieces[0]

    def _failed(self, fault: BaseException, request: Request[Any]) -> DragomanError:
        if isinstance(fault, InvalidOutput):
            log.error("model '%s' failed on request %r: %s", self.name, request.id, fault.message)
            return InvalidOutput(f"model '{self.name}' failed: {public_message(fault.message)}")
        if isinstance(fault, DragomanError):
            return _public(fault)
        log.error("model '%s' failed on request %r", self.name, request.id, exc_info=fault)
        return ModelFailed(f"model '{self.name}' failed: {public_text(fault)}")


def _check_deadline(request: Request[Any]) -> None:
    if request.deadline_s is not None and request.deadline_s <= time.monotonic():
        raise DeadlineExceeded("Request timeout expired")


def _make(spec: ModelSpec) -> Model:
    made = plugins.runtime(spec.runtime or "python").load(spec)
    if not isinstance(made, Model):
        raise ModelFailed(f"runtime '{spec.runtime}' made {type(made).__name__}, expected a dragoman.Model")
    return made


def _loaded(kind: type[Executor], spec: ModelSpec, place: Placement) -> Executor | Model:
    """Create, load and wrap the model in one thread; return the bare model if its `load` must be awaited."""
    model = _make(spec)
    _settle(model, spec, place)
    if inspect.iscoroutinefunction(model.load):
        return model
    model.load()
    return kind(model, spec)


def _close(made: Executor | Model) -> None:
    """Close a model whose caller was cancelled while it loaded."""
    if isinstance(made, Executor):
        asyncio.run(made.close())


def _settle(model: Model, spec: ModelSpec, place: Placement) -> None:
    """Raise WrongPlacement if a model without a configured placement prefers another one."""
    if not spec.placement and model.placement not in ("", place):
        raise WrongPlacement(model.placement)


def _describe(model: Model, spec: ModelSpec) -> Loaded:
    signature = model.signature()
    if spec.inputs:
        signature = replace(signature, inputs=spec.inputs, open_inputs=False)
    if spec.outputs:
        signature = replace(signature, outputs=spec.outputs, open_outputs=False)
    calls = frozenset(
        call
        for call, (method, _) in _VERBS.items()
        if getattr(type(model), method) is not getattr(Model, method) or method in vars(model)
    )
    if not calls:
        able = ", ".join(method for method, _ in _VERBS.values())
        raise ModelFailed(f"{type(model).__name__} can answer nothing; expected a method predict, {able}")
    kinds = {kind_of(getattr(model, _VERBS[call][0])) for call in calls}
    infers = kind_of(model.infer) if Infer in calls else "value"
    return Loaded(
        signature=signature,
        platform=spec.platform or model.platform,
        calls=calls,
        streams=infers in ("generator", "async generator") or _streaming(model) is not None,
        concurrent=bool(kinds & {"coroutine", "async generator"}),
        merges=model.merges,
        details=dict(model.details()),
        handlers=tuple(model.handlers),
    )


def _unsized(signature: Signature) -> Signature:
    """Return the signature without its shapes."""
    inputs, outputs = (tuple(replace(s, shape=None) for s in side) for side in (signature.inputs, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)


def _streaming(model: Model) -> Callable[[Any], Any] | None:
    """Return the async generator `infer_stream` that an `async` model may have for streaming clients."""
    return getattr(model, "infer_stream", None)


def _unless_ours(fault: BaseException) -> None:
    """Re-raise a cancellation of this task; a CancelledError that the model raised itself is an ordinary error."""
    task = asyncio.current_task()
    if isinstance(fault, asyncio.CancelledError) and (task is None or task.cancelling()):
        raise fault


def _public(fault: DragomanError) -> DragomanError:
    """Return an error that a model raised for its client, without server paths and tracebacks of frameworks."""
    message = public_message(fault.message)
    if message != fault.message:
        log.warning("an error of a model was shortened for its caller; in full: %s", fault.message)
        fault.args = (message, *fault.args[1:])
    return fault


def _told(fault: BaseException) -> str:
    """Return the type and the message of an error, shortened."""
    text = f"{type(fault).__name__}: {fault}"
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
