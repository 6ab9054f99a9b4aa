"""Attention over the slots of the cache, registered with transformers so that any decoder of theirs runs on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from dragoman.generation.cache import CacheShape, KeyValueCache, round_up

NAME = "dragoman"
# Decoding rows attend all at once, unless the slots' lengths differ so much that so many times too much would be read.
_RAGGED = 3.0


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How a layer attends: the factor of its scores, how far back it sees, its soft limit; 0 is none."""

    scaling: float
    window: int = 0
    softcap: float = 0.0


class AttentionFunction(Protocol):
    """What answers the attention of one forward pass. Rows are tokens: query, key and value [rows, heads, size]."""

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The attention's output, [rows, heads, value size]."""


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, step: AttentionFunction, **options: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; `step` came through the model's forward."""
    strange = [name for name in ("s_aux", "position_bias", "sinks") if options.get(name) is not None]
    if strange:
        raise NotImplementedError(f"attention with {', '.join(strange)}")
    scaling = options.get("scaling")
    form = AttentionForm(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        options.get("sliding_window") or 0,
        options.get("softcap") or 0.0,
    )
    return step(module.layer_idx, form, *(each[0].transpose(0, 1) for each in (query, key, value)))[None], None


class ShapeRecorder:
    """Attends to nothing, and notes what the cache has to hold and how layers attend."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.forms: dict[int, AttentionForm] = {}

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.seen[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.forms[layer] = form
        return value.new_zeros(*query.shape[:2], value.shape[2])

    def shape(self, layers: int) -> CacheShape:
        """Raises NotImplementedError unless every layer has asked, and all for the same."""
        forms = set(self.seen.values())
        if sorted(self.seen) != list(range(layers)) or len(forms) != 1:
            raise NotImplementedError(f"attention of {len(self.seen)} of {layers} layers, in {len(forms)} shapes")
        return CacheShape(layers, *forms.pop())


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Tokens of one sequence in a step: `count` of them from `first` on, the sequence's own from `start` on."""

    slot: int
    first: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The sequence's length with them."""
        return self.start + self.count


