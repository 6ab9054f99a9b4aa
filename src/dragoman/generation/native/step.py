"""The forward pass in machine code, called on the weights and the cache of a model."""

import ctypes
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from dragoman.generation.attention import AttentionForm
from dragoman.generation.cache import KeyValueCache
from dragoman.generation.fused import FusedModel, PackedLinear
from dragoman.generation.job import BatchRow
from dragoman.generation.native.forward import (
    COUNTER_BYTES,
    PANEL_ROWS,
    LayerArg,
    StepArg,
    build_module,
    counter_count,
)
from dragoman.generation.native.kernels import COLUMNS, KernelConfig, pad
from dragoman.native.code import LANES, Compiled, cpu_features

# A function, its arguments, and objects to keep alive until it has returned.
_Job = tuple[Callable[..., None], tuple[int, ...], object]
_Integers = np.ndarray[Any, np.dtype[np.int64]]


class _StepThread:
    """A thread that sleeps until it gets a job."""

    def __init__(self) -> None:
        self.idle = True
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # at most one: `idle` is checked before `submit`
        target, arguments = _run_jobs, (weakref.ref(self), self._jobs)
        threading.Thread(target=target, args=arguments, name="dragoman-step", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: _Job) -> None:
        self.idle = False
        self._jobs.put(job)


def _run_jobs(owner: weakref.ref[_StepThread], jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job[0](*job[1])
        job = None
        if (thread := owner()) is not None:
            thread.idle = True
        del thread


class StepThreads:
    """Executes a function that divides its work among all threads that call it."""

    def __init__(self) -> None:
        self._threads: list[_StepThread] = []

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], keep_alive: object) -> None:
        """Call the function with each of the arguments concurrently, and wait for the first call, in this thread.

        A thread that still executes an earlier call is skipped, so the function must complete with any number of
        callers. `keep_alive` is referenced until the last call has returned.
        """
        while len(self._threads) < len(calls) - 1:
            self._threads.append(_StepThread())
        for thread, arguments in zip(self._threads, calls[1:], strict=False):
            if thread.idle:
                thread.submit((function, arguments, keep_alive))
        function(*calls[0])


class NativeStep:
    """A step of all layers in machine code, equivalent to `FusedModel`.

    The result of a token is bitwise the same whatever the other tokens, the split of its sequence into steps and the
    number of threads.
    """

    def __init__(self, fused: FusedModel, config: KernelConfig, forms: Mapping[int, AttentionForm]) -> None:
        self._fused, self._config = fused, config
        self.threads = 1
        self._step = Compiled(build_module(config, forms[0].scaling)).function("step", 2)
        self._step_threads = StepThreads()
        self._weights: list[torch.Tensor] = []  # keeps FP32 copies alive
        self._layers = np.array([self._layer_args(i, forms[i].window) for i in range(config.layers)], np.int64)
        self._head = self._product_args(fused.head)
        self._norm = self._fp32_address(fused.norm[: config.hidden])
        self._rotary = torch.empty(0, 2, config.head_size)
        self._memory: dict[StepArg, torch.Tensor] = {}
        self._scratch: list[tuple[_Integers, list[torch.Tensor]]] = []
        self._rows = self._length = 0

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
        self._step_threads.run(self._step, calls, (self, self._scratch, self._memory, arrays))
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

    def _product_args(self, packed: Any) -> tuple[int, int]:
        """Return the addresses of the weights and the padded bias of a product."""
        bias = torch.zeros(pad(packed.out_features))
        if packed.bias is not None:
            bias[: packed.out_features] = packed.bias
        return _address(packed), self._fp32_address(bias)

    def _fp32_address(self, weights: torch.Tensor) -> int:
        self._weights.append(weights.detach().float().contiguous())
        return self._weights[-1].data_ptr()


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


def native_step(config: Any, fused: FusedModel, forms: Mapping[int, AttentionForm]) -> NativeStep | None:
    """Return the step of a model in machine code; None if the model, the CPU or PyTorch's packed layout is not
    supported."""
    kernels = _kernel_config(config, fused)
    alike = {(form.scaling, form.softcap) for form in forms.values()} == {(forms[0].scaling, 0.0)}
    if kernels is None or not alike or not _is_supported(kernels) or not _has_expected_layout(kernels, fused):
        return None
    return NativeStep(fused, kernels, forms)


def _kernel_config(config: Any, fused: FusedModel) -> KernelConfig | None:
    bf16 = fused.embed.dtype is torch.bfloat16
    fits = config.hidden_size % LANES == fused.head_size % (2 * LANES) == 0
    fits = fits and not (bf16 and config.intermediate_size % 2)
    if not isinstance(fused.head, PackedLinear) or not fits or not fused.has_fixed_rotary:
        return None
    return KernelConfig(
        layers=len(fused.layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        query_heads=fused.query_heads,
        kv_heads=fused.kv_heads,
        head_size=fused.head_size,
        vocabulary=fused.head.out_features,
        eps=float(config.rms_norm_eps),
        qk_norm=fused.layers[0].query_norm is not None,
        bf16=bf16,
    )


def _is_supported(config: KernelConfig) -> bool:
    """Return whether this CPU has the instructions, and the system `sched_yield`."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return False
    return {"avx512f", *(("avx512bf16",) if config.bf16 else ())} <= cpu_features()


def _has_expected_layout(config: KernelConfig, fused: FusedModel) -> bool:
    """Return whether PyTorch packs weights as [columns / 64, steps, 64], with pairs of inputs adjacent in BF16.

    Nothing documents this layout: it is checked on an example, and by the size of all weights.
    """
    example = torch.arange(100 * 64).remainder(251).view(100, 64).to(config.dtype)
    blocks = torch.zeros(pad(100), 64, dtype=config.dtype)
    blocks[:100] = example
    pair = 2 if config.bf16 else 1
    expected = blocks.view(-1, COLUMNS, 64 // pair, pair).transpose(1, 2).contiguous()
    packed = PackedLinear(example, None)
    if not _has_all_blocks(config, packed):
        return False
    memory = (ctypes.c_char * expected.nbytes).from_address(_address(packed))
    actual = torch.frombuffer(memory, dtype=config.dtype)
    products = [product for layer in fused.layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    sizes_match = all(_has_all_blocks(config, product) for product in (fused.head, *products))
    return bool((actual == expected.view(-1)).all()) and sizes_match


def _has_all_blocks(config: KernelConfig, packed: Any) -> bool:
    """Return whether packed weights have exactly the size of their blocks."""
    blocks = pad(packed.out_features) // COLUMNS
    return bool(torch.ops.mkldnn._nbytes(packed.packed) == blocks * config.block_bytes(packed.in_features))


def _address(packed: PackedLinear) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed.packed))
