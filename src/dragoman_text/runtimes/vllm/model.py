"""Text generation with vLLM."""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.core.documents import parse_json, read_json
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, WorkerLost
from dragoman.core.foreign_code import is_interruption, public_error
from dragoman.core.text import TEMPLATE_TEXT, Grammar, Sampling
from dragoman_text.generation import folder as folders
from dragoman_text.generation.chat_template import PROMPT_S, SANITIZED, TOOL_RESULTS
from dragoman_text.generation.external_engine import ExternalEngine, ExternalRequest, TokenChunk
from dragoman_text.generation.generation_config import default_sampling, end_tokens
from dragoman_text.generation.grammar_compiler import MINIMA as GRAMMAR_MINIMA
from dragoman_text.generation.grammar_compiler import GrammarLimits
from dragoman_text.generation.input_processor import MAX_TOP_LOGPROBS, EngineLimits, InputProcessor
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.memory import share_of_free_memory
from dragoman_text.generation.text_engine import check_options
from dragoman_text.generation.token_sampler import TokenChoice
from dragoman_text.generation.vocabulary import Vocabulary
from dragoman_text.runtimes.text_model import TextModel
from dragoman_text.runtimes.vllm import RUNTIME

# Arguments that set the memory of the key-value cache.
_MEMORY = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
# https://docs.vllm.ai, SamplingParams: a lower temperature is raised to this one.
_MIN_TEMPERATURE = 0.01

# Unsupported parameters: the condition, and the message.
_UNSUPPORTED: Mapping[str, tuple[Callable[[Sampling], bool], str]] = {
    "num_beams": (lambda sampling: sampling.num_beams > 1, "vLLM's engine has no beam search; expected 1"),
    "typical_p": (lambda sampling: sampling.do_sample and sampling.typical_p < 1, "vLLM does not have it; expected 1"),
    "temperature": (
        lambda sampling: sampling.do_sample and not _MIN_TEMPERATURE <= sampling.temperature <= 2,
        f"vLLM takes {_MIN_TEMPERATURE} to 2",
    ),
    "presence_penalty": (lambda sampling: abs(sampling.presence_penalty) > 2, "vLLM takes -2 to 2"),
    "frequency_penalty": (lambda sampling: abs(sampling.frequency_penalty) > 2, "vLLM takes -2 to 2"),
    "min_new_tokens": (
        lambda sampling: bool(sampling.min_new_tokens and sampling.ignore_eos and sampling.stop_token_ids),
        "with ignore_eos and stop_token_ids vLLM would also hold back the model's own end of text; expected 0",
    ),
}


def check_supported(sampling: Sampling, tokenize: Callable[[str], list[int]]) -> None:
    """Raise InvalidInput naming an unsupported parameter."""
    for name, (is_unsupported, message) in _UNSUPPORTED.items():
        if is_unsupported(sampling):
            raise InvalidInput(f"{name}: {message}, got {getattr(sampling, name)!r}")
    for word in sampling.bad_words:
        if not _forbids(word, tokenize):
            raise InvalidInput(
                f"bad_words: vLLM would forbid {word!r} at the start of a text or after a space, not both; expected "
                "words of as many tokens in either place"
            )


def _forbids(word: str, tokenize: Callable[[str], list[int]]) -> bool:
    """Return whether vLLM forbids a word everywhere, also after a space: both forms must have equally many tokens."""
    alone, spaced = tokenize(word), tokenize(" " + word.lstrip())
    same = len(alone) == len(spaced) and alone[0] != spaced[0]
    return bool(alone) and word == word.lstrip() and (same or alone == spaced)


def sampling_parameters(request: ExternalRequest) -> dict[str, Any]:
    """Return the arguments of SamplingParams except `output_kind` and `structured_outputs`.

    Detokenization and stop strings are handled on our side; end tokens are passed explicitly, so that the folder's
    generation_config changes nothing.
    """
    sampling, ends = request.prompt.sampling, request.ends
    tokens = sorted(ends.eos | ends.requested)
    arguments: dict[str, Any] = {
        "max_tokens": ends.length,
        "min_tokens": min(sampling.min_new_tokens, ends.length) if tokens else 0,
        "ignore_eos": True,
        "stop_token_ids": tokens,
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logprobs": sampling.top_logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "bad_words": list(sampling.bad_words),
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
    }
    if sampling.do_sample:
        arguments |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p, "seed": request.seed}
    return arguments


def grammar_parameters(grammar: Grammar) -> dict[str, Any]:
    """Return the arguments of StructuredOutputsParams."""
    formats: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "json_schema": lambda text: {"json": text},
        "json_object": lambda _: {"json_object": True},
        "regex": lambda text: {"regex": text},
        "lark": lambda text: {"grammar": text},
        "gbnf": lambda text: {"grammar": text},
        "structural_tag": lambda text: {"structural_tag": text},
        "choice": lambda text: {"choice": parse_json(text)},
    }
    return formats[grammar.kind](grammar.text)


