"""Load a text model: weights, cache memory and limits for the memory of the machine."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dragoman.core.calls import Generate
from dragoman.core.chunks import ChunkStream, Take, pushes
from dragoman.core.errors import ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.text import TEMPLATE_TEXT, Generation, Prompt, TokenSpan
from dragoman.system.load_steps import report_step
from dragoman_text.generation import adapters
from dragoman_text.generation.adapter_store import AdapterLimits, AdapterStore
from dragoman_text.generation.async_engine import AsyncEngine
from dragoman_text.generation.attention import UnsupportedArchitecture
from dragoman_text.generation.cache import CacheManager
from dragoman_text.generation.chat_template import PROMPT_S, SANITIZED, TOOL_RESULTS
from dragoman_text.generation.draft_model import DraftModel
from dragoman_text.generation.engine import GenerationEngine, SequenceMemory
from dragoman_text.generation.general import GeneralMemory, GeneralRunner
from dragoman_text.generation.generation_config import default_sampling, end_tokens, stated_sampling
from dragoman_text.generation.grammar_compiler import MINIMA as GRAMMAR_MINIMA
from dragoman_text.generation.grammar_compiler import GrammarLimits
from dragoman_text.generation.image_queue import DEFAULT_MIB
from dragoman_text.generation.input_processor import EngineLimits, InputProcessor
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.memory import release_memory, share_of_free_memory
from dragoman_text.generation.pretrained import (
    DTYPES,
    QUANTIZATIONS,
    Pretrained,
    depends_on_length,
    load_pretrained,
)
from dragoman_text.generation.runner import PackingFailed, Runner
from dragoman_text.generation.speculation import DraftSource, PromptLookups, Speculation
from dragoman_text.generation.text_engine import check_options
from dragoman_text.generation.vision import ImageLimits, VisionProcessor
from dragoman_text.generation.vocabulary import Vocabulary, load_tokenizer

log = logging.getLogger("dragoman.generation")


_IMAGES = ImageLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(GrammarLimits):
    """Settings of a text model, in addition to the limits of grammars.

    max_batch: maximum number of sequences in a batch.
    max_context: tokens of a prompt and its completion (0: as many as the model supports and memory holds).
    dtype: "auto", "float32", "bfloat16" or "float16". device: "auto", "cpu", "cuda" or "cuda:<number>".
    threads: CPU threads (0: the fastest number by measurement).
    prefill_chunk: prompt tokens per step (0: 256, on a GPU 2048).
    prefix_cache: tokens in the prefix cache (-1: an eighth of the key-value cache; 0: none).
    cache_memory: GiB of the key-value cache (0: a quarter of the free memory, half on a GPU).
    packed: store weights in the layout of the CPU's kernels.
    cuda_graphs: record decoding steps on a GPU as CUDA graphs.
    quantization: "none", "int8" or "int4": bits of a weight in memory, on a CPU.
    speculative_tokens: maximum number of drafted tokens of a sequence per step (0: no speculative decoding).
    speculative_ngram: maximum number of last tokens that are searched for earlier in the text.
    draft_model: folder, relative to the model's, of a small model that drafts instead ("": search in the text).
    adapters: folders of LoRA adapters by name, beside those in the model's own folder `adapters`.
    generation_config: use the sampling defaults in generation_config.json, or of llama.cpp for a GGUF file, where
        the API leaves them to the model.
    sampling: sampling defaults that replace those of that file.
    chat_template: file, beside the model's, of a chat template that replaces the model's own ("": the model's own).
    adapter_folder: folder, relative to the model's, from which clients may load adapters.
    max_images, max_image_bytes, max_image_pixels: number of images of a prompt, and bytes and pixels of all together.
    image_memory: MiB of the images of all calls together, which `TextModel` limits.
    prompt_s: seconds for the chat template and the tokenization of the prompts of one call, which `TextModel` limits.
    sanitize_control_tokens: encode control tokens in chats as text: "none", in "tool_results", or "all".
    max_adapters, adapter_memory, max_adapter_rank: number of adapters in memory, MiB of their files, and rank of one.
    """

    max_batch: int = 32
    max_context: int = 0
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    prefill_chunk: int = 0
    prefix_cache: int = -1
    cache_memory: float = 0.0
    packed: bool = True
    cuda_graphs: bool = True
    quantization: str = "none"
    speculative_tokens: int = 0
    speculative_ngram: int = 3
    draft_model: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    generation_config: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    adapter_folder: str = "adapters"
    max_adapters: int = 8
    adapter_memory: int = 1024
    max_adapter_rank: int = 256
    max_images: int = _IMAGES.count
    max_image_bytes: int = _IMAGES.file_bytes
    max_image_pixels: int = _IMAGES.pixels
    image_memory: int = DEFAULT_MIB
    prompt_s: float = PROMPT_S
    sanitize_control_tokens: str = TOOL_RESULTS


# A CPU computes a prompt token in the time of a GPU's for ten or more; other sequences wait for a chunk.
_PREFILL_CHUNK, _PREFILL_CHUNK_ON_GPU = 256, 2048
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", *DTYPES),
    "quantization": tuple(QUANTIZATIONS),
    "sanitize_control_tokens": SANITIZED,
}
_MINIMA: Mapping[str, float] = {
    "max_batch": 1,
    "max_context": 0,
    "threads": 0,
    "prefill_chunk": 0,
    "prefix_cache": -1,
    "cache_memory": 0,
    "speculative_tokens": 0,
    "speculative_ngram": 2,
    "max_adapters": 1,
    "adapter_memory": 1,
    "max_adapter_rank": 1,
    "max_images": 0,
    "max_image_bytes": 1,
    "max_image_pixels": 1,
    "image_memory": 1,
    "prompt_s": 0.01,
    **GRAMMAR_MINIMA,
}


def parse_options(values: Mapping[str, Any]) -> EngineOptions:
    """Parse the parameters of a text model. Raises ModelFailed naming an unknown or invalid one."""
    return check_options(EngineOptions, values, _MINIMA, _CHOICES, "a text model")


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """`TextEngine` on our own engine."""

    service: AsyncEngine
    engine: GenerationEngine
    intake: InputProcessor
    details: Mapping[str, Any]
    adapters: AdapterStore

    @property
    def active(self) -> int:
        return self.service.active

    @property
    def ended(self) -> str:
        return self.service.ended

    async def prepare(self, call: Generate) -> None:
        await self.intake.prepare(call)

    def split_call(self, call: Generate) -> list[PromptRequest]:
        return self.intake.split_call(call)

    def generate(self, prompts: Sequence[PromptRequest]) -> ChunkStream[Generation]:
        names = {prompt.sampling.adapter for prompt in prompts} - {""}
        return self._with_adapters(prompts, sorted(names)) if names else self.service.generate(prompts)

    @pushes
    async def _with_adapters(
        self, prompts: Sequence[PromptRequest], names: Sequence[str], take: Take[Generation]
    ) -> None:
        """Generate with the weights that the adapters have now, which stay in memory until the call has ended."""
        keys = await self.adapters.acquire(names)
        try:
            requests = [replace(prompt, adapter=keys.get(prompt.sampling.adapter, "")) for prompt in prompts]
            await self.service.generate(requests).send_to(take)
        finally:
            self.adapters.release(keys.values())

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        return self.intake.vocabulary.spans(prompt)

    async def reset_prefix_cache(self) -> None:
        """Forget the computed prefixes of prompts, between two steps."""
        await asyncio.wrap_future(self.service.execute(lambda engine: engine.reset_prefix_cache()))

    def measurements(self) -> Iterable[Family]:
        return self.engine.measurements(self.service.active)

    async def close(self) -> None:
        await asyncio.to_thread(self.service.close)
        await asyncio.to_thread(self.intake.close)


def load_engine(folder: Path, options: EngineOptions, capacity: int, name: str) -> LocalEngine:
    """Load the model of a folder. Raises ModelFailed if this engine cannot run it."""
    parts: list[tuple[GenerationEngine, InputProcessor, Mapping[str, Any]]] = []
    limits = AdapterLimits(options.max_adapters, options.adapter_memory, options.max_adapter_rank)
    store = AdapterStore(folder / options.adapter_folder, limits)

    def make() -> GenerationEngine:  # PyTorch is only used in the engine's thread
        parts.append(_engine(folder, options, store))
        return parts[0][0]

    store.service = service = AsyncEngine(make, capacity, name)
    return LocalEngine(service, *parts[0], store)


def _engine(
    folder: Path, options: EngineOptions, store: AdapterStore
) -> tuple[GenerationEngine, InputProcessor, Mapping[str, Any]]:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if not options.prefill_chunk:
        options = replace(options, prefill_chunk=_PREFILL_CHUNK if device == "cpu" else _PREFILL_CHUNK_ON_GPU)
    if number := torch.device(device).index:
        torch.cuda.set_device(number)  # of this thread, which computes
    runner, pretrained = _load_runner(folder, options, device)
    drafter = _load_draft_model(folder, options, runner)
    extra = 0 if drafter is None else drafter.bytes_per_token
    limits, budget, prefix = _memory_limits(runner, pretrained, options, extra)
    memory: SequenceMemory
    if isinstance(runner, Runner):
        memory = CacheManager(runner.shape, budget, prefix, runner.dtype, runner.device, clears=not runner.native)
    else:
        memory = GeneralMemory(_cache_bytes(runner, options), runner.fixed_bytes, runner.bytes_per_token, budget)
    vision = runner.vision if isinstance(runner, GeneralRunner) else None
    vocabulary = Vocabulary(
        folder,
        runner.config.vocab_size,
        vision,
        sanitized=options.sanitize_control_tokens,
        prompt_s=options.prompt_s,
        template=_read_template(folder, options.chat_template) if options.chat_template else None,
    )
    ends = end_tokens(folder, vocabulary)
    defaults = default_sampling(folder) if options.generation_config else {}
    defaults |= stated_sampling(options.sampling)
    report_step("measuring threads")
    threads = runner.set_threads(options.threads) if runner.device.type == "cpu" else 0
    intake = InputProcessor(
        vocabulary,
        limits,
        budget,
        ends,
        store.names,
        options,
        encodes=runner.is_encoder_decoder,
        defaults=defaults,
        skipped=store.skipped,
    )
    details = {
        "max_context": limits.max_context,
        "max_batch": limits.max_batch,
        "cache_tokens": budget,
        "threads": threads,
        **_runner_details(runner),
        "quantization": options.quantization,
        "parameters": pretrained.parameters,
        "file_format": pretrained.file_format,
        "file_quantization": pretrained.file_quantization,
        "block_types": pretrained.block_types,
        "end_tokens": sorted(ends),
        "default_parameters": defaults,
        "chat_template": vocabulary.template.describe() or False,
        TEMPLATE_TEXT: vocabulary.template.text,
        "vision": vision is not None,
        "adapters": store.names,  # which change
        "skipped_adapters": store.skipped,
    }
    engine = GenerationEngine(runner, memory, vocabulary, limits, ends, _speculation(options, drafter, budget))
    store.load_initial(adapters.folders(folder, options.adapters).items(), engine)
    release_memory()  # that of the checks, and of the strings in the header of a GGUF file
    return engine, intake, details


def _read_template(folder: Path, name: str) -> str:
    try:
        return ((folder.parent if folder.is_file() else folder) / name).read_text()
    except (OSError, ValueError) as error:
        raise ModelFailed(f"parameter 'chat_template': '{name}' cannot be read: {error}") from error


def _runner_details(runner: Runner | GeneralRunner) -> Mapping[str, Any]:
    return {
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "machine_code": runner.native,
        "batch_invariant": runner.batch_invariant,
        "cuda_graphs": runner.graphs,
        "forward": runner.forward,
        "model_type": str(runner.config.model_type),
        "vocabulary": runner.config.vocab_size,
    }


def _load_draft_model(folder: Path, options: EngineOptions, runner: Runner | GeneralRunner) -> Runner | None:
    """Return the draft model, None if there is none. Raises ModelFailed if it, or the model, cannot have drafts."""
    if not options.speculative_tokens:
        return None
    if not isinstance(runner, Runner):
        kind = runner.config.model_type
        raise ModelFailed(
            f"parameter 'speculative_tokens': expected 0 for the architecture '{kind}', which has no drafts"
        )
    if not options.draft_model:
        return None
    drafter, pretrained = _load_runner(folder / options.draft_model, options, str(runner.device))
    if not isinstance(drafter, Runner):
        raise ModelFailed(f"parameter 'draft_model': models of type '{drafter.config.model_type}' cannot draft")
    sizes = [each.config.vocab_size for each in (runner, drafter)]
    own, other = (load_tokenizer(each).get_vocab() for each in (folder, folder / options.draft_model))
    if own != other or sizes[0] != sizes[1]:
        raise ModelFailed("parameter 'draft_model': expected a model with the same vocabulary")
    context = options.max_context or int(getattr(runner.config, "max_position_embeddings", None) or 0)
    if pretrained.context is not None and pretrained.context < context:
        raise ModelFailed(
            f"parameter 'draft_model': expected a context of at least {context} tokens (max_context), got "
            f"{pretrained.context}"
        )
    return drafter


def _speculation(options: EngineOptions, drafter: Runner | None, budget: int) -> Speculation | None:
    if not options.speculative_tokens:
        return None
    source: DraftSource = PromptLookups(options.speculative_ngram)
    if drafter is not None:
        drafter.set_threads(options.threads)
        source = DraftModel(drafter, options.max_batch, budget, options.prefill_chunk)
    return Speculation(options.speculative_tokens, source)


def _load_runner(folder: Path, options: EngineOptions, device: str) -> tuple[Runner | GeneralRunner, Pretrained]:
    """Load the model with our attention if that gives the logits of the model's own code, else with its own code."""
    bits = QUANTIZATIONS[options.quantization]
    pretrained = load_pretrained(folder, options.dtype, device, maps=options.packed and not bits, bits=bits)
    own_code = pretrained.is_encoder_decoder or pretrained.has_vision
    own_code = own_code or depends_on_length(pretrained.config, options.max_context)
    for packed in () if own_code else dict.fromkeys((options.packed, False)):
        try:
            return Runner(pretrained, packed=packed, cuda_graphs=options.cuda_graphs), pretrained
        except PackingFailed as error:
            log.info("weights of model type %s are not packed: %s", pretrained.config.model_type, error)
            pretrained = load_pretrained(folder, options.dtype, device, bits=bits)
        except UnsupportedArchitecture as error:
            log.info("model type %s runs with its own code: %s", pretrained.config.model_type, error)
            break
    images = ImageLimits(options.max_images, options.max_image_bytes, options.max_image_pixels)
    vision = VisionProcessor(folder, images, options.prompt_s) if pretrained.has_vision else None
    return GeneralRunner(pretrained, vision), pretrained


def _memory_limits(
    runner: Runner | GeneralRunner, pretrained: Pretrained, options: EngineOptions, extra: int
) -> tuple[EngineLimits, int, int]:
    """Return the engine's limits, and the capacities of the key-value cache and of the prefix cache in tokens.

    extra: bytes per token of the key-value cache in addition to those of the model, for a draft model.
    """
    most = pretrained.context
    if most is not None and options.max_context > most:
        raise ModelFailed(f"max_context: expected at most {most}, the model's context, got {options.max_context}")
    context = options.max_context or pretrained.default_context
    each, free = runner.bytes_per_token + extra, _cache_bytes(runner, options)
    budget = min((free - runner.fixed_bytes) // each, options.max_batch * (context + 64))
    if budget < 128:
        raise ModelFailed(f"cache_memory: {free} bytes hold only {max(0, budget)} tokens of {each} bytes each")
    chunk = runner.prefill_chunk or options.prefill_chunk
    limits = EngineLimits(options.max_batch, min(context, budget - 64), chunk)
    return limits, budget, budget // 8 if options.prefix_cache < 0 else options.prefix_cache


def _cache_bytes(runner: Runner | GeneralRunner, options: EngineOptions) -> int:
    return int(options.cache_memory * 2**30) or _free_bytes(runner.device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory left by loading
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2  # half of the cache exists twice while it grows
    return share_of_free_memory()
