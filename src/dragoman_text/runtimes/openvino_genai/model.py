"""Text generation with OpenVINO GenAI, for folders that optimum-intel exported."""

import asyncio
import itertools
import logging
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, WorkerLost, error_text
from dragoman.core.text import TEMPLATE_TEXT, Sampling
from dragoman_text.generation.chat_template import PROMPT_S, SANITIZED, TOOL_RESULTS
from dragoman_text.generation.external_engine import ExternalEngine, ExternalRequest, TokenChunk
from dragoman_text.generation.generation_config import end_tokens
from dragoman_text.generation.input_processor import EngineLimits, InputProcessor
from dragoman_text.generation.text_engine import check_options, notify, start_thread
from dragoman_text.generation.token_sampler import TokenChoice
from dragoman_text.generation.vocabulary import Vocabulary
from dragoman_text.runtimes.openvino_genai import RUNTIME
from dragoman_text.runtimes.text_model import TextModel, read_config

# Unsupported parameters: the condition, and the message.
_UNSUPPORTED: Mapping[str, tuple[Callable[[Sampling], bool], str]] = {
    "num_beams": (lambda sampling: sampling.num_beams > 1, "beam search is not carried to OpenVINO; expected 1"),
    "typical_p": (
        lambda sampling: sampling.do_sample and sampling.typical_p < 1,
        "OpenVINO does not have it; expected 1",
    ),
    "logit_bias": (lambda sampling: bool(sampling.logit_bias), "OpenVINO does not have it; expected none"),
    "allowed_token_ids": (
        lambda sampling: bool(sampling.allowed_token_ids),
        "OpenVINO does not have it; expected none",
    ),
    "bad_words": (lambda sampling: bool(sampling.bad_words), "OpenVINO does not have it; expected none"),
    "top_logprobs": (lambda sampling: sampling.top_logprobs > 0, "OpenVINO reports only the sampled token; expected 0"),
    "prompt_logprobs": (
        lambda sampling: sampling.prompt_logprobs is not None,
        "OpenVINO's are wrong if several prompts are prefilled in chunks; expected none",
    ),
    "grammar": (
        lambda sampling: sampling.grammar is not None,
        "OpenVINO compiles a grammar in the step of all sequences, which an invalid one would end; expected none",
    ),
    "min_new_tokens": (
        lambda sampling: bool(sampling.min_new_tokens and sampling.ignore_eos and sampling.stop_token_ids),
        "OpenVINO does not suppress stop tokens while it ignores the end token; expected 0",
    ),
}


def check_supported(sampling: Sampling) -> None:
    """Raise InvalidInput naming an unsupported parameter."""
    for name, (is_unsupported, message) in _UNSUPPORTED.items():
        if is_unsupported(sampling):
            raise InvalidInput(f"{name}: {message}, got {getattr(sampling, name)!r}")


