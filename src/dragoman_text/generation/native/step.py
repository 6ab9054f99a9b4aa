"""The forward pass in machine code, called on the weights and the cache of a model."""

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dragoman_text.generation.attention import AttentionForm
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.fused import FusedModel, has_fixed_rotary
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.code import LANES, cpu_features
from dragoman_text.generation.native.forward import COUNTER_BYTES, PANEL_ROWS, LayerArg, StepArg, counter_count
from dragoman_text.generation.native.kernels import AVX2, COLUMNS, GROUP, KernelConfig, pad
from dragoman_text.generation.native.linear import BlockLinear, StepCode

_Integers = np.ndarray[Any, np.dtype[np.int64]]


class NativeStep:
    """A step of all layers in machine code, equivalent to `FusedModel`.

    The result of a token is bitwise the same whatever the other tokens, the split of its sequence into steps and the
    number of threads.
    """

    def __init__(self, code: StepCode, fused: FusedModel, forms: Mapping[int, AttentionForm]) -> None:
        self._code, self._fused, self._config = code, fused, code.config
        config = code.config
        self._weights: list[object] = []  # keeps FP32 copies and packed weights alive
        self._layers = np.array([self._layer_args(i, forms[i].window) for i in range(config.layers)], np.int64)
        self._head = self._product_args(fused.head)
        self._norm = self._fp32_address(fused.norm[: config.hidden])
        self._rotary = torch.empty(0, 2, config.head_size)
        self._memory: dict[StepArg, torch.Tensor] = {}
        self._scratch: list[tuple[_Integers, list[torch.Tensor]]] = []
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
        _check_bounds(tokens, (len(self._fused.embed), cache.length, cache.slots))
        self._reserve(tokens.shape[1], cache.length, threads)
        counters = np.zeros(counter_count(config.layers) * COUNTER_BYTES, np.uint8)
        logits = torch.empty(len(outputs), pad(config.vocabulary))
        table = np.zeros(len(StepArg), np.int64)
        table[StepArg.ROWS], table[StepArg.OUTPUT_COUNT] = tokens.shape[1], len(outputs)
        table[StepArg.OUTPUT_ROWS] = outputs.ctypes.data
        table[StepArg.TOKENS : StepArg.SLOTS + 1] = tokens.ctypes.data + tokens.strides[0] * np.arange(3)
        table[StepArg.EMBEDDING], table[StepArg.LAYERS] = self._fused.embed.data_ptr(), self._layers.ctypes.data
        table[StepArg.KEYS], table[StepArg.VALUES] = cache.keys.data_ptr(), cache.values.data_ptr()
        table[StepArg.RUNS], table[StepArg.RUN_COUNT] = runs.ctypes.data, len(runs)
        table[StepArg.SCORE_BYTES] = 4 * (self._length + 2 * LANES)
        for name, dimension in ((StepArg.LAYER_BYTES, 0), (StepArg.SLOT_BYTES, 1), (StepArg.HEAD_BYTES, 2)):
            table[name] = cache.keys.stride(dimension) * cache.keys.itemsize
        table[StepArg.ROTARY], table[StepArg.NORM] = self._rotary.data_ptr(), self._norm
        table[StepArg.HEAD], table[StepArg.HEAD_BIAS] = self._head
        table[StepArg.LOGITS], table[StepArg.COUNTERS] = logits.data_ptr(), counters.ctypes.data
        for name, memory in self._memory.items():
            table[name] = memory.data_ptr()
        calls = [(table.ctypes.data, addresses.ctypes.data) for addresses, _ in self._scratch[:threads]]
        # A thread may start after the step has ended: all memory that it could read stays alive until then.
        arrays = (table, counters, tokens, outputs, runs, logits, cache.keys, cache.values)
        self._code.run(self._code.step, calls, (self, self._scratch, self._memory, arrays))
        return logits[:, : config.vocabulary]

    def _reserve(self, rows: int, length: int, threads: int) -> None:
        """Allocate memory for this many rows, cache positions and threads."""
        config = self._config
        if length > len(self._rotary):
            self._rotary = torch.cat((self._rotary, self._fused.rotary_table(len(self._rotary), length)))
        if rows > self._rows:
            capacity = max(rows, 2 * self._rows)
            self._memory = {
                StepArg.STATES: torch.zeros(capacity, pad(config.hidden)),
                StepArg.QKV: torch.zeros(capacity, pad(config.qkv_heads * config.head_size)),
                StepArg.ATTENTION: torch.zeros(capacity, config.query_heads * config.head_size, dtype=config.dtype),
                StepArg.GATES: torch.zeros(capacity, pad(2 * config.intermediate)),
                StepArg.MLP: torch.zeros(capacity, pad(config.intermediate), dtype=config.dtype),
            }
            self._rows, self._scratch = capacity, []  # only after all allocations have succeeded
        if length > self._length:
            self._length, self._scratch = length, []
        while len(self._scratch) < threads:
            self._scratch.append(self._allocate_scratch())

    def _allocate_scratch(self) -> tuple[_Integers, list[torch.Tensor]]:
        """Return the memory of a thread, as addresses in the order of `ThreadArg` and as tensors."""
        config = self._config
        tensors = [
            torch.zeros(self._rows, config.hidden, dtype=config.dtype),
            torch.zeros(min(self._rows, PANEL_ROWS), COLUMNS),
            torch.zeros(config.run_rows, config.head_size),
            torch.zeros(config.run_rows, self._length + 2 * LANES),
        ]
        return np.array([each.data_ptr() for each in tensors], np.int64), tensors

    def _layer_args(self, number: int, window: int) -> list[int]:
        layer, hidden = self._fused.layers[number], self._config.hidden
        args = [0] * len(LayerArg)
        for name, norm in ((LayerArg.INPUT_NORM, layer.input_norm), (LayerArg.MLP_NORM, layer.mlp_norm)):
            args[name] = self._fp32_address(norm[:hidden])
        for name, head_norm in ((LayerArg.QUERY_NORM, layer.query_norm), (LayerArg.KEY_NORM, layer.key_norm)):
            args[name] = 0 if head_norm is None else self._fp32_address(head_norm)
        products = (
            (LayerArg.QKV, layer.qkv),
            (LayerArg.OUT, layer.out),
            (LayerArg.GATE_UP, layer.gate_up),
            (LayerArg.DOWN, layer.down),
        )
        for name, product in products:
            args[name], args[name + 1] = self._product_args(product)
        args[LayerArg.WINDOW] = window
        return args

    def _product_args(self, layer: Any) -> tuple[int, int]:
        """Return the addresses of the weights and the padded bias of a product."""
        assert isinstance(layer, BlockLinear)
        self._weights.append(layer)
        return layer.weights.data_ptr(), layer.bias.data_ptr()

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
    """Raise IndexError for a token, position or slot out of bounds: the machine code does not check them."""
    if tokens.min() < 0 or any(tokens.max(1) >= limits):
        raise IndexError(f"tokens, positions and slots: expected 0 to below {limits}, got {tokens.max(1).tolist()}")


