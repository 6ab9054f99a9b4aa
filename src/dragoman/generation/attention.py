"""Attention over the slots of the cache, registered with transformers so that any decoder of theirs runs on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from dragoman.generation.cache import Cache, CacheShape, rounded

NAME = "dragoman"
# Decoding rows attend all at once, unless the slots' lengths differ so much that so many times too much would be read.
_RAGGED = 3.0


@dataclass(frozen=True, slots=True)
class Form:
    """How a layer attends: the factor of its scores, how far back it sees, its soft limit; 0 is none."""

    scaling: float
    window: int = 0
    softcap: float = 0.0


class Attend(Protocol):
    """What answers the attention of one forward pass. Rows are tokens: query [heads, rows, size]."""

    def __call__(
        self, layer: int, form: Form, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The attention's output, [rows, heads, value size]."""


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, step: Attend, **options: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; `step` came through the model's forward."""
    strange = [name for name in ("s_aux", "position_bias", "sinks") if options.get(name) is not None]
    if strange:
        raise NotImplementedError(f"attention with {', '.join(strange)}")
    scaling = options.get("scaling")
    form = Form(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        options.get("sliding_window") or 0,
        options.get("softcap") or 0.0,
    )
    return step(module.layer_idx, form, query[0], key[0], value[0])[None], None


class Shapes:
    """Attends to nothing, and notes what the cache has to hold and how layers attend."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.forms: dict[int, Form] = {}

    def __call__(
        self, layer: int, form: Form, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.seen[layer] = (key.shape[0], key.shape[2], value.shape[2])
        self.forms[layer] = form
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    def shape(self, layers: int) -> CacheShape:
        """Raises NotImplementedError unless every layer has asked, and all for the same."""
        forms = set(self.seen.values())
        if sorted(self.seen) != list(range(layers)) or len(forms) != 1:
            raise NotImplementedError(f"attention of {len(self.seen)} of {layers} layers, in {len(forms)} shapes")
        return CacheShape(layers, *forms.pop())


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step: `count` of them from `first` on, the sequence's own from `start` on."""

    slot: int
    first: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The sequence's length with them."""
        return self.start + self.count


@dataclass(slots=True)
class Step:
    """One forward pass: the first rows are a token of each decoding sequence, then come chunks of prompts."""

    cache: Cache
    decodes: Sequence[Span]
    chunks: Sequence[Span]
    places: torch.Tensor = field(init=False)
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)
    _slots: int = 0
    _length: int = 0
    _order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        device = self.cache.keys.device
        heads, length = self.cache.shape.heads, self.cache.length
        first = [span.slot * heads * length + span.start for span in self.decodes]
        for span in self.chunks:
            begin = span.slot * heads * length
            first += range(begin + span.start, begin + span.stop)
        # Where each row's key goes among the cache's vectors of one layer, [heads * rows].
        each = torch.arange(0, heads * length, length, device=device)[:, None]
        self.places = (each + torch.tensor(first, device=device)).view(-1)
        self._together()

    def _together(self) -> None:
        """Decide whether the decoding rows attend at once, over all slots up to the last one of theirs."""
        if not self.decodes:
            return
        used = [span.slot for span in self.decodes]
        slots, length = max(used) + 1, self._read(max(span.stop for span in self.decodes))
        if slots * length > _RAGGED * sum(span.stop for span in self.decodes):
            return
        self._slots, self._length = slots, length
        if used != list(range(slots)):
            self._order = torch.tensor(used, device=self.cache.keys.device)

    def _read(self, length: int) -> int:
        """How far slots are read for so many tokens: to their end, as one block, where that is not too much.

        Blocks without gaps come from memory in a third of the time. Sums over any number of whole portions are the
        same to the last bit.
        """
        least = rounded(length)
        return self.cache.length if self.cache.length <= 2 * least else least

    def __call__(
        self, layer: int, form: Form, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.view(-1, keys.shape[-1]).index_copy_(0, self.places, key.reshape(-1, keys.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, self.places, value.reshape(-1, values.shape[-1]))
        if self._slots and not self.chunks:
            return self._decoded(form, query, keys, values)
        found = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
        apart = self.chunks
        if self._slots:
            count = len(self.decodes)
            found[:count] = self._decoded(form, query[:, :count], keys, values)
        else:
            apart = (*self.decodes, *self.chunks)
        for span in apart:
            rows = slice(span.first, span.first + span.count)
            if span.count == 1:
                found[rows] = self._single(span, form, query[:, rows], keys, values)
            else:
                found[rows] = _chunk(span, form, query[:, rows], keys[span.slot], values[span.slot]).transpose(0, 1)
        return found

    def _decoded(self, form: Form, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Each slot's one query against its own keys: [rows, heads, value size]."""
        slots, length = self._slots, self._length
        rows = query.transpose(0, 1)
        if self._order is not None:
            placed = rows.new_zeros(slots, *rows.shape[1:])
            placed[self._order] = rows
            rows = placed
        found = _looked(form, rows, keys[:slots, :, :length], values[:slots, :, :length], self._mask(form.window))
        return found if self._order is None else found[self._order]

    def _mask(self, window: int) -> torch.Tensor:
        """What to add to the scores of each slot, [slots, 1, length]: nothing, or -inf where it must not look."""
        if window not in self._masks:
            stops = [1] * self._slots  # a slot that does not decode sees one token, in vain
            for span in self.decodes:
                stops[span.slot] = span.stop
            self._masks[window] = _hidden(stops, self._length, window, self.cache.keys)
        return self._masks[window]

    def _single(
        self, span: Span, form: Form, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One query against its slot, to the last bit as if it attended together: nobody's text depends on a crowd."""
        length = rounded(span.stop)
        mask = _hidden([span.stop], length, form.window, keys)
        slot = slice(span.slot, span.slot + 1)
        return _looked(form, query.transpose(0, 1), keys[slot, :, :length], values[slot, :, :length], mask)


def _looked(
    form: Form, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """A query for each slot, [slots, heads, size], against what the mask leaves of it: [slots, heads, value size]."""
    slots, heads, length, _ = keys.shape
    grouped = rows.reshape(slots * heads, -1, rows.shape[-1])
    scores = torch.bmm(grouped, keys.reshape(slots * heads, length, -1).transpose(1, 2)).view(slots, -1, length)
    weights = _weights(scores, form, mask).view(slots * heads, -1, length)
    found = torch.bmm(weights, values.reshape(slots * heads, length, -1))
    return found.view(slots, -1, found.shape[-1])


def _hidden(stops: Sequence[int], length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """What to add to the scores of slots of those lengths, [slots, 1, length]: 0, and -inf where they must not look."""
    places, ends = torch.arange(length), torch.tensor(stops)[:, None]
    seen = places < ends
    if window:
        seen &= places >= ends - window
    return torch.where(seen, 0.0, float("-inf"))[:, None].to(like.device, like.dtype)


def _weights(scores: torch.Tensor, form: Form, mask: torch.Tensor) -> torch.Tensor:
    if form.softcap:
        scores = torch.tanh(scores * (form.scaling / form.softcap)) * form.softcap + mask
    else:
        scores = torch.add(mask, scores, alpha=form.scaling)
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)


def _chunk(span: Span, form: Form, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
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


def _seen(span: Span, begin: int, window: int, query: torch.Tensor) -> torch.Tensor:
    """Which keys from `begin` on each row may see, [rows, keys]."""
    rows = torch.arange(span.start, span.stop, device=query.device)[:, None]
    places = torch.arange(begin, span.stop, device=query.device)
    seen = places <= rows
    return seen & (places > rows - window) if window else seen
