"""A shorter way through the layers of Llama and its kin: the same weights, fused, and fewer operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from dragoman.generation.attention import AttentionForm, AttentionFunction
from dragoman.generation.packing import MIN_ROWS, PackedLinear

# Architectures of this form. Each model is compared with its own code in transformers before the short way is taken.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of rotary embedding, by transformers' names.
_STEADY = ("default", "linear", "llama3", "yarn")


class LinearLayer(Protocol):
    """A linear layer. `product` and `plus` want at least `MIN_ROWS` rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor: ...
    def product(self, rows: torch.Tensor) -> torch.Tensor: ...
    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer's weights: of norms before attention and between it and the MLP, each twice, and of products."""

    before: torch.Tensor
    qkv: LinearLayer
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: LinearLayer
    between: torch.Tensor
    gate_up: LinearLayer
    down: LinearLayer
    form: AttentionForm


class FusedModel:
    """Llama's forward pass: queries, keys and values in one product, both halves of the MLP in another.

    Made of the model that transformers has loaded, and of the forms in which its layers attend, by layer.
    """

    def __init__(self, model: Any, forms: Mapping[int, AttentionForm], packed: bool) -> None:
        self._linear: Callable[..., LinearLayer] = _packed if packed else UnpackedLinear
        self._least = MIN_ROWS if packed else 1
        self._eps = float(model.config.rms_norm_eps)
        embed = model.model.embed_tokens.weight.detach()
        self.embed = embed.clone() if embed.device.type == "cpu" else embed  # not a part of the file
        self._rotary, self.norm = model.model.rotary_emb, _twice(model.model.norm)
        attention = model.model.layers[0].self_attn
        self.size = int(attention.head_dim)
        self.keys = attention.k_proj.out_features // self.size
        self.queries = attention.q_proj.out_features // self.size
        self.layers = [self._layer(layer, forms[i]) for i, layer in enumerate(model.model.layers)]
        self.head = self._linear(model.lm_head)

    def __call__(
        self, tokens: torch.Tensor, places: torch.Tensor, kept: torch.Tensor | int, step: AttentionFunction
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of those rows of `tokens` that `kept` names, or of all where it is 0."""
        count = len(tokens)
        # Too few rows are computed several times over all the way, rather than in each product.
        filled = torch.arange(self._least) % count if count < self._least else None
        if filled is not None:
            tokens, places = tokens[filled], places[filled]
        states = self.embed[tokens]
        cosine, sine = self._turns(states, places)
        for number, layer in enumerate(self.layers):
            found = layer.qkv.product(self._normed(states, layer.before))
            read = self._attended(layer, number, found, cosine, sine, step, count)
            states = layer.out.plus(read if filled is None else read[filled], states)
            gate, up = layer.gate_up.product(self._normed(states, layer.between)).chunk(2, -1)
            states = layer.down.plus(silu(gate) * up, states)
        states = states[kept] if isinstance(kept, torch.Tensor) else states[:count]
        return self.head.forward(self._normed(states, self.norm))

    @property
    def steady(self) -> bool:
        """Whether a token's turn depends on its place alone, not on how long the text is."""
        return getattr(self._rotary, "rope_type", "") in _STEADY

    def turns(self, start: int, stop: int) -> torch.Tensor:
        """Cosines and signed sines of some places, [places, 2, size], FP32."""
        places = torch.arange(start, stop, device=self.embed.device)
        return torch.stack(self._turns(torch.zeros(len(places), 1), places), 1).flatten(2)

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The states over their root mean square (Zhang and Sennrich 2019), times the weight, which is given twice.

        It is the layer norm of the states beside their negatives, whose mean is 0: PyTorch has a kernel for that one.
        """
        size = states.shape[-1]
        return layer_norm(torch.cat((states, -states), -1), weight.shape, weight, None, self._eps)[:, :size]

    def _turns(self, states: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary embedding, [rows, 1, size]; the first half of the sines is negative, so that
        a state turns by x * cosine + roll(x) * sine (Su et al. 2021)."""
        cosine, sine = self._rotary(states[None], places[None])
        half = self.size // 2
        signed = torch.cat((-sine[..., :half], sine[..., half:]), -1)
        return cosine[0][:, None], signed[0][:, None]

    def _attended(
        self,
        layer: FusedLayer,
        number: int,
        found: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        step: AttentionFunction,
        count: int,
    ) -> torch.Tensor:
        """What the first `count` rows read by their queries, from the product that holds keys and values as well."""
        found = found.view(len(found), -1, self.size)
        turning, value = found[:, : self.queries + self.keys], found[:count, self.queries + self.keys :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turning[:, : self.queries], turning[:, self.queries :]
            query = rms_norm(query, query.shape[-1:], layer.query_norm, self._eps)
            turning = torch.cat((query, rms_norm(key, key.shape[-1:], layer.key_norm, self._eps)), 1)
        turned = torch.addcmul(turning * cosine, turning.roll(self.size // 2, -1), sine)
        query, key = turned[:count, : self.queries], turned[:count, self.queries :]
        read = step(number, layer.form, query, key, value)
        return read.reshape(count, -1)

    def _layer(self, layer: Any, form: AttentionForm) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        return FusedLayer(
            _twice(layer.input_layernorm),
            self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            getattr(getattr(attention, "q_norm", None), "weight", None),
            getattr(getattr(attention, "k_norm", None), "weight", None),
            self._linear(attention.o_proj),
            _twice(layer.post_attention_layernorm),
            self._linear(mlp.gate_proj, mlp.up_proj),
            self._linear(mlp.down_proj),
            form,
        )


def is_supported(model: Any) -> bool:
    """Whether a model has the form that `FusedModel` is for."""
    return model.config.model_type in ARCHITECTURES and getattr(model.config, "hidden_act", "") == "silu"


def _joined(parts: tuple[nn.Linear, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias of several layers side by side."""
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return weight, None
    return weight, torch.cat(
        [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in parts]
    )


def _packed(*parts: nn.Linear) -> LinearLayer:
    return PackedLinear(*_joined(parts))


class UnpackedLinear:
    """Several layers side by side, by the library's own product."""

    def __init__(self, *parts: nn.Linear) -> None:
        self._weight, self._bias = (parts[0].weight, parts[0].bias) if len(parts) == 1 else _joined(parts)
        begin = 0
        for part in parts:  # so that nothing is there twice
            stop = begin + len(part.weight)
            part.weight.data = self._weight[begin:stop]
            begin = stop

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight, self._bias)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return added + self.product(rows)


def _twice(norm: Any) -> torch.Tensor:
    return torch.cat((norm.weight.detach(), norm.weight.detach()))
