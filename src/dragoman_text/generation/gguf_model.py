"""Decoders whose weights stay in a GGUF file, which is mapped into memory: layers that multiply with its blocks."""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dragoman_kernels import NoKernels, best_form, function
from dragoman_kernels.threads import StepThreads
from dragoman_text.generation.gguf_file import GgufFile, Tensor, open_file
from dragoman_text.generation.integer_weights import IntegerWeight, NoBlocks
from dragoman_text.generation.native import structures
from dragoman_text.generation.native.config import COLUMNS, GROUP

# Types that the kernels of blocks.c multiply.
MAPPED_TYPES = frozenset(["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
_FLOATS = ("F32", "F16", "BF16")
# Kernels reach up to 16 rows by offsets of 32 bits.
_MAX_ROW_BYTES = 1 << 27


class NotMapped(Exception):
    """The weights of a file cannot be used as they are; the message says why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a product, in a file or in memory, which `memory` then keeps.

    head: size of heads whose rows are in pairs, as llama.cpp rotates them; 0: in order. order: for each input of the
    tensor, which one of the layer's it is; None: in order.
    """

    tensor: Tensor
    address: int
    head: int = 0
    memory: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Number of rows of the tensor, which are outputs."""
        return math.prod(self.tensor.shape[:-1])

    def structure(self, first: int = 0) -> structures.Segment:
        """Return it for the kernels. first: the output of its first row."""
        type_, row_bytes = self.tensor.type.number, self.tensor.row_bytes
        return structures.Segment(type_, self.address, self.columns, row_bytes, first, self.head)


class BlockKernels:
    """The functions of blocks.c for a model, and the threads that call them. Raises NoKernels.

    file: that has the weights, None if they are in memory. A product has as many threads as those of PyTorch.
    """

    def __init__(self, file: GgufFile | None = None) -> None:
        form = best_form()
        self._linear = function("blocks_linear", form, ctypes.c_void_p)
        self._rows = function("blocks_rows", form, *[ctypes.c_int64] * 7)
        self._data = np.frombuffer(b"" if file is None else file.data, np.uint8)
        self._step_threads = StepThreads()

    def segment(self, tensor: Tensor, head: int = 0) -> Segment:
        return Segment(tensor, self._data.ctypes.data + tensor.offset, head)

    def linear(self, name: str, weight: IntegerWeight, bias: torch.Tensor | None) -> "MappedLinear":
        """Return a layer with the blocks of a weight in memory. Raises NoBlocks."""
        weight, order = weight.in_order()
        type_, blocks = weight.blocks()
        tensor = Tensor(name, type_, tuple(weight.integers.shape), 0)
        if tensor.row_bytes > _MAX_ROW_BYTES:
            raise NoBlocks(f"expected rows of at most {_MAX_ROW_BYTES} bytes, got {tensor.row_bytes}")
        return MappedLinear(self, [Segment(tensor, blocks.data_ptr(), 0, blocks, order)], bias)

    def rows(self, of: Segment, numbers: Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
        """Return rows of a tensor in FP32. Raises IndexError for a row that it does not have."""
        wanted, tensor = np.ascontiguousarray(numbers, np.int64), of.tensor
        if len(missing := wanted[(wanted < 0) | (wanted >= of.columns)]):
            raise IndexError(f"rows of '{tensor.name}': expected 0 to below {of.columns}, got {missing[0]}")
        output = torch.empty(len(wanted), tensor.shape[-1])
        arguments = (tensor.row_bytes, tensor.shape[-1], wanted.ctypes.data, len(wanted), output.data_ptr())
        self._rows(tensor.type.number, of.address, *arguments)
        return output

    def multiply(self, layer: "BlockLayer", inputs: torch.Tensor) -> torch.Tensor:
        """Return the product of inputs [rows, size] with a layer, [rows, outputs], FP32."""
        rows, size = inputs.shape
        output, loops = torch.empty(rows, layer.outputs), np.zeros(2 * structures.COUNTER_BYTES, np.uint8)
        memory, addresses = input_memory(rows * size, rows * layer.float_inputs)
        outputs = (output.data_ptr(), layer.outputs)
        call = structures.BlockCall(layer.address, inputs.data_ptr(), rows, *outputs, addresses, loops.ctypes.data)
        keep = (self, layer, inputs, output, loops, memory, call)
        self._step_threads.run(self._linear, [(ctypes.addressof(call),)] * torch.get_num_threads(), keep)
        return output


class BlockLayer:
    """A `block_layer` of blocks.h. float_inputs: inputs that it needs in FP32, all or none."""

    def __init__(self, segments: Sequence[Segment], bias: torch.Tensor | None) -> None:
        columns = [each.columns for each in segments]
        self.size, self.outputs = segments[0].tensor.shape[-1], sum(columns)
        self.blocks = sum(-(-count // COLUMNS) for count in columns)
        firsts = accumulate(columns[:-1], initial=0)
        self._segments = (structures.Segment * len(segments))(
            *(each.structure(first) for each, first in zip(segments, firsts, strict=True))
        )
        self._bias, self._order = bias, segments[0].order
        floats = [each.tensor.type.name in _FLOATS for each in segments]
        self.float_inputs = self.size if any(floats) else 0
        self._layer = structures.BlockLayer(
            ctypes.addressof(self._segments),
            0 if bias is None else bias.data_ptr(),
            self.size,
            self.blocks,
            rounds=not all(floats),
            floats=any(floats),
            order=0 if self._order is None else self._order.data_ptr(),
        )
        self.address = ctypes.addressof(self._layer)


def input_memory(inputs: int, float_inputs: int) -> tuple[torch.Tensor, structures.BlockInputs]:
    """Return memory for this many inputs of all rows, and the addresses of its parts."""
    sizes = (inputs, inputs // 8, inputs // 4, 4 * float_inputs)  # integers; a scale and two sums for each 32; FP32
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    return memory, structures.BlockInputs(*accumulate(sizes[:-1], initial=memory.data_ptr()))


class MappedLinear(nn.Module):
    """A linear layer whose weight is one or several tensors in blocks, as a `LinearLayer`; it computes in FP32.

    bias: a parameter may still be loaded before the first product. The result of a row is bitwise independent of the
    other rows and of the number of threads.
    """

    min_rows = 1

    def __init__(self, kernels: BlockKernels, segments: Sequence[Segment], bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.kernels, self.segments, self.bias = kernels, tuple(segments), bias
        self.in_features = segments[0].tensor.shape[-1]
        self.out_features = sum(each.columns for each in segments)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features

    @cached_property
    def layer(self) -> BlockLayer:
        return BlockLayer(self.segments, None if self.bias is None else self.bias.detach().float())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._sums(rows).to(rows.dtype)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return (self._sums(rows) + added).to(added.dtype)

    def _sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product in FP32."""
        inputs = rows.reshape(-1, self.in_features).float().contiguous()
        return self.kernels.multiply(self.layer, inputs).view(*rows.shape[:-1], self.out_features)


def joining(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes one layer of several with the same input: of those in blocks without a copy of their
    weights, of others by `pack`."""
    return lambda *layers: _join(layers) if isinstance(layers[0], MappedLinear) else pack(*layers)


def _join(layers: Sequence[MappedLinear]) -> MappedLinear:
    biases = [each.bias for each in layers]
    joined = None
    if any(each is not None for each in biases):
        parts = [
            torch.zeros(of.out_features) if bias is None else bias.detach().float()
            for of, bias in zip(layers, biases, strict=True)
        ]
        joined = torch.cat(parts)
    return MappedLinear(layers[0].kernels, [each for layer in layers for each in layer.segments], joined)


class MappedEmbedding(nn.Module):
    """Rows of a tensor in the file, FP32."""

    def __init__(self, kernels: BlockKernels, segment: Segment) -> None:
        super().__init__()
        self._kernels, self._segment, self._structure = kernels, segment, segment.structure()
        self.num_embeddings, self.address = segment.columns, ctypes.addressof(self._structure)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._kernels.rows(self._segment, tokens.reshape(-1).numpy()).view(*tokens.shape, -1)


# --- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MappedConfig:
    """Sizes of a decoder, by their names in transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    is_encoder_decoder: bool = False


class Rotary:
    """Rotary embedding (Su et al. 2021), of frequencies [head size / 2]."""

    rope_type = "default"

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.inv_freq = frequencies

    def __call__(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions [..., tokens] as transformers does, [..., tokens, size of a head]."""
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class MappedAttention:
    head_dim: int
    q_proj: MappedLinear
    k_proj: MappedLinear
    v_proj: MappedLinear
    o_proj: MappedLinear
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class MappedMLP:
    gate_proj: MappedLinear
    up_proj: MappedLinear
    down_proj: MappedLinear


@dataclass(frozen=True, slots=True)
class MappedLayer:
    input_layernorm: Norm
    self_attn: MappedAttention
    post_attention_layernorm: Norm
    mlp: MappedMLP

    @property
    def linear(self) -> tuple[MappedLinear, ...]:
        attention, mlp = self.self_attn, self.mlp
        own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        return (*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


@dataclass(frozen=True, slots=True)
class MappedLayers:
    embed_tokens: MappedEmbedding
    layers: tuple[MappedLayer, ...]
    norm: Norm
    rotary_emb: Rotary


@dataclass(frozen=True, slots=True)
class MappedModel:
    """A decoder; its parts have the names of transformers. kernels: of its layers. quantization: stated by the file."""

    config: MappedConfig
    model: MappedLayers
    lm_head: MappedLinear
    kernels: BlockKernels
    quantization: str

    @property
    def parameters(self) -> int:
        """Number of weights; those of a tied head are counted once."""
        config, layers = self.config, self.model.layers
        linear = [each for layer in layers for each in layer.linear]
        if not config.tie_word_embeddings:
            linear.append(self.lm_head)
        norms = [self.model.norm]
        for layer in layers:
            attention = layer.self_attn
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        biases = sum(len(each.bias) for each in linear if each.bias is not None)
        products = sum(each.weights for each in linear)
        return products + biases + config.vocab_size * config.hidden_size + sum(len(norm.weight) for norm in norms)

    def sample(self) -> "MappedModel":
        """Return the model with one layer of each combination of types of tensors: others compute in the same way."""
        kinds = {
            tuple(each.segments[0].tensor.type.name for each in layer.linear): layer for layer in self.model.layers
        }
        return replace(
            self,
            config=replace(self.config, num_hidden_layers=len(kinds)),
            model=replace(self.model, layers=tuple(kinds.values())),
        )


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What the decoders of an architecture have. in_pairs: heads of queries and keys are stored for llama.cpp's rotary
    embedding. has_bias: of queries, keys and values. has_norms: of the heads of queries and keys."""

    in_pairs: bool = False
    has_bias: bool = False
    has_norms: bool = False


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(in_pairs=True),
    "qwen2": _Architecture(has_bias=True),
    "qwen3": _Architecture(has_norms=True),
}
# Layers, and the names of their tensors in files.
_ATTENTION: Mapping[str, str] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
}
_MLP: Mapping[str, str] = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
# Factors by which the frequencies of the rotary embedding are divided (Llama 3.1).
_FREQUENCIES = "rope_freqs.weight"


def load_mapped(path: Path) -> MappedModel:
    """Return the decoder of a file, in FP32. Raises NotMapped."""
    file = open_file(path)
    try:
        kernels = BlockKernels(file)
    except NoKernels as error:
        raise NotMapped(str(error)) from error
    return _Builder(file, kernels).model()


class _Builder:
    """Builds the model of a file and checks that each of its tensors has a place."""

    def __init__(self, file: GgufFile, kernels: BlockKernels) -> None:
        self._file, self._kernels, self._used = file, kernels, set[str]()
        self._name = str(file.metadata.get("general.architecture"))
        if self._name not in _ARCHITECTURES:
            raise NotMapped(f"architecture: expected {', '.join(_ARCHITECTURES)}, got {self._name}")
        self._architecture = _ARCHITECTURES[self._name]

    def model(self) -> MappedModel:
        config, kernels = self._config(), self._kernels
        rotary = self._rotary(config.head_dim)
        embedding = self._segment("token_embd.weight", (config.vocab_size, config.hidden_size))
        head = embedding
        if not config.tie_word_embeddings:
            head = self._segment("output.weight", (config.vocab_size, config.hidden_size))
        norm = self._norm("output_norm.weight", config.hidden_size)
        layers = tuple(self._layer(config, f"blk.{number}.") for number in range(config.num_hidden_layers))
        unused = sorted(self._file.tensors.keys() - self._used)
        if unused:
            raise NotMapped(f"tensor '{unused[0]}' has no place in the architecture {self._name}")
        parts = MappedLayers(MappedEmbedding(kernels, embedding), layers, norm, rotary)
        return MappedModel(config, parts, MappedLinear(kernels, [head]), kernels, self._file.quantization)

    # --- configuration -----------------------------------------------------------------------------------

    def _config(self) -> MappedConfig:
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        head_size = self._integer("attention.key_length", self._integer("rope.dimension_count", hidden // heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._integer(name, head_size) != head_size:
                raise NotMapped(f"{self._name}.{name}: expected {head_size}, got {self._integer(name)}")
        if self._integer("expert_count", 0):
            raise NotMapped(f"{self._name}.expert_count: expected 0, got {self._integer('expert_count')}")
        embedding = self._file.tensors.get("token_embd.weight")
        return MappedConfig(
            self._name,
            0 if embedding is None else embedding.shape[0],
            hidden,
            self._integer("feed_forward_length"),
            self._integer("block_count"),
            heads,
            self._integer("attention.head_count_kv", heads),
            head_size,
            self._integer("context_length"),
            self._number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in self._file.tensors,
        )

    def _rotary(self, head_size: int) -> Rotary:
        theta, kind = self._number("rope.freq_base", 10000.0), self._get("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise NotMapped(f"{self._name}.rope.scaling.type: expected none or linear, got {kind}")
        frequencies = 1.0 / theta ** (torch.arange(0, head_size, 2).float() / head_size)
        if kind == "linear":
            frequencies /= self._number("rope.scaling.factor")
        if _FREQUENCIES in self._file.tensors:
            frequencies /= self._floats(_FREQUENCIES, head_size // 2)
        return Rotary(frequencies)

    def _get(self, name: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._name}.{name}", default)
        if value is None:
            raise NotMapped(f"the file has no {self._name}.{name}")
        return value

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != default):
            raise NotMapped(f"{self._name}.{name}: expected a positive integer, got {str(value)[:40]}")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, float | int) or not 0 < value < float("inf"):
            raise NotMapped(f"{self._name}.{name}: expected a positive number, got {str(value)[:40]}")
        return float(value)

    # --- tensors -----------------------------------------------------------------------------------------

    def _layer(self, config: MappedConfig, prefix: str) -> MappedLayer:
        hidden, head = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        shapes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size),
        }
        linear = {
            part: self._linear(f"{prefix}{name}", shapes[part], head) for part, name in {**_ATTENTION, **_MLP}.items()
        }
        norms: list[Norm | None] = [None, None]
        if self._architecture.has_norms:
            norms = [self._norm(f"{prefix}{name}.weight", head) for name in _HEAD_NORMS]
        return MappedLayer(
            self._norm(f"{prefix}attn_norm.weight", hidden),
            MappedAttention(head, linear["q_proj"], linear["k_proj"], linear["v_proj"], linear["o_proj"], *norms),
            self._norm(f"{prefix}ffn_norm.weight", hidden),
            MappedMLP(linear["gate_proj"], linear["up_proj"], linear["down_proj"]),
        )

    def _linear(self, name: str, shape: tuple[int, int], head: int) -> MappedLinear:
        is_rotated, has_bias = name.endswith(("attn_q", "attn_k")), name.endswith(("attn_q", "attn_k", "attn_v"))
        in_pairs = self._architecture.in_pairs and is_rotated
        segment = self._segment(f"{name}.weight", shape, head if in_pairs else 0)
        bias = self._floats(f"{name}.bias", shape[0]) if self._architecture.has_bias and has_bias else None
        return MappedLinear(self._kernels, [segment], bias)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self._floats(name, size))

    def _floats(self, name: str, size: int) -> torch.Tensor:
        return self._kernels.rows(self._segment(name, (size,)), [0])[0]

    def _segment(self, name: str, shape: tuple[int, ...], head: int = 0) -> Segment:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise NotMapped(f"the file has no tensor '{name}'")
        if tensor.shape != shape:
            raise NotMapped(f"tensor '{name}': expected the shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.type.name not in MAPPED_TYPES:
            raise NotMapped(
                f"tensor '{name}': expected a type of {', '.join(sorted(MAPPED_TYPES))}, got {tensor.type.name}"
            )
        if len(shape) > 1 and shape[-1] % GROUP:
            raise NotMapped(f"tensor '{name}': expected a multiple of {GROUP} inputs, got {shape[-1]}")
        if tensor.row_bytes > _MAX_ROW_BYTES:
            raise NotMapped(f"tensor '{name}': expected rows of at most {_MAX_ROW_BYTES} bytes, got {tensor.row_bytes}")
        self._used.add(name)
        return self._kernels.segment(tensor, head)
