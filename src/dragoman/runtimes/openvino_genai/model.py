"""Text generation with OpenVINO GenAI, for folders that optimum-intel exported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.generation.external_engine import ExternalEngine, end_tokens
from dragoman.generation.input_processor import EngineLimits, InputProcessor
from dragoman.generation.text_engine import check_options
from dragoman.generation.vocabulary import Vocabulary
from dragoman.runtimes.openvino_genai import RUNTIME
from dragoman.runtimes.openvino_genai.tokens import OpenVinoTokens
from dragoman.runtimes.text_model import TextModel, read_config

_MODEL = "openvino_model.xml"
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# OpenVINO queues sequences until there is room in its cache, so no prompt is rejected for lack of room.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """Parameters of a model on OpenVINO.

    max_batch, max_context, dtype, threads, prefill_chunk: as for our own engine. device: OpenVINO's name of it.
    prefix_cache: 0 disables it. cache_memory: GiB for the key-value cache (0: as needed). properties: further device
    properties, by OpenVINO's names.
    """

    max_batch: int = 32
    max_context: int = 0
    dtype: str = "auto"
    device: str = "CPU"
    threads: int = 0
    prefill_chunk: int = 256
    prefix_cache: int = -1
    cache_memory: int = 0
    properties: dict[str, Any] = field(default_factory=dict)


_CHOICES = {"dtype": ("auto", *_PRECISIONS)}
_LEAST = {"max_batch": 1, "max_context": 0, "threads": 0, "prefill_chunk": 1, "prefix_cache": -1, "cache_memory": 0}


class OpenVinoModel(TextModel):
    """A folder of `optimum-cli export openvino`; its parameters are those of `OpenVinoOptions`."""

    platform = "openvino_generation"
    runtime = RUNTIME

    def check(self, folder: Path) -> None:
        if not (folder / _MODEL).is_file():
            raise ModelFailed(
                f"there is no {_MODEL} in '{folder.name}'; make such a folder of it: pip install "
                "'optimum-intel[openvino]', then optimum-cli export openvino --task text-generation-with-past "
                f"--model {folder.name} --weight-format fp16 {folder.name}-openvino"
            )
        RUNTIME.require("openvino_genai")

    def start_engine(self, folder: Path) -> ExternalEngine:
        options = check_options(OpenVinoOptions, self.spec.parameters, _LEAST, _CHOICES, "a text model on OpenVINO")
        config = read_config(folder)
        positions = int(config.get("max_position_embeddings") or 2048)
        if options.max_context > positions:
            raise ModelFailed(
                f"max_context: expected at most {positions}, the positions of the model, got {options.max_context}"
            )
        vocabulary = Vocabulary(folder, int(config["vocab_size"]))
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
            "chat_template": vocabulary.has_template,
            "adapters": [],
        }
        engine = OpenVinoTokens(lambda: _pipeline(genai, folder, options), f"openvino-{self.spec.name}")
        return ExternalEngine(engine, intake, ends, self.spec.max_queue, details)


def _pipeline(genai: Any, folder: Path, options: OpenVinoOptions) -> Any:
    schedule = genai.SchedulerConfig()
    schedule.max_num_seqs = options.max_batch
    schedule.max_num_batched_tokens = max(options.prefill_chunk, options.max_batch)
    schedule.enable_prefix_caching = options.prefix_cache != 0
    schedule.cache_size = options.cache_memory
    return genai.ContinuousBatchingPipeline(str(folder), schedule, options.device, dict(_properties(options)))


def _properties(options: OpenVinoOptions) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if options.dtype != "auto":
        # Keys and values would be rounded to 8 bits otherwise, which changes words.
        precision = _PRECISIONS[options.dtype]
        found |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if options.threads:
        found["INFERENCE_NUM_THREADS"] = options.threads
    return found | options.properties
