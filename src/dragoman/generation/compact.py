"""A shorter way through the layers of Llama and its kin: the same weights, fused, and fewer operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from dragoman.generation.attention import Attend, Form
from dragoman.generation.packing import PackedLinear

# Architectures of this form. Each model is compared with its own code in transformers before the short way is taken.
KINDS = ("llama", "mistral", "qwen2", "qwen3")

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    before: torch.Tensor
    qkv: Multiply
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Multiply
    between: torch.Tensor
    gate_up: Multiply
    down: Multiply
    form: Form


class Compact:
    """Llama's forward pass: queries, keys and values in one product, both halves of the MLP in another.

    Made of the model that transformers has loaded, and of the forms in which its layers attend, by layer.
    """

    def __init__(self, model: Any, forms: Mapping[int, Form], packed: bool) -> None:
        self._multiply = _packed if packed else _plain
        self._eps = float(model.config.rms_norm_eps)
        self._embed = model.model.embed_tokens.weight
        self._rotary, self._norm = model.model.rotary_emb, model.model.norm.weight
        attention = model.model.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._keys = attention.k_proj.out_features // self._size
        self._queries = attention.q_proj.out_features // self._size
        self._layers = [self._layer(layer, forms[i]) for i, layer in enumerate(model.model.layers)]
        self._head = self._multiply(model.lm_head)

    def __call__(
        self, tokens: torch.Tensor, places: torch.Tensor, kept: torch.Tensor | int, step: Attend
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of those rows of `tokens` that `kept` names, or of all where it is 0."""
        states = self._embed[tokens]
        cosine, sine = self._turns(states, places)
        for number, layer in enumerate(self._layers):
            read = self._attended(
                layer, number, rms_norm(states, states.shape[-1:], layer.before, self._eps), cosine, sine, step
            )
            states = states + layer.out(read)
            halves = layer.gate_up(rms_norm(states, states.shape[-1:], layer.between, self._eps))
            gate, up = halves.chunk(2, -1)
            states = states + layer.down(silu(gate) * up)
        if isinstance(kept, torch.Tensor):
            states = states[kept]
        return self._head(rms_norm(states, states.shape[-1:], self._norm, self._eps))

    def _turns(self, states: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary embedding, [rows, 1, size]; the first half of the sines is negative, so that
        a state turns by x * cosine + roll(x) * sine (Su et al. 2021)."""
        cosine, sine = self._rotary(states[None], places[None])
        half = self._size // 2
        signed = torch.cat((-sine[..., :half], sine[..., half:]), -1)
        return cosine[0][:, None], signed[0][:, None]

    def _attended(
        self, layer: _Layer, number: int, states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, step: Attend
    ) -> torch.Tensor:
        found = layer.qkv(states).view(len(states), -1, self._size)
        turning, value = found[:, : self._queries + self._keys], found[:, self._queries + self._keys :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turning[:, : self._queries], turning[:, self._queries :]
            query = rms_norm(query, query.shape[-1:], layer.query_norm, self._eps)
            turning = torch.cat((query, rms_norm(key, key.shape[-1:], layer.key_norm, self._eps)), 1)
        turned = torch.addcmul(turning * cosine, turning.roll(self._size // 2, -1), sine)
        query, key = turned[:, : self._queries], turned[:, self._queries :]
        read = step(number, layer.form, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        return read.reshape(len(states), -1)

    def _layer(self, layer: Any, form: Form) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm.weight,
            self._multiply(attention.q_proj, attention.k_proj, attention.v_proj),
            getattr(getattr(attention, "q_norm", None), "weight", None),
            getattr(getattr(attention, "k_norm", None), "weight", None),
            self._multiply(attention.o_proj),
            layer.post_attention_layernorm.weight,
            self._multiply(mlp.gate_proj, mlp.up_proj),
            self._multiply(mlp.down_proj),
            form,
        )


def suits(model: Any) -> bool:
    """Whether a model has the form that `Compact` is for."""
    return model.config.model_type in KINDS and getattr(model.config, "hidden_act", "") == "silu"


def _joined(parts: tuple[nn.Linear, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias of several layers side by side."""
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return weight, None
    return weight, torch.cat(
        [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in parts]
    )


def _packed(*parts: nn.Linear) -> Multiply:
    return PackedLinear(*_joined(parts)).forward


def _plain(*parts: nn.Linear) -> Multiply:
    weight, bias = (parts[0].weight, parts[0].bias) if len(parts) == 1 else _joined(parts)
    return lambda rows: linear(rows, weight, bias)
