"""Decoding steps on a GPU as CUDA graphs: all kernels of a step are launched at once, not one by one from Python."""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dragoman.generation.attention import AttentionForm, CacheBlocks
from dragoman.generation.cache import KeyValueCache
from dragoman.generation.fused import FusedModel
from dragoman.generation.sequence import BatchRow

log = logging.getLogger("dragoman.generation")

_Integers = np.ndarray[tuple[int, int], np.dtype[np.int64]]

Compute = Callable[[], torch.Tensor]
# Executes a computation once and returns a function that replays it on the same memory, into the same result tensor.
Capture = Callable[[Compute], Compute]

# A graph is captured when its shape occurs this often: capture takes as long as a few steps.
_MIN_USES = 2
# Maximum number of graphs; each takes some MB for a model of 32 layers.
_MAX_GRAPHS = 64
# Lengths are rounded up to an eighth of the next power of two, and at least to a multiple of this.
_MIN_ROUNDING = 128
_CAPTURE_LOCK = threading.Lock()


class CudaGraphs:
    """CUDA graphs of decoding steps, one for each number of slots and slot length.

    Slots without a row in the step are computed too; their results are ignored and their contents are kept. Graphs
    refer to the cache's memory at capture and are dropped when the cache moves.
    """

    def __init__(self, fused: FusedModel, device: torch.device, capture: Capture, tolerance: float) -> None:
        """tolerance: maximum difference from the logits without graphs, relative to the largest logit."""
        self._fused, self._device, self._capture, self._tolerance = fused, device, capture, tolerance
        self._working = True
        self._memory: weakref.ref[torch.Tensor] | None = None
        self._uses: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], tuple[torch.Tensor, Compute]] = {}

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor | None:
        """Return the logits as `Runner.run` does; None if the step is not computed by a graph."""
        if self._memory is None or self._memory() is not cache.keys:
            self._reset(cache)
        if not self._working or any(len(row.tokens) > 1 for row in rows):
            return None
        slots = [row.slot for row in rows]
        count = min(_round_slots(max(slots) + 1), cache.slots)
        if count > 2 * _round_slots(len(rows)):
            return None
        shape = count, min(_round_length(max(row.start for row in rows) + 1), cache.length)
        inputs_array = np.zeros((3, count), np.int64)
        inputs_array[:, slots] = [row.tokens[0] for row in rows], [row.start for row in rows], [1] * len(rows)
        if shape not in self._graphs:
            self._uses[shape] += 1
            if self._uses[shape] < _MIN_USES or not self._capture_graph(cache, shape, inputs_array):
                return None
        inputs, replay = self._graphs[shape]
        inputs.copy_(torch.from_numpy(inputs_array))
        return replay()[torch.tensor([row.slot for row in rows if row.wanted], dtype=torch.long, device=self._device)]

    def _capture_graph(self, cache: KeyValueCache, shape: tuple[int, int], inputs_array: _Integers) -> bool:
        """Capture the graph of a shape; return whether it gives the same logits as without a graph."""
        if len(self._graphs) == _MAX_GRAPHS:
            self._graphs.clear()
        slots = _SlotAttention(cache, *shape)
        inputs = torch.from_numpy(inputs_array).to(self._device, copy=True)

        def compute() -> torch.Tensor:
            tokens, positions, used = inputs
            slots.begin(positions, used)
            return self._fused(tokens, positions, 0, slots).float()

        try:
            expected = compute()
            replay = self._capture(compute)
            found, expected = (logits[inputs[2] > 0] for logits in (replay(), expected))
            deviation = float((found - expected).abs().max() / expected.abs().max())
        except RuntimeError as error:
            log.warning("CUDA graphs not available, kernels run one by one: %s: %s", type(error).__name__, error)
            self._working = False
            return False
        if not deviation < self._tolerance:
            log.warning("logits of a CUDA graph differ by %.2g from those without, graphs are not used", deviation)
            self._working = False
            return False
        self._graphs[shape] = inputs, replay
        return True

    def _reset(self, cache: KeyValueCache) -> None:
        self._memory = weakref.ref(cache.keys)
        self._graphs.clear()
        self._uses.clear()


class _SlotAttention:
    """Attention of the first `count` slots, one query each, over `length` positions.

    It only uses tensors with constant shapes and addresses, so that it can be captured.
    """

    def __init__(self, cache: KeyValueCache, count: int, length: int) -> None:
        self._keys, self._values = cache.flat()
        self._blocks = CacheBlocks(cache, slice(count), length)
        self._device, self._heads = cache.keys.device, cache.shape.heads
        self._length, self._cache_length = length, cache.length
        self._indices = self._positions = self._used = self._range = torch.empty(0)
        self._masks: dict[int, torch.Tensor] = {}

    def begin(self, positions: torch.Tensor, used: torch.Tensor) -> None:
        """Begin a step with a token at these positions, [slots], of the slots that are used.

        Tensors are created here so that they belong to the graph and live as long.
        """
        self._positions, self._used = positions[:, None], (used > 0)[:, None, None]
        self._range = torch.arange(self._length, device=self._device)
        # Index of the first key of each slot and head in the flat cache of a layer, [slots, heads].
        begins = torch.arange(len(positions) * self._heads, device=self._device) * self._cache_length
        self._indices = begins.view(len(positions), -1) + self._positions
        self._masks = {}

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        for cached, new in ((self._keys[layer], key), (self._values[layer], value)):
            cached[self._indices] = torch.where(self._used, new, cached[self._indices])
        return self._blocks.attend(layer, form, query, self._mask(form.window, query.dtype))

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask to add to the scores of each slot, [slots, 1, length]."""
        if window not in self._masks:
            visible = self._range <= self._positions
            if window:
                visible &= self._range > self._positions - window
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[window] = zeros.masked_fill_(~visible, float("-inf"))[:, None]
        return self._masks[window]


def cuda_graph(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html).

    They share one memory pool: the result of one is overwritten when another is replayed, so it must be copied before.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE_LOCK, torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries choose kernels and allocate memory, which cannot be captured
                compute()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads, which may compute other models, are not affected.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _round_slots(count: int) -> int:
    """Round up to a power of two, from 8 on to a multiple of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _round_length(length: int) -> int:
    multiple = max(_MIN_ROUNDING, (1 << (length - 1).bit_length()) // 8)
    return -(-length // multiple) * multiple
