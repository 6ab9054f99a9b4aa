"""An object of the class `TritonPythonModel`, in a thread of its own.

The thread takes batches from the queue of the model until that is closed, whatever the model raises. If it ends before,
say because an `async` model has stopped its event loop, the instance has `ended`: the batches that it was executing
fail, and it answers no others.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, Protocol

from dragoman.core.callers import current_caller
from dragoman.core.calls import Infer, Inference
from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed, WorkerLost, public_text
from dragoman.system.call_times import current_call
from dragoman_triton import pb_utils
from dragoman_triton.bls import deadline
from dragoman_triton.request_queue import PendingRequest, RequestQueue, call_of

log = logging.getLogger("dragoman.model")

READY_TIMEOUT_S = 5.0  # for `is_ready`, as in Triton
_JOIN_S = 10.0  # for which unloading waits for a model's thread


class InstanceModel(Protocol):
    """The model of an instance."""

    @property
    def name(self) -> str: ...

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have none or several responses."""

    def to_request(self, pending: PendingRequest) -> pb_utils.InferenceRequest:
        """Return a request as the model gets it, with a sender for its responses."""

    def to_inference(self, response: pb_utils.InferenceResponse, call: Infer) -> Inference | DragomanError:
        """Return the outputs of a response, or its error, or that of an output which is not as configured."""

    def reschedule(self, pending: PendingRequest) -> None:
        """Queue a request that is executed again."""


