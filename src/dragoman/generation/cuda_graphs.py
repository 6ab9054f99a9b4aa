"""Steps of texts on a GPU as CUDA graphs: all of a step's kernels launched as one, not one by one from Python."""

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
# Runs work once on this thread, and gives what runs it again on the same memory, with the same tensor for its result.
Capture = Callable[[Compute], Compute]

# A step's graph is made when its shape comes for the second time: making one takes as long as a few steps.
_AGAIN = 2
# So many graphs are held at a time. A model of 32 layers takes some MB for each.
_HELD = 64
# Lengths are told apart by an eighth of the power of two above them, and by no less than this.
_LEAST_PORTION = 128
_ONE_AT_A_TIME = threading.Lock()


class CudaGraphs:
    """CUDA graphs of decoding steps, one for each number of slots and slot length.

    Slots without a row in the step are computed too; their results are ignored and their contents are kept. Graphs
    refer to the cache's memory at capture and are dropped when the cache moves.
    """

    def __init__(self, compact: FusedModel, device: torch.device, capture: Capture, alike: float) -> None:
        """`alike`: how far a graph's logits may be from those of the same work kernel by kernel, of the largest one."""
        self._compact, self._device, self._capture, self._tolerance = compact, device, capture, alike
        self._working = True
        self._memory: weakref.ref[torch.Tensor] | None = None
        self._came: Counter[tuple[int, int]] = Counter()
        self._held: dict[tuple[int, int], tuple[torch.Tensor, Compute]] = {}

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor | None:
        """What `Runner.run` gives; None where the step has to be computed in another way."""
        if self._memory is None or self._memory() is not cache.keys:
            self._forget(cache)
        if not self._working or any(len(row.tokens) > 1 for row in rows):
            return None
        slots = [row.slot for row in rows]
        count = min(_ample(max(slots) + 1), cache.slots)
        if count > 2 * _ample(len(rows)):
            return None
        shape = count, min(_portions(max(row.start for row in rows) + 1), cache.length)
        given = np.zeros((3, count), np.int64)
        given[:, slots] = [row.tokens[0] for row in rows], [row.start for row in rows], [1] * len(rows)
        if shape not in self._held:
            self._came[shape] += 1
            if self._came[shape] < _AGAIN or not self._make(cache, shape, given):
                return None
        inputs, replay = self._held[shape]
        inputs.copy_(torch.from_numpy(given))
        return replay()[torch.tensor([row.slot for row in rows if row.wanted], dtype=torch.long, device=self._device)]

    def _make(self, cache: KeyValueCache, shape: tuple[int, int], given: _Integers) -> bool:
        """Make the graph of a shape, if it gives the logits that the same work gives without."""
        if len(self._held) == _HELD:
            self._held.clear()
        slots = _Slots(cache, *shape)
        inputs = torch.from_numpy(given).to(self._device, copy=True)

        def compute() -> torch.Tensor:
            tokens, places, used = inputs
            slots.begin(places, used)
            return self._compact(tokens, places, 0, slots).float()

        try:
            expected = compute()
            replay = self._capture(compute)
            found, expected = (logits[inputs[2] > 0] for logits in (replay(), expected))
            deviation = float((found - expected).abs().max() / expected.abs().max())
        except RuntimeError as error:
            log.warning("no CUDA graphs, steps are launched kernel by kernel: %s: %s", type(error).__name__, error)
            self._working = False
            return False
        if not deviation < self._tolerance:
            log.warning("a CUDA graph's logits differ by %.2g from those without, no graphs are used", deviation)
            self._working = False
            return False
        self._held[shape] = inputs, replay
        return True

    def _forget(self, cache: KeyValueCache) -> None:
        self._memory = weakref.ref(cache.keys)
        self._held.clear()
        self._came.clear()


class _Slots:
    """Attention of the first `count` slots, a query each, over `length` places: by tensors alone, whose shapes and
    addresses stay, so that it can be captured."""

    def __init__(self, cache: KeyValueCache, count: int, length: int) -> None:
        self._keys, self._values = cache.flat()
        self._blocks = CacheBlocks(cache, slice(count), length)
        self._device, self._heads = cache.keys.device, cache.shape.heads
        self._length, self._whole = length, cache.length
        self._where = self._last = self._used = self._all = torch.empty(0)
        self._masks: dict[int, torch.Tensor] = {}

    def begin(self, places: torch.Tensor, used: torch.Tensor) -> None:
        """A step in which slots get a token at these places, [slots], unless they are not used.

        All that it reads besides is made here, so that it belongs to what is captured and lives as long.
        """
        self._last, self._used = places[:, None], (used > 0)[:, None, None]
        self._all = torch.arange(self._length, device=self._device)
        # The slots' heads begin one after another among the cache's vectors of one layer: [slots, heads].
        begins = torch.arange(len(places) * self._heads, device=self._device) * self._whole
        self._where = begins.view(len(places), -1) + self._last
        self._masks = {}

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        for held, new in ((self._keys[layer], key), (self._values[layer], value)):
            held[self._where] = torch.where(self._used, new, held[self._where])
        return self._blocks.looked(layer, form, query, self._mask(form.window, query.dtype))

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """What to add to the scores of each slot, [slots, 1, length]: 0, and -inf where it must not look."""
        if window not in self._masks:
            seen = self._all <= self._last
            if window:
                seen &= self._all > self._last - window
            nothing = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._masks[window] = nothing.masked_fill_(~seen, float("-inf"))[:, None]
        return self._masks[window]


def cuda_graph(device: torch.device) -> Capture:
    """Captures by CUDA graphs, as https://docs.pytorch.org/docs/stable/notes/cuda.html describes.

    All are in one pool of memory: the result of one is overwritten when another runs, so it has to be copied before.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries choose kernels and take memory: that cannot be captured
                compute()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may go on: another model's may be at work.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _ample(count: int) -> int:
    """So many slots for that many: the next power of two up to 8, then the next multiple of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _portions(length: int) -> int:
    portion = max(_LEAST_PORTION, (1 << (length - 1).bit_length()) // 8)
    return -(-length // portion) * portion
