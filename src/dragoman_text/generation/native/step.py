"""The forward pass of the kernels, called on the weights and the cache of a model."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dragoman_kernels import best_form
from dragoman_text.generation.attention import AttentionForm
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.fused import FusedModel, has_fixed_rotary
from dragoman_text.generation.gguf_model import MappedEmbedding, MappedLinear, input_memory
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.adapters import KernelAdapters
from dragoman_text.generation.native.config import COLUMNS, LANES, MAX_HEAD_SIZE, KernelConfig, pad
from dragoman_text.generation.native.linear import BlockLinear, StepCode
from dragoman_text.generation.native.structures import (
    COUNTER_BYTES,
    LINEAR_LAYERS,
    PANEL_ROWS,
    AttentionShape,
    Decoder,
    DecoderLayer,
    DecoderStep,
    LinearLayer,
    StepScratch,
    counter_count,
)

_Integers = np.ndarray[Any, np.dtype[np.int64]]


class NativeStep:
    """A step of all layers by one kernel, equivalent to `FusedModel`.

    The result of a token is bitwise the same whatever the other tokens, the split of its sequence into steps and the
    number of threads.

    adapters: LoRA adapters in memory, which rows select.
    """

    def __init__(self, code: StepCode, fused: FusedModel, forms: Mapping[int, AttentionForm]) -> None:
        self._code, self._fused, self._config = code, fused, code.config
        config = code.config
        self.adapters = KernelAdapters(fused, config)
        self._weights: list[object] = []  # keeps FP32 copies and packed weights alive
        # Of a row, at most: inputs of layers whose weights are in blocks, and those that such layers need in FP32.
        self._block_inputs = self._block_floats = 0
        self._layers = (DecoderLayer * config.layers)(*(self._layer(i, forms[i].window) for i in range(config.layers)))
        self._head, self._norm = self._product(fused.head), self._fp32_address(fused.norm[: config.hidden])
        self._rotary = torch.empty(0, 2, config.head_size)
        self._memory: dict[str, torch.Tensor] = {}
        self._model = Decoder()
        self._scratch: list[tuple[StepScratch, list[torch.Tensor]]] = []
        self._rows = self._length = 0

    @property
    def threads(self) -> int:
        return self._code.threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._code.threads = count

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Write keys and values of the rows' tokens to the cache; return logits [wanted, vocabulary], FP32."""
        config, threads = self._config, self.threads
        tokens, outputs, runs = _flatten(rows, config.run_rows)
        _check_bounds(tokens, (self._fused.embed.num_embeddings, cache.length, cache.slots))
        self._reserve(tokens.shape[1], cache.length, threads)
        adapted, adapters = self.adapters.runs(rows)
        counters = np.zeros(counter_count(config.layers, adapted=bool(len(adapted))) * COUNTER_BYTES, np.uint8)
        logits = torch.empty(len(outputs), pad(config.vocabulary))
        layer_bytes, slot_bytes, head_bytes = (stride * cache.keys.itemsize for stride in cache.keys.stride()[:3])
        step = DecoderStep(
            ctypes.addressof(self._model),
            tokens.shape[1],
            *(tokens.ctypes.data + tokens.strides[0] * i for i in range(3)),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            layer_bytes,
            slot_bytes,
            head_bytes,
            output_count=len(outputs),
            output_rows=outputs.ctypes.data,
            run_count=len(runs),
            runs=runs.ctypes.data,
            adapted_count=len(adapted),
            adapted=ctypes.addressof(adapted),
            logits=logits.data_ptr(),
            counters=counters.ctypes.data,
        )
        calls = [(ctypes.addressof(step), ctypes.addressof(scratch)) for scratch, _ in self._scratch[:threads]]
        # A thread may start after the step has ended: all memory that it could read stays alive until then.
        arrays = (step, counters, tokens, outputs, runs, adapted, adapters, logits, cache.keys, cache.values)
        keep_alive = (self, self._model, self._rotary, self._scratch, self._memory, arrays)
        self._code.run(self._code.step, calls, keep_alive)
        return logits[:, : config.vocabulary]

    def _reserve(self, rows: int, length: int, threads: int) -> None:
        """Allocate memory for this many rows, cache positions and threads."""
        config, model = self._config, self._model
        if length > len(self._rotary):
            self._rotary = torch.cat((self._rotary, self._fused.rotary_table(len(self._rotary), length)))
        if rows > self._rows:
            capacity = max(rows, 2 * self._rows)
            self._memory = {
                "states": torch.zeros(capacity, pad(config.hidden)),
                "qkv": torch.zeros(capacity, pad(config.qkv_heads * config.head_size)),
                "attended": torch.zeros(capacity, config.query_heads * config.head_size, dtype=config.dtype),
                "gates": torch.zeros(capacity, pad(2 * config.intermediate)),
                "mlp": torch.zeros(capacity, pad(config.intermediate), dtype=config.dtype),
            }
            self._rows, self._scratch = capacity, []  # only after all allocations have succeeded
        if length > self._length:
            self._length, self._scratch = length, []
        if model.rotary != self._rotary.data_ptr() or model.states != self._memory["states"].data_ptr():
            self._model = self._decoder()  # a new one: a late thread may still read the one before
        while len(self._scratch) < threads:
            self._scratch.append(self._allocate_scratch())

    def _decoder(self) -> Decoder:
        config, embed = self._config, self._fused.embed
        return Decoder(
            AttentionShape(
                config.query_heads,
                config.kv_heads,
                config.head_size,
                config.qk_norm,
                config.bf16,
                config.eps,
                config.scaling,
            ),
            config.layers,
            config.hidden,
            config.intermediate,
            ctypes.addressof(self._layers),
            *((0, embed.address) if isinstance(embed, MappedEmbedding) else (embed.weight.data_ptr(), 0)),
            self._norm,
            self._head,
            self._rotary.data_ptr(),
            **{name: memory.data_ptr() for name, memory in self._memory.items()},
        )

    def _allocate_scratch(self) -> tuple[StepScratch, list[torch.Tensor]]:
        """Return the memory of a thread."""
        config, score_count = self._config, self._length + LANES
        tensors = [
            torch.zeros(self._rows, config.hidden, dtype=config.dtype),
            torch.zeros(min(self._rows, PANEL_ROWS), COLUMNS),
            torch.zeros(config.run_rows, config.head_size),
            torch.zeros(config.run_rows, score_count),
        ]
        memory, inputs = input_memory(self._rows * self._block_inputs, self._rows * self._block_floats)
        return StepScratch(*(each.data_ptr() for each in tensors), score_count, inputs), [*tensors, memory]

    def _layer(self, number: int, window: int) -> DecoderLayer:
        layer, hidden = self._fused.layers[number], self._config.hidden
        query_norm, key_norm = (
            0 if norm is None else self._fp32_address(norm) for norm in (layer.query_norm, layer.key_norm)
        )
        return DecoderLayer(
            self._fp32_address(layer.input_norm[:hidden]),
            query_norm,
            key_norm,
            self._fp32_address(layer.mlp_norm[:hidden]),
            *(self._product(getattr(layer, name)) for name in LINEAR_LAYERS),
            window,
        )

    def _product(self, layer: Any) -> LinearLayer:
        self._weights.append(layer)
        if isinstance(layer, MappedLinear):
            block = layer.layer
            self._block_inputs = max(self._block_inputs, block.size)
            self._block_floats = max(self._block_floats, block.float_inputs)
            return LinearLayer(size=block.size, blocks=block.blocks, blocked=block.address)
        assert isinstance(layer, BlockLinear)
        return layer.layer

    def _fp32_address(self, weights: torch.Tensor) -> int:
        weights = weights.detach().float().contiguous()
        self._weights.append(weights)
        return weights.data_ptr()


