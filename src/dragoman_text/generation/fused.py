"""Fused forward pass for Llama and similar models: fewer operations, weights packed for the CPU's matrix kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from dragoman_text.generation import gpu
from dragoman_text.generation.attention import AttentionForm, AttentionFunction
from dragoman_text.generation.rounding import cancelling
from dragoman_text.generation.threads import MAX_THREADS

# Number of rows for which the layout of the weights is optimized; it works for any.
_ROWS = 32
# Fewer rows are repeated: they would use other kernels, which are slower and round differently.
MIN_ROWS = 4
# Numbers of rows that are tried, around those at which oneDNN changes its kernel; more rows are computed in blocks.
_COUNTS = (MIN_ROWS, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 128, 256, 288)
_LEAST_ROWS = (MIN_ROWS, 8, 16)
# Columns of the weight that is tried instead of a larger one.
_MAX_COLUMNS = 2048
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Linear layer with its weight in the layout of oneDNN's kernels, the only copy of it.

    in_features, out_features: those of the layer that it replaces. The result of a row is bitwise independent of the
    other rows: fewer or more rows than have one result are repeated, or computed in blocks.
    """

    min_rows = MIN_ROWS

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = _reorder(weight)
        self.bias = None if bias is None else bias.detach()
        self._least, self._most = row_range(self.out_features, self.in_features, weight.dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._compute(rows, None)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Return `product` plus `added` in one operation."""
        return self._compute(rows, added)

    def _compute(self, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        count = rows.numel() // self.in_features
        if self._least <= count <= self._most or not count:
            return _multiply(rows, self.packed, self.bias, added)
        shape = (*rows.shape[:-1], self.out_features)
        rows, added = rows.reshape(count, -1), None if added is None else added.reshape(count, -1)
        output = rows.new_empty(count, self.out_features)
        for first in range(0, count, self._most):
            block = slice(first, first + self._most)
            own, own_added = rows[block], None if added is None else added[block]
            size = len(own)
            if size < self._least:
                repeated = torch.arange(self._least) % size
                own, own_added = own[repeated], None if own_added is None else own_added[repeated]
            output[block] = _multiply(own, self.packed, self.bias, own_added)[:size]
        return output.view(shape)


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return packed


def _multiply(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, added: torch.Tensor | None
) -> torch.Tensor:
    output: torch.Tensor
    if added is None:
        output = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    else:
        output = torch.ops.mkldnn._linear_pointwise.binary(rows, added, packed, bias, "add")
    return output


@lru_cache(1024)
def row_range(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of rows of a product whose rows have the same bits for all numbers
    between, with one thread and with all.

    oneDNN chooses its kernel, and with it the order of sums, by the dimensions: with the AMX instructions it has one
    for up to 32 rows of BF16 and others for more; for 4 inputs one for up to 15 rows and another for more.
    """
    columns, rows = cancelling(min(out_features, _MAX_COLUMNS), _COUNTS[-1], in_features, dtype)
    packed, threads = _reorder(columns), torch.get_num_threads()

    def agrees(count: int) -> bool:
        return torch.equal(_multiply(rows[:count], packed, None, None)[: len(expected)], expected)

    least, most = MIN_ROWS, 0
    try:
        torch.set_num_threads(1)
        for fewest in _LEAST_ROWS:
            expected = _multiply(rows[:fewest], packed, None, None)
            *_, last = takewhile(agrees, [count for count in _COUNTS if count >= fewest])
            if last > most:
                least, most = fewest, last
            if most == _COUNTS[-1]:
                break
        expected = _multiply(rows[:least], packed, None, None)
        torch.set_num_threads(MAX_THREADS)
        return least, most if agrees(least) and agrees(most) else least
    finally:
        torch.set_num_threads(threads)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this machine has kernels for packed weights of this dtype."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch._C._has_mkldnn:
        return False
    try:
        PackedLinear(torch.zeros(8, 8, dtype=dtype), None)(torch.zeros(1, 8, dtype=dtype))
    except (AttributeError, RuntimeError):  # an operator of this version of PyTorch, or an instruction, is missing
        return False
    return True


def pack(module: nn.Module) -> None:
    """Replace all linear layers, including transposed ones of GPT-2, by packed ones."""
    for name, child in module.named_children():
        packed = _pack_layer(child)
        if packed is None:
            pack(child)
        else:
            setattr(module, name, packed)


def _pack_layer(child: Any) -> PackedLinear | None:
    if type(child) is nn.Linear:
        return PackedLinear(child.weight, child.bias)
    if type(child).__name__ == "Conv1D" and hasattr(child, "nf"):
        return PackedLinear(child.weight.t(), child.bias)
    return None


# Supported architectures. Each model is compared with its own code in transformers before the fused pass is used.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary embeddings (names of transformers) that depend only on the position, not on the length of the sequence.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


class LinearLayer(Protocol):
    """A linear layer. `product` and `plus` require at least `min_rows` rows."""

    in_features: int
    out_features: int
    min_rows: int

    def forward(self, rows: torch.Tensor) -> torch.Tensor: ...
    def product(self, rows: torch.Tensor) -> torch.Tensor: ...
    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer; on a CPU `input_norm` and `mlp_norm` contain their weights twice, for `_norm`."""

    input_norm: torch.Tensor
    qkv: LinearLayer
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: LinearLayer
    mlp_norm: torch.Tensor
    gate_up: LinearLayer
    down: LinearLayer
    form: AttentionForm


class FusedModel:
    """Forward pass with one product for queries, keys and values, and one for both halves of the MLP.

    model: as loaded by transformers. forms: parameters of attention by layer. linear: makes one layer of several with
    the same input.
    """

    def __init__(self, model: Any, forms: Mapping[int, AttentionForm], linear: Callable[..., LinearLayer]) -> None:
        self._linear = linear
        self._eps = float(model.config.rms_norm_eps)
        self.embed = _embedding(model.model.embed_tokens)
        device, dtype = model.model.norm.weight.device, model.model.norm.weight.dtype
        self._on_cpu, self._kernels = is_cpu(device), gpu.kernels(device, dtype)
        self._rotary_embedding, self.norm = model.model.rotary_emb, self._norm_weight(model.model.norm)
        attention = model.model.layers[0].self_attn
        self.head_size = int(attention.head_dim)
        self.kv_heads = attention.k_proj.out_features // self.head_size
        self.query_heads = attention.q_proj.out_features // self.head_size
        self.layers = [self._layer(layer, forms[i]) for i, layer in enumerate(model.model.layers)]
        # On a GPU cosines and sines of all positions are read from a table: a dozen short kernels less in each step.
        self._table = torch.empty(0)
        if not self._on_cpu and has_fixed_rotary(model):
            self._table = self.rotary_table(0, int(model.config.max_position_embeddings)).to(dtype)
        self.head = linear(model.lm_head)
        self._min_rows = self.head.min_rows

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor | int, step: AttentionFunction
    ) -> torch.Tensor:
        """Return logits [rows, vocabulary] of the rows in `outputs`, or of all rows if it is 0."""
        count = len(tokens)
        # If there are too few rows, they are repeated once here, not in each product.
        repeated = torch.arange(self._min_rows) % count if count < self._min_rows else None
        if repeated is not None:
            tokens, positions = tokens[repeated], positions[repeated]
        states = self.embed(tokens)
        rotary = self._rotary(states, positions)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv.product(self._norm(states, layer.input_norm))
            attended = self._attend(layer, number, qkv, rotary, step, count)
            states = layer.out.plus(attended if repeated is None else attended[repeated], states)
            gate_up = layer.gate_up.product(self._norm(states, layer.mlp_norm))
            states = layer.down.plus(self._gated(gate_up), states)
        states = states[outputs] if isinstance(outputs, torch.Tensor) else states[:count]
        return self.head.forward(self._norm(states, self.norm))

    def rotary_table(self, start: int, stop: int) -> torch.Tensor:
        """Return cosines and signed sines of positions, [positions, 2, size], FP32."""
        positions = torch.arange(start, stop, device=self.norm.device)
        return self._compute_rotary(self.norm.new_zeros(1, dtype=torch.float32), positions)

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root mean square norm (Zhang and Sennrich 2019).

        It equals the layer norm of [states, -states], whose mean is 0, with the weight repeated: PyTorch has one kernel
        for that on a CPU, and for the norm itself on a GPU.
        """
        if self._kernels is not None:
            output: torch.Tensor = self._kernels.rms_norm(states, weight, self._eps)
            return output
        if not self._on_cpu:
            return rms_norm(states, weight.shape, weight, self._eps)
        size = states.shape[-1]
        return layer_norm(torch.cat((states, -states), -1), weight.shape, weight, None, self._eps)[:, :size]

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            output: torch.Tensor = self._kernels.gated(gate_up)
            return output
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def _norm_weight(self, norm: Any) -> torch.Tensor:
        weight: torch.Tensor = norm.weight.detach()
        return torch.cat((weight, weight)) if self._on_cpu else weight

    def _rotary(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `_compute_rotary`, from the table if there is one."""
        return self._table[positions] if len(self._table) else self._compute_rotary(states, positions)

    def _compute_rotary(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [rows, 2, size], the first half of the sines negated.

        x is rotated by x * cosine + roll(x) * sine (Su et al. 2021).
        """
        cosine, sine = self._rotary_embedding(states[None], positions[None])
        half = self.head_size // 2
        signed = torch.cat((-sine[..., :half], sine[..., half:]), -1)
        return torch.stack((cosine[0], signed[0]), 1)

    def _attend(
        self,
        layer: FusedLayer,
        number: int,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        step: AttentionFunction,
        count: int,
    ) -> torch.Tensor:
        """Return the attention output of the first `count` rows."""
        qkv = qkv.view(len(qkv), -1, self.head_size)
        rotated = self._rotate(layer, qkv, rotary)
        query, key = rotated[:count, : self.query_heads], rotated[:count, self.query_heads :]
        value = qkv[:count, self.query_heads + self.kv_heads :]
        return step(number, layer.form, query, key, value).reshape(count, -1)

    def _rotate(self, layer: FusedLayer, qkv: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Return the rotated queries and keys of all rows, after their norms, if the layer has some."""
        heads, norms = self.query_heads + self.kv_heads, (layer.query_norm, layer.key_norm)
        if self._kernels is not None:
            self._kernels.rotate(qkv, rotary, heads, self.query_heads, norms, self._eps)
            return qkv[:, :heads]
        rotating = qkv[:, :heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotating[:, : self.query_heads], rotating[:, self.query_heads :]
            query = rms_norm(query, query.shape[-1:], layer.query_norm, self._eps)
            rotating = torch.cat((query, rms_norm(key, key.shape[-1:], layer.key_norm, self._eps)), 1)
        cosine, sine = rotary[:, :1], rotary[:, 1:]
        return torch.addcmul(rotating * cosine, rotating.roll(self.head_size // 2, -1), sine)

    def _layer(self, layer: Any, form: AttentionForm) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        return FusedLayer(
            self._norm_weight(layer.input_layernorm),
            self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            getattr(getattr(attention, "q_norm", None), "weight", None),
            getattr(getattr(attention, "k_norm", None), "weight", None),
            self._linear(attention.o_proj),
            self._norm_weight(layer.post_attention_layernorm),
            self._linear(mlp.gate_proj, mlp.up_proj),
            self._linear(mlp.down_proj),
            form,
        )


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def is_supported(model: Any) -> bool:
    return model.config.model_type in ARCHITECTURES and getattr(model.config, "hidden_act", "") == "silu"


def has_fixed_rotary(model: Any) -> bool:
    """Return whether the rotary embedding depends only on the position, not on the length of the sequence."""
    return getattr(model.model.rotary_emb, "rope_type", "") in _FIXED_ROTARY


def concatenate(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of several layers with the same input as one layer."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    return weight, torch.cat(
        [weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach() for layer in layers]
    )


def pack_layers(*layers: nn.Linear) -> LinearLayer:
    return PackedLinear(*concatenate(layers))


class UnpackedLinear:
    """Several linear layers with the same input as one, in PyTorch's layout."""

    min_rows = 1

    def __init__(self, *layers: nn.Linear) -> None:
        self._weight, self._bias = (layers[0].weight, layers[0].bias) if len(layers) == 1 else concatenate(layers)
        self.out_features, self.in_features = self._weight.shape
        begin = 0
        for layer in layers:  # the layers become views, so that weights exist only once
            stop = begin + len(layer.weight)
            layer.weight.data = self._weight[begin:stop]
            begin = stop

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight, self._bias)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Add the product to `added` in one operation and return it."""
        output = added.addmm_(rows, self._weight.t())
        return output if self._bias is None else output.add_(self._bias)


def _embedding(layer: Any) -> Any:
    """Return the embedding of tokens as a module."""
    if not isinstance(layer, nn.Embedding):
        return layer
    weight = layer.weight.detach()
    copied = weight.clone() if is_cpu(weight.device) else weight  # not the memory-mapped file
    return nn.Embedding.from_pretrained(copied)  # type: ignore[no-untyped-call]
