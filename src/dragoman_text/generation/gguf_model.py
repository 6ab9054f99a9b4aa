"""Decoders whose weights stay in a GGUF file, which is mapped into memory: layers that multiply with its blocks."""

import ctypes
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dragoman_kernels import NoKernels, best_form, function
from dragoman_kernels.threads import StepThreads
from dragoman_text.generation.gguf_file import GgufFile, Tensor
from dragoman_text.generation.native import structures
from dragoman_text.generation.native.config import COLUMNS, GROUP

log = logging.getLogger("dragoman.generation")

# Types that the kernels of blocks.c multiply.
MAPPED_TYPES = frozenset(["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
_FLOATS = ("F32", "F16", "BF16")
# Kernels reach up to 16 rows by offsets of 32 bits.
_MAX_ROW_BYTES = 1 << 27


class NotMapped(Exception):
    """The weights of a file cannot be used as they are; the message says why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a product. head: size of heads whose rows are in pairs, as llama.cpp rotates them; 0: in order."""

    tensor: Tensor
    address: int
    head: int = 0

    @property
    def columns(self) -> int:
        """Number of rows of the tensor, which are outputs."""
        return math.prod(self.tensor.shape[:-1])

    def structure(self, first: int = 0) -> structures.Segment:
        """Return it for the kernels. first: the output of its first row."""
        type_, row_bytes = self.tensor.type.number, self.tensor.row_bytes
        return structures.Segment(type_, self.address, self.columns, row_bytes, first, self.head)


class BlockKernels:
    """The functions of blocks.c for a file, and the threads that call them. Raises NoKernels.

    threads: number of threads, which the caller's is one of.
    """

    def __init__(self, file: GgufFile) -> None:
        form = best_form()
        self.file, self.threads = file, 1
        self._linear = function("blocks_linear", form, ctypes.c_void_p)
        self._rows = function("blocks_rows", form, *[ctypes.c_int64] * 7)
        self._data = np.frombuffer(file.data, np.uint8)
        self._step_threads = StepThreads()

    def segment(self, tensor: Tensor, head: int = 0) -> Segment:
        return Segment(tensor, self._data.ctypes.data + tensor.offset, head)

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
        self._step_threads.run(self._linear, [(ctypes.addressof(call),)] * self.threads, keep)
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
        self._bias = bias
        floats = [each.tensor.type.name in _FLOATS for each in segments]
        self.float_inputs = self.size if any(floats) else 0
        self._layer = structures.BlockLayer(
            ctypes.addressof(self._segments),
            0 if bias is None else bias.data_ptr(),
            self.size,
            self.blocks,
            rounds=not all(floats),
            floats=any(floats),
        )
        self.address = ctypes.addressof(self._layer)


def input_memory(inputs: int, float_inputs: int) -> tuple[torch.Tensor, structures.BlockInputs]:
    """Return memory for this many inputs of all rows, and the addresses of its parts."""
    sizes = (inputs, inputs // 8, inputs // 4, 4 * float_inputs)  # integers; a scale and two sums for each 32; FP32
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    return memory, structures.BlockInputs(*accumulate(sizes[:-1], initial=memory.data_ptr()))


class MappedLinear(nn.Module):
    """A linear layer whose weight is one or several tensors in the file, as a `LinearLayer`; computes in FP32.

    The result of a row is bitwise independent of the other rows and of the number of threads.
    """

    min_rows = 1

    def __init__(self, kernels: BlockKernels, segments: Sequence[Segment], bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.kernels, self.segments, self.bias = kernels, tuple(segments), bias
        self.layer = BlockLayer(segments, bias)
        self.in_features, self.out_features = self.layer.size, self.layer.outputs

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.kernels.multiply(self.layer, rows.reshape(-1, self.in_features).contiguous())
        return output.view(*rows.shape[:-1], self.out_features)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return self.forward(rows) + added


def join(*layers: MappedLinear) -> MappedLinear:
    """Return several layers with the same input as one, without a copy of their weights."""
    biases = [each.bias for each in layers]
    joined = None
    if any(each is not None for each in biases):
        joined = torch.cat(
            [torch.zeros(of.out_features) if bias is None else bias for of, bias in zip(layers, biases, strict=True)]
        )
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
# Layers of the models in transformers, and the names of their tensors in files.
_LINEAR: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS: Mapping[str, str] = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS: Mapping[str, str] = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Factors by which the frequencies of the rotary embedding are divided (Llama 3.1).
_FREQUENCIES = "rope_freqs.weight"


def load_mapped(path: Path) -> tuple[Any, BlockKernels]:
    """Return a model of transformers with the mapped weights of a file, in FP32. Raises NotMapped."""
    file = GgufFile(path)
    try:
        kernels = BlockKernels(file)
    except NoKernels as error:
        raise NotMapped(str(error)) from error
    return _Builder(file, kernels).model(), kernels


class _Builder:
    """Builds the model of a file and checks that each of its tensors has a place."""

    def __init__(self, file: GgufFile, kernels: BlockKernels) -> None:
        self._file, self._kernels, self._used = file, kernels, set[str]()
        self._name = str(file.metadata.get("general.architecture"))
        if self._name not in _ARCHITECTURES:
            raise NotMapped(f"architecture: expected {', '.join(_ARCHITECTURES)}, got {self._name}")
        self._architecture = _ARCHITECTURES[self._name]

    def model(self) -> Any:
        config = self._config()
        with torch.device("meta"):  # weights in memory are replaced below
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        embedding = self._segment("token_embd.weight", (config.vocab_size, config.hidden_size))
        model.model.embed_tokens = MappedEmbedding(self._kernels, embedding)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._segment("output.weight", (config.vocab_size, config.hidden_size))
        model.lm_head = MappedLinear(self._kernels, [head])
        self._set_norm(model.model.norm, "output_norm.weight")
        for number, layer in enumerate(model.model.layers):
            self._fill(layer, f"blk.{number}.")
        model.model.rotary_emb = self._rotary(type(model.model.rotary_emb)(config=config), config.head_dim)
        unused = sorted(self._file.tensors.keys() - self._used)
        if unused:
            raise NotMapped(f"tensor '{unused[0]}' has no place in the architecture {self._name}")
        ids = {name: config.__dict__.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**ids)
        return model.eval()

    # --- configuration -----------------------------------------------------------------------------------

    def _config(self) -> Any:
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        head_size = self._integer("attention.key_length", self._integer("rope.dimension_count", hidden // heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._integer(name, head_size) != head_size:
                raise NotMapped(f"{self._name}.{name}: expected {head_size}, got {self._integer(name)}")
        if self._integer("expert_count", 0):
            raise NotMapped(f"{self._name}.expert_count: expected 0, got {self._integer('expert_count')}")
        embedding = self._file.tensors.get("token_embd.weight")
        metadata = self._file.metadata
        values = {
            "vocab_size": 0 if embedding is None else embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_size,
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }
        return AutoConfig.for_model(self._name, **values)

    def _rope(self) -> dict[str, Any]:
        theta, kind = self._number("rope.freq_base", 10000.0), self._get("rope.scaling.type", "none")
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind != "linear":
            raise NotMapped(f"{self._name}.rope.scaling.type: expected none or linear, got {kind}")
        return {"rope_type": kind, "rope_theta": theta, "factor": self._number("rope.scaling.factor")}

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

    def _fill(self, layer: Any, prefix: str) -> None:
        for path, name in _LINEAR.items():
            parent, _, last = path.rpartition(".")
            own = layer.get_submodule(path)
            in_pairs = self._architecture.in_pairs and name in ("attn_q", "attn_k")
            head = layer.self_attn.head_dim if in_pairs else 0
            segment = self._segment(f"{prefix}{name}.weight", tuple(own.weight.shape), head)
            bias = None
            if self._architecture.has_bias and path in _BIASED:
                bias = self._floats(f"{prefix}{name}.bias", own.weight.shape[0])
            setattr(layer.get_submodule(parent), last, MappedLinear(self._kernels, [segment], bias))
        norms = {**_NORMS, **(_HEAD_NORMS if self._architecture.has_norms else {})}
        for path, name in norms.items():
            self._set_norm(layer.get_submodule(path), f"{prefix}{name}.weight")

    def _set_norm(self, norm: Any, name: str) -> None:
        norm.weight = nn.Parameter(self._floats(name, norm.weight.shape[0]), requires_grad=False)

    def _rotary(self, rotary: Any, head_size: int) -> Any:
        if _FREQUENCIES in self._file.tensors:
            rotary.inv_freq = rotary.inv_freq / self._floats(_FREQUENCIES, head_size // 2)
        return rotary

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


def parameters(model: Any) -> Iterator[int]:
    """Yield the numbers of weights of a mapped model's modules; those of a tied head are counted once."""
    for module in model.modules():
        if isinstance(module, MappedLinear) and not (module is model.lm_head and model.config.tie_word_embeddings):
            yield module.in_features * module.out_features + (0 if module.bias is None else len(module.bias))
    yield model.model.embed_tokens.num_embeddings * model.config.hidden_size
    yield from (each.numel() for each in model.parameters())
