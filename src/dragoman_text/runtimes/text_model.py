"""Shared by the runtimes of text generation: the model around an engine."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from msgspec import structs

from dragoman.codecs.elements import strings
from dragoman.core.callers import current_caller
from dragoman.core.calls import Generate, Infer, Inference, Tokenize
from dragoman.core.chunks import ChunkStream, Take, pushes
from dragoman.core.datatypes import BOOL, BYTES, INT32, INT64
from dragoman.core.documents import parse_json, read_json
from dragoman.core.errors import DeadlineExceeded, DragomanError, InvalidInput, ModelFailed, WorkerLost
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.sampling import KINDS, check_value, sampling
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.core.text import (
    Chat,
    Generation,
    InfillPrompt,
    Prompt,
    Sampling,
    Text,
    Tokenized,
    merge_chunks,
)
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy
from dragoman.runtimes.files import model_path
from dragoman.system.call_times import current_call, note_tokens
from dragoman.system.threads import PYTORCH_LOADS, DaemonThreads, TimeLimitExceededError, run_stoppable
from dragoman.system.transformers_loads import transformers_lock
from dragoman_text.generation import folder as folders
from dragoman_text.generation.chat_template import PROMPT_S
from dragoman_text.generation.image_queue import DEFAULT_MIB, ImageQueue, feature_bytes, image_bytes

A = TypeVar("A")
_POLICY = Policy()  # limits for JSON in strings

GenerateFunction = Callable[[Generate], ChunkStream[Generation]]

# Triton's names of the inputs, and other names of the input of prompts.
_PROMPTS = "text_input"
_ALIASES = (_PROMPTS, "input", "inputs", "prompt", "text", "args", "text_inputs")
_COMPANIONS = ("stream", "sampling_parameters", "exclude_input_in_output", "max_tokens")
SIGNATURE = Signature(
    inputs=(
        TensorSpec(_PROMPTS, BYTES, (-1,), optional=True),
        TensorSpec("sampling_parameters", BYTES, (1,), optional=True),
        TensorSpec("max_tokens", INT32, (1,), optional=True),
        TensorSpec("stream", BOOL, (1,), optional=True),
        TensorSpec("exclude_input_in_output", BOOL, (1,), optional=True),
    ),
    outputs=(
        TensorSpec("text_output", BYTES, (-1,)),
        TensorSpec("finish_reason", BYTES, (-1,), optional=True),
        TensorSpec("generated_tokens", INT64, (-1,), optional=True),
    ),
    open_inputs=True,
)
_NAMES: Mapping[str, str] = {
    **{name: name for name in KINDS},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_sequences": "stop",
}
_LISTS = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
# Parameters of the protocol, which are passed to the model with its own.
_PROTOCOL_PARAMETERS = frozenset(
    {"timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "content_type", "headers"}
)
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,20})?")
_MAX_NEW_TOKENS = 20
_MAX_SEQUENCES = 64
# Maximum number of unknown parameters that the response names.
_MAX_REPORTED = 32


async def infer_texts(generate: GenerateFunction, call: Infer) -> Inference:
    """Return the completions of all prompts: one row each, or one for each of `n`."""
    request, ignored = parse_generate(call, stream=False)
    chunks: list[Generation] = []
    await generate(request).send_to(chunks.append)
    generation = merge_chunks(chunks)
    note_tokens(sum(info.tokens for info in generation.prompts), sum(text.generated for text in generation.texts))
    names = [quote(name[:64], safe=".-_") for name in ignored[:_MAX_REPORTED]]
    value = {"x-ignored-parameters": ", ".join(names)} if names else {}
    outputs = _outputs(generation.texts, whole=True)
    if _repeats_prompts(call):
        prompts = [str(request.prompts[each.prompt]).encode() for each in generation.texts]
        whole = [a + b for a, b in zip(prompts, outputs["text_output"].data, strict=True)]
        outputs["text_output"] = Tensor(object_array(whole, (len(whole),)), BYTES)
    return Inference(outputs, metadata=value)


@pushes
async def stream_texts(generate: GenerateFunction, call: Infer, take: Take[Inference]) -> None:
    """Return the new text of each completion, one row each; finish_reason is empty until it ends."""
    if _repeats_prompts(call):
        raise InvalidInput("input 'exclude_input_in_output': expected true, as a stream has only new text")
    request, _ = parse_generate(call, stream=True)
    count = max(1, request.sampling.n)
    rows = [Text(p, c) for p in range(len(request.prompts)) for c in range(count)]
    prompts, generated, times = 0, dict[tuple[int, int], int](), current_call.get()

    def take_chunk(chunk: Generation) -> Awaitable[None] | None:
        nonlocal prompts, generated
        new = {(text.prompt, text.choice): text for text in chunk.texts}
        prompts += sum(info.tokens for info in chunk.prompts)
        generated |= {key: text.generated for key, text in new.items()}
        note_tokens(prompts, sum(generated.values()), times)
        return take(Inference(_outputs([new.get((row.prompt, row.choice), row) for row in rows], whole=False)))

    await generate(request).send_to(take_chunk)


def parse_generate(call: Infer, *, stream: bool) -> tuple[Generate, list[str]]:
    """Return the Generate of an Infer, and the unknown parameters. Raises InvalidInput naming the parameter."""
    names = [name for name in call.inputs if name not in _COMPANIONS]
    if len(names) != 1 or names[0] not in _ALIASES:
        raise InvalidInput(f"expected one input of prompts, '{_PROMPTS}'; got {', '.join(names) or 'none'}")
    name, tensor = names[0], call.inputs[names[0]]
    if tensor.datatype is not BYTES:
        raise InvalidInput(f"input '{name}': expected BYTES, got {tensor.datatype.name}")
    prompts: list[str] = strings(tensor, name).reshape(-1).tolist()
    if not prompts or not all(prompts):
        raise InvalidInput(f"input '{name}': expected non-empty strings")
    fields, ignored = _sampling_fields({**call.parameters, **_sampling_parameters(call)})
    return Generate(prompts=tuple(prompts), sampling=_sampling(fields), stream=stream), ignored


def _sampling_parameters(call: Infer) -> dict[str, Any]:
    """Return the parameters that Triton's clients send in separate inputs: a number of tokens, and JSON.

    Numbers in the JSON may be strings, as those of Triton's benchmark of vLLM.
    """
    limit: dict[str, Any] = {}
    if "max_tokens" in call.inputs:
        limit = {"max_tokens": _single(call, "max_tokens").item()}
    if "sampling_parameters" not in call.inputs:
        return limit
    text = str(strings(call.inputs["sampling_parameters"], "sampling_parameters").reshape(-1)[0])
    try:
        parameters = _json(text)
    except ValueError as error:
        raise InvalidInput(f"input 'sampling_parameters': expected JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidInput("input 'sampling_parameters': expected a JSON object")
    return limit | {name: _number(name, value) for name, value in parameters.items()}


def _number(name: str, value: Any) -> Any:
    """Return the number in a string; any other value, and texts such as stop strings, unchanged."""
    if not isinstance(value, str) or _NAMES.get(name) in _LISTS:
        return value
    try:
        return parse_json(value) if _NUMBER.fullmatch(value) else value
    except ValueError:  # a number of too many digits
        return value


def _repeats_prompts(call: Infer) -> bool:
    """Return whether completions begin with their prompts: the input `exclude_input_in_output` is false."""
    name = "exclude_input_in_output"
    return name in call.inputs and not _single(call, name)


def _single(call: Infer, name: str) -> Any:
    """Return the element of an input of one. Raises InvalidInput."""
    data = call.inputs[name].data
    if data.size != 1:
        raise InvalidInput(f"input '{name}': expected one element, got {data.size}")
    return data.reshape(-1)[0]


def _json(text: str) -> Any:
    check_json(text.encode(), _POLICY)
    return parse_json(text)


def _sampling_fields(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    ignored = []
    for name, value in parameters.items():
        field = _NAMES.get(name)
        if field is None:
            if name not in _PROTOCOL_PARAMETERS:
                ignored.append(name)
            continue
        if field in _LISTS and isinstance(value, str) and value[:1] in ("[", "{"):  # parameters hold no lists
            try:
                value = _json(value)
            except ValueError as error:
                raise InvalidInput(f"parameter '{name}': expected JSON: {error}") from error
        fields[field] = check_value(name, value, KINDS[field])
    return fields, ignored


def _sampling(fields: dict[str, Any]) -> Sampling:
    default = Sampling()
    random_fields = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    if "do_sample" not in fields and "num_beams" not in fields:
        fields["do_sample"] = any(
            fields.get(name, getattr(default, name)) != getattr(default, name) for name in random_fields
        )
    shorten = "max_new_tokens" not in fields
    return sampling({"max_new_tokens": _MAX_NEW_TOKENS, "shorten": shorten, **fields}, {}, _MAX_SEQUENCES)


def _outputs(texts: Any, *, whole: bool) -> dict[str, Tensor]:
    completions = [(text.whole if whole else text.text).encode() for text in texts]
    reasons = [text.finish.encode() for text in texts]
    counts = np.array([text.generated for text in texts], np.int64)
    return {
        "text_output": Tensor(object_array(completions, (len(completions),)), BYTES),
        "finish_reason": Tensor(object_array(reasons, (len(reasons),)), BYTES),
        "generated_tokens": Tensor(counts, INT64),
    }


# Prompts of more characters are processed in threads of their own, so that shorter ones do not wait for them.
_LONG = 20_000
# Threads for shorter and for longer prompts.
_THREADS, _LONG_THREADS = 8, 4
# Converting one token to text takes as long as tokenizing this many characters.
_CHARACTERS_PER_TOKEN = 16


class TextModel(Model):
    """A folder with a tokenizer, and an engine that a subclass starts.

    `runtime` declares the packages that it needs. Nothing is downloaded, and no code of a model is run, except its chat
    template, in a sandbox. Templates and tokenizers may take any time: they run in threads, for at most `prompt_s`.
    """

    runtime: Runtime

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.text_engine: Any = None
        self._images = ImageQueue(DEFAULT_MIB << 20)
        self._threads = DaemonThreads(_THREADS, "dragoman-prompts")
        self._long_threads = DaemonThreads(_LONG_THREADS, "dragoman-long-prompts")
        self._prompt_s = PROMPT_S

    def load(self) -> None:
        folder = Path(model_path(self.spec)).resolve()
        self.check(folder)
        # A GGUF file seldom needs transformers, whose import takes seconds.
        with PYTORCH_LOADS if folder.is_file() else transformers_lock(self.runtime.require):
            try:
                self.text_engine = self.start_engine(folder)
                self._images = ImageQueue(int(self.spec.parameters.get("image_memory", DEFAULT_MIB)) << 20)
                self._prompt_s = float(self.spec.parameters.get("prompt_s", PROMPT_S))
            except DragomanError:
                raise
            except Exception as error:  # the libraries document no class of error
                raise ModelFailed(folders.explain_error(error, folder)) from error

    def unavailable(self) -> str:
        if self.text_engine is not None and (reason := self.text_engine.ended):
            raise WorkerLost(reason)
        return ""

    def check(self, folder: Path) -> None:
        """Raise ModelFailed if a file of the folder or a package is missing."""

    def start_engine(self, folder: Path) -> Any:
        """Start the engine of the folder, a `dragoman_text.generation.text_engine.TextEngine`."""
        raise NotImplementedError

    def details(self) -> Mapping[str, Any]:
        details: Mapping[str, Any] = self.text_engine.details
        return details

    def measurements(self) -> Iterable[Family]:
        families: Iterable[Family] = self.text_engine.measurements()
        return families

    @pushes
    async def generate(self, call: Generate, take: Take[Generation]) -> None:
        call = self._with_owner(call)
        if call.sampling.grammar is not None:
            await self.text_engine.prepare(call)
        with self._images.reserve(size := image_bytes(call.prompts)) as reserve:
            job = await self._run(call.prompts, partial(self.text_engine.split_call, call))
            if size:
                reserve(feature_bytes(job))
            stream: ChunkStream[Generation] = self.text_engine.generate(job)
            if call.stream:
                await stream.send_to(take)
            else:
                chunks: list[Generation] = []
                await stream.send_to(chunks.append)
                if (wait := take(merge_chunks(chunks))) is not None:
                    await wait

    def _with_owner(self, call: Generate) -> Generate:
        """Return the call with the owner of its request in the salt of the prefix cache, unless owners share it."""
        owner = "" if self.spec.share_caches else current_caller.get().owner
        if not owner:
            return call
        salt = f"{owner}\0{call.sampling.cache_salt}"
        return structs.replace(call, sampling=replace(call.sampling, cache_salt=salt))

    def signature(self) -> Signature:
        return SIGNATURE

    async def infer(self, call: Infer) -> Inference:
        return await infer_texts(self.generate, call)

    def infer_stream(self, call: Infer) -> ChunkStream[Inference]:
        return stream_texts(self.generate, call)

    async def tokenize(self, call: Tokenize) -> Tokenized:
        with self._images.reserve(image_bytes([call.prompt])):
            return Tokenized(*await self._run([call.prompt], partial(self.text_engine.spans, call.prompt)))

    async def _run(self, prompts: Sequence[Prompt], function: Callable[[], A]) -> A:
        """Return the value of a function that processes prompts, in a thread. Raises DeadlineExceeded."""
        try:
            if image_bytes(prompts):
                return await self._images.run(function, self._prompt_s)
            threads = self._long_threads if sum(map(_size, prompts)) > _LONG else self._threads
            return await run_stoppable(threads, function, self._prompt_s)
        except TimeLimitExceededError:
            raise DeadlineExceeded(
                f"prompt: the chat template, the tokenization and images took more than {self._prompt_s:g} s (prompt_s)"
            ) from None

    async def close(self) -> None:
        self._images.close()
        if self.text_engine is not None:
            await self.text_engine.close()


def _size(prompt: Prompt) -> int:
    """Return the number of characters of a prompt, or an equivalent by processing time."""
    if isinstance(prompt, Chat):
        return sum(len(str(message)) for message in prompt.messages)
    if isinstance(prompt, InfillPrompt):
        return len(prompt.prefix) + len(prompt.suffix)
    return len(prompt) * (_CHARACTERS_PER_TOKEN if isinstance(prompt, tuple) else 1)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the folder's config.json. Raises ModelFailed if it cannot be read."""
    try:
        config: Mapping[str, Any] = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ModelFailed(f"'{folder.name}' has no config.json that can be read: {error}") from error
    return config