def _flatten(rows: Sequence[BatchRow], run_rows: int) -> tuple[_Integers, _Integers, _Integers]:
    """Return tokens, positions and slots [3, tokens]; the indices of tokens whose logits are wanted; and runs [runs, 2]
    of tokens that attend together."""
    counts = [len(row.tokens) for row in rows]
    if max(counts) == 1:
        tokens = np.array([(row.tokens[0], row.start, row.slot) for row in rows], np.int64).T.copy()
        outputs = np.array([i for i, row in enumerate(rows) if row.wanted], np.int64)
        return tokens, outputs, np.array([(i, 1) for i in range(len(rows))], np.int64)
    tokens, stops, runs = np.empty((3, sum(counts)), np.int64), np.cumsum(counts), []
    for row, count, stop in zip(rows, counts, stops, strict=True):
        first, in_full_runs = stop - count, count // run_rows * run_rows
        tokens[0, first:stop] = row.tokens
        tokens[1, first:stop] = np.arange(row.start, row.start + count)
        tokens[2, first:stop] = row.slot
        runs += [(first + i, run_rows) for i in range(0, in_full_runs, run_rows)]
        runs += [(first + i, 1) for i in range(in_full_runs, count)]
    last = [np.arange(stop - row.wanted, stop) for row, stop in zip(rows, stops, strict=True)]
    return tokens, np.concatenate(last), np.array(runs, np.int64)


