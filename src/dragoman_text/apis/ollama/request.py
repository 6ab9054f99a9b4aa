"""Requests of Ollama's API: options, chats and prompts."""

import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import (
    InvalidValueError,
    ValueKind,
    flag,
    format_value,
    integer,
    number,
    text,
)
from dragoman.core.text import Grammar, InfillPrompt, Prompt, RawPrompt
from dragoman.protocols.parameters import (
    JSON_SCHEMA,
    Parameter,
    ParsedParameters,
    anything,
    body_schema,
    get_object,
    ignored,
    json_object,
    label,
    option,
    parse_parameters,
    reject_unused,
    sets,
    unsupported,
)
from dragoman.protocols.wire import Policy
from dragoman_text.apis.common.chat import ChatRequest, build_chat_request, parse_conversation
from dragoman_text.apis.common.images import image_part
from dragoman_text.apis.common.openai_format import COMMON
from dragoman_text.apis.common.tools import Tools

_LEVELS = ("low", "medium", "high", "max")


def _think() -> ValueKind:
    def convert(value: Any) -> bool | str:
        if not isinstance(value, bool) and value not in _LEVELS:
            raise InvalidValueError
        return bool(value) if isinstance(value, bool) else str(value)

    return ValueKind(f"true, false or one of {', '.join(_LEVELS)}", convert)


def _format() -> ValueKind:
    def convert(value: Any) -> Grammar | None:
        if value == "":
            return None
        if isinstance(value, dict):
            grammar: Grammar = JSON_SCHEMA.convert(value)
            return grammar
        if value != "json":
            raise InvalidValueError
        return Grammar("json_object")

    return ValueKind('"json" or a JSON schema', convert)


_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"(\d{{1,18}}(?:\.\d{{0,18}})?|\.\d{{1,18}})({'|'.join(_UNIT_S)})", re.ASCII)
_DURATION = re.compile(rf"[+-]?(0|({_PART.pattern}){{1,16}})", re.ASCII)


def _keep_alive() -> ValueKind:
    def convert(value: Any) -> float:
        if isinstance(value, str) and _DURATION.fullmatch(value):
            seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(value))
            value = -seconds if value.startswith("-") else seconds
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidValueError
        return math.inf if value < 0 or value > _MAX_INTEGER else float(value)

    return ValueKind('a number of seconds or a duration such as "5m", negative to keep the model', convert)


