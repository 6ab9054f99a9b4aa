"""Loads a decoder by transformers and runs one step of it: tokens in, logits out."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dragoman.core.errors import ModelFailed
from dragoman.generation.adapters import AdapterRows, attach
from dragoman.generation.adaptive_threads import MAX_THREADS, AdaptiveThreads, fastest_thread_count
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
from dragoman.generation.cuda_graphs import Capture, CudaGraphs
from dragoman.generation.fused import FusedModel, is_supported
from dragoman.generation.packing import can_pack, pack
from dragoman.generation.sequence import BatchRow

log = logging.getLogger("dragoman.generation")

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# How far logits of the same weights may differ by rounding alone, of the largest one.
_SAME = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_NONE: Mapping[str, Path] = {}


class WholeStep(Protocol):
    """What `Runner.run` does, with so many threads."""

    threads: int

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor: ...


class Runner:
    """A decoder in memory, all of whose work is begun by the one thread that calls it."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        *,
        packed: bool = True,
        adapters: Mapping[str, Path] = _NONE,
        capture: Capture | None = None,
    ) -> None:
        AttentionInterface.register(NAME, attention)
        self.device = torch.device(device)
        self._compact: FusedModel | None = None
        self._adapted: AdapterRows | None = None
        self._crew: AdaptiveThreads | None = None
        self._native: WholeStep | None = None
        self._graphs: CudaGraphs | None = None
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.dtype = DTYPES[dtype] if dtype != "auto" else _saved_dtype(config, self.device)
        loaded, told = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=self.dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        _check_whole(told)
        self.model: Any = loaded
        self.model.eval().to(self.device)
        self.config: Any = self.model.config.get_text_config(decoder=True)
        if adapters:
            self._adapted = attach(self.model, adapters, self.dtype, self.device)
        shapes = self._probe_shapes()
        self.shape = shapes.shape(self.config.num_hidden_layers)
        self.packed = packed and can_pack(self.dtype, self.device)
        if not adapters:
            self._use_fast_paths(shapes, capture)
        if self._compact is None and self.packed:
            pack(self.model)

    @property
    def native(self) -> bool:
        """Whether it computes by machine code of our own."""
        return self._native is not None

    def run(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """The logits that the rows want, in their order: [wanted, vocabulary], FP32, on the model's device.

        AdapterRows of one token each come first; their keys and values are in the cache afterwards.
        """
        if self._native is not None:
            return self._native(cache, rows)
        if self._graphs is not None:
            with torch.inference_mode():
                found = self._graphs(cache, rows)
            if found is not None:
                return found
        spans, first = [], 0
        for row in rows:
            spans.append(SlotSpan(row.slot, first, row.start, len(row.tokens)))
            first += len(row.tokens)
        count = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
        wanted = [
            place
            for row, span in zip(rows, spans, strict=True)
            for place in range(span.first + span.count - row.wanted, span.first + span.count)
        ]
        tokens = [token for row in rows for token in row.tokens]
        places = [place for span in spans for place in range(span.start, span.stop)]
        if self._adapted is not None:
            names = [row.adapter for row in rows for _ in row.tokens]
            self._adapted.assign(names, self.device)
        with torch.inference_mode(), self._crew or nullcontext():
            return self._forward(tokens, places, wanted, AttentionStep(cache, spans[:count], spans[count:]))

    def set_threads(self, wanted: int) -> int:
        """Set the number of threads; 0 for the fastest number, reduced while other processes need the cores.

        Return the number.
        """
        threads = wanted or fastest_thread_count(self._work_s, MAX_THREADS)
        self._use(threads)
        self._crew = None if wanted or threads == 1 or self.native else AdaptiveThreads(threads)
        return threads

    def _use(self, threads: int) -> None:
        torch.set_num_threads(threads)
        if self._native is not None:
            self._native.threads = threads

    def _work_s(self, threads: int) -> float:
        """How long a step of eight texts takes with so many threads and one that reads eight of their tokens each."""
        self._use(threads)
        cache = KeyValueCache(self.shape, 1024, self.dtype, self.device)
        cache.reserve(8, 64)
        begin_s = time.perf_counter()
        for tokens in ([0], [0] * 8):
            self.run(cache, [BatchRow(slot, 32, tokens) for slot in range(8)])
        return time.perf_counter() - begin_s

    def _forward(
        self, tokens: list[int], places: list[int], wanted: list[int], step: AttentionFunction
    ) -> torch.Tensor:
        kept = self._integers(wanted) if len(wanted) != len(tokens) else 0
        if self._compact is not None:
            return self._compact(self._integers(tokens), self._integers(places), kept, step).float()
        found = self.model(
            input_ids=self._integers(tokens)[None],
            position_ids=self._integers(places)[None],
            use_cache=False,
            logits_to_keep=kept,
            step=step,
        )
        logits: torch.Tensor = found.logits[0]
        return logits.float()

    def _integers(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def _probe_shapes(self) -> ShapeRecorder:
        """What the model's own code asks of attention, in a run on one token."""
        shapes = ShapeRecorder()
        with torch.inference_mode():
            self._forward([0], [0], [0], shapes)
        return shapes

    def _use_fast_paths(self, shapes: ShapeRecorder, capture: Capture | None) -> None:
        """Take shorter ways through the model, where there are such and they lead to the same logits."""
        if not is_supported(self.model):
            return
        expected = self._sample()
        with torch.no_grad():
            self._compact = compact = FusedModel(self.model, shapes.forms, self.packed)
        if not self._agrees(expected, "the short way"):
            self._compact = None
            return
        # Their weights have been taken over; without them the file is no longer in memory.
        self.model.model.layers = torch.nn.ModuleList()
        del self.model.model.embed_tokens, self.model.model.norm, self.model.lm_head
        self._native = _native_step(self.config, compact, shapes.forms) if self.packed else None
        if self._native is not None and not self._agrees(expected, "the step in machine code"):
            self._native = None
        if capture is not None and compact.steady:
            self._graphs = CudaGraphs(compact, self.device, capture, _SAME[self.dtype])

    def _sample(self) -> torch.Tensor:
        """Logits of the last tokens of a short prompt, and of one more."""
        cache = KeyValueCache(self.shape, 64, self.dtype, self.device)
        cache.reserve(1, 64)
        tokens = range(min(16, self.config.vocab_size))
        begun = self.run(cache, [BatchRow(0, 0, tokens, wanted=4)])
        return torch.cat((begun, self.run(cache, [BatchRow(0, len(tokens), [tokens[-1]])])))

    def _agrees(self, expected: torch.Tensor, what: str) -> bool:
        """Whether a way through the model that was just chosen gives the numbers that the model's own code gave."""
        error = float((self._sample() - expected).abs().max() / expected.abs().max())
        if not error < _SAME[self.dtype]:
            log.warning("%s differs by %.2g from the model's own code and is not taken", what, error)
            return False
        return True


def _native_step(config: Any, compact: FusedModel, forms: Mapping[int, AttentionForm]) -> WholeStep | None:
    try:
        from dragoman.generation.native.step import native

        return native(config, compact, forms)
    except ImportError:  # there is no LLVM for every machine
        return None
    except (OSError, RuntimeError, AttributeError, TypeError) as error:  # another version of it, or of PyTorch
        log.warning("no machine code, PyTorch computes: %s: %s", type(error).__name__, error)
        return None


def _check_whole(told: Mapping[str, Any]) -> None:
    """ModelFailed where weights are not in the files, or of another shape: transformers would draw them at random."""
    missing = sorted(told["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFailed(f"the files of weights lack {', '.join(missing[:3])}{more}")


def _saved_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The type of the saved weights where the device computes in it, else FP32."""
    named = getattr(config, "dtype", None)
    saved = named if isinstance(named, torch.dtype) else DTYPES.get(str(named), torch.float32)
    if device.type == "cpu" and (saved is torch.float16 or not _computes_bfloat16()):
        return torch.float32
    return saved


def _computes_bfloat16() -> bool:
    """Whether this CPU multiplies BF16 by instructions of its own; without, it is slower than FP32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx", "bf16"))