class Instance:
    """One object of the model's class, in a thread of its own.

    ended: why its thread has ended before the queue was closed; "" while it runs. on_end: called when it has.
    """

    def __init__(
        self,
        kind: Any,
        arguments: dict[str, str],
        queue: RequestQueue,
        model: InstanceModel,
        on_end: Callable[[], None],
    ) -> None:
        self._kind, self._arguments, self._queue, self._model = kind, arguments, queue, model
        self._is_async = inspect.iscoroutinefunction(kind.execute)
        self.ended, self._on_end = "", on_end
        self._executing: list[list[PendingRequest]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # of an `async` execute
        self._loop_ended: Future[None] = Future()
        self._loaded: Future[None] = Future()
        self._readiness: Future[str] | None = None
        self._asked_s, self._not_ready = 0.0, "is_ready() has not returned yet"
        self._thread = threading.Thread(target=self._run, name=arguments["model_instance_name"], daemon=True)
        self._thread.start()

    def wait_until_loaded(self) -> None:
        self._loaded.result()

    def join(self) -> None:
        self._thread.join(_JOIN_S)

    def unavailable(self, wait_s: float = 0.0) -> str:
        """Return why the model is not ready by its own `is_ready`, as it was when it was asked last; ask it again.

        Waits `wait_s` for the answer. One call of `is_ready` runs at a time.
        """
        if not hasattr(self._kind, "is_ready"):
            return ""
        if self._readiness is None or self._readiness.done():
            if self._readiness is not None:
                self._not_ready = self._readiness.result()
            self._readiness, self._asked_s = Future(), time.monotonic()
            threading.Thread(target=self._ask, args=(self._readiness,), daemon=True).start()
            if wait_s:
                with suppress(TimeoutError):
                    self._not_ready = self._readiness.result(wait_s)
        elif time.monotonic() - self._asked_s > READY_TIMEOUT_S:
            self._not_ready = f"is_ready() has not returned within {READY_TIMEOUT_S:g} s"
        return self._not_ready

    def _ask(self, answer: "Future[str]") -> None:
        try:
            ready = self._instance.is_ready()
            if inspect.isawaitable(ready):
                ready = asyncio.run(_await(ready))
        except BaseException as error:
            log.exception("model '%s': is_ready() raised", self._model.name)
            answer.set_result(f"is_ready() raised {type(error).__name__}")
            return
        if ready is True:
            answer.set_result("")
        else:
            answer.set_result("is_ready() returned False" if ready is False else "is_ready(): expected True or False")

    def _run(self) -> None:
        try:
            self._instance = self._kind()
            if hasattr(self._instance, "initialize"):
                self._instance.initialize(self._arguments)
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        try:
            if self._is_async:
                self._serve_async()
            else:
                while batch := self._queue.take():
                    self._execute(batch)
        except BaseException as error:
            self._end(error)
        if hasattr(self._instance, "finalize"):
            try:
                self._instance.finalize()
            except BaseException:
                log.exception("model '%s': finalize() raised", self._model.name)

    def _end(self, error: BaseException) -> None:
        """Fail the batches that are executed: the thread ends, and the model must be loaded again."""
        name = self._thread.name
        log.error("model '%s': the thread of instance '%s' has ended", self._model.name, name, exc_info=error)
        self.ended = f"the thread of its instance '{name}' has ended: {public_text(error)}"
        for pending in (pending for batch in self._executing for pending in batch):
            pending.fail(WorkerLost(f"model '{self._model.name}': {self.ended}"))
        self._on_end()

    def _serve_async(self) -> None:
        """Run the event loop of an `async` execute, on which another thread starts the batches.

        Raises RuntimeError if the model has stopped it.
        """
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            name = f"{self._thread.name}-queue"
            threading.Thread(target=self._feed, args=(loop,), name=name, daemon=True).start()
            try:
                loop.run_forever()
            finally:
                self._loop_ended.set_result(None)
                self._queue.wake()
        if not self._queue.is_closed:
            raise RuntimeError("the model has stopped the event loop that executes it")

    def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start batches until the queue is closed; those of a decoupled model overlap. Then stop the event loop."""
        running: set[Future[None]] = set()
        with suppress(RuntimeError):  # the event loop is closed
            while batch := self._queue.take(self._loop_ended.done):
                self._executing.append(batch)
                _set_origin(batch)  # in the context of the task
                executed: Future[None] = Future()
                loop.call_soon_threadsafe(self._start, loop, batch, executed)
                running = {each for each in running if not each.done()} | {executed}
                if not self._model.is_decoupled:
                    wait((executed, self._loop_ended), return_when=FIRST_COMPLETED)
            while running and not self._loop_ended.done():
                running -= wait((*running, self._loop_ended), return_when=FIRST_COMPLETED).done
            loop.call_soon_threadsafe(loop.stop)

    def _start(self, loop: asyncio.AbstractEventLoop, batch: list[PendingRequest], executed: "Future[None]") -> None:
        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            executed.set_result(None)

        task = loop.create_task(self._execute_async(batch))
        self._tasks.add(task)
        task.add_done_callback(on_done)

    async def _execute_async(self, batch: list[PendingRequest]) -> None:
        _record_start(batch)
        try:
            requests = [self._model.to_request(pending) for pending in batch]
            self._respond(batch, requests, await self._instance.execute(requests))
        except BaseException as error:
            self._fail(batch, error)
        self._executing.remove(batch)

    def _execute(self, batch: list[PendingRequest]) -> None:
        self._executing.append(batch)
        _set_origin(batch)
        _record_start(batch)
        try:
            requests = [self._model.to_request(pending) for pending in batch]
            self._respond(batch, requests, self._instance.execute(requests))
        except BaseException as error:
            self._fail(batch, error)
        self._executing.remove(batch)

    def _respond(self, batch: list[PendingRequest], requests: list[pb_utils.InferenceRequest], returned: Any) -> None:
        """Deliver what `execute` returned, which has None in place of responses that the model sends itself."""
        if self._model.is_decoupled and returned is not None:
            raise InvalidOutput(
                f"Python model '{self._thread.name}' is using the decoupled mode and the execute function must return "
                "None."
            )
        if returned is None and (self._model.is_decoupled or all(request.uses_sender for request in requests)):
            returned = [None] * len(batch)
        _check_responses(requests, returned, is_decoupled=self._model.is_decoupled)
        for pending, request, response in zip(batch, requests, returned, strict=True):
            if request.is_rescheduled:
                self._model.reschedule(pending)
            elif response is not None:
                pending.deliver(self._model.to_inference(response, call_of(pending.request)), True)

    def _fail(self, batch: list[PendingRequest], error: BaseException) -> None:
        name = self._model.name
        if not isinstance(error, DragomanError):
            log.error("model '%s': execute() raised", name, exc_info=error)
            text = f"Failed to process the request(s) for model '{name}', message: {public_text(error)}"
            error = ModelFailed(text)
        for pending in batch:
            pending.fail(error)


def _set_origin(batch: Sequence[PendingRequest]) -> None:
    """Set the deadline of the calls that `execute` makes for a batch, the latest of its requests if all have one, and
    their caller: the requests have one owner."""
    current_caller.set(batch[0].request.caller)
    ends = [pending.request.deadline_s for pending in batch]
    deadline.set(None if None in ends else max(end for end in ends if end is not None))


def _record_start(batch: Sequence[PendingRequest]) -> None:
    """Record that the model begins to compute requests: until now they have waited in its queue."""
    for pending in batch:
        times = pending.context.get(current_call)
        if times is not None and not pending.executions:
            times.started_s = time.monotonic()


def _check_responses(requests: Sequence[pb_utils.InferenceRequest], returned: Any, *, is_decoupled: bool) -> None:
    """Raise InvalidOutput unless `execute` has returned a response for each request that needs one."""
    if not isinstance(returned, list):
        raise InvalidOutput(f"Expected a list in the execute return, found type '{type(returned).__name__}'")
    if len(returned) != len(requests):
        raise InvalidOutput(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"Expected {len(requests)}, got {len(returned)}"
        )
    for request, response in zip(requests, returned, strict=True):
        if request.is_rescheduled and response is not None:
            raise InvalidOutput(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response).__name__}'"
            )
        is_answered = is_decoupled or request.uses_sender or request.is_rescheduled
        if not isinstance(response, pb_utils.InferenceResponse) and not (response is None and is_answered):
            raise InvalidOutput(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response).__name__}'"
            )


async def _await(work: Awaitable[Any]) -> Any:
    return await work