class CacheBlocks:
    """What decoding rows read: keys and values of some slots up to a length, by layer, [slots * heads, length, size].

    The views of all layers are made at once, in less time than those of a few layers one by one.
    """

    def __init__(self, cache: KeyValueCache, slots: slice, length: int) -> None:
        self._keys = _vectors(cache.keys[:, slots, :, :length]).transpose(2, 3).unbind()
        self._values = _vectors(cache.values[:, slots, :, :length]).unbind()

    def looked(self, layer: int, form: AttentionForm, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What a query for each slot, [slots, heads, size], reads as the mask lets it: [slots, heads, value size]."""
        keys, values = self._keys[layer], self._values[layer]
        scores = torch.bmm(rows.reshape(len(keys), -1, rows.shape[-1]), keys)
        weights = _weights(scores.view(len(rows), -1, scores.shape[-1]), form, mask)
        return torch.bmm(weights.view(scores.shape), values).view(*rows.shape[:2], -1)


def _vectors(held: torch.Tensor) -> torch.Tensor:
    """A part of the cache, [layers, slots, heads, length, size], as [layers, slots * heads, length, size]."""
    return held.view(len(held), -1, *held.shape[3:])


def _hidden(stops: Sequence[int], length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """What to add to the scores of slots of those lengths, [slots, 1, length]: 0, and -inf where they must not look."""
    places, ends = np.arange(length), np.array(stops)[:, None]
    seen = places < ends
    if window:
        seen &= places >= ends - window
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
    return torch.from_numpy(mask).to(like.device, like.dtype)


@dataclass(slots=True)
class AttentionStep:
    """One forward pass: the first rows are a token of each decoding sequence, then come chunks of prompts."""

    cache: KeyValueCache
    decodes: Sequence[SlotSpan]
    chunks: Sequence[SlotSpan]
    places: torch.Tensor = field(init=False)
    _keys: Sequence[torch.Tensor] = field(init=False)
    _values: Sequence[torch.Tensor] = field(init=False)
    _together: CacheBlocks | None = None
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
        # Where each row's keys go among the cache's vectors of one layer, [rows, heads].
        places = np.array(first)[:, None] + np.arange(0, heads * length, length)
        self.places = torch.from_numpy(places).to(cache.keys.device)
        self._keys, self._values = cache.flat()
        self._together = self._blocks()

    def _blocks(self) -> CacheBlocks | None:
        """What the decoding rows read, where they attend at once, over all slots up to the last one of theirs."""
        if not self.decodes:
            return None
        used = [span.slot for span in self.decodes]
        slots, length = max(used) + 1, self._read(max(span.stop for span in self.decodes))
        if slots * length > _RAGGED * sum(span.stop for span in self.decodes):
            return None
        self._slots, self._length = slots, length
        if used != list(range(slots)):
            self._order = torch.tensor(used, device=self.cache.keys.device)
        return CacheBlocks(self.cache, slice(slots), length)

    def _read(self, length: int) -> int:
        """How far slots are read for so many tokens: to their end, as one block, where that is not too much.

        CacheBlocks without gaps come from memory in a third of the time. Sums over any number of whole portions are the
        same to the last bit.
        """
        least = round_up(length)
        return self.cache.length if self.cache.length <= 2 * least else least

    def __call__(
        self, layer: int, form: AttentionForm, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self._keys[layer][self.places] = key
        self._values[layer][self.places] = value
        if self._together is not None and not self.chunks:
            return self._decoded(self._together, layer, form, query)
        found, apart = query.new_empty(*query.shape[:2], value.shape[-1]), self.chunks
        if self._together is not None:
            count = len(self.decodes)
            found[:count] = self._decoded(self._together, layer, form, query[:count])
        else:
            apart = (*self.decodes, *self.chunks)
        for span in apart:
            rows = slice(span.first, span.first + span.count)
            if span.count == 1:
                found[rows] = self._single(span, layer, form, query[rows])
            else:
                keys, values = self.cache.keys[layer, span.slot], self.cache.values[layer, span.slot]
                found[rows] = _chunk(span, form, query[rows].transpose(0, 1), keys, values).transpose(0, 1)
        return found

    def _decoded(self, blocks: CacheBlocks, layer: int, form: AttentionForm, query: torch.Tensor) -> torch.Tensor:
        """Each slot's one query against its own keys: [rows, heads, value size]."""
        if self._order is None:
            return blocks.looked(layer, form, query, self._mask(form.window))
        placed = query.new_zeros(self._slots, *query.shape[1:])
        placed[self._order] = query
        return blocks.looked(layer, form, placed, self._mask(form.window))[self._order]

    def _mask(self, window: int) -> torch.Tensor:
        """What to add to the scores of each slot, [slots, 1, length]: nothing, or -inf where it must not look."""
        if window not in self._masks:
            stops = [1] * self._slots  # a slot that does not decode sees one token, in vain
            for span in self.decodes:
                stops[span.slot] = span.stop
            self._masks[window] = _hidden(stops, self._length, window, self.cache.keys)
        return self._masks[window]

    def _single(self, span: SlotSpan, layer: int, form: AttentionForm, query: torch.Tensor) -> torch.Tensor:
        """One query against its slot, to the last bit as if it attended together: nobody's text depends on a crowd."""
        length = round_up(span.stop)
        alone = CacheBlocks(self.cache, slice(span.slot, span.slot + 1), length)
        return alone.looked(layer, form, query, _hidden([span.stop], length, form.window, self.cache.keys))


def _weights(scores: torch.Tensor, form: AttentionForm, mask: torch.Tensor) -> torch.Tensor:
    if form.softcap:
        scores = torch.tanh(scores * (form.scaling / form.softcap)) * form.softcap + mask
    else:
        scores = torch.add(mask, scores, alpha=form.scaling)
    return torch.softmax(scores, -1)  # in FP32 inside, whatever the type


def _chunk(
    span: SlotSpan, form: AttentionForm, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """One sequence's queries [heads, rows, size] against its slot: [heads, rows, value size]."""
    begin = max(0, span.start + 1 - form.window) if form.window else 0
    keys, values = keys[:, begin : span.stop], values[:, begin : span.stop]
    if form.softcap:
        groups = query.shape[0] // keys.shape[0]
        scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2)
        mask = torch.zeros_like(scores[0]).masked_fill_(~_seen(span, begin, form.window, query), float("-inf"))
        return _weights(scores, form, mask) @ values.repeat_interleave(groups, 0)
    plain = span.start == 0 and not form.window
    found: torch.Tensor = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        None if plain else _seen(span, begin, form.window, query),
        scale=form.scaling,
        is_causal=plain,
        enable_gqa=True,
    )
    return found[0]


def _seen(span: SlotSpan, begin: int, window: int, query: torch.Tensor) -> torch.Tensor:
    """Which keys from `begin` on each row may see, [rows, keys]."""
    rows = torch.arange(span.start, span.stop, device=query.device)[:, None]
    places = torch.arange(begin, span.stop, device=query.device)
    seen = places <= rows
    return seen & (places > rows - window) if window else seen
