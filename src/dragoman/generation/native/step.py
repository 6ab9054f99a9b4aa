"""Tokens through a whole model as one call of machine code."""

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
from dragoman.generation.fused import FusedModel
from dragoman.generation.native.forward import COUNTER_BYTES, PANEL, Layer, StepArg, counters, module
from dragoman.generation.native.kernels import COLUMNS, KernelConfig, padded
from dragoman.generation.packing import PackedLinear
from dragoman.generation.sequence import BatchRow
from dragoman.native.code import LANES, Compiled, instructions

# A function and its arguments; the objects are kept alive as long as a thread may look at them.
_Job = tuple[Callable[..., None], tuple[int, ...], object]


class _Mate:
    """A thread that sleeps until it has something to do."""

    def __init__(self) -> None:
        self.idle = True
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # one at most: who gives asks first whether it is idle
        threading.Thread(target=_works, args=(weakref.ref(self), self._jobs), name="dragoman-mate", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def give(self, job: _Job) -> None:
        self.idle = False
        self._jobs.put(job)


def _works(mate: weakref.ref[_Mate], jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job[0](*job[1])
        job = None
        if (here := mate()) is not None:
            here.idle = True
        del here


class ThreadTeam:
    """Calls a function that shares its work among its callers, in the thread that asks and in others beside it."""

    def __init__(self) -> None:
        self._mates: list[_Mate] = []

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], kept: object) -> None:
        """Call the function with each of the arguments at once; return when the first call has.

        A mate that is still about an earlier call is left out: the function must do all its work for whoever comes.
        `kept` lives as long as a call may be under way.
        """
        while len(self._mates) < len(calls) - 1:
            self._mates.append(_Mate())
        for mate, arguments in zip(self._mates, calls[1:], strict=False):
            if mate.idle:
                mate.give((function, arguments, kept))
        function(*calls[0])


_Integers = np.ndarray[Any, np.dtype[np.int64]]


