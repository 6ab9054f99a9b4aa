"""Infer for text models: prompts and completions as BYTES tensors."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.calls import Generate, Infer, Inference
from dragoman.core.datatypes import BOOL, BYTES, INT64
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import KINDS, check_value, sampling
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.core.text import Generation, Sampling, Text, merge_chunks
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy

_POLICY = Policy()  # limits for JSON in strings

GenerateFunction = Callable[[Generate], AsyncIterator[Generation]]

# Triton's names of the inputs, and other names of the input of prompts.
_PROMPTS = "text_input"
_ALIASES = (_PROMPTS, "input", "inputs", "prompt", "text", "args", "text_inputs")
_COMPANIONS = ("stream", "sampling_parameters", "exclude_input_in_output")
SIGNATURE = Signature(
    inputs=(
        TensorSpec(_PROMPTS, BYTES, (-1,), optional=True),
        TensorSpec("sampling_parameters", BYTES, (1,), optional=True),
        TensorSpec("stream", BOOL, (1,), optional=True),
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
_MAX_NEW_TOKENS = 20
_MAX_SEQUENCES = 64
# Maximum number of unknown parameters that the response names.
_MAX_REPORTED = 32


async def infer(generate: GenerateFunction, call: Infer) -> Inference:
    """Return the completions of all prompts: one row each, or one for each of `n`."""
    request, ignored = parse_generate(call, stream=False)
    source: Any = generate(request)
    async with aclosing(source) as chunks:
        generation = merge_chunks([chunk async for chunk in chunks])
    names = [quote(name[:64], safe=".-_") for name in ignored[:_MAX_REPORTED]]
    value = {"x-ignored-parameters": ", ".join(names)} if names else {}
    return Inference(_outputs(generation.texts, whole=True), metadata=value)


async def stream(generate: GenerateFunction, call: Infer) -> AsyncGenerator[Inference, None]:
    """Yield the new text of each completion, one row each; finish_reason is empty until it ends."""
    request, _ = parse_generate(call, stream=True)
    count = max(1, request.sampling.n)
    rows = [Text(p, c) for p in range(len(request.prompts)) for c in range(count)]
    source: Any = generate(request)
    async with aclosing(source) as chunks:
        async for chunk in chunks:
            new = {(text.prompt, text.choice): text for text in chunk.texts}
            yield Inference(_outputs([new.get((row.prompt, row.choice), row) for row in rows], whole=False))


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
        raise InvalidInput(f"input '{name}': expected texts that are not empty")
    fields, ignored = _sampling_fields({**call.parameters, **_sampling_parameters(call)})
    return Generate(prompts=tuple(prompts), sampling=_sampling(fields), stream=stream), ignored


def _sampling_parameters(call: Infer) -> dict[str, Any]:
    """Return the parameters that Triton's clients send as JSON in a separate input."""
    if "sampling_parameters" not in call.inputs:
        return {}
    text = str(strings(call.inputs["sampling_parameters"], "sampling_parameters").reshape(-1)[0])
    try:
        parameters = _json(text)
    except ValueError as error:
        raise InvalidInput(f"input 'sampling_parameters': expected JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidInput("input 'sampling_parameters': expected a JSON object")
    return parameters


def _json(text: str) -> Any:
    check_json(text.encode(), _POLICY)
    return json.loads(text)


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
