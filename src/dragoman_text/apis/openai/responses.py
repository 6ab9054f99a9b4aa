"""Requests of OpenAI's Responses API: input items and tools as a chat."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from msgspec.structs import replace

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import (
    InvalidValueError,
    ValueKind,
    flag,
    format_value,
    text,
)
from dragoman.core.text import PartsText
from dragoman.protocols.parameters import (
    GUIDED,
    Parameter,
    ParsedParameters,
    add_flat_format,
    anything,
    get_object,
    ignored,
    json_object,
    label,
    one_of,
    option,
    options,
    parse_parameters,
    reject_unused,
    sets,
    unsupported,
)
from dragoman.protocols.wire import HttpError, Policy
from dragoman_text.apis.common.chat import ChatRequest, build_chat_request, parse_conversation, reasoning_variables
from dragoman_text.apis.common.chat_reader import join_system_messages
from dragoman_text.apis.common.openai_format import COMMON
from dragoman_text.apis.common.tools import TOOL_NAME, TOOL_NAMES, custom_arguments, tool_fields_without_effect
from dragoman_text.apis.openai.compaction import read_items
from dragoman_text.limits import MAX_MESSAGES

_CALL_ID = "call_"  # removed from ids for chat templates: those of Mistral accept only short ids
_TEXT_PARTS = frozenset({"input_text", "output_text", "summary_text", "reasoning_text", "text"})
# What an assistant's message is: text before a call, or the end of a turn. It labels messages, and changes no prompt.
PHASES = ("commentary", "final_answer")
_PAGE, _MAX_PER_PAGE = 20, 100
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
# Fields without an effect: the response returns them as they were sent.
ECHOED = (
    "metadata",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "max_tool_calls",
)
_LOGPROBS = "message.output_text.logprobs"
_REASONING: Mapping[str, Parameter] = {
    "effort": option("effort", anything()),
    "summary": ignored(),
    "generate_summary": ignored(),
    "context": ignored("auto"),
    "mode": ignored("standard"),
}
_TEXT: Mapping[str, Parameter] = {"format": option("format", anything()), "verbosity": ignored("medium")}
_NO_BACKGROUND = "this server does not run responses in the background"


def _texts() -> ValueKind:
    def convert(value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidValueError
        return value

    return ValueKind("a list of strings", convert, {"type": "array", "items": {"type": "string"}})


# Parameters of a conversation, which token counting has too.
CONVERSATION: Mapping[str, Parameter] = {
    "model": COMMON["model"],
    "input": option("input", anything()),
    "instructions": option("instructions", text()),
    "text": options("text", _TEXT),
    "reasoning": options("reasoning", _REASONING),
    "tools": option("tools", anything()),
    "tool_choice": option("tool_choice", anything()),
    "parallel_tool_calls": option("parallel_tool_calls", flag()),
    "chat_template_kwargs": option("chat_template_kwargs", json_object()),
    "previous_response_id": option("previous_response_id", text()),
    "conversation": option("conversation", anything()),
    "truncation": option("truncation", one_of("disabled", "auto")),
}
COUNT: Mapping[str, Parameter] = {**CONVERSATION, "personality": ignored()}
COMPACT: Mapping[str, Parameter] = {
    **{name: CONVERSATION[name] for name in ("model", "input", "instructions", "previous_response_id")},
    "conversation": unsupported("send its items as `input`, or a `previous_response_id`"),
    "service_tier": ignored("auto", "default"),
    **{name: label() for name in ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")},
}
PARAMETERS: Mapping[str, Parameter] = {
    **CONVERSATION,
    **{
        name: COMMON[name]
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words"),
            *("min_tokens", "include_stop_str_in_output", "skip_special_tokens", "adapter"),
            *("cache_salt", "stream"),
        )
    },
    "structured_outputs": GUIDED["structured_outputs"],
    "max_output_tokens": sets("max_new_tokens"),
    "top_logprobs": sets("top_logprobs"),
    "stream_options": options("stream_options", {"include_obfuscation": label()}),
    "include_reasoning": option("include_reasoning", flag()),
    "store": option("store", flag()),
    "prompt": unsupported("send its text as `instructions` and `input`"),
    "background": unsupported(f"{_NO_BACKGROUND}: expected false"),
    "background_options": unsupported(_NO_BACKGROUND),
    "context_management": unsupported('compact by /v1/responses/compact; `truncation`: "auto" leaves out old turns'),
    "moderation": unsupported("this server does not moderate texts"),
    "access_programs": ignored(),
    "image": ignored(),
    "service_tier": ignored("auto", "default"),
    "include": option("include", _texts()),
    **{name: option(name, anything()) for name in ECHOED},
}


def parse_response_parameters(
    body: Mapping[str, Any], policy: Policy, table: Mapping[str, Parameter] = PARAMETERS
) -> ParsedParameters:
    """Parse and check the fields of a request, except input and tools. Raises InvalidInput naming the field."""
    parameters = parse_parameters(body, table, policy)
    parameters.names["prompt"] = "input"
    unused = [f"include.{name}" for name in parameters.options.get("include", ()) if name != _LOGPROBS]
    unused += tool_fields_without_effect(parameters.options.get("tools"))
    reject_unused(unused, policy)
    parameters = replace(parameters, ignored=(*parameters.ignored, *unused))
    return add_flat_format(parameters, "text.format", get_object(parameters.options, "text").get("format"), policy)


def build_request(
    parameters: ParsedParameters,
    history: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    policy: Policy,
) -> ChatRequest:
    """Return the chat of earlier items and those of the request. Raises InvalidInput naming the item."""
    options = parameters.options
    instructions = options.get("instructions")
    conversation = _Conversation([{"role": "system", "content": instructions}] if instructions else [])
    for item in history:
        conversation.add(item, "`previous_response_id`")
    for i, item in enumerate(items):
        conversation.add(item, f"`input[{i}]`")
    effort = get_object(options, "reasoning").get("effort")
    body = {
        "messages": join_system_messages(conversation.messages),
        "tools": _tools(options.get("tools")),
        "tool_choice": _tool_choice(options.get("tool_choice")),
        "parallel_tool_calls": options.get("parallel_tool_calls"),
        "chat_template_kwargs": {
            **(reasoning_variables(effort, "reasoning.effort") if effort is not None else {}),
            **options.get("chat_template_kwargs", {}),
        },
    }
    chat, tools = parse_conversation(body, policy)
    chat = replace(chat, drops_turns=options.get("truncation") == "auto")
    return build_chat_request(chat, tools, parameters, policy)


class PreviousNotFound(HttpError):
    """The response of `previous_response_id` is not stored."""

    code = "previous_response_not_found"
    param = "previous_response_id"


# --- input -----------------------------------------------------------------------------------------------


def input_items(value: Any) -> list[dict[str, Any]]:
    """Return the items of `input`, a text or a list. Raises InvalidInput."""
    if isinstance(value, str) and value:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise InvalidInput(
            f"`input` must be a non-empty string, or a list of 1 to {MAX_MESSAGES} items; got {format_value(value)}"
        )
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidInput(f"`input[{i}]` must be an object; got {format_value(item)}")
    return value


def check_items(items: Sequence[Any], name: str, before: Sequence[Mapping[str, Any]] = ()) -> None:
    """Check items that are stored. Raises InvalidInput naming the item of the field `name`."""
    conversation = _Conversation([])
    for item in before:
        conversation.add(item, "`conversation`")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidInput(f"`{name}[{i}]` must be an object; got {format_value(item)}")
        conversation.add(item, f"`{name}[{i}]`")


def with_id(item: Mapping[str, Any], new_id: Callable[[str], str]) -> dict[str, Any]:
    """Return an input item with the fields that clients may leave out."""
    kind = item.get("type") or "message"
    return {"id": new_id(_PREFIXES.get(kind, "item")), "type": kind, **{n: v for n, v in item.items() if v is not None}}


def parse_page(query: str) -> tuple[int, str, str]:
    """Return limit, order and the id before the page of a list. Raises InvalidInput."""
    fields = parse_qs(query)
    limit, order = fields.get("limit", [str(_PAGE)])[-1], fields.get("order", ["desc"])[-1]
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PER_PAGE:
        raise InvalidInput(f"`limit` must be an integer from 1 to {_MAX_PER_PAGE}; got {format_value(limit)}")
    if order not in ("asc", "desc"):
        raise InvalidInput(f'`order` must be "asc" or "desc"; got {format_value(order)}')
    return int(limit), order, fields.get("after", [""])[-1]


def page_of(items: Sequence[Mapping[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """Return a page of a list: `limit` items behind the one with the id `after`."""
    start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
    page = items[start : start + limit]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ids, "has_more": start + len(page) < len(items)}


def referenced_id(item: Mapping[str, Any]) -> str | None:
    """Return the id of the stored item that an item stands for, None if it is none that refers to another."""
    is_reference = item.get("type", None if "role" in item else "item_reference") == "item_reference"
    id_ = item.get("id")
    return id_ if is_reference and isinstance(id_, str) else None


class _Conversation:
    """Messages of a chat, collected from items."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._calls: set[str] = set()

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item; `where` names it in errors."""
        match item:
            case {"type": "compaction"}:
                for each in read_items(item, where):
                    self.add(each, where)
            case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
                self._add_call(call_id, {"name": name, "arguments": arguments})
            case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name), "input": str(value)}:
                self._add_call(call_id, {"name": name, "arguments": custom_arguments(value)})
            case {
                "type": "function_call_output" | "custom_tool_call_output",
                "call_id": str(call_id),
                "output": output,
            }:
                if call_id not in self._calls:
                    expected = "the `call_id` of an earlier call"
                    raise InvalidInput(f"{where}: `call_id` must be {expected}; got {format_value(call_id)}")
                content = _text_of(output, where, "output")
                self.messages.append(
                    {"role": "tool", "tool_call_id": call_id.removeprefix(_CALL_ID), "content": content}
                )
            case {"type": "reasoning"}:
                texts = [_text_of(item.get(name) or "", where, name) for name in ("summary", "content")]
                self._assistant()["reasoning_content"] = "".join(texts)  # one of the two
            case {"role": "user" | "system" | "developer" | "assistant" as role, "content": content}:
                if (item.get("type") or "message") != "message":
                    raise InvalidInput(f"{where}: {_expected_item(item)}")
                if item.get("phase") not in (None, *PHASES):
                    phase = format_value(item["phase"])
                    raise InvalidInput(f'{where}: `phase` must be "commentary" or "final_answer"; got {phase}')
                text = _text_of(content, where, "content") if role != "user" else _parts_of(content, where)
                self._add_message(role, text)
            case _:
                raise InvalidInput(f"{where}: {_expected_item(item)}")

    def _add_call(self, call_id: str, function: Mapping[str, Any]) -> None:
        self._calls.add(call_id)
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id.removeprefix(_CALL_ID), "type": "function", "function": function})

    def _assistant(self) -> dict[str, Any]:
        """Return the message of the assistant's current turn."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]

    def _add_message(self, role: str, content: str | list[dict[str, Any]]) -> None:
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
            last["content"] = content  # after its reasoning
        else:
            self.messages.append({"role": "system" if role == "developer" else role, "content": content})


