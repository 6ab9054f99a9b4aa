"""Model runner: compute the logits of a decoder step by step, for many sequences at once, on our attention."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any, Protocol

import torch

from dragoman.core.errors import ModelFailed
from dragoman.system.load_steps import report_step
from dragoman_kernels import NoKernels
from dragoman_text.generation.adapters import AdapterLayers, Adapters
from dragoman_text.generation.attention import (
    CHECKED,
    NAME,
    AttentionForm,
    AttentionFunction,
    AttentionStep,
    MaskRecorder,
    ShapeRecorder,
    SlotSpan,
    UnsupportedArchitecture,
    attention,
    can_merge,
    record_mask,
    use_attention,
)
from dragoman_text.generation.cache import CacheShape, KeyValueCache
from dragoman_text.generation.fused import (
    ARCHITECTURES,
    FusedModel,
    UnpackedLinear,
    can_pack,
    is_cpu,
    is_supported,
    pack,
    pack_layers,
)
from dragoman_text.generation.gguf_model import MappedModel, joining
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.step import NativeStep, Unsupported, step_code
from dragoman_text.generation.pretrained import Pretrained
from dragoman_text.generation.rounding import check_tokens
from dragoman_text.generation.step_graphs import Record, StepGraphs
from dragoman_text.generation.threads import MAX_THREADS, AdaptiveThreads, fastest_thread_count

log = logging.getLogger("dragoman.generation")

# Tokens of two sequences by step, (sequence, tokens): both begin, one or both continue.
_SAMPLE_STEPS = (((0, 7), (1, 5)), ((0, 1), (1, 3)), ((0, 1),), ((0, 2),))
# Numbers of sequences of a step beside which one sequence must have the same logits, and tokens of their prompts. Few,
# since they are computed at each load: how many rows keep their bits was found for each product before.
_CROWDS, _CROWD_TOKENS = (9, 33), 2


class PackingFailed(Exception):
    """The layers of a model cannot be replaced by packed ones."""


class StepFunction(Protocol):
    """An implementation of `Runner.run` with this number of threads, and its adapters."""

    threads: int

    @property
    def adapters(self) -> Adapters: ...

    def __call__(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor: ...


class Runner:
    """A decoder in memory, used by one thread.

    It computes with the fastest of these that gives the logits of the model's own code: our kernels, the fused forward
    pass in PyTorch, or the code in transformers on our attention. Raises UnsupportedArchitecture if none does; the
    model is then as it was. With `packed`, raises PackingFailed if its layers cannot be packed; it is then unusable.

    batch_invariant: whether the logits of a sequence had the same bits alone and beside others at load.
    cuda_graphs: record decoding steps on a GPU as CUDA graphs.
    """

    prefill_chunk: int | None = None
    forward = "ours"
    is_encoder_decoder = False
    fixed_bytes = 0

    def __init__(self, pretrained: Pretrained, *, packed: bool = True, cuda_graphs: bool = True) -> None:
        self.device, self.dtype = pretrained.device, pretrained.dtype
        self._blocks, self._tolerance = pretrained.blocks, pretrained.tolerance
        self.fused: FusedModel | None = None
        self._adaptive_threads: AdaptiveThreads | None = None
        self._native: StepFunction | None = None
        self._graphs: StepGraphs | None = None
        self.model, self.config = pretrained.model, pretrained.config
        self._layers = AdapterLayers(self.model, None, self.dtype, self.device, packed=False)
        # Weights may be in another layout: that of our kernels, or that of oneDNN, which some builds of PyTorch do not
        # have, and which takes BF16 only with some instructions of the CPU.
        self._repacks = packed and is_cpu(self.device)
        self._merges, self.packed = True, self._repacks and can_pack(self.dtype, self.device)
        self._selects_logits = False
        if isinstance(self.model, MappedModel):
            self._use_mapped(self.model)
        else:
            self._use_own(self.model, pretrained.default_context)
            self.batch_invariant = self.native or self._is_batch_invariant()
        self._layers = AdapterLayers(self.model, self.fused, self.dtype, self.device, packed=self.packed)
        if cuda_graphs and self.device.type == "cuda":
            self.use_graphs()

    def use_graphs(self, record: Record | None = None) -> None:
        """Compute decoding steps with fixed shapes and record them; `record` replaces CUDA graphs."""

        def forward(tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionFunction) -> torch.Tensor:
            return self._forward(tokens, positions, 0, attention)

        self._graphs = StepGraphs(forward, self._tolerance, record)

    @property
    def graphs(self) -> bool:
        """Whether decoding steps are recorded as CUDA graphs."""
        return self._graphs is not None and self._graphs.works

    @property
    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token(self.dtype)

    @property
    def native(self) -> bool:
        """Whether it computes with our kernels."""
        return self._native is not None

    @property
    def adapters(self) -> Adapters:
        return self._layers if self._native is None else self._native.adapters

    def run(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Write keys and values of the rows' tokens to the cache; return the wanted logits in order.

        Rows with one token, or with drafts, must come first. Returns [wanted, vocabulary], FP32, on the model's device.
        """
        return (self._native or self._run)(cache, rows)

    def _run(self, cache: KeyValueCache, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Compute the rows in PyTorch."""
        if self._graphs is not None:
            self._layers.assign([""])
            with torch.inference_mode():
                logits = self._graphs.run(cache, rows)
            if logits is not None:
                return logits
        spans: list[SlotSpan] = []
        outputs: list[int] = []
        first = 0
        for row in rows:
            count = len(row.tokens)
            outputs += range(first + count - row.wanted, first + count)
            if row.drafts:
                spans += [SlotSpan(row.slot, first + i, row.start + i, 1) for i in range(count)]
            else:
                spans.append(SlotSpan(row.slot, first, row.start, count))
            first += count
        decoding = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
        tokens = [token for row in rows for token in row.tokens]
        positions = [position for span in spans for position in range(span.start, span.stop)]
        self._layers.assign([row.adapter for row in rows for _ in row.tokens])
        with torch.inference_mode(), self._adaptive_threads or nullcontext():
            step = AttentionStep(cache, spans[:decoding], spans[decoding:], self._merges)
            selected = self._tensor(outputs) if len(outputs) != len(tokens) else 0
            return self._forward(self._tensor(tokens), self._tensor(positions), selected, step).float()

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
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | int, step: AttentionFunction
    ) -> torch.Tensor:
        """Return the logits of these rows, of all if it is 0."""
        if self.fused is not None:
            return self.fused(tokens, positions, rows, step)
        selected = {"logits_to_keep": rows} if self._selects_logits else {}
        with use_attention(step):
            output = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **selected)
        logits: torch.Tensor = output.logits[0]
        if not self._selects_logits and isinstance(rows, torch.Tensor):
            logits = logits[rows]
        return logits

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    # --- checks ------------------------------------------------------------------------------------------

    def _use_own(self, model: Any, context: int) -> None:
        """Choose the fastest implementation that gives the logits of a model of transformers with its own code."""
        from transformers import AttentionInterface, AttentionMaskInterface  # imported for such a model alone

        AttentionInterface.register(NAME, attention)
        AttentionInterface.register(CHECKED, attention)
        AttentionMaskInterface.register(CHECKED, record_mask)
        self._selects_logits = "logits_to_keep" in signature(model.forward).parameters
        with torch.inference_mode():
            expected = self._own_logits()
        shapes = self._use_our_attention(context, expected)
        self._merges = not self._repacks or can_merge(self.shape, shapes.query_heads, self.dtype)
        report_step("compiling")
        self._use_fast_paths(shapes, expected)
        if self.fused is None and self.packed:
            pack(model)
            self._check_packed(expected)

    def _use_mapped(self, model: MappedModel) -> None:
        """Use the kernels for a mapped model if they give the logits of the forward pass in PyTorch, else use that.

        Both, and the bits in a batch, are compared for one layer of each kind. Raises ModelFailed for weights whose
        logits are not finite.
        """
        config = model.config
        heads = config.num_attention_heads, config.num_key_value_heads
        self._merges = can_merge(CacheShape(1, heads[1], *2 * [config.head_dim]), heads[0], self.dtype)
        native = self._build_mapped(model.sample())
        expected = self._sample_logits()
        self._native = native
        uses_kernels = native is not None and self.agrees(expected, "the step of the kernels")
        self.batch_invariant = uses_kernels or self._is_batch_invariant()
        native = self._build_mapped(model)
        self._native = native if uses_kernels else None
        if not bool(self._sample_logits().isfinite().all()):
            raise ModelFailed("the logits of the weights in the file are not finite numbers")

    def _build_mapped(self, model: MappedModel) -> StepFunction | None:
        """Make the forward pass in PyTorch, which is used, and return that of the kernels, None if there is none."""
        config = model.config
        forms = dict.fromkeys(range(config.num_hidden_layers), AttentionForm(config.head_dim**-0.5))
        self.shape = CacheShape(len(forms), config.num_key_value_heads, config.head_dim, config.head_dim)
        self._native, self.fused = None, FusedModel(model, forms, joining(pack_layers))
        try:
            return NativeStep(step_code(model, forms), self.fused, forms)
        except Unsupported as error:
            self._use_pytorch(str(error))
            return None

    def _use_our_attention(self, context: int, expected: torch.Tensor) -> ShapeRecorder:
        """Replace the model's attention by ours and compare logits; return the shapes and forms of the layers.

        Raises UnsupportedArchitecture, with the model's own attention restored, if anything differs.
        """
        own, shapes, masks = self.config._attn_implementation, ShapeRecorder(), MaskRecorder(context)
        try:
            self.model.set_attn_implementation(CHECKED)
            with torch.inference_mode(), masks.record():
                self._forward(self._tensor([0]), self._tensor([0]), 0, shapes)
            self.shape = shapes.shape(self.config.num_hidden_layers)
            masks.compare(shapes.forms)
            self.model.set_attn_implementation(NAME)
            if not self.agrees(expected, "our attention"):
                raise UnsupportedArchitecture("logits differ")
        except Exception as error:  # code of any model
            self.model.set_attn_implementation(own)
            if isinstance(error, UnsupportedArchitecture):
                raise
            raise UnsupportedArchitecture(f"{type(error).__name__}: {error}") from error
        return shapes

    def _use_fast_paths(self, shapes: ShapeRecorder, expected: torch.Tensor) -> None:
        """Use the kernels or the fused forward pass if they are available and give the same logits."""
        if not is_supported(self.model):
            self._use_pytorch(f"expected a model type of {', '.join(ARCHITECTURES)}, got {self.config.model_type}")
            return
        if not self._use_native(shapes.forms, expected):
            self.fused = FusedModel(self.model, shapes.forms, joining(pack_layers if self.packed else UnpackedLinear))
            if not self.agrees(expected, "the fused forward pass"):
                self.fused = None
                return
        # Frees the loaded weights, which the fused model has copied or still refers to.
        self.model.model.layers = torch.nn.ModuleList()
        del self.model.model.embed_tokens, self.model.model.norm, self.model.lm_head

    def _use_native(self, forms: Mapping[int, AttentionForm], expected: torch.Tensor) -> bool:
        """Use the kernels if there are any and give the same logits, as their layers do in PyTorch; log why not."""
        if not (self._repacks or self._blocks is not None):
            self._use_pytorch("a GPU, or `packed = false`")
            return False
        try:
            code = step_code(self.model, forms)
        except Unsupported as error:
            self._use_pytorch(str(error))
            return False
        except NoKernels as error:
            self._use_pytorch(str(error), logging.WARNING)
            return False
        fused = FusedModel(self.model, forms, joining(code.pack))
        native = NativeStep(code, fused, forms)
        self.fused = fused
        if self.agrees(expected, "the forward pass with the kernels"):
            self._native = native
            if self.agrees(expected, "the step of the kernels"):
                return True
        self._native = None
        self._use_pytorch("logits differ")
        return False

    def _use_pytorch(self, reason: str, level: int = logging.INFO) -> None:
        """Log why the kernels are not used."""
        log.log(level, "the kernels are not used, PyTorch computes: %s", reason)

    def _check_packed(self, expected: torch.Tensor) -> None:
        try:
            holds = self.agrees(expected, "the model with packed weights")
        except Exception as error:  # code of any model, which may read the weights of a layer
            raise PackingFailed(str(error)) from error
        if not holds:
            raise PackingFailed("logits differ")

    def _own_logits(self) -> torch.Tensor:
        """Return the logits of the model's own code, in the order of `_sample_logits`."""
        samples = [
            self.model(input_ids=self._tensor(tokens)[None], use_cache=False).logits[0].float()
            for tokens in self._samples()
        ]
        taken = [0] * len(samples)
        parts = []
        for counts in _SAMPLE_STEPS:
            for number, count in counts:
                parts.append(samples[number][taken[number] : taken[number] + count])
                taken[number] += count
        return torch.cat(parts)

    def _sample_logits(self) -> torch.Tensor:
        """Return all logits of two sequences that are computed in steps together."""
        cache = KeyValueCache(self.shape, 256, self.dtype, self.device)
        cache.reserve(2, 64)
        samples, taken, parts = self._samples(), [0, 0], []
        for counts in _SAMPLE_STEPS:
            rows = []
            for number, count in counts:
                start = taken[number]
                taken[number] = stop = start + count
                rows.append(BatchRow(number, start, samples[number][start:stop], wanted=count))
            parts.append(self.run(cache, rows))
        return torch.cat(parts)

    def _is_batch_invariant(self) -> bool:
        """Return whether the logits of a sequence are the same alone and beside others in PyTorch; log if not.

        The kernels compute each row in a fixed order.
        """
        if self.device.type != "cpu":
            log.info("completions depend on the batch by rounding: device=%s", self.device)
            return False
        alone = self._crowd_logits(1)
        for count in _CROWDS:
            if not torch.equal(self._crowd_logits(count), alone):
                log.info("completions depend on the batch by rounding: sequences=%d packed=%s", count, self.packed)
                return False
        return True

    def _crowd_logits(self, count: int) -> torch.Tensor:
        """Return the logits of a sequence, the last of this number, for its prompt and its next token."""
        cache, tokens = KeyValueCache(self.shape, 64 * count, self.dtype, self.device), self._samples()[0]
        cache.reserve(count, 64 if count > 1 else 32)
        parts = []
        for start, stop in ((0, _CROWD_TOKENS), (_CROWD_TOKENS, _CROWD_TOKENS + 1)):
            rows = [BatchRow(slot, start, tokens[start:stop], wanted=1) for slot in range(count)]
            parts.append(self._run(cache, rows)[-1])
        return torch.stack(parts)

    def _samples(self) -> list[list[int]]:
        tokens = check_tokens(19, self.config.vocab_size)
        return [tokens[:11], tokens[11:]]

    def agrees(self, expected: torch.Tensor, name: str) -> bool:
        """Return whether the current implementation gives the logits of the model's own code; log if not."""
        error = float((self._sample_logits() - expected).abs().max() / expected.abs().max())
        if not error < self._tolerance:
            log.warning("%s differs by %.2g from the model's own code and is not used", name, error)
            return False
        return True
