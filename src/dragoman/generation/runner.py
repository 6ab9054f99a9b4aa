"""Model runner: load a decoder with transformers, compute its logits step by step, and find the best thread count."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dragoman.core.errors import ModelFailed
from dragoman.generation.adapters import AdapterRows, attach
from dragoman.generation.attention import (
    NAME,
    AttentionForm,
    AttentionFunction,
    AttentionStep,
    ShapeRecorder,
    SlotSpan,
    attention,
)
from dragoman.generation.cache import KeyValueCache
from dragoman.generation.fused import FusedModel, can_pack, is_supported, pack
from dragoman.generation.job import BatchRow
from dragoman.system.load_steps import report_step

# PyTorch's default, or OMP_NUM_THREADS, before a model sets another number.
MAX_THREADS = torch.get_num_threads()
# Doubling the threads must reduce the time to this share. Measurements are repeated _TURNS times, up to _ENOUGH_S.
_PAYS = 0.9
_TURNS, _ENOUGH_S = 3, 2.0
# With this much CPU time for two steps, two threads are always used.
_LONG_S = 0.02
# If the main thread ran for less than this share of a window, other processes use the cores, and threads that
# synchronize with each other wait for them.
_WINDOW_S, _CROWDED = 0.1, 0.75
# Duration of single-threaded computation afterwards: first, and maximum after repeated detection.
_ALONE_S, _ALONE_MOST_S = 1.0, 16.0


class AdaptiveThreads:
    """Context manager for computation that chooses between all threads and one.

    OpenMP threads spin while they wait for each other, which saves time on an idle machine but costs many times as much
    if other processes need the cores.
    """

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._threads, self._clock, self._compute, self._use = threads, clock, computed, use
        self._alone_s = _ALONE_S
        self._until_s: float | None = None
        self._wall_s = self._cpu_s = 0.0
        self._begun = (0.0, 0.0)
        use(threads)

    def __enter__(self) -> None:
        self._begun = self._clock(), self._compute()
        if self._until_s is not None and self._begun[0] >= self._until_s:
            self._until_s = None
            self._use(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._until_s is not None:
            return
        now_s = self._clock()
        self._wall_s += now_s - self._begun[0]
        self._cpu_s += self._compute() - self._begun[1]
        if self._wall_s < _WINDOW_S:
            return
        if self._cpu_s < _CROWDED * self._wall_s:
            self._use(1)
            self._until_s = now_s + self._alone_s
            self._alone_s = min(2 * self._alone_s, _ALONE_MOST_S)
        else:
            self._alone_s = _ALONE_S
        self._wall_s = self._cpu_s = 0.0


def fastest_thread_count(work_s: Callable[[int], float], most: int) -> int:
    """Return the number of threads, 1, 2, 4, ... up to `most`, with the shortest time of `work_s(threads)`.

    More threads are chosen only if they are clearly faster: small models become slower with them. Long work uses at
    least two, whatever the load of the machine at the moment.
    """
    tried = [1 << i for i in range(most.bit_length())]
    begin_s = time.thread_time()
    work_s(1)
    if time.thread_time() - begin_s > _LONG_S:
        tried = tried[1:] or tried
    taken_s = dict.fromkeys(tried, float("inf"))
    for _ in range(_TURNS if len(tried) > 1 else 0):  # in turns, so that other load affects all candidates
        for threads in tried:
            taken_s[threads] = min(taken_s[threads], work_s(threads))
        if sum(taken_s.values()) > _ENOUGH_S:
            break
    best = tried[0]
    for threads in tried:
        if taken_s[threads] < taken_s[best] * _PAYS:
            best = threads
    return best


log = logging.getLogger("dragoman.generation")

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Maximum difference of logits by rounding, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_NO_ADAPTERS: Mapping[str, Path] = {}


class StepFunction(Protocol):
    """An implementation of `Runner.run` with this number of threads."""

    threads: int

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor: ...


class Runner:
    """A decoder in memory, used by one thread.

    It computes with the fastest of these that gives the logits of the model's own code: machine code, the
    fused forward pass, or the code in transformers on our attention.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        *,
        packed: bool = True,
        adapters: Mapping[str, Path] = _NO_ADAPTERS,
    ) -> None:
        AttentionInterface.register(NAME, attention)
        self.device = torch.device(device)
        self.fused: FusedModel | None = None
        self._adapters: AdapterRows | None = None
        self._adaptive_threads: AdaptiveThreads | None = None
        self._native: StepFunction | None = None
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.dtype = DTYPES[dtype] if dtype != "auto" else _default_dtype(config, self.device)
        loaded, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=self.dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        _check_weights(loading_info)
        self.model: Any = loaded
        self.model.eval().to(self.device)
        self.config: Any = self.model.config.get_text_config(decoder=True)
        if adapters:
            self._adapters = attach(self.model, adapters, self.dtype, self.device)
        shapes = ShapeRecorder()
        with torch.inference_mode():
            self._forward([0], [0], [0], shapes)
        self.shape = shapes.shape(self.config.num_hidden_layers)
        self.packed = packed and can_pack(self.dtype, self.device)
        if not adapters:
            report_step("compiling")
            self._use_fast_paths(shapes)
        if self.fused is None and self.packed:
            pack(self.model)

    @property
    def native(self) -> bool:
        """Whether it computes in machine code."""
        return self._native is not None

    def run(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Write keys and values of the rows' tokens to the cache; return the wanted logits in order.

        Rows with one token must come first. Returns [wanted, vocabulary], FP32, on the model's device.
        """
        if self._native is not None:
            return self._native(cache, rows)
        spans, first = [], 0
        for row in rows:
            spans.append(SlotSpan(row.slot, first, row.start, len(row.tokens)))
            first += len(row.tokens)
        decoding = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
        outputs = [
            index
            for row, span in zip(rows, spans, strict=True)
            for index in range(span.first + span.count - row.wanted, span.first + span.count)
        ]
        tokens = [token for row in rows for token in row.tokens]
        positions = [position for span in spans for position in range(span.start, span.stop)]
        if self._adapters is not None:
            names = [row.adapter for row in rows for _ in row.tokens]
            self._adapters.assign(names, self.device)
        with torch.inference_mode(), self._adaptive_threads or nullcontext():
            step = AttentionStep(cache, spans[:decoding], spans[decoding:])
            return self._forward(tokens, positions, outputs, step)

    def set_threads(self, count: int) -> int:
        """Set the number of threads; 0 for the fastest number, reduced while other processes need the cores.

        Return the number.
        """
        threads = count or fastest_thread_count(self._measure_s, MAX_THREADS)
        self._use_threads(threads)
        self._adaptive_threads = None if count or threads == 1 or self.native else AdaptiveThreads(threads)
        return threads

    def _use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
        if self._native is not None:
            self._native.threads = threads

    def _measure_s(self, threads: int) -> float:
        """Return the time of two steps of eight sequences, with one token and with eight tokens of each."""
        self._use_threads(threads)
        cache = KeyValueCache(self.shape, 1024, self.dtype, self.device)
        cache.reserve(8, 64)
        begin_s = time.perf_counter()
        for tokens in ([0], [0] * 8):
            self.run(cache, [BatchRow(slot, 32, tokens) for slot in range(8)])
        return time.perf_counter() - begin_s

    def _forward(
        self, tokens: list[int], positions: list[int], outputs: list[int], step: AttentionFunction
    ) -> torch.Tensor:
        rows = self._tensor(outputs) if len(outputs) != len(tokens) else 0
        if self.fused is not None:
            return self.fused(self._tensor(tokens), self._tensor(positions), rows, step).float()
        output = self.model(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=rows,
            step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def _use_fast_paths(self, shapes: ShapeRecorder) -> None:
        """Use the fused forward pass and machine code if they are available and give the same logits."""
        if not is_supported(self.model):
            return
        expected = self._sample_logits()
        with torch.no_grad():
            self.fused = fused = FusedModel(self.model, shapes.forms, self.packed)
        if not self.agrees(expected, "the fused forward pass"):
            self.fused = None
            return
        # Frees the loaded weights, which the fused model has copied or still refers to.
        self.model.model.layers = torch.nn.ModuleList()
        del self.model.model.embed_tokens, self.model.model.norm, self.model.lm_head
        self._native = _native_step(self.config, fused, shapes.forms) if self.packed else None
        if self._native is not None and not self.agrees(expected, "the step in machine code"):
            self._native = None

    def _sample_logits(self) -> torch.Tensor:
        """Return logits of the last tokens of a short prompt and of one further token."""
        cache = KeyValueCache(self.shape, 64, self.dtype, self.device)
        cache.reserve(1, 64)
        tokens = range(min(16, self.config.vocab_size))
        prompt = self.run(cache, [BatchRow(0, 0, tokens, wanted=4)])
        return torch.cat((prompt, self.run(cache, [BatchRow(0, len(tokens), [tokens[-1]])])))

    def agrees(self, expected: torch.Tensor, name: str) -> bool:
        """Return whether the current implementation gives the logits of the model's own code; log if not."""
        error = float((self._sample_logits() - expected).abs().max() / expected.abs().max())
        if not error < _TOLERANCE[self.dtype]:
            log.warning("%s differs by %.2g from the model's own code and is not used", name, error)
            return False
        return True


def _native_step(config: Any, fused: FusedModel, forms: Mapping[int, AttentionForm]) -> StepFunction | None:
    try:
        from dragoman.generation.native.step import native_step

        return native_step(config, fused, forms)
    except ImportError:  # llvmlite is optional
        return None
    except (OSError, RuntimeError, AttributeError, TypeError) as error:  # another version of llvmlite or PyTorch
        log.warning("machine code not available, PyTorch computes: %s: %s", type(error).__name__, error)
        return None


def _check_weights(loading_info: Mapping[str, Any]) -> None:
    """Raise ModelFailed if weights are missing: transformers would initialize them at random."""
    missing = sorted(loading_info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFailed(f"the files of weights lack {', '.join(missing[:3])}{more}")


def _default_dtype(config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of the saved weights if the device computes in it, else FP32."""
    named = getattr(config, "dtype", None)
    saved = named if isinstance(named, torch.dtype) else DTYPES.get(str(named), torch.float32)
    if device.type == "cpu" and (saved is torch.float16 or not _has_bfloat16()):
        return torch.float32
    return saved


def _has_bfloat16() -> bool:
    """Return whether this CPU has instructions for BF16 products; without them it is slower than FP32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx", "bf16"))
