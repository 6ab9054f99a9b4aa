"""Attention over the slots of the cache, registered with transformers so that its decoders run on this cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from dragoman_text.generation import gpu
from dragoman_text.generation.cache import LENGTH_STEP, CacheShape, KeyValueCache, round_up
from dragoman_text.generation.rounding import cancelling

# Names of our attention in transformers; with the second one models also ask for their masks.
NAME, CHECKED = "dragoman", "dragoman_checked"
# Decoding rows attend in one operation, unless that would read more than this multiple of the needed keys.
_MAX_PADDING = 3.0
# Numbers of slots and lengths with which `can_merge` tries to attend.
_SLOTS, _LENGTHS = (2, 5, 16, 33), (LENGTH_STEP, 2 * LENGTH_STEP, 3 * LENGTH_STEP, 8 * LENGTH_STEP)


class UnsupportedArchitecture(Exception):
    """Our attention cannot run the model; its own code can."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Parameters of a layer's attention: factor of the scores, window size and soft cap (0: none)."""

    scaling: float
    window: int = 0
    softcap: float = 0.0


class AttentionFunction(Protocol):
    """Attention of one forward pass. Rows are tokens: query, key and value have the shape [rows, heads, size]."""

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the output, [rows, heads, value size]."""


_used: ContextVar[AttentionFunction] = ContextVar("attention_function")
# Arguments of an attention function that change nothing here: masks and positions are those of the step.
_WITHOUT_EFFECT = frozenset(
    {
        "attention_mask",
        "cache_position",
        "deterministic",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
        "use_mask",
    }
)
_OBEYED = frozenset({"scaling", "sliding_window", "softcap"})


@contextmanager
def use_attention(function: AttentionFunction) -> Iterator[None]:
    """Call `function` for the attention of the layers of models that run in this block."""
    token = _used.set(function)
    try:
        yield
    finally:
        _used.reset(token)


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers. Raises UnsupportedArchitecture for arguments that it does not know."""
    scaling = options.get("scaling")
    form = AttentionForm(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        options.get("sliding_window") or 0,
        options.get("softcap") or 0.0,
    )
    unknown = [name for name, each in options.items() if each is not None and name not in _OBEYED | _WITHOUT_EFFECT]
    if unknown:
        raise UnsupportedArchitecture(f"attention with {', '.join(unknown)}")
    return _used.get()(module.layer_idx, form, *(each[0].transpose(0, 1) for each in (query, key, value)))[None], None