def generation_config(request: ExternalRequest) -> dict[str, Any]:
    """Return the fields of a GenerationConfig. Detokenization and stop strings are handled on our side."""
    sampling, ends = request.prompt.sampling, request.ends
    config: dict[str, Any] = {
        "apply_chat_template": False,
        "max_new_tokens": ends.length,
        "logprobs": 1,
        "do_sample": sampling.do_sample,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    # If the end token is ignored, stop tokens are checked on our side.
    if sampling.ignore_eos or not ends.eos:
        config |= {"ignore_eos": True}
    else:
        config |= {
            "ignore_eos": False,
            "eos_token_id": min(ends.eos),
            "stop_token_ids": set(ends.eos | ends.requested),
            "min_new_tokens": min(sampling.min_new_tokens, ends.length),
        }
    if sampling.do_sample:
        config |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        config |= {"rng_seed": request.seed} | ({"top_k": sampling.top_k} if sampling.top_k else {})
    return config


log = logging.getLogger("dragoman.generation")
_FAILED = "OpenVINO has failed; the model must be reloaded"


class OpenVinoTokens:
    """A `TokenEngine`. `make` makes the pipeline, in the thread that then calls all of it."""

    def __init__(self, make: Callable[[], Any], name: str, *, has_prefix_cache: bool = False) -> None:
        self._has_prefix_cache = has_prefix_cache
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.sequences: dict[_Sequence, Any] = {}
        self._numbers = itertools.count()
        self.ended = ""
        self._thread = start_thread(make, self._work, name)

    def check(self, sampling: Sampling) -> None:
        check_supported(sampling)
        if sampling.cache_salt and self._has_prefix_cache:
            raise InvalidInput(
                "cache_salt: OpenVINO's prefix cache has no salts; expected none, or the parameter prefix_cache 0"
            )

    async def tokens(self, request: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.ended:
            raise WorkerLost(self.ended)
        sequence = _Sequence(request)
        self.commands.put(lambda: self._begin(sequence))
        try:
            if self.ended:  # in the meantime: the thread may have stopped
                raise WorkerLost(self.ended)
            has_ended = False
            while not has_ended:
                await sequence.updated.wait()
                sequence.updated.clear()
                has_ended = sequence.has_ended  # read first: tokens that came before the end are then complete
                if sequence.choices:
                    yield sequence.take_chunk()
                if sequence.error is not None:
                    raise sequence.error
        finally:
            self.commands.put(lambda: self._end(sequence))

    async def close(self) -> None:
        self.ended = self.ended or "the text engine is stopped"
        self.commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the pipeline's thread ------------------------------------------------------------------------

    def _work(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        try:
            while self._run_commands():
                try:
                    self.pipeline.step()
                    self._distribute()
                except BaseException as error:
                    self._recover(error)
        except BaseException:
            log.exception("the thread of OpenVINO has ended; the model must be reloaded")
            self.ended = _FAILED
        while not self.commands.empty():  # calls that began meanwhile end, too
            if (command := self.commands.get()) is not None:
                self._execute(command)
        self._fail_all(WorkerLost(self.ended))
        del self.pipeline

    def _run_commands(self) -> bool:
        """Run the queued commands, and wait for one if there is nothing else to do; return False at the end."""
        while not (self.pipeline.has_non_finished_requests() and self.commands.empty()):
            command = self.commands.get()
            if command is None:
                return False
            self._execute(command)
        return True

    def _execute(self, command: Callable[[], object]) -> None:
        try:
            command()
        except BaseException:  # the thread must survive any error
            log.exception("a command of OpenVINO failed")

    def _begin(self, sequence: "_Sequence") -> None:
        if self.ended:
            sequence.end(WorkerLost(self.ended))
            return
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        try:
            config = GenerationConfig()
            for name, value in generation_config(sequence.request).items():
                setattr(config, name, value)
            tokens = Tensor(np.array([sequence.request.prompt.tokens], np.int64))
            self.sequences[sequence] = self.pipeline.add_request(next(self._numbers), tokens, config)
        except BaseException as error:
            sequence.end(InvalidInput(f"OpenVINO rejects the request: {_error_line(error)}"))

    def _end(self, sequence: "_Sequence") -> None:
        handle = self.sequences.pop(sequence, None)
        if handle is not None:
            handle.cancel()

    def _distribute(self) -> None:
        from openvino_genai import GenerationStatus

        updated: dict[asyncio.AbstractEventLoop, list[_Sequence]] = {}
        for sequence, handle in list(self.sequences.items()):
            while handle.can_read():
                for output in handle.read().values():
                    sequence.take(output.generated_ids, output.generated_log_probs)
                updated.setdefault(sequence.loop, []).append(sequence)
            status = handle.get_status()
            if status != GenerationStatus.RUNNING:
                del self.sequences[sequence]
                lost = None if status == GenerationStatus.FINISHED else ModelFailed(f"generation failed: {status.name}")
                sequence.end(lost)
        for loop, sequences in updated.items():
            notify(loop, sequences)

    def _recover(self, error: BaseException) -> None:
        """Fail all sequences after a failed step: the one at fault is unknown."""
        log.exception("OpenVINO failed in a step; its sequences end")
        self._fail_all(ModelFailed(f"generation failed: {_error_line(error)}"))
        try:
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()
        except BaseException:
            log.exception("OpenVINO does not recover; the model must be reloaded")
            self.ended = _FAILED
            self.commands.put(None)

    def _fail_all(self, error: DragomanError) -> None:
        opened, self.sequences = self.sequences, {}
        for sequence, handle in opened.items():
            sequence.end(error)
            self._execute(handle.cancel)


class _Sequence:
    """The tokens of one sequence: written by the thread of the pipeline, read on the event loop."""

    def __init__(self, request: ExternalRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.updated = asyncio.Event()
        self.wake = self.updated.set
        self.choices: deque[TokenChoice] = deque()
        self.has_ended = False
        self.error: DragomanError | None = None

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.choices.extend(TokenChoice(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True))

    def take_chunk(self) -> TokenChunk:
        return TokenChunk([self.choices.popleft() for _ in range(len(self.choices))])

    def end(self, error: DragomanError | None) -> None:
        self.error = error
        self.has_ended = True
        notify(self.loop, [self])


def _error_line(error: BaseException) -> str:
    """Return the message of an error without locations in the sources of OpenVINO."""
    lines = [line for line in error_text(error).splitlines() if line and "failed at /" not in line]
    return lines[-1] if lines else type(error).__name__


_MODEL = "openvino_model.xml"
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# OpenVINO queues sequences until there is room in its cache, so no prompt is rejected for lack of room.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """Parameters of a model on OpenVINO.

    max_batch, max_context, dtype, threads, prefill_chunk, prompt_s, sanitize_control_tokens: as for our own engine.
    device: name of an OpenVINO device.
    prefix_cache: 0 disables it.
    cache_memory: GiB for the key-value cache (0: as needed).
    properties: further device properties, by OpenVINO's names.
    """

    max_batch: int = 32
    max_context: int = 0
    dtype: str = "auto"
    device: str = "CPU"
    threads: int = 0
    prefill_chunk: int = 256
    prefix_cache: int = -1
    cache_memory: int = 0
    prompt_s: float = PROMPT_S
    sanitize_control_tokens: str = TOOL_RESULTS
    properties: dict[str, Any] = field(default_factory=dict)


_CHOICES = {"dtype": ("auto", *_PRECISIONS), "sanitize_control_tokens": SANITIZED}
_MINIMUM = {"max_batch": 1, "max_context": 0, "threads": 0, "prefill_chunk": 1, "prefix_cache": -1, "cache_memory": 0}


class OpenVinoTextModel(TextModel):
    """A folder of `optimum-cli export openvino`; its parameters are those of `OpenVinoOptions`."""

    platform = "openvino_generation"
    runtime = RUNTIME

    def check(self, folder: Path) -> None:
        if not (folder / _MODEL).is_file():
            raise ModelFailed(
                f"'{_MODEL}' not found in '{folder.name}'; convert the model: pip install "
                "'optimum-intel[openvino]', then optimum-cli export openvino --task text-generation-with-past "
                f"--model {folder.name} --weight-format fp16 {folder.name}-openvino"
            )
        RUNTIME.require("openvino_genai")

    def start_engine(self, folder: Path) -> ExternalEngine:
        options = check_options(OpenVinoOptions, self.spec.parameters, _MINIMUM, _CHOICES, "a text model on OpenVINO")
        config = read_config(folder)
        positions = int(config.get("max_position_embeddings") or 2048)
        if options.max_context > positions:
            raise ModelFailed(
                f"max_context: expected at most {positions}, the positions of the model, got {options.max_context}"
            )
        vocabulary = Vocabulary(
            folder, int(config["vocab_size"]), sanitized=options.sanitize_control_tokens, prompt_s=options.prompt_s
        )
        ends = end_tokens(folder, vocabulary)
        limits = EngineLimits(options.max_batch, options.max_context or positions, options.prefill_chunk)
        intake = InputProcessor(vocabulary, limits, _UNLIMITED, ends, frozenset())
        genai = RUNTIME.require("openvino_genai")
        details = {
            "engine": f"openvino_genai {genai.__version__}",
            "max_context": limits.max_context,
            "max_batch": limits.max_batch,
            "dtype": options.dtype,
            "device": options.device,
            "model_type": str(config.get("model_type")),
            "vocabulary": vocabulary.size,
            "end_tokens": sorted(ends),
            "chat_template": vocabulary.template.describe() or False,
            TEMPLATE_TEXT: vocabulary.template.text,
            "file_format": "openvino",
            "adapters": [],
        }
        # Without salts the cache would tell the owner of a request what others have sent.
        caches = options.prefix_cache != 0 and self.spec.share_caches
        engine = OpenVinoTokens(
            lambda: _pipeline(genai, folder, options, caches), f"openvino-{self.spec.name}", has_prefix_cache=caches
        )
        return ExternalEngine(engine, intake, ends, self.spec.max_queue, details)


def _pipeline(genai: Any, folder: Path, options: OpenVinoOptions, has_prefix_cache: bool) -> Any:
    schedule = genai.SchedulerConfig()
    schedule.max_num_seqs = options.max_batch
    schedule.max_num_batched_tokens = max(options.prefill_chunk, options.max_batch)
    schedule.enable_prefix_caching = has_prefix_cache
    schedule.cache_size = options.cache_memory
    return genai.ContinuousBatchingPipeline(str(folder), schedule, options.device, dict(_properties(options)))


def _properties(options: OpenVinoOptions) -> Mapping[str, Any]:
    properties: dict[str, Any] = {}
    if options.dtype != "auto":
        # Keys and values would be rounded to 8 bits otherwise, which changes words.
        precision = _PRECISIONS[options.dtype]
        properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if options.threads:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    return properties | options.properties
