"""Decoding steps of fixed shapes, which a GPU records once as CUDA graphs and then replays.

A step of one token per sequence is hundreds of short kernels, and launching them one by one takes longer than computing
them. A graph launches all of them at once, but its shapes and addresses are those of the step that was recorded.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np
import torch

from dragoman_text.generation.attention import AttentionForm, AttentionFunction, CacheBlocks, write_tokens
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow

log = logging.getLogger("dragoman.generation")

# Rows and lengths are rounded up to these, so that few graphs are recorded.
_POWERS_UP_TO, _ROW_STEP = 16, 16
_MIN_LENGTH = 128
_MAX_GRAPHS = 64


class StepForward(Protocol):
    """Forward pass of tokens at positions, both [rows]; returns their logits [rows, vocabulary]."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionFunction) -> torch.Tensor: ...


# Records a computation and returns a function that repeats it.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class FixedAttention:
    """Attention of one token in each of the first slots of a cache; equivalent to `AttentionStep`.

    positions, slots: where each row's keys and values are written, [rows]. length: positions that are read.
    repeats: whether a row may repeat that of another slot, whose output it then has.
    """

    def __init__(
        self, cache: KeyValueCache, positions: torch.Tensor, slots: torch.Tensor, length: int, *, repeats: bool
    ) -> None:
        heads = torch.arange(cache.shape.heads, device=slots.device)
        self._indices = (slots[:, None] * cache.shape.heads + heads) * cache.length + positions[:, None]
        self._keys, self._values = cache.flat()
        self._blocks = CacheBlocks(cache, slice(len(slots)), length)
        self._order = slots if repeats else None
        self._positions = positions[:, None, None]
        self._read, self._dtype = torch.arange(length, device=slots.device), cache.keys.dtype
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        write_tokens(self._keys[layer], self._values[layer], self._indices, key, value)
        if form.window not in self._masks:
            self._masks[form.window] = self._mask(form.window)
        output = self._blocks.attend(layer, form, query, self._masks[form.window])
        return output if self._order is None else output[self._order]

    def _mask(self, window: int) -> torch.Tensor:
        visible = self._read <= self._positions
        if window:
            visible = visible & (self._read > self._positions - window)
        return torch.zeros(visible.shape, dtype=self._dtype, device=visible.device).masked_fill(~visible, float("-inf"))


class StepGraphs:
    """Decoding steps on one cache, recorded when their shape occurs first.

    tolerance: a recorded step is used if its logits differ from those of the same step, computed without a
    graph, by at most this share of the largest one. Otherwise, or if it cannot be recorded, there are no graphs.
    """

    def __init__(self, forward: StepForward, tolerance: float, record: Record | None = None) -> None:
        self._forward, self._tolerance = forward, tolerance
        self._record = record or CudaRecorder()
        self._steps: dict[_Shape, _FixedStep] = {}
        self._keys: Callable[[], torch.Tensor | None] = lambda: None
        self._logits = torch.empty(0)
        self.works = True

    def run(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor | None:
        """Return the logits of a decoding step, [rows, vocabulary], FP32; None if it has no graph."""
        if not self.works or not is_decoding(rows):
            return None
        if self._keys() is not cache.keys:  # its memory was allocated anew
            self._forget()
            self._keys = ref(cache.keys)
        count = min(_round_rows(max(row.slot for row in rows) + 1), cache.slots)
        length = min(_round_length(max(row.start for row in rows) + 1), cache.length)
        shape = _Shape(count, length, len(rows) < count)
        step = self._steps.get(shape) or self._recorded(cache, shape, rows)
        if step is None:
            return None
        step.assign(rows)
        step.replay()
        slots = [row.slot for row in rows]
        if slots == list(range(len(rows))):
            return self._logits[: len(rows)].clone()
        return self._logits[slots]

    def _recorded(self, cache: KeyValueCache, shape: "_Shape", rows: Sequence[BatchRow]) -> "_FixedStep | None":
        count = shape.rows
        if len(self._steps) >= _MAX_GRAPHS:
            self._steps.clear()
        step = _FixedStep(cache, count)
        step.assign(rows)

        def compute() -> torch.Tensor:
            tokens, positions, slots = step.inputs.unbind()
            attention = FixedAttention(cache, positions, slots, shape.length, repeats=shape.repeats)
            return self._forward(tokens, positions, attention)

        def write() -> None:
            self._logits[:count].copy_(compute())

        try:
            expected = compute().float()
            if self._logits.shape != (cache.slots, expected.shape[1]):
                self._logits = expected.new_zeros(cache.slots, expected.shape[1])
            step.replay = self._record(write)
            step.replay()
            difference, largest = float((self._logits[:count] - expected).abs().max()), float(expected.abs().max())
        except Exception as error:  # code of any model
            self._stop(f"{type(error).__name__}: {error}")
            return None
        if not difference <= self._tolerance * largest:  # also true for NaN; all are 0 after a padding token
            self._stop(f"logits of at most {largest:.2g} differ by {difference:.2g}")
            return None
        self._steps[shape] = step
        return step

    def _stop(self, reason: str) -> None:
        log.warning("decoding steps cannot be recorded as CUDA graphs, and are slower: %s", reason)
        self._forget()
        self.works = False

    def _forget(self) -> None:
        self._steps.clear()
        self._logits = torch.empty(0)


class _Shape(NamedTuple):
    """Number of rows, positions that are read, and whether there are slots without a token."""

    rows: int
    length: int
    repeats: bool


class _FixedStep:
    """A decoding step of the first `count` slots, of which row i is the token of slot i.

    Rows of slots without a token repeat that of another one: they compute the same, write the same keys and values to
    the same place, and their logits are not used.

    inputs: tokens, positions and slots, [3, count].
    """

    def __init__(self, cache: KeyValueCache, count: int) -> None:
        self.inputs = torch.zeros(3, count, dtype=torch.long, device=cache.keys.device)
        self.replay: Callable[[], None] = lambda: None

    def assign(self, rows: Sequence[BatchRow]) -> None:
        table = np.empty((3, self.inputs.shape[1]), np.int64)
        first = rows[0]
        table[:] = np.array([[first.tokens[0]], [first.start], [first.slot]])
        slots = [row.slot for row in rows]
        table[0, slots] = [row.tokens[0] for row in rows]
        table[1, slots] = [row.start for row in rows]
        table[2, slots] = slots
        self.inputs.copy_(torch.from_numpy(table))


class CudaRecorder:
    """Records computations as CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        # Libraries allocate memory at their first use on a stream, which is not possible while it is recorded.
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, for other models.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay


def is_decoding(rows: Sequence[BatchRow]) -> bool:
    """Return whether all rows are one token of a sequence each, without an adapter, whose logits are wanted."""
    single = all(len(row.tokens) == row.wanted == 1 and not row.adapter and not row.drafts for row in rows)
    return single and bool(rows) and len({row.slot for row in rows}) == len(rows)


def _round_length(length: int) -> int:
    return max(_MIN_LENGTH, 1 << (length - 1).bit_length())


def _round_rows(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= _POWERS_UP_TO else -(-count // _ROW_STEP) * _ROW_STEP