def record_mask(**options: Any) -> None:
    """Record the mask that a model asks for; our attention needs none."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(options["mask_function"])


class MaskRecorder:
    """Records the masks that a model creates, as windows of positions before each token within `context`."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._windows: set[int] = set()

    @contextmanager
    def record(self) -> Iterator[None]:
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    def add(self, function: Callable[..., Any]) -> None:
        """Record a mask. Raises UnsupportedArchitecture if it is not one window for all positions."""
        last = self._context - 1
        window = self._visible(function, last)
        for position in {0, 1, window - 1, window, window + 1, last // 2, last * 2 // 3} & set(range(last)):
            if self._visible(function, position) != min(window, position + 1):
                raise UnsupportedArchitecture("a mask that is not a window")
        self._windows.add(0 if window == self._context else window)

    def compare(self, forms: Mapping[int, AttentionForm]) -> None:
        """Raise UnsupportedArchitecture if the recorded windows are not those of the layers."""
        windows = {form.window for form in forms.values() if form.window < self._context}
        if self._windows and self._windows - {0} != windows - {0}:
            raise UnsupportedArchitecture(f"masks with the windows {self._windows}, layers with {windows}")

    def _visible(self, function: Callable[..., Any], position: int) -> int:
        """Return how many positions up to its own a token attends to."""
        zero = torch.tensor(0)
        visible = function(zero, zero, torch.tensor(position), torch.arange(position + 1))
        count = int(visible.sum()) if isinstance(visible, torch.Tensor) and visible.ndim else position + 1
        if isinstance(visible, torch.Tensor) and visible.ndim and not bool(visible[position + 1 - count :].all()):
            raise UnsupportedArchitecture("a mask that is not a window")
        return count


_recorder: ContextVar[MaskRecorder | None] = ContextVar("mask_recorder", default=None)


class ShapeRecorder:
    """Attention that computes nothing and records the shapes and forms of the layers."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, int, int]] = {}
        self._query_heads: set[int] = set()
        self.forms: dict[int, AttentionForm] = {}

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self._shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self._query_heads.add(query.shape[1])
        self.forms[layer] = form
        return value.new_zeros(*query.shape[:2], value.shape[2])

    @property
    def query_heads(self) -> int:
        """Largest number of query heads of a layer."""
        return max(self._query_heads, default=0)

    def shape(self, layers: int) -> CacheShape:
        """Return the shape of the cache. Raises UnsupportedArchitecture if layers differ or do not attend."""
        shapes = set(self._shapes.values())
        if sorted(self._shapes) != list(range(layers)) or len(shapes) != 1:
            raise UnsupportedArchitecture(
                f"attention of {len(self._shapes)} of {layers} layers, in {len(shapes)} shapes"
            )
        return CacheShape(layers, *shapes.pop())


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Tokens of one sequence in a step: rows `first` to `first + count`, positions `start` to `start + count`."""

    slot: int
    first: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class CacheBlocks:
    """Keys and values of some slots up to a length, by layer, [slots * heads, length, size].

    The views of all layers are created at once, which takes less time than one by one.
    """

    def __init__(self, cache: KeyValueCache, slots: slice, length: int) -> None:
        self._keys = _merge_heads(cache.keys[:, slots, :, :length]).transpose(2, 3).unbind()
        self._values = _merge_heads(cache.values[:, slots, :, :length]).unbind()

    def attend(self, layer: int, form: AttentionForm, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend with one query per slot, [slots, heads, size]; return [slots, heads, value size]."""
        keys, values = self._keys[layer], self._values[layer]
        scores = torch.bmm(query.reshape(len(keys), -1, query.shape[-1]), keys)
        weights = _weights(scores.view(len(query), -1, scores.shape[-1]), form, mask)
        return torch.bmm(weights.view(scores.shape), values).view(*query.shape[:2], -1)


@lru_cache(64)
def can_merge(shape: CacheShape, query_heads: int, dtype: torch.dtype) -> bool:
    """Return whether the attention of a sequence has the same bits alone and together with others on a CPU.

    Products of BF16 can have other kernels, with another order of sums, for more slots or longer ones.
    """
    heads, groups = shape.heads, query_heads // shape.heads
    slots, length = _SLOTS[-1], _LENGTHS[-1]
    # Only the first tokens are compared; the others have weight 0, as masked ones.
    columns, queries = cancelling(LENGTH_STEP, groups, shape.key_size, dtype)
    value_columns, rows = cancelling(shape.value_size, groups, LENGTH_STEP, dtype)
    keys, values = (columns.new_zeros(slots * heads, length, size) for size in (shape.key_size, shape.value_size))
    keys[:, :LENGTH_STEP], values[:, :LENGTH_STEP] = columns, value_columns.t()
    keys, weights = keys.transpose(1, 2), rows.new_zeros(groups, length)
    weights[:, :LENGTH_STEP] = rows
    queries, weights = (each.expand(slots * heads, -1, -1).contiguous() for each in (queries, weights))

    def attend(begin: int, stop: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(begin * heads, stop * heads)
        scores = torch.bmm(queries[part], keys[part, :, :length])[..., :LENGTH_STEP]
        return scores, torch.bmm(weights[part, :, :length].contiguous(), values[part, :length])

    alone = attend(0, 1, LENGTH_STEP)
    return all(
        torch.equal(found, expected.repeat(count, 1, 1))
        for count in _SLOTS
        for length in _LENGTHS
        for found, expected in zip(attend(0, count, length), alone, strict=True)
    )


def write_tokens(
    keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write keys and values [rows, heads, size] to rows `indices` [rows, heads] of a layer's flat cache."""
    kernels = gpu.kernels(keys.device, keys.dtype)
    if kernels is not None:
        kernels.store(key, value, keys, values, indices)
        return
    keys[indices] = key
    values[indices] = value


def _merge_heads(cached: torch.Tensor) -> torch.Tensor:
    """Reshape [layers, slots, heads, length, size] to [layers, slots * heads, length, size]."""
    return cached.view(len(cached), -1, *cached.shape[3:])


def _mask(stops: Sequence[int], length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return the mask [slots, 1, length] to add to the scores of queries at the end of slots of these lengths."""
    positions, ends = np.arange(length), np.array(stops)[:, None]
    visible = positions < ends
    if window:
        visible &= positions >= ends - window
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
    return torch.from_numpy(mask).to(like.device, like.dtype)


@dataclass(slots=True)
class AttentionStep:
    """Attention of one step: the first rows are single tokens, followed by chunks of prompts.

    Several single tokens of one sequence attend to each other as if they were computed one by one. merges: whether
    sequences attend together, which requires `can_merge` for equal bits in any batch.
    """

    cache: KeyValueCache
    decodes: Sequence[SlotSpan]
    chunks: Sequence[SlotSpan]
    merges: bool = True
    indices: torch.Tensor = field(init=False)  # of each row's keys in the flat cache of a layer, [rows, heads]
    _keys: Sequence[torch.Tensor] = field(init=False)
    _values: Sequence[torch.Tensor] = field(init=False)
    _blocks: CacheBlocks | None = None
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)
    _slots: int = 0
    _length: int = 0
    _order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        cache, heads, length = self.cache, self.cache.shape.heads, self.cache.length
        first = [span.slot * heads * length + span.start for span in self.decodes]
        for span in self.chunks:
            begin = span.slot * heads * length
            first += range(begin + span.start, begin + span.stop)
        indices = np.array(first)[:, None] + np.arange(0, heads * length, length)
        self.indices = torch.from_numpy(indices).to(cache.keys.device)
        self._keys, self._values = cache.flat()
        self._blocks = self._decoding_blocks()

    def _decoding_blocks(self) -> CacheBlocks | None:
        """Return the blocks for one operation over all slots up to the last decoding one; None if too much padding."""
        if not self.decodes or not self.merges:
            return None
        used = [span.slot for span in self.decodes]
        if len(set(used)) < len(used):  # drafts
            return None
        slots, length = max(used) + 1, self._read_length(max(span.stop for span in self.decodes))
        if slots * length > _MAX_PADDING * sum(span.stop for span in self.decodes):
            return None
        self._slots, self._length = slots, length
        if used != list(range(slots)):
            self._order = torch.tensor(used, device=self.cache.keys.device)
        return CacheBlocks(self.cache, slice(slots), length)

    def _read_length(self, length: int) -> int:
        """Return how far slots are read: to their end, if that is at most twice the needed length.

        Contiguous memory is read in a third of the time. Sums have the same bits for any multiple of the length step.
        """
        needed = round_up(length)
        return self.cache.length if self.cache.length <= 2 * needed else needed

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        write_tokens(self._keys[layer], self._values[layer], self.indices, key, value)
        if self._blocks is not None and not self.chunks:
            return self._decode(self._blocks, layer, form, query)
        output, separate = query.new_empty(*query.shape[:2], value.shape[-1]), self.chunks
        if self._blocks is not None:
            count = len(self.decodes)
            output[:count] = self._decode(self._blocks, layer, form, query[:count])
        else:
            separate = (*self.decodes, *self.chunks)
        for span in separate:
            rows = slice(span.first, span.first + span.count)
            if span.count == 1:
                output[rows] = self._decode_alone(span, layer, form, query[rows])
            else:
                keys, values = self.cache.keys[layer, span.slot], self.cache.values[layer, span.slot]
                output[rows] = _attend_chunk(span, form, query[rows].transpose(0, 1), keys, values).transpose(0, 1)
        return output

    def _decode(self, blocks: CacheBlocks, layer: int, form: AttentionForm, query: torch.Tensor) -> torch.Tensor:
        """Attend with one query per decoding sequence, all in one operation."""
        if form.window not in self._masks:
            stops = [1] * self._slots  # the result of a slot that does not decode is not used
            for span in self.decodes:
                stops[span.slot] = span.stop
            self._masks[form.window] = _mask(stops, self._length, form.window, self.cache.keys)
        mask = self._masks[form.window]
        if self._order is None:
            return blocks.attend(layer, form, query, mask)
        by_slot = query.new_zeros(self._slots, *query.shape[1:])
        by_slot[self._order] = query
        return blocks.attend(layer, form, by_slot, mask)[self._order]

    def _decode_alone(self, span: SlotSpan, layer: int, form: AttentionForm, query: torch.Tensor) -> torch.Tensor:
        """Attend with the query of one sequence; bitwise equal to `_decode`, so results do not depend on the batch."""
        length = round_up(span.stop)
        blocks = CacheBlocks(self.cache, slice(span.slot, span.slot + 1), length)
        return blocks.attend(layer, form, query, _mask([span.stop], length, form.window, self.cache.keys))


def _weights(scores: torch.Tensor, form: AttentionForm, mask: torch.Tensor) -> torch.Tensor:
    if form.softcap:
        scores = torch.tanh(scores * (form.scaling / form.softcap)) * form.softcap + mask
    else:
        scores = torch.add(mask, scores, alpha=form.scaling)
    return torch.softmax(scores, -1)  # computed in FP32 for any dtype


def _attend_chunk(
    span: SlotSpan, form: AttentionForm, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with several queries of one sequence, [heads, rows, size]; return [heads, rows, value size]."""
    begin = max(0, span.start + 1 - form.window) if form.window else 0
    keys, values = keys[:, begin : span.stop], values[:, begin : span.stop]
    if form.softcap:
        groups = query.shape[0] // keys.shape[0]
        scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2)
        hidden = ~_visible(span, begin, form.window, query)
        mask = torch.zeros_like(scores[0]).masked_fill_(hidden, float("-inf"))
        return _weights(scores, form, mask) @ values.repeat_interleave(groups, 0)
    is_causal = span.start == 0 and not form.window
    output: torch.Tensor = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        None if is_causal else _visible(span, begin, form.window, query),
        scale=form.scaling,
        is_causal=is_causal,
        enable_gqa=True,
    )
    return output[0]


def _visible(span: SlotSpan, begin: int, window: int, query: torch.Tensor) -> torch.Tensor:
    """Return which keys from position `begin` on each row may attend to, [rows, keys]."""
    rows = torch.arange(span.start, span.stop, device=query.device)[:, None]
    positions = torch.arange(begin, span.stop, device=query.device)
    visible = positions <= rows
    return visible & (positions > rows - window) if window else visible
