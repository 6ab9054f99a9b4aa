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
from dragoman.core.spec import ModelSpec
from dragoman.engine.binder import Binder
from dragoman.formats.body import parse_request
from dragoman.formats.policy import Policy
from dragoman.system.coroutines import complete
from dragoman.system.load_steps import report_step
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


async def warm_up(spec: ModelSpec, pool: Pool, loaded: Loaded, binder: Binder) -> None:
    """Send each request of the model's warm-up file to every replica, one request after the other.

    Raises ModelFailed that names the request if one fails, and NotReady if the model may load later; the pool is
    closed then.
    """
    report_step("warming up")
    try:
        await _send_requests(spec, pool, loaded, binder)
    except BaseException:
        await pool.close()
        raise


async def _send_requests(spec: ModelSpec, pool: Pool, loaded: Loaded, binder: Binder) -> None:
    replicas = spec.replicas if pool.is_replicated else 1
    try:
        calls = await asyncio.to_thread(read_requests, Path(spec.warmup))
    except InvalidInput as error:
        raise _error(spec, error.message) from error
    for number, call in enumerate(calls, 1):
        answers = (_answer(Request(call, spec.name, spec.version), pool, loaded, binder) for _ in range(replicas))
        try:
            await asyncio.gather(*answers)
        except NotReady:
            raise
        except DragomanError as error:
            raise _error(spec, f"request {number}: {error.message}") from error


async def _answer(request: Request[Any], pool: Pool, loaded: Loaded, binder: Binder) -> None:
    """Compute one request, without a batcher, which would merge those for several replicas."""
    if Infer not in loaded.calls:
        raise InvalidInput("expected a model that supports inference requests")

    async def call_pool(request: Request[Any]) -> Any:
        return await complete(pool.call(request))

    bound = binder.bind(request.call)
    if bound is None:  # the sizes of the model depend on the config of the request
        request, _ = await binder.bind_configured(request, call_pool)
    else:
        request = structs.replace(request, call=bound)
    if not loaded.streams:
        await call_pool(request)
        return
    async with aclosing(pool.stream(request)) as chunks:
        async for _ in chunks:
            pass


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
