"""Response cache of one model version: the answer to an equal earlier request, without running the model."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from hashlib import sha256
from types import CoroutineType
from typing import Any

import numpy as np
from msgspec import structs

from dragoman.core.bytes_tensor import BytesTensor, came_as_text, with_parameters
from dragoman.core.calls import ApplyHessian, ApplyJacobian, Embed, Embedded, Gradient, Infer, Inference, Request
from dragoman.core.datatypes import BYTES
from dragoman.core.metrics import Family, Labels, Sample
from dragoman.core.sizes import THREAD
from dragoman.core.tensor import Tensor
from dragoman.system.call_times import CallTimes
from dragoman.system.coroutines import complete
from dragoman.system.request_context import get_context, set_context

# The calls whose answers are stored: those that return arrays. Text generation and custom handlers are not.
CACHED_CALLS = frozenset({Infer, Gradient, ApplyJacobian, ApplyHessian, Embed})

# Estimates of the memory of an entry besides its numbers, in bytes: the entry, each tensor, each element of BYTES.
_ENTRY_SIZE, _TENSOR_SIZE, _ELEMENT_SIZE = 512, 512, 48
_PREFIX = "dragoman_response_cache"
_COUNTERS: Mapping[str, str] = {
    "hits": "Calls answered from the response cache, or by an equal call that was running.",
    "misses": "Calls that the response cache could not answer.",
}


class ResponseCache:
    """Stores answers up to `max_bytes`; the one that was not used for the longest time is removed first.

    The key is a digest of the whole call, of the metadata of its request and of its owner. Errors are not stored. Equal
    concurrent calls share one computation, which is cancelled when the last of their clients has left.

    compute: returns the answer to a request, or a coroutine that computes it. is_shared: owners share their answers.
    """

    def __init__(self, max_bytes: int, compute: Callable[[Request[Any]], Any], *, is_shared: bool = False) -> None:
        self._max_bytes = max_bytes
        self._is_shared = is_shared
        self._compute = compute
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # answers with their sizes
        self._running: dict[bytes, _Computation] = {}
        self.size = 0
        self.evictions = 0
        self.counts: Counter[tuple[str, str]] = Counter()  # by "hits" or "misses", and the type of call

    def call(self, request: Request[Any]) -> Any:
        """Return the answer to a bound request, or a coroutine that computes it. Its arrays are read-only."""
        call_type = type(request.call)
        if call_type not in CACHED_CALLS:
            return self._compute(request)
        description = self._describe(request)
        if description is None:
            self.counts["misses", call_type.__name__] += 1
            return self._compute(request)
        if sum(map(len, description)) > THREAD:
            return self._call_large(description, request)
        return self._call(_digest(description), request)

    async def _call_large(self, description: list[Any], request: Request[Any]) -> Any:
        """Compute the digest in a thread, so that the event loop does not wait for it."""
        return await complete(self._call(await asyncio.to_thread(_digest, description), request))

    def _call(self, key: bytes, request: Request[Any]) -> Any:
        entry, running = self._entries.get(key), self._running.get(key)
        self.counts["hits" if entry or running else "misses", type(request.call).__name__] += 1
        if entry is not None:
            self._entries.move_to_end(key)
            return _with_own_parameters(entry[0])
        if running is not None:
            return running.answer(request.times)
        if request.deadline_s is not None:  # each caller awaits the answer until its own
            request = structs.replace(request, deadline_s=None)
        answer = self._compute(request)
        if type(answer) is CoroutineType:
            self._running[key] = computation = _Computation(self, key, answer, request.times)
            return computation.answer(request.times)
        return _with_own_parameters(self._store(key, answer))

    def finish(self, key: bytes, computation: "_Computation", answer: Any) -> Any:
        """Return the answer of a computation, stored unless it was forgotten meanwhile."""
        return self._store(key, answer) if self._running.get(key) is computation else _freeze(answer)[0]

    def forget_running(self, key: bytes, computation: "_Computation") -> None:
        """Let no further call share a computation."""
        if self._running.get(key) is computation:
            del self._running[key]

    def discard(self, request: Request[Any]) -> None:
        """Remove the answer to a request, which has been found invalid."""
        description = self._describe(request)
        if description is not None and (key := _digest(description)) in self._entries:
            self.size -= self._entries.pop(key)[1]

    def _describe(self, request: Request[Any]) -> list[Any] | None:
        return _describe_request(request, "" if self._is_shared else request.caller.owner)

    def count(self, kind: str) -> int:
        """Return the number of "hits" or "misses"."""
        return sum(count for (each, _), count in self.counts.items() if each == kind)

    def clear(self) -> None:
        """Remove every answer, also those that are being computed."""
        self._entries.clear()
        self._running.clear()
        self.size = 0

    def _store(self, key: bytes, answer: Any) -> Any:
        """Return a copy of an answer that no one else can change, stored if it fits."""
        answer, size = _freeze(answer)
        if size <= self._max_bytes:
            self._entries[key] = answer, size
            self.size += size
            while self.size > self._max_bytes:
                self.size -= self._entries.popitem(last=False)[1][1]
                self.evictions += 1
        return answer


class _Computation:
    """A call that is being computed for everyone who awaits its `answer`."""

    def __init__(self, cache: ResponseCache, key: bytes, computing: Coroutine[Any, Any, Any], times: CallTimes) -> None:
        self._cache = cache
        self._key = key
        self._waiting = 0
        self._context, self._times = get_context(), times
        self._computing = computing
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_end)

    async def answer(self, times: CallTimes) -> Any:
        """Return the answer to the call with these times. The computation is cancelled when all who await it are."""
        self._waiting += 1
        try:
            return _with_own_parameters(await asyncio.shield(self._task))
        finally:
            self._waiting -= 1
            if times is not self._times:
                times.share(self._times)
                times.is_cached = True
            if not self._waiting and not self._task.done():
                self._cache.forget_running(self._key, self)
                self._task.cancel()

    async def _run(self) -> Any:
        set_context(self._context)
        return self._cache.finish(self._key, self, await self._computing)

    def _on_end(self, _: asyncio.Task[Any]) -> None:
        self._cache.forget_running(self._key, self)
        self._computing.close()  # if it was cancelled before it began


# --- keys ----------------------------------------------------------------------------------------------------


def _describe_request(request: Request[Any], owner: str) -> list[Any] | None:
    """Return buffers that hold everything in a request that the answer may depend on, except its id and its deadline,
    and the owner of the answer.

    The first one contains the sizes of the others. None if a value has no exact form.
    """
    text: list[str] = [type(request.call).__name__, repr(owner)]
    arrays: list[Any] = []
    try:
        call: Any = request.call
        _describe(structs.asdict(call), text, arrays)
        _describe(request.metadata, text, arrays)
    except TypeError:
        return None
    return ["\n".join(text).encode(), *arrays]


def _digest(buffers: list[Any]) -> bytes:
    digest = sha256(b"%d\n" % len(buffers[0]))
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _describe(value: Any, text: list[str], arrays: list[Any]) -> None:
    """Append the types and values of a value, one a line, and the contents of its tensors, whose sizes are in the text.

    Raises TypeError for a value without an exact form.
    """
    kind = type(value)
    if kind is Tensor or kind is BytesTensor:
        _describe_tensor(value, text, arrays)
    elif kind in (str, int, float, bool, bytes, type(None)):
        text.append(repr(value))  # without line breaks; 1, 1.0, True and "1" differ
    elif isinstance(value, Mapping):
        text.append(f"table {len(value)}")
        for key, item in value.items():
            _describe(key, text, arrays)
            _describe(item, text, arrays)
    elif kind in (list, tuple):
        text.append(f"{kind.__name__} {len(value)}")
        for item in value:
            _describe(item, text, arrays)
    else:
        raise TypeError(f"{kind.__name__} cannot be part of a key")


def _describe_tensor(tensor: Tensor, text: list[str], arrays: list[Any]) -> None:
    data = tensor.data
    text.append(f"{tensor.datatype.name} {came_as_text(tensor)} {data.dtype.str} {data.shape}")
    _describe(tensor.parameters, text, arrays)
    if tensor.datatype is not BYTES:
        arrays.append(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        return
    elements = data.ravel().tolist()
    if set(map(type, elements)) - {bytes}:
        raise TypeError("an element is not bytes")
    arrays.append(np.fromiter(map(len, elements), np.int64, len(elements)).view(np.uint8))
    arrays.append(b"".join(elements))


# --- answers -------------------------------------------------------------------------------------------------


# Headers of CloudEvents with the id of the request, which would be wrong in the answers to later ones.
_ID_HEADERS = frozenset({"ce-id", "ce-requestid"})


def _freeze(answer: Any) -> tuple[Any, int]:
    """Return a copy of an answer with read-only arrays in memory of their own, and its size in bytes."""
    if isinstance(answer, Inference):
        frozen = {name: _freeze_tensor(tensor) for name, tensor in answer.outputs.items()}
        outputs = {name: tensor for name, (tensor, _) in frozen.items()}
        metadata = {name: value for name, value in answer.metadata.items() if name.lower() not in _ID_HEADERS}
        size = _ENTRY_SIZE + sum(size for _, size in frozen.values()) + len(repr((answer.parameters, metadata)))
        return Inference(outputs, dict(answer.parameters), metadata), size
    if isinstance(answer, Embedded):
        vectors, size = _freeze_tensor(answer.vectors)
        return Embedded(vectors, answer.tokens), _ENTRY_SIZE + size
    tensor, size = _freeze_tensor(answer)
    return tensor, _ENTRY_SIZE + size


def _freeze_tensor(tensor: Tensor) -> tuple[Tensor, int]:
    data = tensor.data
    size = _TENSOR_SIZE + data.nbytes + len(repr(tensor.parameters))
    if tensor.datatype is BYTES:
        size += sum(_ELEMENT_SIZE + len(element) for element in data.flat)
    if isinstance(tensor, BytesTensor):  # immutable
        return _with_copied_parameters(tensor), size
    data = data.copy()
    data.flags.writeable = False
    return _with_copied_parameters(Tensor(data, tensor.datatype, tensor.parameters)), size


def _with_own_parameters(answer: Any) -> Any:
    """Return an answer whose tables may be changed without changing the stored one."""
    if isinstance(answer, Inference):
        outputs = {name: _with_copied_parameters(tensor) for name, tensor in answer.outputs.items()}
        return Inference(outputs, dict(answer.parameters), dict(answer.metadata))
    return _with_copied_parameters(answer) if isinstance(answer, Tensor) else answer


def _with_copied_parameters(tensor: Tensor) -> Tensor:
    return with_parameters(tensor, dict(tensor.parameters)) if tensor.parameters else tensor


# --- metrics -------------------------------------------------------------------------------------------------


def cache_families(cache: ResponseCache, labels: Labels, calls: Iterable[type[Any]]) -> Iterable[Family]:
    """Return the metrics of a model's response cache, with counters of these types of calls."""
    cached = sorted(call.__name__ for call in CACHED_CALLS.intersection(calls))
    for name, help_text in _COUNTERS.items():
        full = f"{_PREFIX}_{name}_total"
        counts = tuple(Sample(full, {**labels, "call": call}, cache.counts[name, call]) for call in cached)
        yield Family(full, "counter", help_text, counts)
    for name, kind, help_text, value in (
        (
            "evictions_total",
            "counter",
            "Answers removed from the response cache to make room for others.",
            cache.evictions,
        ),
        ("bytes", "gauge", "Estimated memory of the answers in the response cache.", cache.size),
    ):
        full = f"{_PREFIX}_{name}"
        yield Family(full, kind, help_text, (Sample(full, labels, value),))  # type: ignore[arg-type]  # two literals