def _expected_item(item: Mapping[str, Any]) -> str:
    calls = "function_call, function_call_output, custom_tool_call, custom_tool_call_output"
    expected = f"a message with `role` and `content`, {calls}, reasoning, compaction or item_reference"
    return f"expected {expected}; got {format_value(item)}"


def _parts_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a user's message: its text, or parts if it has images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text_of(content, where, "content")
    return [_image(part, where) if _is_image(part) else _text_part(part, where) for part in content]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise InvalidInput(f"{where}: `file_id` of an input_image is not supported: send `image_url` with a data: URL")
    return {"type": "image_url", "image_url": part.get("image_url")}


def _text_part(part: Any, where: str) -> dict[str, Any]:
    return {"type": "text", "text": _text_of([part], where, "content")}


def _text_of(content: Any, where: str, name: str) -> str:
    """Return the text of a content: a string, or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(f"{where}: `{name}` must be a string or a list of parts; got {format_value(content)}")
    texts = []
    for part in content:
        match part:
            case {
                "type": "input_text" | "output_text" | "summary_text" | "reasoning_text" | "text",
                "text": str(value),
            }:
                texts.append(value)
            case {"type": "refusal", "refusal": str(value)}:
                texts.append(value)
            case _:
                raise InvalidInput(f"{where}: `{name}` must have parts of text alone; got {format_value(part)}")
    return PartsText.of(texts)


# --- tools -----------------------------------------------------------------------------------------------


def _tools(value: Any) -> Any:
    """Return the tools as chats have them: there a function is nested."""
    if not isinstance(value, list):
        return value
    return [_tool(tool, i) for i, tool in enumerate(value)]


def _tool(tool: Any, at: int) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str(name), **rest} if _is_function(name, rest.get("parameters")):
            return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type" and v is not None}}
        case {"type": "custom", "name": str(name)} if _is_function(name, None):
            return {"type": "custom", "custom": {n: v for n, v in tool.items() if n != "type" and v is not None}}
        case {"type": str(kind)} if kind not in ("function", "custom"):
            raise InvalidInput(
                f"`tools[{at}]`: tools of type {format_value(kind)} are not supported: the server has nothing that "
                "runs them; expected functions"
            )
    expected = '{"type": "function", "name": ..., "parameters": {a JSON schema}}'
    raise InvalidInput(f"`tools[{at}]` must be {expected}, {TOOL_NAMES}; got {format_value(tool)}")


def _is_function(name: str, parameters: Any) -> bool:
    return TOOL_NAME.fullmatch(name) is not None and isinstance(parameters, dict | None)


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [_tool_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": str(_)}:
            raise InvalidInput(
                '`tool_choice` must be "none", "auto", "required", a function or allowed_tools; '
                f"got {format_value(choice)}"
            )
    return choice