# vLLM queues sequences until there is room in its cache, so no prompt is rejected for lack of room.
_UNLIMITED = 2**62
_ENDED = "vLLM's engine has ended; its log says why"
# The ranks of LoRA adapters that vLLM has kernels for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(GrammarLimits):
    """Parameters of a model on vLLM, in addition to the limits of grammars.

    max_batch, max_context, dtype, prefill_chunk, generation_config, prompt_s, sanitize_control_tokens: as for our own
        engine.
    prefix_cache: 0 disables it.
    cache_memory: GiB for the key-value cache (0: on a CPU a quarter of the free memory, where vLLM itself would demand
        92 % of all memory; on a GPU its own default).
    adapters: folders of LoRA adapters by name.
    arguments: further arguments of vLLM's engine, such as `tensor_parallel_size` or `quantization`.
    """

    max_batch: int = 32
    max_context: int = 0
    dtype: str = "auto"
    prefill_chunk: int = 0
    prefix_cache: int = -1
    cache_memory: float = 0.0
    adapters: dict[str, str] = field(default_factory=dict)
    generation_config: bool = True
    prompt_s: float = PROMPT_S
    sanitize_control_tokens: str = TOOL_RESULTS
    arguments: dict[str, Any] = field(default_factory=dict)


_CHOICES = {"dtype": ("auto", "float32", "bfloat16", "float16"), "sanitize_control_tokens": SANITIZED}
_MINIMUM = {
    "max_batch": 1,
    "max_context": 0,
    "prefill_chunk": 0,
    "prefix_cache": -1,
    "cache_memory": 0,
    "prompt_s": 0.01,
    **GRAMMAR_MINIMA,
}


class VllmModel(TextModel):
    """A Hugging Face decoder on vLLM; its parameters are those of `VllmOptions`."""

    platform = "vllm_generation"
    runtime = RUNTIME

    def check(self, folder: Path) -> None:
        folders.check(folder)
        RUNTIME.require("vllm")

    def start_engine(self, folder: Path) -> ExternalEngine:
        options = check_options(VllmOptions, self.spec.parameters, _MINIMUM, _CHOICES, "a text model on vLLM")
        adapters = find_adapters(folder, options.adapters)
        engine = _start_vllm(_arguments(folder, options, adapters))
        config = engine.vllm_config.model_config
        vocabulary = Vocabulary(
            folder, config.get_vocab_size(), sanitized=options.sanitize_control_tokens, prompt_s=options.prompt_s
        )
        ends = end_tokens(folder, vocabulary)
        limits = EngineLimits(options.max_batch, config.max_model_len)
        defaults = default_sampling(folder) if options.generation_config else {}
        intake = InputProcessor(
            vocabulary,
            limits,
            _UNLIMITED,
            ends,
            frozenset(adapters),
            options,
            follows_grammars=False,
            defaults=defaults,
        )
        details = {
            "engine": f"vllm {RUNTIME.require('vllm').__version__}",
            "max_context": limits.max_context,
            "max_batch": limits.max_batch,
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": engine.vllm_config.device_config.device_type,
            "model_type": str(config.hf_config.model_type),
            "vocabulary": vocabulary.size,
            "end_tokens": sorted(ends),
            "default_parameters": defaults,
            "chat_template": vocabulary.template.describe() or False,
            TEMPLATE_TEXT: vocabulary.template.text,
            "file_format": "safetensors",
            "adapters": sorted(adapters),
        }
        return ExternalEngine(VllmTokens(engine, vocabulary, adapters), intake, ends, self.spec.max_queue, details)


class VllmTokens:
    """A `TokenEngine`: tokens from an `AsyncLLM` of vLLM."""

    def __init__(self, engine: Any, vocabulary: Vocabulary, adapters: Mapping[str, str]) -> None:
        self.engine, self._vocabulary = engine, vocabulary
        self._adapters = {name: (number, path) for number, (name, path) in enumerate(adapters.items(), 1)}
        self._numbers = itertools.count()

    @property
    def ended(self) -> str:
        """Why vLLM's engine has ended: it cannot be started again in this process."""
        return _ENDED if self.engine is not None and self.engine.errored else ""

    def check(self, sampling: Sampling) -> None:
        check_supported(sampling, self._vocabulary.tokenize)

    async def tokens(self, request: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        from vllm.sampling_params import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt_request, name = request.prompt, f"dragoman-{next(self._numbers)}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_request.tokens)}
        if prompt_request.sampling.cache_salt:
            prompt["cache_salt"] = prompt_request.sampling.cache_salt
        try:
            source = self.engine.generate(
                prompt, _sampling(request), name, lora_request=self._adapter(prompt_request.sampling)
            )
            async with aclosing(source) as found:
                first = True
                async for chunk in found:
                    yield _tokens(chunk, prompt_request, first)
                    first = False
        except DragomanError:
            raise
        except VLLMValidationError as error:
            raise InvalidInput(f"vLLM rejects the request: {error}") from error
        except EngineDeadError as error:
            raise WorkerLost(_ENDED) from error
        except BaseException as error:
            if is_interruption(error):
                raise
            raise public_error(error, "generation failed") from error

    def _adapter(self, sampling: Sampling) -> Any:
        if not sampling.adapter:
            return None
        from vllm.lora.request import LoRARequest

        number, path = self._adapters[sampling.adapter]
        return LoRARequest(sampling.adapter, number, path)

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)