_MAX_INTEGER = (1 << 31) - 1
# Negative values of these mean none.
_OPTIONAL = ("num_predict", "seed", "repeat_last_n")
OPTIONS: Mapping[str, Parameter] = {
    "num_predict": sets("max_new_tokens", integer(1, _MAX_INTEGER)),
    "seed": sets("seed", integer(0)),
    "temperature": sets("temperature", number(0.0, 2.0)),
    "repeat_penalty": sets("repetition_penalty"),
    "top_p": sets("top_p"),
    **{name: COMMON[name] for name in ("top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "stop")},
    "repeat_last_n": ignored(),
    "tfs_z": ignored(1.0),
    **{name: ignored() for name in ("mirostat", "mirostat_eta", "mirostat_tau", "penalize_newline")},
    # Options of the memory and the devices of Ollama's engine.
    **{name: ignored() for name in ("num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "numa")},
    **{name: ignored() for name in ("low_vram", "f16_kv", "use_mmap", "use_mlock")},
    **{name: ignored() for name in ("embedding_only", "logits_all", "vocab_only")},
}
KEEP_ALIVE = option("keep_alive", _keep_alive())
_SHARED: Mapping[str, Parameter] = {
    "model": option("model", text()),
    "stream": option("stream", flag()),
    "think": option("think", _think()),
    "options": option("options", replace(json_object(), schema=body_schema(OPTIONS))),
    "logprobs": option("logprobs", flag()),
    "top_logprobs": sets("top_logprobs"),
    "format": sets("grammar", _format()),
    "keep_alive": KEEP_ALIVE,
    "shift": ignored(),
    "truncate": option("truncate", flag()),
}
CHAT: Mapping[str, Parameter] = {
    **_SHARED,
    "messages": option("messages", anything()),
    "tools": option("tools", anything()),
}
GENERATE: Mapping[str, Parameter] = {
    **_SHARED,
    "prompt": option("prompt", text()),
    "system": option("system", text()),
    "raw": option("raw", flag()),
    "images": option("images", anything()),
    "suffix": option("suffix", text()),
    "template": unsupported("prompts have the chat template of the model; send `raw`: true for none"),
    "context": unsupported("send the conversation as `messages` to /api/chat"),
    **{name: unsupported("this server generates no images") for name in ("width", "height", "steps")},
}
EMBED: Mapping[str, Parameter] = {
    "model": option("model", anything()),
    "input": option("input", anything()),
    "prompt": option("prompt", anything()),  # of the older route
    "dimensions": option("dimensions", integer(1)),
    "options": _SHARED["options"],
    "keep_alive": KEEP_ALIVE,
    "truncate": option("truncate", flag()),
}
PULL: Mapping[str, Parameter] = {
    "model": option("model", anything()),
    "name": option("name", anything()),  # of older clients
    "stream": option("stream", flag()),
    "insecure": label(),
}


def parse_chat_request(body: Mapping[str, Any], policy: Policy) -> ChatRequest:
    """Return the chat of a body. Raises InvalidInput naming the field."""
    parameters = _parameters(body, CHAT, policy)
    parameters.names["prompt"] = "messages"
    options = parameters.options
    messages = options.get("messages")
    if not isinstance(messages, list):
        raise InvalidInput(f"`messages` must be a list; got {format_value(messages)}")
    chat = {
        "messages": [_message(message, i) for i, message in enumerate(messages)],
        "tools": options.get("tools"),
        "chat_template_kwargs": _variables(options.get("think")),
    }
    conversation, tools = parse_conversation(chat, policy)
    conversation = replace(conversation, drops_turns=options.get("truncate", True))
    return build_chat_request(conversation, tools, parameters, policy, shorten=True)


def parse_generate_request(body: Mapping[str, Any], policy: Policy) -> tuple[ChatRequest, Prompt]:
    """Return the chat of a prompt with its parameters, and the prompt for the model.

    Raises InvalidInput naming the field.
    """
    parameters = _parameters(body, GENERATE, policy)
    options = parameters.options
    prompt = options.get("prompt", "")
    system = [{"role": "system", "content": options["system"]}] if options.get("system") else []
    if options.get("raw") and options.get("images"):
        raise InvalidInput("`images` must not be given with `raw`: true, which uses no chat template")
    content = _content(prompt, options.get("images"), "`images`")
    messages = [*system, {"role": "user", "content": content}]
    body = {"messages": messages, "chat_template_kwargs": _variables(options.get("think"))}
    chat = build_chat_request(parse_conversation(body, policy)[0], Tools(), parameters, policy, shorten=True)
    if options.get("suffix"):
        if system or options.get("images"):
            raise InvalidInput("`suffix` must not be given with `system` or `images`: a text is filled in, not a chat")
        return chat, InfillPrompt(prompt, options["suffix"])
    return chat, RawPrompt(prompt) if options.get("raw") else chat.chat


def is_load(body: Mapping[str, Any]) -> bool:
    """Return whether a body only asks to load the model: it has neither messages nor a prompt."""
    return not body.get("messages") and not body.get("prompt")


def parse_fields(body: Mapping[str, Any], table: Mapping[str, Parameter], policy: Policy) -> ParsedParameters:
    """Parse the fields of a body; `keep_alive` has an effect only if models are loaded on demand."""
    parsed = parse_parameters(body, table, policy)
    if "keep_alive" not in parsed.options or policy.load_on_demand:
        return parsed
    reject_unused(["keep_alive"], policy)
    del parsed.options["keep_alive"]
    return replace(parsed, ignored=(*parsed.ignored, "keep_alive"))


def _parameters(body: Mapping[str, Any], table: Mapping[str, Parameter], policy: Policy) -> ParsedParameters:
    """Parse the fields of a body together with its `options`."""
    parsed = parse_fields(body, table, policy)
    values = dict(get_object(parsed.options, "options"))
    for name in _OPTIONAL:
        if isinstance(values.get(name), int) and values[name] < 0:
            del values[name]
    options = parse_parameters(values, OPTIONS, policy)
    fields = {**parsed.fields, **options.fields}
    names = {**parsed.names, **options.names}
    return ParsedParameters(fields, parsed.options, names, (*parsed.ignored, *options.ignored))


def _variables(think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": think is not False, **effort}


def _content(prompt: str, images: Any, where: str) -> Any:
    """Return a text, or parts if there are images, which come first."""
    if not images:
        return prompt
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise InvalidInput(f"{where} must be a list of image files in base64; got {format_value(images)}")
    return [*map(image_part, images), {"type": "text", "text": prompt}]


def _message(message: Any, at: int) -> Any:
    """Return a message as chats have it: with ids of calls, `reasoning_content`, and images as parts."""
    if not isinstance(message, dict):
        return message  # rejected with the others
    where, rest = f"`messages[{at}]`", {n: v for n, v in message.items() if n not in ("thinking", "images")}
    if message.get("images"):
        rest["content"] = _content(message.get("content") or "", message["images"], f"{where}: `images`")
    if message.get("thinking") is not None:
        rest["reasoning_content"] = message["thinking"]
    if message.get("tool_name") is not None:
        rest.setdefault("name", message["tool_name"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        rest["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return rest
