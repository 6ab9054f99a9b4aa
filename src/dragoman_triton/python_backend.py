"""Models of Triton's Python backend: the class `TritonPythonModel` of a `model.py`."""

import asyncio
import importlib
import itertools
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import (
    DragomanError,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    NotReady,
    WorkerLost,
    public_message,
)
from dragoman.core.model import Model
from dragoman.core.schedule import ScheduleOptions
from dragoman.core.sequences import SequenceStep, parse_flag, parse_id
from dragoman.core.signature import Signature
from dragoman.core.spec import COMPLETED_CONFIG, ModelSpec
from dragoman.core.tensor import Scalar, Tensor
from dragoman_triton import model_file, pb_utils
from dragoman_triton.bls import ERRORS, MODULES, ServerAccess, import_with_access, request_class
from dragoman_triton.python_instance import READY_TIMEOUT_S, Instance
from dragoman_triton.request_queue import PendingRequest, RequestQueue, call_of
from dragoman_triton.sequences import SequenceInputs
from dragoman_triton.tensors import Configuration

log = logging.getLogger("dragoman.model")

# Parameters of a request that models do not see as custom ones.
_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


class PythonBackendModel(Model):
    """A `TritonPythonModel`. `execute` gets a list of requests, which are never concatenated or split.

    In a worker process there is one instance. In the server's process, where models run that call others, there is one
    thread for each of the `replicas`.
    """

    takes_request = True
    platform = "python"
    merges = 0
    _completed: Mapping[str, Any] = {}
    _instances: Sequence[Instance] = ()
    _request_class = pb_utils.InferenceRequest

    def load(self) -> None:
        siblings = self.spec.siblings
        self._access = None if siblings is None else ServerAccess(self.spec.name, siblings)
        if self._access is not None:
            self._request_class = request_class(self._access)
        kind = _load_class(self.spec, self._access)
        given = json.loads(json.dumps(self.spec.parameters["config"]))
        if complete := getattr(kind, "auto_complete_config", None):
            completed = complete(pb_utils.ModelConfig(given))
            if not isinstance(completed, pb_utils.ModelConfig):
                raise ModelFailed("auto_complete_config: expected a ModelConfig as its result")
            given = completed.as_dict()
            _check_completed(given)
            self._completed = {COMPLETED_CONFIG: given}
        self._config = Configuration(given)
        self._outputs = {tensor.spec.name: tensor for tensor in self._config.outputs}
        sequences = given.get("sequence_batching")
        self._is_iterative = bool(sequences and sequences.get("iterative_sequence"))
        self._iterative_ids = itertools.count(1)
        self._sequences = None if sequences is None else SequenceInputs(given, Path(), keeps_rows=False)
        merges = ("dynamic_batching" in given or sequences is not None) and self._config.max_batch_size > 1
        delay_us = given.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)
        self._queue = RequestQueue(
            self._config.max_batch_size if merges else 1,
            delay_us / 1e6 if merges else 0.0,
            ScheduleOptions(**self.spec.parameters.get("schedule", {})),
            by_owner=self._access is not None,
        )
        if self._config.is_decoupled:
            self.infer = self._stream  # type: ignore[method-assign, assignment]
        count = self.spec.replicas if self.spec.siblings is not None else 1
        self._instances = [
            Instance(kind, _arguments(self.spec, given, number), self._queue, self, self._check_instances)
            for number in range(count)
        ]
        try:
            for instance in self._instances:
                instance.wait_until_loaded()
            self._check_instances()
            self._instances[0].unavailable(READY_TIMEOUT_S)
            if self._access is not None:
                self._access.is_executing = True
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def details(self) -> Mapping[str, Any]:
        return self._completed

    def _warm_up(self) -> None:
        for name, call in self._config.warmup_calls(Path(str(self.spec.parameters["source"])).parent):
            answered: Future[None] = Future()

            def deliver(
                response: Inference | DragomanError | None, is_last: bool, answered: "Future[None]" = answered
            ) -> None:
                if isinstance(response, DragomanError) and not answered.done():
                    answered.set_exception(response)
                elif is_last and not answered.done():
                    answered.set_result(None)

            self._queue.put(
                PendingRequest(Request(call, self.spec.name, self.spec.version), self._config.rows(call), deliver)
            )
            try:
                answered.result()
            except DragomanError as error:
                raise ModelFailed(f"warm-up request '{name}': {error.message}") from error

    def signature(self) -> Signature:
        """Return the configured tensors. Outputs may be missing from a response, as in Triton."""
        return self._config.signature(optional_outputs=self._outputs)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have none or several responses."""
        return self._config.is_decoupled

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        answered: asyncio.Future[Inference] = asyncio.get_running_loop().create_future()

        def deliver(response: Inference | DragomanError | None, _is_last: bool) -> None:
            if answered.done() or response is None:
                return
            if isinstance(response, DragomanError):
                answered.set_exception(response)
            else:
                answered.set_result(response)

        pending = self._submit(request, deliver)
        try:
            return await answered
        finally:
            if not answered.done() or answered.cancelled():
                pending.cancelled.set()

    async def _stream(self, request: Request[Inference]) -> AsyncIterator[Inference | DragomanError]:
        """Yield the responses of a decoupled model. An error is one of them unless it is the last."""
        responses: asyncio.Queue[tuple[Inference | DragomanError | None, bool]] = asyncio.Queue()
        pending = self._submit(request, lambda response, is_last: responses.put_nowait((response, is_last)))
        try:
            while True:
                response, is_last = await responses.get()
                if isinstance(response, DragomanError) and is_last:
                    raise response
                if response is not None:
                    yield (
                        structs.replace(response, is_last=True)
                        if isinstance(response, Inference) and is_last
                        else response
                    )
                if is_last:
                    return
        finally:
            pending.cancelled.set()

    def _submit(
        self, request: Request[Inference], deliver: Callable[[Inference | DragomanError | None, bool], None]
    ) -> PendingRequest:
        """Queue a request. `deliver` is called on the event loop of this thread."""
        call = call_of(request)
        self._config.requested_outputs(call)
        if reserved := next(filter(_is_reserved, request.metadata), None):
            raise InvalidInput(error_texts.reserved_header(reserved))
        loop = asyncio.get_running_loop()

        def deliver_on_loop(response: Inference | DragomanError | None, is_last: bool) -> None:
            try:
                loop.call_soon_threadsafe(deliver, response, is_last)
            except RuntimeError:  # the event loop is closed
                pending.cancelled.set()

        rows = self._config.rows(call)
        if self._sequences is not None and rows != 1:
            raise InvalidInput(error_texts.too_many_rows_of_sequence(self.spec.name))
        if self._is_iterative and self._sequences is not None and (id_ := call.parameters.get("sequence_id")):
            self._sequences.check_id(id_)  # the engine checks those of other sequences
        pending = PendingRequest(request, rows, deliver_on_loop)
        if wait_s := self._queue.put(pending):
            loop.call_later(wait_s, self._queue.expire, pending)
        return pending

    def unavailable(self) -> str:
        instance = next((each for each in self._instances if not each.ended), None)
        if instance is None:
            raise WorkerLost(self._instances[0].ended)
        return instance.unavailable()

    def _check_instances(self) -> None:
        """Reject requests if no instance is left that could answer them."""
        if self._instances and all(instance.ended for instance in self._instances):
            self._queue.close(WorkerLost(f"model '{self.name}': {self._instances[0].ended}"))

    def close(self) -> None:
        if hasattr(self, "_queue"):
            if self._access is not None:
                self._access.is_executing = False
            self._queue.close(NotReady("the model is unloading"))
            for instance in self._instances:
                instance.join()

    # --- in the threads of the instances ---------------------------------------------------------------------

    def to_request(self, pending: PendingRequest) -> pb_utils.InferenceRequest:
        """Return a request as the model gets it, with a sender for its responses."""
        call = call_of(pending.request)
        step, timeout = _step(call), call.parameters.get("timeout", 0)
        if self._is_iterative:
            step = self._iterative_step(pending, step)
        flags = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * step.start
        flags |= pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * step.end
        parameters = {k: v for k, v in call.parameters.items() if not _is_reserved(k)}
        by_name = {tensor.spec.name: tensor for tensor in self._config.inputs}
        tensors = {n: by_name[n].to_model(t) if n in by_name else t for n, t in call.inputs.items()}
        if self._sequences is not None:
            tensors |= self._sequences.controls(step)
        request: pb_utils.InferenceRequest = self._request_class(
            request_id=pending.request.id or "",
            correlation_id=step.correlation_id,
            inputs=[pb_utils.Tensor(name, tensor.data) for name, tensor in tensors.items()],
            requested_output_names=self._config.requested_outputs(call),
            model_name=self.spec.name,
            model_version=int(self.spec.version or 1),
            flags=flags,
            timeout=timeout if isinstance(timeout, int) else 0,
            trace=pb_utils.InferenceTrace(pending.context),
            parameters={**parameters, **pending.request.metadata},
        )

        def send(response: pb_utils.InferenceResponse | None, is_last: bool) -> None:
            pending.deliver(None if response is None else self.to_inference(response, call), is_last)

        request.may_be_rescheduled = self._is_iterative
        request.sender = pb_utils.InferenceResponseSender(
            send, pending.cancelled.is_set, is_decoupled=self._config.is_decoupled
        )
        return request

    def _iterative_step(self, pending: PendingRequest, step: SequenceStep) -> SequenceStep:
        """Return the place in its sequence of a request that is executed repeatedly: it starts the first time only."""
        if not step.id:
            pending.sequence_id = pending.sequence_id or next(self._iterative_ids)
            step = SequenceStep(pending.sequence_id, start=True, end=step.end)
        step.start = step.start and not pending.executions
        return step

    def reschedule(self, pending: PendingRequest) -> None:
        """Queue a request that is executed again."""
        pending.executions += 1
        try:
            self._queue.put(pending)
        except DragomanError as error:
            pending.fail(error)

    def to_inference(self, response: pb_utils.InferenceResponse, call: Infer) -> Inference | DragomanError:
        """Return the outputs of a response, or its error, or that of an output which is not as configured."""
        error = response.error()
        if error is not None:
            return ERRORS.get(error.code(), ModelFailed)(public_message(error.message()))
        outputs: dict[str, Tensor] = {}
        for tensor in response.output_tensors():
            configured = self._outputs.get(tensor.name())
            if configured is None:
                return InvalidOutput(f"output '{tensor.name()}' is not in 'config.pbtxt'")
            if call.outputs and tensor.name() not in call.outputs:
                continue
            try:
                converted = configured.convert(Tensor.of(tensor.elements()), self._config.rows(call))
                outputs[tensor.name()] = configured.to_client(converted)
            except DragomanError as failure:
                return failure
        parameters: dict[str, Scalar] = json.loads(response.parameters())
        return Inference(outputs, parameters)


def _check_completed(config: Mapping[str, Any]) -> None:
    """Raise ModelFailed if a tensor still lacks its datatype or dims."""
    for tensor in (*config.get("input", ()), *config.get("output", ())):
        if tensor["data_type"] == "TYPE_INVALID" or not tensor["dims"]:
            raise ModelFailed(
                f"'{tensor['name']}' of 'config.pbtxt': expected a data_type and dims, also from auto_complete_config"
            )


def _step(call: Infer) -> SequenceStep:
    """Return the place of a call in its sequence. Other models than stateful ones see it in the parameters.

    Raises InvalidInput for an id that is neither an integer nor text, and flags that are not booleans.
    """
    if call.sequences:
        return call.sequences[0]
    start, end = (parse_flag(call.parameters, name) for name in ("sequence_start", "sequence_end"))
    return SequenceStep(parse_id(call.parameters.get("sequence_id", 0)), start, end)


def _load_class(spec: ModelSpec, access: ServerAccess | None) -> Any:
    """Return the class of a model file, which is imported as part of its version folder.

    In a process of its own the file can import modules beside it, relatively too. In the server's process it shares
    `sys.modules` with other models and is imported alone.
    """
    path = model_file(spec)
    if access is not None:
        module: Any = import_with_access(path, access)
    else:
        sys.modules.update(dict.fromkeys(MODULES, pb_utils))
        for folder in (path.parent, path.parent.parent):
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None or not callable(getattr(model_class, "execute", None)):
        raise ModelFailed(f"'{path.name}' has no class TritonPythonModel with a method execute")
    return model_class


def _arguments(spec: ModelSpec, config: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return the arguments of `initialize`, all of them text."""
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{spec.name}_0_{number}",
        "model_instance_device_id": "0",
        "model_repository": str(Path(str(spec.parameters["source"])).resolve().parent),
        "model_version": spec.version or "1",
        "model_name": spec.name,
    }


def _is_reserved(parameter: str) -> bool:
    return parameter in _RESERVED or parameter.startswith("triton_")