def _check_bounds(tokens: _Integers, limits: tuple[int, int, int]) -> None:
    """Raise IndexError for a token, position or slot out of bounds: the kernels do not check them."""
    if tokens.min() < 0 or any(tokens.max(1) >= limits):
        raise IndexError(f"tokens, positions and slots: expected 0 to below {limits}, got {tokens.max(1).tolist()}")


class Unsupported(Exception):
    """The kernels cannot compute the model; the message says why."""


def step_code(model: Any, forms: Mapping[int, AttentionForm]) -> StepCode:
    """Return the kernels for a model of `fused.ARCHITECTURES`. Raises Unsupported, or NoKernels if this installation
    has none."""
    if {(form.scaling, form.softcap) for form in forms.values()} != {(forms[0].scaling, 0.0)}:
        raise Unsupported("its layers differ in the scaling of attention, or have a soft cap")
    return StepCode(_kernel_config(model, forms[0].scaling))


def _kernel_config(model: Any, scaling: float) -> KernelConfig:
    config, attention, embed = model.config, model.model.layers[0].self_attn, model.model.embed_tokens
    dtype = torch.float32 if isinstance(embed, MappedEmbedding) else embed.weight.dtype
    bf16, head_size = dtype is torch.bfloat16, int(attention.head_dim)
    for name, size, multiple in (
        ("head size", head_size, 2 * LANES),
        ("hidden size", config.hidden_size, LANES),
        ("intermediate size", config.intermediate_size, 2 if bf16 else 1),
    ):
        if size % multiple:
            raise Unsupported(f"{name}: expected a multiple of {multiple}, got {size}")
    if head_size > MAX_HEAD_SIZE:
        raise Unsupported(f"head size: expected at most {MAX_HEAD_SIZE}, got {head_size}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"dtype: expected float32 or bfloat16, got {str(dtype).removeprefix('torch.')}")
    if not has_fixed_rotary(model):
        raise Unsupported("its rotary embedding depends on the length of the sequence")
    return KernelConfig(
        layers=len(model.model.layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        query_heads=attention.q_proj.out_features // head_size,
        kv_heads=attention.k_proj.out_features // head_size,
        head_size=head_size,
        vocabulary=model.lm_head.out_features,
        eps=float(config.rms_norm_eps),
        qk_norm=getattr(attention, "q_norm", None) is not None,
        bf16=bf16,
        form=best_form(),
        scaling=scaling,
    )