class Unsupported(Exception):
    """The machine code cannot compute the model, or not on this CPU; the message says why."""


def step_code(model: Any, forms: Mapping[int, AttentionForm], bits: int) -> StepCode:
    """Compile the step of a model of `fused.ARCHITECTURES`, with weights in this number of bits; 0 for its dtype.

    Raises Unsupported.
    """
    _check_cpu()
    config = _kernel_config(model, bits)
    if {(form.scaling, form.softcap) for form in forms.values()} != {(forms[0].scaling, 0.0)}:
        raise Unsupported("its layers differ in the scaling of attention, or have a soft cap")
    return StepCode(config, forms[0].scaling)


def _kernel_config(model: Any, bits: int) -> KernelConfig:
    config, attention, dtype = model.config, model.model.layers[0].self_attn, model.model.embed_tokens.weight.dtype
    bf16, head_size = dtype is torch.bfloat16, int(attention.head_dim)
    for name, size, multiple in (
        ("head size", head_size, 2 * LANES),
        ("hidden size", config.hidden_size, GROUP if bits else LANES),
        ("intermediate size", config.intermediate_size, GROUP if bits else 2 if bf16 else 1),
    ):
        if size % multiple:
            raise Unsupported(f"{name}: expected a multiple of {multiple}, got {size}")
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
        qk_norm=hasattr(attention, "q_norm"),
        bf16=bf16,
        bits=bits,
        avx512=_has_avx512(bf16, bits),
    )


def _has_avx512(bf16: bool, bits: int) -> bool:
    """Return whether this CPU has all AVX-512 instructions that the kernels use for such weights."""
    needed = {"avx512f"}
    if bf16:
        needed |= {"avx512bf16", *{8: ["avx512vbmi"], 4: ["avx512bw"]}.get(bits, ())}
    return needed <= cpu_features()


def _check_cpu() -> None:
    """Raise Unsupported if this CPU lacks instructions, or the system `sched_yield`."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        raise Unsupported("it needs Linux or macOS on x86-64")
    if missing := sorted(AVX2 - cpu_features()):
        raise Unsupported(f"this CPU has no {' and '.join(missing)}")
