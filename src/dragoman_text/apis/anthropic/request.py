"""Requests of Anthropic's Messages API: content blocks and tools as a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import InvalidValueError, ValueKind, check_value, flag, format_value, number
from dragoman.core.text import PartsText
from dragoman.protocols.parameters import (
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
from dragoman.protocols.wire import Policy
from dragoman_text.apis.common.chat import ChatRequest, build_chat_request, parse_conversation, reasoning_variables
from dragoman_text.apis.common.chat_reader import join_system_messages
from dragoman_text.apis.common.images import content_of, image_part
from dragoman_text.apis.common.openai_format import COMMON
from dragoman_text.apis.common.tools import TOOL_NAME, TOOL_NAMES, tool_fields_without_effect

_CALL_ID = "toolu_"  # removed from ids for chat templates: those of Mistral accept only short ids
_MIN_BUDGET = 1024
# A line of Claude Code that changes with each request, so that no prefix of the prompt would be cached.
_BILLING = "x-anthropic-billing-header"
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}

_CLEARS_THINKING = "clear_thinking_"  # edits of thinking in earlier turns, which chat templates leave out anyway


def _context_management() -> ValueKind:
    def convert(value: Any) -> list[Any]:
        if not isinstance(value, dict) or not isinstance(edits := value.get("edits"), list | None):
            raise InvalidValueError
        types = [each.get("type") if isinstance(each, dict) else None for each in edits or ()]
        if not all(isinstance(each, str) and each.startswith(_CLEARS_THINKING) for each in types):
            raise InvalidValueError
        return edits or []

    text = "with `edits` that clear thinking alone: this server keeps tool results, and does not compact conversations"
    return ValueKind(f"an object {text}", convert)


# Parameters of a conversation, which token counting has too.
CONVERSATION: Mapping[str, Parameter] = {
    "messages": option("messages", anything()),
    "model": option("model", anything()),
    "system": option("system", anything()),
    "tools": option("tools", anything()),
    "tool_choice": option("tool_choice", json_object()),
    "thinking": options(
        "thinking",
        {
            "type": option("type", one_of("enabled", "disabled", "adaptive")),
            "budget_tokens": option("budget_tokens", anything()),
            "display": option("display", one_of("summarized", "omitted")),
            "block_binding": ignored(),
        },
    ),
    "output_config": options(
        "output_config",
        {"effort": option("effort", anything()), "format": option("format", anything()), "task_budget": ignored()},
    ),
    "output_format": unsupported("send it as `output_config.format`"),
    "cache_control": label(),  # prefixes of prompts are cached without being asked
    "context_management": option("context_management", _context_management()),
    "compaction": unsupported("this server does not summarize conversations"),
    "mcp_servers": unsupported("this server calls no tools; offer those of the server as `tools`"),
    "speed": ignored("standard"),
    "billing_policy": ignored(),
}
PARAMETERS: Mapping[str, Parameter] = {
    **CONVERSATION,
    "max_tokens": sets("max_new_tokens"),
    "stop_sequences": sets("stop"),
    "temperature": sets("temperature", number(0.0, 1.0)),
    "top_p": sets("top_p"),
    **{name: COMMON[name] for name in ("top_k", "min_p", "repetition_penalty", "seed", "adapter")},
    "stream": option("stream", flag()),
    "thread": option("thread", anything()),  # see threads.py
    "container": unsupported("this server runs no code"),
    "metadata": label(),
    "service_tier": label(),  # this server has one
    "inference_geo": ignored(),
    "diagnostics": ignored(),
    "fallbacks": ignored(),  # for models that decline to answer
    "fallback_credit_token": ignored(),
}


def parse_message_request(
    body: Mapping[str, Any], policy: Policy, table: Mapping[str, Parameter] = PARAMETERS, *, earlier: int = 0
) -> ChatRequest:
    """Return the chat of a body, with the parameters of a table. Raises InvalidInput naming the field.

    `earlier`: how many of the messages are from earlier requests.
    """
    parameters = parse_parameters(body, table, policy)
    unused = ["thinking.budget_tokens"] if "budget_tokens" in get_object(parameters.options, "thinking") else []
    unused += ["context_management"] if parameters.options.get("context_management") else []
    unused += tool_fields_without_effect(parameters.options.get("tools"))
    reject_unused(unused, policy)
    parameters = replace(parameters, ignored=(*parameters.ignored, *unused))
    parameters.names["prompt"] = "messages"
    if table is PARAMETERS and "max_new_tokens" not in parameters.fields:
        raise InvalidInput("`max_tokens` must be an integer that is strictly positive; got none")
    options = parameters.options
    messages = _messages(options.get("messages"), earlier)
    chat = {
        "messages": join_system_messages([*_system(options.get("system")), *messages]),
        "tools": _tools(options.get("tools")),
        "chat_template_kwargs": _variables(parameters),
        **_tool_choice(options.get("tool_choice")),
    }
    if messages[-1]["role"] == "assistant":  # the model continues its last message
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    conversation, tools = parse_conversation(chat, policy)
    format_ = get_object(options, "output_config").get("format")
    parameters = add_flat_format(parameters, "output_config.format", format_, policy)
    return build_chat_request(conversation, tools, parameters, policy, shorten=True)


def _variables(parameters: ParsedParameters) -> dict[str, Any]:
    """Return the variables of the chat template for thinking and effort."""
    effort = get_object(parameters.options, "output_config").get("effort")
    variables = reasoning_variables(effort, "output_config.effort") if effort is not None else {}
    match parameters.options.get("thinking"):
        case None | {"type": "adaptive"}:
            return variables
        case {"type": "disabled"}:
            return {**variables, "enable_thinking": False}
        case {"type": "enabled", "budget_tokens": int(budget)} if not isinstance(budget, bool):
            limit = parameters.fields.get("max_new_tokens")
            if budget >= _MIN_BUDGET and (limit is None or budget < limit):
                return {**variables, "enable_thinking": True}
    expected = f'"enabled" with `budget_tokens` >= {_MIN_BUDGET} and < `max_tokens`, "disabled" or "adaptive"'
    raise InvalidInput(f"`thinking` must be of type {expected}; got {format_value(parameters.options['thinking'])}")


# --- messages --------------------------------------------------------------------------------------------


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None or value == "" or value == []:
        return []
    texts = _texts(value, "`system`")
    return [{"role": "system", "content": "\n".join(text for text in texts if not text.startswith(_BILLING))}]


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a content: a string, or blocks of text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidInput(f"{where} must be a string or a list of blocks; got {format_value(content)}")
    texts = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidInput(f"{where} must have blocks of text alone; got {format_value(block)}")
    return texts


def _messages(value: Any, earlier: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) <= earlier:
        sent = value[earlier:] if isinstance(value, list) else value
        raise InvalidInput(f"`messages` must be a list of at least one message; got {format_value(sent)}")
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, message in enumerate(value):
        where = f"`messages[{i - earlier}]`"
        match message:
            case {"role": "user" | "assistant" | "system" as role, "content": content}:
                blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
                if not isinstance(blocks, list):
                    raise InvalidInput(f"{where}: `content` must be a string or a list; got {format_value(content)}")
            case _:
                expected = "an object with `role` (user or assistant) and `content`"
                raise InvalidInput(f"{where} must be {expected}; got {format_value(message)}")
        if role == "assistant":
            messages.append(_assistant_message(blocks, where, calls))
            continue
        results = [_tool_result(block, where, calls) for block in blocks if _type_of(block) == "tool_result"]
        others = [block for block in blocks if _type_of(block) != "tool_result"]
        parts = [_part(block, role, f"{where}: `content`") for block in others]
        messages += results
        if parts or not results:
            _add_parts(messages, role, parts)
    return messages


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _part(block: Any, role: str, where: str) -> dict[str, Any]:
    """Return the part of OpenAI's chats for a block of text, or of the user's images."""
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": source} if role == "user":
            match source:
                case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
                    return image_part(data, media_type)
            raise InvalidInput(
                f'{where}: `source` of an image must be of type "base64" with `media_type` and `data`; the server '
                f"fetches no URLs; got {format_value(source)}"
            )
    expected = "text or image" if role == "user" else "text alone"
    raise InvalidInput(f"{where} must have blocks of {expected}; got {format_value(block)}")


def _add_parts(messages: list[dict[str, Any]], role: str, parts: list[dict[str, Any]]) -> None:
    """Add a message; several of the user in succession are one."""
    if role == "user" and messages and messages[-1]["role"] == role:
        messages[-1]["content"] += parts
    else:
        messages.append({"role": role, "content": content_of(parts) if role == "system" else parts})


def _tool_result(block: Mapping[str, Any], where: str, calls: set[str]) -> dict[str, Any]:
    id_ = block.get("tool_use_id")
    if not isinstance(id_, str) or id_ not in calls:
        raise InvalidInput(f"{where}: `tool_use_id` must be the id of an earlier tool_use; got {format_value(id_)}")
    content = block.get("content")
    texts = [] if content is None else _texts(content, f"{where}: `content` of a tool_result")
    text = ("Error: " if block.get("is_error") is True else "") + "\n".join(texts)
    return {"role": "tool", "tool_call_id": id_.removeprefix(_CALL_ID), "content": text}


def _assistant_message(blocks: Sequence[Any], where: str, calls: set[str]) -> dict[str, Any]:
    texts, thinking, uses = [], [], []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thinking.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(id_), "name": str(name), "input": dict(value)}:
                calls.add(id_)
                function = {"name": name, "arguments": value}
                uses.append({"id": id_.removeprefix(_CALL_ID), "type": "function", "function": function})
            case _:
                expected = "blocks of text, thinking, redacted_thinking or tool_use"
                raise InvalidInput(f"{where}: `content` must have {expected}; got {format_value(block)}")
    message: dict[str, Any] = {"role": "assistant", "content": PartsText.of(texts) if texts else None}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    return {**message, "tool_calls": uses} if uses else message


# --- tools -----------------------------------------------------------------------------------------------


def _tools(value: Any) -> Any:
    """Return the tools as chats have them."""
    if not isinstance(value, list):
        if value is not None:
            raise InvalidInput(f"`tools` must be a list; got {format_value(value)}")
        return None
    tools = []
    for i, tool in enumerate(value):
        match tool:
            case {"type": str(kind)} if kind != "custom":
                raise InvalidInput(
                    f"`tools[{i}]`: tools of type {format_value(kind)} are not supported: the server has nothing that "
                    "runs them"
                )
            case {"name": str(name), "input_schema": dict(schema)} if TOOL_NAME.fullmatch(name):
                more = {n: tool[n] for n in ("description", "strict") if tool.get(n) is not None}
                tools.append({"type": "function", "function": {"name": name, **more, "parameters": schema}})
            case _:
                expected = '{"name": ..., "input_schema": {a JSON schema}}'
                raise InvalidInput(f"`tools[{i}]` must be {expected}, {TOOL_NAMES}; got {format_value(tool)}")
    return tools


def _tool_choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    single = check_value("disable_parallel_tool_use", choice.get("disable_parallel_tool_use") or False, flag())
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"tool_choice": {"type": "function", "function": {"name": name}}, "parallel_tool_calls": not single}
        case {"type": str(kind)} if kind in _CHOICES:
            return {"tool_choice": _CHOICES[kind], "parallel_tool_calls": not single}
    raise InvalidInput(
        f'`tool_choice` must be of type "auto", "any", "none", or "tool" with a `name`; got {format_value(choice)}'
    )
