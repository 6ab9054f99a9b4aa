"""Run calls on one loaded model, whose methods are functions, generators or `async`, and time them."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from subprocess import CalledProcessError, TimeoutExpired
from time import monotonic
from typing import Any, Literal, TypeGuard

from msgspec import structs

from dragoman import plugins
from dragoman.core.about import one_line
from dragoman.core.callers import current_caller
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
    Tensors,
    Tokenize,
)
from dragoman.core.chunks import ChunkStream, ReaderClosed, Take
from dragoman.core.errors import (
    MAX_CHARACTERS,
    DeadlineExceeded,
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotReady,
    NotSupported,
    WorkerLost,
    error_text,
    public_message,
    public_text,
)
from dragoman.core.foreign_code import is_interruption
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.model_digests import begin_load
from dragoman.core.scoring import Score
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor
from dragoman.core.text_engine_calls import LoadAdapter, ResetPrefixCache, UnloadAdapter
from dragoman.system.call_times import current_call
from dragoman.system.load_steps import report_step
from dragoman.system.request_context import request_id
from dragoman.system.threads import TimeLimitExceededError, run_here, run_in_thread
from dragoman.workers.pool import Loaded, WrongPlacement, load_error, load_limit_s, load_timeout_message
from dragoman.workers.results import derivative, embeddings, generation, inference, return_unchanged, scores
from dragoman.workers.sequence_states import SequenceStates

log = logging.getLogger("dragoman.model")

_MAX_PROGRAM_OUTPUT = 4000  # characters in the log

MethodKind = Literal["value", "generator", "coroutine", "async generator"]

# The method for each call, and the function that converts its result to the response.
_METHODS: Mapping[type[Call[Any]], tuple[str, Callable[[Any, Any, Signature], Any]]] = {
    Infer: ("infer", inference),
    SignatureFor: ("signature_for", return_unchanged),
    Gradient: ("gradient", derivative),
    ApplyJacobian: ("apply_jacobian", derivative),
    ApplyHessian: ("apply_hessian", derivative),
    Generate: ("generate", generation),
    Tokenize: ("tokenize", return_unchanged),
    LoadAdapter: ("load_adapter", return_unchanged),
    UnloadAdapter: ("unload_adapter", return_unchanged),
    ResetPrefixCache: ("reset_prefix_cache", return_unchanged),
    Embed: ("embed", embeddings),
    Score: ("score", scores),
    Handle: ("handle", return_unchanged),
}


def _method_kind(method: Callable[..., Any]) -> MethodKind:
    if inspect.isasyncgenfunction(method) or getattr(method, "returns_chunk_stream", False):
        return "async generator"
    if inspect.iscoroutinefunction(method):
        return "coroutine"
    return "generator" if inspect.isgeneratorfunction(method) else "value"


class Executor:
    """One loaded model. The kind of each method (function, generator, `async`) is determined once.

    A model may raise any BaseException, such as `sys.exit()` in a request, or the panic of a library in Rust: it ends
    neither a thread nor the event loop, and the caller gets an error.

    is_lost: whether the model can never answer again in this process, as of the last `unavailable()`.
    has_measurements: whether the model reports metrics.
    """

    def __init__(self, model: Model, spec: ModelSpec) -> None:
        self.model = model
        self.name = spec.name
        self.is_lost = False
        self.loaded = _describe(model, spec)
        # The engine checks sizes that depend on the config of a call; here everything but the shapes is checked then.
        self._unsized = _without_shapes(self.loaded.signature) if SignatureFor in self.loaded.calls else None
        self._kinds = {call: _method_kind(getattr(model, method)) for call, (method, _) in _METHODS.items()}
        # The methods that are plain functions, and what converts their results.
        self._functions = {
            call: (getattr(model, method), convert, model.takes_request)
            for call, (method, convert) in _METHODS.items()
            if call in self.loaded.calls and self._kinds[call] == "value"
        }
        self._measurements_error = ""
        self.has_measurements = type(model).measurements is not Model.measurements
        self._states = SequenceStates(spec.name) if self.loaded.sequences is not None else None
        if self._states is not None and Infer in self._functions:
            method, convert, takes_request = self._functions[Infer]
            self._functions[Infer] = (lambda argument: method(self._with_state(argument)), convert, takes_request)

    @classmethod
    async def load(cls, spec: ModelSpec, placement: Placement, *, in_thread: bool = True) -> "Executor":
        """Create and load the model.

        With `in_thread` the event loop stays free; without, the model is loaded in the thread that it will run in. If
        this is cancelled, the model is closed once it is loaded.

        Raises ModelFailed, NotReady if it may load later, or WrongPlacement before it is loaded.
        """
        run: Callable[..., Awaitable[Any]] = run_in_thread if in_thread else run_here
        try:
            limit_s = load_limit_s(spec)
            check = None if spec.digests is None else await run(begin_load, spec, discard=_ignore)
            result: Executor | Model = await run(_load, cls, spec, placement, discard=_close, limit_s=limit_s)
            if isinstance(result, Model):
                await result.load()  # a coroutine
                result = await run(cls, result, spec, discard=_close)
            assert isinstance(result, Executor)
            if check is not None:
                try:
                    await run(check.confirm, discard=_ignore)
                except BaseException:
                    await result.close()
                    raise
            return result
        except WrongPlacement:
            raise
        except TimeLimitExceededError as error:
            raise load_error(spec.name, load_timeout_message(spec), error) from error
        except NotReady as error:
            raise NotReady(f"failed to load '{spec.name}', {error.message}") from error
        except DragomanError as error:
            raise load_error(spec.name, error.message, error) from error
        except BaseException as error:
            if is_interruption(error):
                raise
            _add_program_output(error)
            log.exception("model '%s' could not be loaded", spec.name)
            raise load_error(spec.name, _describe_error(error), error) from error

    def measurements(self) -> Sequence[Family]:
        """Return the metrics of the model; none if it raises."""
        try:
            return tuple(self.model.measurements())
        except BaseException as error:
            text = public_text(error)
            if text != self._measurements_error:  # logged once: it may be called every second
                log.exception("model '%s': measurements() raised", self.name)
                self._measurements_error = text
            return ()

    def unavailable(self) -> str:
        """Return why the model cannot answer now; "" while it can, or if it raises."""
        try:
            return self.model.unavailable()
        except WorkerLost as error:
            self.is_lost = True
            return error.message
        except BaseException:
            log.exception("model '%s': unavailable() raised", self.name)
            return ""

    async def close(self) -> None:
        try:
            result = self.model.close()
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if is_interruption(error):
                raise
            log.exception("model '%s': close() raised", self.name)

    # --- for functions and generators, in any thread -----------------------------------------------------

    def call(self, request: Request[Any]) -> Any:
        """Return the response. Raises NotSupported if a generator yields none or several chunks."""
        current_caller.set(request.caller)
        call = request.call
        function = self._functions.get(type(call))
        if function is not None:
            if request.deadline_s is not None:
                _check_deadline(request.deadline_s)
            method, convert, takes_request = function
            signature = self.loaded.signature
            if self._unsized is not None and getattr(call, "config", None):
                signature = self._unsized
            times = request.times
            times.started_s = monotonic()
            try:
                return convert(method(request if takes_request else call), call, signature)
            except BaseException as error:
                raise self._public_error(error, request) from _cause(error)
            finally:
                times.computed_s = monotonic()
        with closing(self.stream(request)) as chunks:
            return self._single(list(islice(chunks, 2)))

    def stream(self, request: Request[Any]) -> Generator[Any, None, None]:
        """Yield the chunks of the response; a DragomanError is that of one chunk. Closing it closes the model's
        generator."""
        if self._kind(request) == "value":
            yield self.call(request)
            return
        request.times.started_s = monotonic()
        try:
            call, convert, signature = self._conversion(request)
            with closing(self._begin(request)) as results:
                for result in results:
                    is_error = isinstance(result, DragomanError)
                    yield self._public_error(result, request) if is_error else convert(result, call, signature)
        except BaseException as error:
            if is_interruption(error):
                raise
            raise self._public_error(error, request) from _cause(error)
        finally:
            request.times.computed_s = monotonic()

    # --- for every kind of method, on the event loop -----------------------------------------------------

    async def call_async(self, request: Request[Any]) -> Any:
        """As `call`, for any kind of method."""
        kind = self._kind(request)
        if kind == "value":
            return self.call(request)
        if kind == "coroutine":
            current_call.set(request.times)
            request.times.started_s = monotonic()
            try:
                call, convert, signature = self._conversion(request)
                return convert(await self._begin(request), call, signature)
            except BaseException as error:
                if is_interruption(error):
                    raise
                raise self._public_error(error, request) from _cause(error)
            finally:
                request.times.computed_s = monotonic()
        first_two: list[Any] = []

        def take(chunk: Any) -> None:
            first_two.append(chunk)
            if len(first_two) > 1:
                raise ReaderClosed

        with suppress(ReaderClosed):
            await self.stream_async(request, take)
        return self._single(first_two)

    async def stream_async(self, request: Request[Any], take: Take[Any]) -> None:
        """As `stream`, for any kind of method: pass the chunks to `take`. Other tasks get a turn between them."""
        kind = self._kind(request)
        stream_method = _stream_method(self.model) if isinstance(request.call, Infer) else None
        if kind == "coroutine" and stream_method is None:
            if (wait := take(await self.call_async(request))) is not None:
                await wait
        elif kind in ("coroutine", "async generator"):
            current_call.set(request.times)
            request.times.started_s = monotonic()
            try:
                call, convert, signature = self._conversion(request)

                def convert_and_take(result: Any) -> Awaitable[None] | None:
                    is_error = isinstance(result, DragomanError)
                    return take(self._public_error(result, request) if is_error else convert(result, call, signature))

                results = self._begin(request, stream_method)
                stream = results if isinstance(results, ChunkStream) else ChunkStream.of(results)
                await stream.send_to(convert_and_take)
            except BaseException as error:
                if is_interruption(error):
                    raise
                raise self._public_error(error, request) from _cause(error)
            finally:
                request.times.computed_s = monotonic()
        else:
            with closing(self.stream(request)) as chunks:
                for chunk in chunks:
                    if (wait := take(chunk)) is not None:
                        await wait
                    await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------------

    def _kind(self, request: Request[Any]) -> MethodKind:
        current_caller.set(request.caller)
        if request.deadline_s is not None:
            _check_deadline(request.deadline_s)
        call = type(request.call)
        if call not in self.loaded.calls:
            raise NotSupported(f"model '{self.name}' does not support {call.__name__}")
        return self._kinds[call]

    def _begin(self, request: Request[Any], method: Callable[[Any], Any] | None = None) -> Any:
        """Call the method for a request, or another one; return its generator or coroutine."""
        argument = request if self.model.takes_request else request.call
        if self._states is not None:
            argument = self._with_state(argument)
        return (method or getattr(self.model, _METHODS[type(request.call)][0]))(argument)

    def _with_state(self, argument: Any) -> Any:
        """Return the argument of a method of a stateful model with the states of its sequences."""
        assert self._states is not None
        if isinstance(argument, Infer):
            return self._states.attach(argument)
        if isinstance(argument, Request) and isinstance(argument.call, Infer):
            return structs.replace(argument, call=self._states.attach(argument.call))
        return argument

    def _conversion(self, request: Request[Any]) -> tuple[Any, Callable[[Any, Any, Signature], Any], Signature]:
        """Return the call, the function that converts its results, and the signature for that."""
        call, signature = request.call, self.loaded.signature
        if self._unsized is not None and getattr(call, "config", None):
            signature = self._unsized
        return call, _METHODS[type(call)][1], signature

    def _single(self, chunks: list[Any]) -> Any:
        if len(chunks) != 1:
            count = "no response" if not chunks else "several responses"
            raise NotSupported(f"model '{self.name}' gives {count} to this call; request a stream")
        if isinstance(chunks[0], DragomanError):
            raise chunks[0]
        return chunks[0]

    def _public_error(self, error: BaseException, request: Request[Any]) -> DragomanError:
        """Log an exception of the model; return the error for the client, without server paths and tracebacks."""
        level = logging.DEBUG if request.is_trial else logging.ERROR
        if isinstance(error, InvalidOutput):
            log.log(level, "model '%s' failed on request %r: %s", self.name, request.id or request_id(), error.message)
            return InvalidOutput(f"model '{self.name}' failed: {public_message(error.message)}")
        if _is_for_clients(error):
            message = public_message(error.message)
            if message != error.message:
                log.warning("model '%s': error message was shortened for the client: %s", self.name, error.message)
                error.args = (message, *error.args[1:])
            return error
        _add_program_output(error)
        log.log(level, "model '%s' failed on request %r", self.name, request.id or request_id(), exc_info=error)
        return ModelFailed(f"model '{self.name}' failed: {public_text(error)}")


def _add_program_output(error: BaseException) -> None:
    """Add what a program of the model wrote before it failed, which its exception does not show, for the log."""
    seen: set[int] = set()
    failure: BaseException | None = error
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        if isinstance(failure, CalledProcessError | TimeoutExpired):
            for name, output in (("stderr", failure.stderr), ("stdout", failure.stdout)):
                if output:
                    text = output.decode(errors="replace") if isinstance(output, bytes) else str(output)
                    failure.add_note(f"the end of its {name}:\n{text[-_MAX_PROGRAM_OUTPUT:].rstrip()}")
                    break
        failure = failure.__cause__ or failure.__context__


def _is_for_clients(error: BaseException) -> TypeGuard[DragomanError]:
    return isinstance(error, DragomanError) and not isinstance(error, InvalidOutput)


def _cause(error: BaseException) -> BaseException | None:
    """Return the cause of the public error: an error that is its own cause would keep the request, as a cycle."""
    return None if _is_for_clients(error) else error


def _check_deadline(deadline_s: float) -> None:
    if deadline_s <= monotonic():
        raise DeadlineExceeded("Request timeout expired")


def _load(executor_type: type[Executor], spec: ModelSpec, placement: Placement) -> Executor | Model:
    """Create, load and wrap the model in one thread; return the bare model if its `load` must be awaited.

    Raises WrongPlacement if a model without a configured placement prefers another one.
    """
    report_step("reading")
    model = plugins.runtime(spec.runtime or "python").load(spec)
    if not isinstance(model, Model):
        raise ModelFailed(f"runtime '{spec.runtime}' returned {type(model).__name__}, expected a dragoman.Model")
    if not spec.placement and model.placement not in ("", placement):
        raise WrongPlacement(model.placement)
    report_step("loading", sum(size for _, _, size, _ in spec.files))
    if inspect.iscoroutinefunction(model.load):
        return model
    model.load()
    return executor_type(model, spec)


def _ignore(_: object) -> None:
    """What a check returns needs no end."""


def _close(loaded: Executor | Model) -> None:
    """Close a model whose caller was cancelled while it loaded."""
    if isinstance(loaded, Executor):
        asyncio.run(loaded.close())


def _describe(model: Model, spec: ModelSpec) -> Loaded:
    signature = model.signature()
    if spec.inputs:
        signature = replace(signature, inputs=spec.inputs, open_inputs=False)
    if spec.outputs:
        signature = replace(signature, outputs=spec.outputs, open_outputs=False, outputs_are_hints=False)
    calls = frozenset(
        call
        for call, (method, _) in _METHODS.items()
        if getattr(type(model), method) is not getattr(Model, method) or method in vars(model)
    )
    if not calls:
        methods = ", ".join(method for method, _ in _METHODS.values())
        raise ModelFailed(f"{type(model).__name__} has no method that answers calls: expected predict, {methods}")
    kinds = {_method_kind(getattr(model, _METHODS[call][0])) for call in calls}
    infer_kind = _method_kind(model.infer) if Infer in calls else "value"
    streams = infer_kind in ("generator", "async generator") or _stream_method(model) is not None
    sequences = spec.sequences or model.sequences
    return Loaded(
        signature=signature,
        platform=spec.platform or model.platform,
        calls=calls,
        streams=streams,
        concurrent=bool(kinds & {"coroutine", "async generator"}),
        merges=0 if streams or sequences else model.merges,
        details=dict(model.details()),
        handlers=tuple(model.handlers),
        sequences=sequences,
        example=_example(model, signature),
        labels={name: tuple(map(str, names)) for name, names in model.class_labels().items()},
        kind=one_line(model.kind),
        description=one_line(spec.description) or one_line(model.description),
    )


def _example(model: Model, signature: Signature) -> Tensors | None:
    """Return the example that a model knows, in the datatypes of its signature. Raises ModelFailed if it is none."""
    example = model.example_inputs()
    if example is None:
        return None
    try:
        return {name: _example_tensor(value, signature.input(name)) for name, value in example.items()}
    except InvalidInput as error:
        raise ModelFailed(f"its example: {error.message}") from error


def _example_tensor(value: Any, spec: TensorSpec | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    own = Tensor.of(value)
    is_accepted = spec is None or spec.datatype is None or own.datatype in (spec.datatype, *spec.accepts)
    return own if is_accepted or spec is None else Tensor.of(value, spec.datatype)


def _without_shapes(signature: Signature) -> Signature:
    inputs, outputs = (tuple(replace(s, shape=None) for s in side) for side in (signature.inputs, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)


def _stream_method(model: Model) -> Callable[[Any], Any] | None:
    """Return the async generator `infer_stream` that an `async` model may have for streaming clients."""
    return getattr(model, "infer_stream", None)


def _describe_error(error: BaseException) -> str:
    """Return the type and the message of an error, shortened."""
    text = f"{type(error).__name__}: {error_text(error)}"
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