def _start_vllm(arguments: Mapping[str, Any]) -> Any:
    # vLLM's processes are spawned: a fork of a server with threads may deadlock. No usage statistics are sent.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    known = AsyncEngineArgs.__dataclass_fields__
    strange = [name for name in arguments if name not in known]
    if strange:
        raise ModelFailed(f"parameter 'arguments': this vLLM's engine knows no '{strange[0]}'")
    if current_platform.is_cpu() and not arguments.keys() & _MEMORY:
        arguments = {**arguments, "kv_cache_memory_bytes": share_of_free_memory()}
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except RuntimeError as error:
        if "core" not in str(error).lower():
            raise
        raise ModelFailed(
            "vLLM's engine did not start; its process has written the reason to the log above. If it lacks memory for "
            f"the cache, set the parameter 'cache_memory' (GiB) ({error})"
        ) from error


def _arguments(folder: Path, options: VllmOptions, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": options.dtype,
        "max_num_seqs": options.max_batch,
        "max_logprobs": MAX_TOP_LOGPROBS,
        "enable_prefix_caching": options.prefix_cache != 0,
        "generation_config": "vllm",  # what a request does not say is not filled in from the folder
        "structured_outputs_config": {"backend": "guidance"},  # the library that our own engine takes
        "disable_log_stats": True,
        "trust_remote_code": False,
    }
    if options.max_context:
        arguments["max_model_len"] = options.max_context
    if options.prefill_chunk:
        arguments["max_num_batched_tokens"] = options.prefill_chunk
    if options.cache_memory:
        arguments["kv_cache_memory_bytes"] = int(options.cache_memory * 2**30)
    if adapters:
        # On a CPU vLLM (0.32) gives the last place's adapter to texts that asked for none: that place stays empty.
        arguments |= {"enable_lora": True, "max_loras": len(adapters) + 1, "max_lora_rank": max_rank(adapters)}
    return arguments | options.arguments


def find_adapters(folder: Path, named: Mapping[str, str]) -> dict[str, str]:
    """Return the folders of LoRA adapters by name: those in `adapters` of the model's folder, and those configured."""
    own = sorted(path.parent for path in (folder / "adapters").glob("*/adapter_config.json"))
    return {path.name: str(path) for path in own} | {name: str(Path(path).resolve()) for name, path in named.items()}


def max_rank(adapters: Mapping[str, str]) -> int:
    ranks = [int(read_json(Path(path) / "adapter_config.json")["r"]) for path in adapters.values()]
    return next((rank for rank in _RANKS if rank >= max(ranks)), max(ranks))


def _sampling(request: ExternalRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    prompt = request.prompt
    parameters = sampling_parameters(request)
    if prompt.sampling.grammar is not None:
        parameters["structured_outputs"] = StructuredOutputsParams(**grammar_parameters(prompt.sampling.grammar))
    # Without a stream and stop strings one final output is enough.
    final_only = not prompt.stream and not prompt.sampling.stop
    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY if final_only else RequestOutputKind.DELTA, **parameters
    )


def _tokens(chunk: Any, prompt: PromptRequest, first: bool) -> TokenChunk:
    """Convert an output of vLLM with one completion."""
    (text,), sampling = chunk.outputs, prompt.sampling
    tokens = zip(text.token_ids, text.logprobs or (), strict=True)
    choices = [_choice(token, candidates, sampling.top_logprobs) for token, candidates in tokens]
    if not first:
        return TokenChunk(choices)
    prompt_tokens = list(zip(prompt.tokens, chunk.prompt_logprobs or (), strict=False))[1:]
    prefill = [_choice(token, candidates, sampling.prompt_logprobs or 0) for token, candidates in prompt_tokens]
    return TokenChunk(choices, prefill, chunk.num_cached_tokens or 0)


def _choice(token: int, candidates: Mapping[int, Any], count: int) -> TokenChoice:
    """Convert a token; `candidates` contains it and the top tokens, in any order."""
    ranked = sorted((found.rank, each, found.logprob) for each, found in candidates.items())[:count]
    return TokenChoice(token, candidates[token].logprob, tuple((each, logprob) for _, each, logprob in ranked))
