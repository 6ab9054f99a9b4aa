"""The last steps before a model is ready: its settings for protocols, class labels, and warm-up requests."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from dragoman import plugins
from dragoman.core.calls import ClassLabels, Infer, Request
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, NotReady
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor
from dragoman.engine.binder import Binder
from dragoman.formats.body import parse_request
from dragoman.formats.policy import Policy
from dragoman.system.coroutines import complete
from dragoman.system.load_steps import report_step
from dragoman.system.threads import run_in_thread
from dragoman.workers.pool import Loaded, Pool


def check_protocols(spec: ModelSpec) -> None:
    """Raise ModelFailed if the settings of a model for a protocol are invalid."""
    for name in spec.protocols:
        try:
            plugins.find("protocol_settings", name)(spec)
        except ModelFailed as error:
            raise ModelFailed(f"failed to load '{spec.name}', {error.message}") from error


def read_labels(spec: ModelSpec) -> dict[str, ClassLabels]:
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


class LoadedReplicas(msgspec.Struct, frozen=True):
    """A model that is loaded, and not ready yet."""

    spec: ModelSpec
    placement: Placement
    pool: Pool
    loaded: Loaded
    binder: Binder

    @property
    def blocks_event_loop(self) -> bool:
        """Whether it runs on the event loop and is not `async`."""
        return self.placement == "inline" and not self.loaded.concurrent

    async def answer(self, call: Any, *, is_trial: bool = False) -> Any:
        """Return the answer to one call, without a batcher, which would merge those for several replicas.

        Of a stream it is the last chunk, or in a trial the first one, which ends it; None if there is none. A model
        that would block the event loop runs in a thread meanwhile.
        """
        request = Request(_read_only(call), self.spec.name, self.spec.version, is_trial=is_trial)
        bound = self.binder.bind(request.call)
        if bound is None:  # the sizes of the model depend on the config of the request
            request, _ = await self.binder.bind_configured(request, self._call_pool)
        else:
            request = structs.replace(request, call=bound)
        if not self.loaded.streams or type(call) is not Infer:
            return await self._call_pool(request)
        answer = None
        async with aclosing(self.pool.stream(request)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, DragomanError):
                    raise chunk
                answer = chunk
                if is_trial:
                    break
        return answer

    async def _call_pool(self, request: Request[Any]) -> Any:
        if self.blocks_event_loop:
            return await complete(await run_in_thread(self.pool.call, request, discard=lambda _: None))
        return await complete(self.pool.call(request))


def _read_only(call: Any) -> Any:
    """Return the call with inputs that the model cannot change, as those of requests."""
    if type(call) is not Infer:
        return call
    inputs = {}
    for name, tensor in call.inputs.items():
        data = tensor.data.view()
        data.flags.writeable = False
        inputs[name] = Tensor(data, tensor.datatype, tensor.parameters)
    return structs.replace(call, inputs=inputs)


async def warm_up(model: LoadedReplicas) -> tuple[Infer, Any] | None:
    """Send each request of the model's warm-up file to every replica, one request after the other.

    Returns the first request and its answer, None if there is none. Raises ModelFailed that names the request if one
    fails, and NotReady if the model may load later.
    """
    report_step("warming up")
    spec, first = model.spec, None
    replicas = spec.replicas if model.pool.is_replicated else 1
    try:
        calls = await asyncio.to_thread(read_requests, Path(spec.warmup))
        if Infer not in model.loaded.calls:
            raise InvalidInput("expected a model that supports inference requests")
    except InvalidInput as error:
        raise _error(spec, error.message) from error
    for number, call in enumerate(calls, 1):
        try:
            answer, *_ = await asyncio.gather(*(model.answer(call) for _ in range(replicas)))
        except NotReady:
            raise
        except DragomanError as error:
            raise _error(spec, f"request {number}: {error.message}") from error
        first = first or (call, answer)
    return first


def read_requests(file: Path) -> list[Infer]:
    """Return the requests in a file: one Open Inference request in JSON, or a list of them. Raises InvalidInput."""
    try:
        text = file.read_bytes()
        bodies = msgspec.json.decode(text, type=list[msgspec.Raw]) if text.lstrip().startswith(b"[") else [text]
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInput(f"the file '{file.name}' cannot be read: {reason}") from error
    return [_parse(bytes(body), number) for number, body in enumerate(bodies, 1)]


def _parse(text: bytes, number: int) -> Infer:
    try:
        body = parse_request(text, None, Policy())
    except DragomanError as error:
        raise InvalidInput(f"request {number}: {error.message}") from error
    return Infer(body.inputs, tuple(output.name for output in body.outputs), body.parameters)


def _error(spec: ModelSpec, reason: str) -> ModelFailed:
    return ModelFailed(f"failed to load '{spec.name}', warm-up: {reason}")