class NativeStep:
    """Tokens of some sequences through all layers.

    A token's numbers are the same to the last bit whatever is beside it, however its text was cut into steps, and
    however many threads compute.
    """

    def __init__(self, compact: FusedModel, build: KernelConfig, forms: Mapping[int, AttentionForm]) -> None:
        self._compact, self._build = compact, build
        self.threads = 1
        self._step, self._team = Compiled(module(build, forms[0].scaling)).function("step", 2), ThreadTeam()
        self._kept: list[torch.Tensor] = []
        self._layers = np.array([self._layer(i, forms[i].window) for i in range(build.layers)], np.int64)
        self._head = self._product(compact.head)
        self._norm = self._floats(compact.norm[: build.hidden])
        self._turns = torch.empty(0, 2, build.size)
        self._memory: dict[StepArg, torch.Tensor] = {}
        self._own: list[tuple[np.ndarray[Any, Any], list[torch.Tensor]]] = []
        self._rows = self._length = 0

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Logits [wanted, vocabulary], FP32; keys and values of the rows' tokens are in the cache afterwards."""
        build, threads = self._build, self.threads
        asked, wanted, runs = _spread(rows, build.together)
        _check_within(asked, (len(self._compact.embed), cache.length, cache.slots))
        self._reserve(asked.shape[1], cache.length, threads)
        counted = np.zeros(counters(build.layers) * COUNTER_BYTES, np.uint8)
        logits = torch.empty(len(wanted), padded(build.vocabulary))
        table = np.zeros(len(StepArg), np.int64)
        table[StepArg.ROWS], table[StepArg.KEPT], table[StepArg.WANTED] = (
            asked.shape[1],
            len(wanted),
            wanted.ctypes.data,
        )
        table[StepArg.TOKENS : StepArg.SLOTS + 1] = asked.ctypes.data + asked.strides[0] * np.arange(3)
        table[StepArg.EMBEDDING], table[StepArg.LAYERS] = self._compact.embed.data_ptr(), self._layers.ctypes.data
        table[StepArg.KEYS], table[StepArg.VALUES] = cache.keys.data_ptr(), cache.values.data_ptr()
        table[StepArg.RUNS], table[StepArg.RUN_COUNT] = runs.ctypes.data, len(runs)
        table[StepArg.SCORE_BYTES] = 4 * (self._length + 2 * LANES)
        for name, dimension in ((StepArg.LAYER_BYTES, 0), (StepArg.SLOT_BYTES, 1), (StepArg.HEAD_BYTES, 2)):
            table[name] = cache.keys.stride(dimension) * cache.keys.itemsize
        table[StepArg.TURNS], table[StepArg.NORM] = self._turns.data_ptr(), self._norm
        table[StepArg.HEAD], table[StepArg.HEAD_BIAS] = self._head
        table[StepArg.LOGITS], table[StepArg.COUNTERS] = logits.data_ptr(), counted.ctypes.data
        for given, held in self._memory.items():
            table[given] = held.data_ptr()
        calls = [(table.ctypes.data, own.ctypes.data) for own, _ in self._own[:threads]]
        # All that any thread may look at, also one that comes when this step is over.
        looked = (self, table, self._own, self._memory, counted, asked, wanted, runs, logits, cache.keys, cache.values)
        self._team.run(self._step, calls, looked)
        return logits[:, : build.vocabulary]

    def _reserve(self, rows: int, length: int, threads: int) -> None:
        """Have memory for so many rows of texts so long, for so many threads."""
        build = self._build
        if length > len(self._turns):
            self._turns = torch.cat((self._turns, self._compact.turns(len(self._turns), length)))
        if rows > self._rows:
            kind, ample = _kind(build), max(rows, 2 * self._rows)
            self._memory = {
                StepArg.STATES: torch.zeros(ample, padded(build.hidden)),
                StepArg.HEADS: torch.zeros(ample, padded(build.heads * build.size)),
                StepArg.READ: torch.zeros(ample, build.queries * build.size, dtype=kind),
                StepArg.GATES: torch.zeros(ample, padded(2 * build.inner)),
                StepArg.INNER: torch.zeros(ample, padded(build.inner), dtype=kind),
            }
            self._rows, self._own = ample, []  # once all of it is there
        if length > self._length:
            self._length, self._own = length, []
        while len(self._own) < threads:
            self._own.append(self._made())

    def _made(self) -> tuple[np.ndarray[Any, Any], list[torch.Tensor]]:
        """A thread's own memory, in the order of `Own`."""
        build, kind = self._build, _kind(self._build)
        held = [
            torch.zeros(self._rows, build.hidden, dtype=kind),
            torch.zeros(min(self._rows, PANEL), COLUMNS),
            torch.zeros(build.together, build.size),
            torch.zeros(build.together, self._length + 2 * LANES),
        ]
        return np.array([each.data_ptr() for each in held], np.int64), held

    def _layer(self, number: int, window: int) -> list[int]:
        layer, hidden = self._compact.layers[number], self._build.hidden
        found = [0] * len(Layer)
        for name, norm in ((Layer.BEFORE, layer.before), (Layer.BETWEEN, layer.between)):
            found[name] = self._floats(norm[:hidden])
        for name, heads in ((Layer.QUERY_NORM, layer.query_norm), (Layer.KEY_NORM, layer.key_norm)):
            found[name] = 0 if heads is None else self._floats(heads)
        parts = (Layer.QKV, layer.qkv), (Layer.OUT, layer.out), (Layer.GATE_UP, layer.gate_up), (Layer.DOWN, layer.down)
        for place, part in parts:
            found[place], found[place + 1] = self._product(part)
        found[Layer.WINDOW] = window
        return found

    def _product(self, packed: Any) -> tuple[int, int]:
        """Where a product's weights lie and where its bias."""
        bias = torch.zeros(padded(packed.out_features))
        if packed.bias is not None:
            bias[: packed.out_features] = packed.bias
        return _address(packed), self._floats(bias)

    def _floats(self, numbers: torch.Tensor) -> int:
        self._kept.append(numbers.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def _spread(rows: Sequence[BatchRow], together: int) -> tuple[_Integers, _Integers, _Integers]:
    """Tokens, their places and their slots, [3, tokens]; the numbers of those whose logits are wanted; and runs of
    tokens that attend together, [runs, 2]."""
    counts = [len(row.tokens) for row in rows]
    if max(counts) == 1:
        each = np.array([(row.tokens[0], row.start, row.slot) for row in rows], np.int64).T.copy()
        wanted = np.array([i for i, row in enumerate(rows) if row.wanted], np.int64)
        return each, wanted, np.array([(i, 1) for i in range(len(rows))], np.int64)
    asked, stops, runs = np.empty((3, sum(counts)), np.int64), np.cumsum(counts), []
    for row, count, stop in zip(rows, counts, stops, strict=True):
        first, whole = stop - count, count // together * together
        asked[0, first:stop] = row.tokens
        asked[1, first:stop] = np.arange(row.start, row.start + count)
        asked[2, first:stop] = row.slot
        runs += [(first + i, together) for i in range(0, whole, together)]
        runs += [(first + i, 1) for i in range(whole, count)]
    kept = [np.arange(stop - row.wanted, stop) for row, stop in zip(rows, stops, strict=True)]
    return asked, np.concatenate(kept), np.array(runs, np.int64)


def _check_within(asked: _Integers, limits: tuple[int, int, int]) -> None:
    """IndexError where a token, a place or a slot is beyond memory, which machine code does not ask about."""
    if asked.min() < 0 or any(asked.max(1) >= limits):
        raise IndexError(f"tokens, places and slots up to {asked.max(1).tolist()}, from {asked.min()}; within {limits}")


def native(config: Any, compact: FusedModel, forms: Mapping[int, AttentionForm]) -> NativeStep | None:
    """The step of such a model as machine code, None where it, the machine or PyTorch's packed weights are not of the
    kind that is written here."""
    build = _build(config, compact)
    alike = {(form.scaling, form.softcap) for form in forms.values()} == {(forms[0].scaling, 0.0)}
    if build is None or not alike or not _computes(build) or not _laid(build, compact):
        return None
    return NativeStep(compact, build, forms)


def _build(config: Any, compact: FusedModel) -> KernelConfig | None:
    head = compact.head
    halves = compact.embed.dtype is torch.bfloat16
    fits = config.hidden_size % LANES == compact.size % (2 * LANES) == 0
    fits = fits and not (halves and config.intermediate_size % 2)
    if not isinstance(head, PackedLinear) or not fits or not compact.steady:
        return None
    return KernelConfig(
        layers=len(compact.layers),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        queries=compact.queries,
        keys=compact.keys,
        size=compact.size,
        vocabulary=head.out_features,
        eps=float(config.rms_norm_eps),
        normed=compact.layers[0].query_norm is not None,
        halves=halves,
    )


def _computes(build: KernelConfig) -> bool:
    """Whether this machine has the instructions, and its system what threads wait with."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return False
    return {"avx512f", *(("avx512bf16",) if build.halves else ())} <= instructions()


def _kind(build: KernelConfig) -> torch.dtype:
    return torch.bfloat16 if build.halves else torch.float32


def _laid(build: KernelConfig, compact: FusedModel) -> bool:
    """Whether PyTorch packs weights as they are read here: [columns / 64, steps, 64], in BF16 two rows of the input
    beside each other. Seen by an example, and by the sizes of all."""
    kind = _kind(build)
    example = torch.arange(100 * 64).remainder(251).view(100, 64).to(kind)
    blocks = torch.zeros(padded(100), 64, dtype=kind)
    blocks[:100] = example
    pair = 2 if build.halves else 1
    expected = blocks.view(-1, COLUMNS, 64 // pair, pair).transpose(1, 2).contiguous()
    packed = PackedLinear(example, None)
    if not _whole(build, packed):
        return False
    found = torch.frombuffer((ctypes.c_char * expected.nbytes).from_address(_address(packed)), dtype=kind)
    parts = [part for layer in compact.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return bool((found == expected.view(-1)).all()) and all(_whole(build, part) for part in (compact.head, *parts))


def _whole(build: KernelConfig, packed: Any) -> bool:
    """Whether all blocks are there, and nothing else."""
    blocks = padded(packed.out_features) // COLUMNS
    return bool(torch.ops.mkldnn._nbytes(packed.packed) == blocks * build.block_bytes(packed.in_features))


def _address(packed: PackedLinear) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed.packed))
