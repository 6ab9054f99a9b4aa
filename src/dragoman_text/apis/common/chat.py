"""OpenAI chat requests, for every protocol that accepts chats."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.calls import Generate
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import check_value, flag, format_value
from dragoman.core.text import Chat, Sampling
from dragoman.formats.json_scan import count_values
from dragoman.protocols.parameters import (
    Parameter,
    ParsedParameters,
    anything,
    build_request,
    enforceable,
    get_object,
    ignored,
    label,
    option,
    parse_parameters,
    sets,
    unsupported,
)
from dragoman.protocols.wire import EndpointResult, EngineCall, HttpRequest, HttpStream, Policy
from dragoman_text.apis.common.chat_response import ChatFormatter
from dragoman_text.apis.common.images import content_of, parse_image
from dragoman_text.apis.common.openai_format import (
    COMMON,
    DONE,
    FormatError,
    error_event,
    resolve_model,
    resolve_options,
)
from dragoman_text.apis.common.tools import Tools, custom_arguments, message_or_calls, parse_tools
from dragoman_text.limits import MAX_MESSAGES, MAX_TEMPLATE_CHARACTERS

_MAX_EFFORT_CHARACTERS = 32
_ROLES = {"developer": "system"}  # templates do not know OpenAI's newer word for it
# Parameters for the format of a message's text.
_MESSAGE_FORMATS = frozenset({"response_format", "text.format", "output_config.format", "format"})
# vLLM also accepts these among the variables of a template.
_AMONG_VARIABLES = ("chat_template", "add_generation_prompt", "continue_final_message")
# Parameters of `parse_conversation`, besides `add_special_tokens`.
CONVERSATION: Mapping[str, Parameter] = {
    "messages": option("messages", anything()),
    "tools": option("tools", anything()),
    "tool_choice": option("tool_choice", anything()),
    "parallel_tool_calls": option("parallel_tool_calls", flag()),
    "reasoning_effort": option("reasoning_effort", anything()),
    "chat_template": option("chat_template", anything()),
    "chat_template_kwargs": option("chat_template_kwargs", anything()),
    "add_generation_prompt": option("add_generation_prompt", flag()),
    "continue_final_message": option("continue_final_message", flag()),
}
PARAMETERS: Mapping[str, Parameter] = {
    **COMMON,
    "max_completion_tokens": sets("max_new_tokens"),
    "logprobs": option("logprobs", flag()),
    "top_logprobs": sets("top_logprobs"),
    "include_reasoning": option("include_reasoning", flag()),
    **CONVERSATION,
    # Prefixes of prompts are cached without being asked.
    **{name: label() for name in ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")},
    "safety_identifier": label(),
    "verbosity": ignored("medium"),
    "prediction": ignored(),  # it only makes responses faster
    "tool_prompt": ignored(),  # TGI
    "audio": unsupported("this server generates text alone"),
    "modalities": unsupported('this server generates text alone: expected ["text"]', ["text"]),
    "functions": unsupported("send them as `tools`"),
    "function_call": unsupported("send `tools` and `tool_choice`", "none", "auto"),
    "web_search_options": unsupported("this server does not search; offer a function that does, in `tools`"),
    "moderation": unsupported("this server does not moderate texts"),
}


class ChatRequest(msgspec.Struct, frozen=True):
    """A parsed chat request: conversation, sampling, tools and parameters."""

    chat: Chat
    sampling: Sampling
    tools: Tools
    parameters: ParsedParameters


def parse_chat_request(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, format_error: FormatError, model: str = ""
) -> EndpointResult:
    """Parse a chat request; `model` is the one that the path names."""
    return resolve_model(body, http, lambda name: _chat(body, http, policy, format_error, name), model)


def parse_conversation(body: Mapping[str, Any], policy: Policy) -> tuple[Chat, Tools]:
    """Parse the conversation of a body. Raises InvalidInput naming the message."""
    variables = dict(get_object(body, "chat_template_kwargs"))
    body = {**body, **{name: variables.pop(name) for name in _AMONG_VARIABLES if name in variables}}
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidInput(f"`messages` must be a list of 1 to {MAX_MESSAGES} messages; got {format_value(messages)}")
    _check_arguments(messages, policy)
    tools = parse_tools(body.get("tools"), body.get("tool_choice"))
    if body.get("parallel_tool_calls") is False:
        tools = replace(tools, single=True)
    generation_prompt = get_flag(body, "add_generation_prompt", otherwise=True)
    special_tokens = get_flag(body, "add_special_tokens", otherwise=False)
    if get_flag(body, "continue_final_message", otherwise=False):
        if generation_prompt:
            raise InvalidInput("`continue_final_message` must only be given with `add_generation_prompt`: false")
        variables["continue_final_message"] = True
    if body.get("reasoning_effort") is not None:
        variables = {**reasoning_variables(body["reasoning_effort"]), **variables}
    read = tuple(_message(message, i) for i, message in enumerate(messages))
    template = _template(body.get("chat_template"), policy)
    return Chat(read, tools.offered, variables, generation_prompt, special_tokens, template), tools


def reasoning_variables(effort: Any, name: str = "reasoning_effort") -> dict[str, Any]:
    """Return the variables of chat templates for an effort of reasoning. Raises InvalidInput with the name."""
    if not isinstance(effort, str) or not 0 < len(effort) <= _MAX_EFFORT_CHARACTERS:
        raise InvalidInput(f'`{name}` must be a string such as "none", "low" or "high"; got {format_value(effort)}')
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _template(value: Any, policy: Policy) -> str:
    """Return the chat template of the request, "" for none."""
    if value is None:
        return ""
    if not policy.trust_request_chat_template:
        raise InvalidInput(
            "`chat_template` is not accepted: this server only uses the model's own template, unless its operator "
            "allows others with --trust-request-chat-template"
        )
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEMPLATE_CHARACTERS:
        raise InvalidInput(
            f"`chat_template` must be a string of 1 to {MAX_TEMPLATE_CHARACTERS} characters; got {format_value(value)}"
        )
    return value


def get_flag(body: Mapping[str, Any], name: str, *, otherwise: bool) -> bool:
    """Return an optional boolean field of a body."""
    value = body.get(name)
    return otherwise if value is None else check_value(name, value, flag()) is True


def parse_chat(body: Mapping[str, Any], policy: Policy) -> ChatRequest:
    """Parse the body of a chat. Raises InvalidInput naming the field."""
    parameters = parse_parameters(body, PARAMETERS, policy)
    parameters.names["prompt"] = "messages"
    chat, tools = parse_conversation(body, policy)
    fields, options = parameters.fields, parameters.options
    if body.get("max_completion_tokens") is not None:
        fields["max_new_tokens"] = int(body["max_completion_tokens"])
    options["read"] = "prompt_logprobs" in fields
    options["token_ids"] = fields.get("prompt_token_ids", False)
    _check_logprobs(parameters)
    return build_chat_request(chat, tools, parameters, policy)


def build_chat_request(
    chat: Chat, tools: Tools, parameters: ParsedParameters, policy: Policy, **defaults: Any
) -> ChatRequest:
    """Return the request for a conversation, with the constraints that its tools need; `defaults` are fields of
    Sampling. Raises InvalidInput if parameters contradict each other."""
    fields, options = parameters.fields, parameters.options
    resolve_options(fields, options)
    grammar = tools.grammar()
    if grammar is not None:
        unused = _ineffective_formats(parameters, policy)
        fields["grammar"], unenforced = enforceable("tools", grammar, policy, strict=tools.is_strict)
        parameters = replace(parameters, ignored=(*parameters.ignored, *unused, *unenforced))
        parameters.names["grammar"] = "tools"
    elif tools.offered:  # the markup of calls may consist of special tokens, as Mistral's
        fields.setdefault("skip_special_tokens", False)
        parameters = _add_calls(tools, parameters, policy)
    options["splits_reasoning"] = "grammar" not in fields
    return ChatRequest(chat, parameters.sampling(policy, **defaults), tools, parameters)


def _chat(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, format_error: FormatError, model: str
) -> EndpointResult:
    parsed = parse_chat(body, policy)
    parameters, stream = parsed.parameters, parsed.parameters.options.get("stream", False)
    formatter = ChatFormatter(parameters.options, parsed.tools)
    call = Generate(prompts=(parsed.chat,), sampling=parsed.sampling, stream=stream)
    request, format_failure = build_request(call, http, policy, model), parameters.error_formatter(format_error)
    if stream:
        headers = formatter.stream_headers(parameters.headers)
        return HttpStream(
            request, formatter.format_chunk, error_event, DONE, headers, format_failure, formatter.format_last_chunk
        )
    return EngineCall(request, lambda response: formatter.format_complete(response, parameters.headers), format_failure)


def _ineffective_formats(parameters: ParsedParameters, policy: Policy) -> list[str]:
    """Return the format of the message, if one is requested although a call is required: the call is the whole text.

    As in OpenAI's API the format of a message does not apply to calls. Raises InvalidInput for constraints on the whole
    text, and for all in strict mode.
    """
    if "grammar" not in parameters.fields:
        return []
    name = parameters.names["grammar"]
    if name not in _MESSAGE_FORMATS or policy.strict_parameters:
        raise InvalidInput(
            f"`{name}` must not be given with a `tool_choice` that requires a call: the call is the whole text"
        )
    return [name]


def _add_calls(tools: Tools, parameters: ParsedParameters, policy: Policy) -> ParsedParameters:
    """Return the parameters with the format of a message, if there is one, extended by calls of the tools."""
    fields = parameters.fields
    if "grammar" not in fields or parameters.names["grammar"] not in _MESSAGE_FORMATS:
        return parameters
    call, unenforced = enforceable("tools", tools.call_grammar(), policy, strict=tools.is_strict)
    both = message_or_calls(fields["grammar"], call, single=tools.single)
    if both is None:
        return parameters
    fields["grammar"] = both
    return replace(parameters, ignored=(*parameters.ignored, *unenforced))


def _check_logprobs(parameters: ParsedParameters) -> None:
    if parameters.fields.get("top_logprobs") and not parameters.options.get("logprobs"):
        raise InvalidInput("`top_logprobs` must only be given with `logprobs`: true")


# --- messages ----------------------------------------------------------------------------------------------


def _message(message: Any, at: int) -> dict[str, Any]:
    where = f"`messages[{at}]`"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidInput(f"{where} must be an object with `role` and `content`; got {format_value(message)}")
    calls = message.get("tool_calls")
    if message.get("reasoning") is not None and message.get("reasoning_content") is None:
        message = {**message, "reasoning_content": message["reasoning"]}  # the name that templates know
    fields = {name: value for name, value in message.items() if value is not None}
    fields["role"] = _ROLES.get(fields["role"], fields["role"])
    fields["content"] = _content(message, where)
    if calls:
        if not isinstance(calls, list):
            raise InvalidInput(f"{where}: `tool_calls` must be a list; got {format_value(calls)}")
        fields["tool_calls"] = [_tool_call(call, where) for call in calls]
    return fields


def _content(message: Mapping[str, Any], where: str) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: a text, parts if it has images, or None for an assistant that wrote none."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) and refusal else None
    if content is None and role == "tool":  # as of a function that returned nothing
        return ""
    if isinstance(content, list):
        return content_of([_part(part, role, where) for part in content])
    raise InvalidInput(f"{where}: `content` must be a string, or a list of parts; got {format_value(content)}")


def _part(part: Any, role: str, where: str) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)} if role == "assistant":
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": value} if role == "user":
            return parse_image(value, where)
    expected = {"user": "text, or image_url", "assistant": "text, or refusal"}.get(role, "text alone")
    raise InvalidInput(f"{where}: `content` must have parts of {expected}; got {format_value(part)}")


def _check_arguments(messages: list[Any], policy: Policy) -> None:
    """Raise InvalidInput if the arguments of all tool calls, which are JSON strings, have too many values."""
    remaining = policy.max_json_values
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(text)}}:
                    remaining -= count_values(text.encode())
            if remaining < 0:
                limit = policy.max_json_values
                raise InvalidInput(f"`tool_calls`: too many values in `arguments`: expected at most {limit}, got more")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text."""
    match call:
        case {"function": {"name": str(_)} as function}:
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                arguments = json.dumps(arguments, ensure_ascii=False)
            if isinstance(arguments, str | None):
                return {**call, "function": {**function, "arguments": arguments or "{}"}}
        case {"custom": {"name": str(name), "input": str(text)}}:
            function = {"name": name, "arguments": custom_arguments(text)}
            return {**{n: v for n, v in call.items() if n != "custom"}, "type": "function", "function": function}
    raise InvalidInput(
        f"{where}: `tool_calls` must have a `function` with `name` and `arguments`; got {format_value(call)}"
    )
