"""Tools of a chat: those offered, those required, and the calls of the model."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value
from dragoman.core.text import Grammar
from dragoman_text.limits import MAX_TOOLS

TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}", re.ASCII)
CUSTOM_INPUT = "input"  # the argument of functions that stand for custom tools
_INPUT_START = re.compile(rf'\s*{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
TOOL_NAMES = "with a name of 1 to 128 letters, digits, _ . or -"


class ToolCall(msgspec.Struct, frozen=True):
    """A call by the model; `arguments` is JSON text, or of a custom tool any text."""

    name: str
    arguments: str
    id: str
    is_custom: bool = False

    def to_json(self) -> dict[str, Any]:
        if self.is_custom:
            return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Tools(msgspec.Struct, frozen=True):
    """The tools that a chat offers, as templates take them, and which the model must call: any, or one.

    `single`: only the first of several calls is returned. `custom`: names of tools whose input is a text. Models are
    offered functions with that text as their only argument.
    """

    offered: tuple[dict[str, Any], ...] = ()
    required: bool = False
    only: str = ""
    single: bool = False
    custom: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def is_strict(self) -> bool:
        """Whether a tool asks that all of its schema is enforced."""
        return any(tool["function"].get("strict") is True for tool in self.offered)

    def grammar(self) -> Grammar | None:
        """Return the grammar of the output if a call is required."""
        if self.only:
            return Grammar("json_schema", json.dumps(self.parameters(self.only)))
        if not self.required:
            return None
        limit = {"maxItems": 1} if self.single else {}
        choices, schemas = self._calls("arguments")
        schema = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": choices}, "$defs": schemas}
        return Grammar("json_schema", json.dumps(schema))

    def call_grammar(self) -> Grammar:
        """Return the grammar of one call that the model may make."""
        choices, schemas = self._calls("arguments", "parameters")
        return Grammar("json_schema", json.dumps({"anyOf": choices, "$defs": schemas}))

    def _calls(self, *keys: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the schemas of a call, with its arguments under each of some keys, and of the arguments by tool."""
        choices = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for key in keys
            for name in sorted(self.names)
        ]
        return choices, {name: _relocate(self.parameters(name), f"#/$defs/{name}") for name in sorted(self.names)}

    def parameters(self, name: str) -> Any:
        """Return the schema of a tool's arguments."""
        tool = next(tool for tool in self.offered if tool["function"]["name"] == name)
        schema = tool["function"].get("parameters")
        if not schema:  # OpenAI: without parameters it takes none
            return {"type": "object", "properties": {}, "additionalProperties": False}
        # Arguments are an object, also if the schema leaves this out.
        return schema if "$ref" in schema else {**schema, "type": "object"}


def message_or_calls(message: Grammar, call: Grammar, *, single: bool) -> Grammar | None:
    """Return the grammar of a message or calls, as an object alone or in the markup of Hermes and Qwen.

    None for a message whose grammar cannot be a part of another one.
    """
    match message.kind:
        case "json_schema":
            content = {"type": "json_schema", "json_schema": parse_json(message.text)}
        case "json_object":
            content = {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            content = {"type": "regex", "pattern": message.text}
        case _:
            return None
    line = {"type": "optional", "content": {"type": "const_string", "value": "\n"}}
    plain = {"type": "json_schema", "json_schema": parse_json(call.text)}
    tag = {"begin": "<tool_call>", "content": {"type": "sequence", "elements": [line, plain, line]}}
    calls = {
        "type": "tags_with_separator",
        "tags": [{**tag, "end": "</tool_call>"}],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": single,
    }
    form = {"type": "or", "elements": [content, plain, calls]}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def _relocate(schema: Any, path: str) -> Any:
    """Return a schema with its references (`#/$defs/...`) adjusted to its place inside another one."""
    if isinstance(schema, list):
        return [_relocate(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    relocated = {name: _relocate(value, path) for name, value in schema.items()}
    pointer = schema.get("$ref")
    return {**relocated, "$ref": path + pointer[1:]} if isinstance(pointer, str) and pointer[:1] == "#" else relocated


def new_call(name: str) -> ToolCall:
    """Return a call with a new id of nine letters and digits: Mistral's templates accept no other."""
    return ToolCall(name, "", uuid.uuid4().hex[:9])


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A chunk of the arguments of the call at `index`; `opens` is that call, in its first chunk."""

    index: int
    arguments: str
    opens: ToolCall | None = None
    is_custom: bool = False

    def to_json(self) -> list[dict[str, Any]]:
        """Format as OpenAI does: the name of a call first, with empty arguments, then the arguments."""
        opened = [{"index": self.index, **replace(self.opens, arguments="").to_json()}] if self.opens else []
        more = {"custom": {"input": self.arguments}} if self.is_custom else {"function": {"arguments": self.arguments}}
        return [*opened, *([{"index": self.index, **more}] if self.arguments else [])]


class CustomInputs:
    """Turns the arguments of calls of custom tools into their text, once they are complete."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._arguments: dict[int, str] = {}  # of open calls by index

    def convert(
        self, parts: "Sequence[str | Reasoning | ToolCallDelta]", *, last: bool
    ) -> "list[str | Reasoning | ToolCallDelta]":
        converted: list[str | Reasoning | ToolCallDelta] = []
        for part in parts:
            if not isinstance(part, ToolCallDelta):
                converted.append(part)
                continue
            if part.opens:
                converted += self._close()
            if part.opens and part.opens.name in self._names:
                self._arguments[part.index] = ""
                converted.append(ToolCallDelta(part.index, "", replace(part.opens, is_custom=True), is_custom=True))
            if part.index in self._arguments:
                self._arguments[part.index] += part.arguments
            else:
                converted.append(part)
        return [*converted, *self._close()] if last else converted

    def _close(self) -> list[ToolCallDelta]:
        closed = [ToolCallDelta(i, _input(text), is_custom=True) for i, text in self._arguments.items()]
        self._arguments.clear()
        return closed


def _input(arguments: str) -> str:
    """Return the input of a custom tool from its arguments, which may be truncated; other text is the input itself."""
    start = _INPUT_START.match(arguments)
    try:
        value = parse_json(arguments)
    except ValueError:
        if start is None:
            return arguments
        ends = (arguments[start.end() :].rstrip("\\")[: -n or None] for n in range(6))  # without a part of an escape
        return next((text for each in ends if (text := _unescape(each)) is not None), arguments)
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments


def _unescape(text: str) -> str | None:
    try:
        return str(parse_json(f'"{text}"'))
    except ValueError:
        return None


class Reasoning(msgspec.Struct, frozen=True):
    """A chunk of the reasoning that precedes the text for the user."""

    text: str


class ChatChunk(msgspec.Struct, frozen=True):
    """Text for the user, reasoning and chunks of tool calls, in their order."""

    parts: Sequence[str | Reasoning | ToolCallDelta] = ()

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def deltas(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


def merge_deltas(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the chunks of each call."""
    merged: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = merged.get(new.index)
        merged[new.index] = new if old is None else replace(old, arguments=old.arguments + new.arguments)
    return list(merged.values())


def collect_calls(part: ChatChunk) -> list[ToolCall]:
    """Return the calls that begin in a chunk, with their arguments so far."""
    return [replace(delta.opens, arguments=delta.arguments) for delta in merge_deltas(part.deltas) if delta.opens]


# Fields of tools that tune something that this server does not have.
_TUNING = ("async", "defer_loading", "input_examples", "output_schema")


def tool_fields_without_effect(tools: Any) -> list[str]:
    """Return the names of fields of tools that have no effect, such as `tools.defer_loading`.

    Raises InvalidInput for tools that only programs of the model may call.
    """
    found: dict[str, None] = {}
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        callers = tool.get("allowed_callers")
        if callers and (not isinstance(callers, list) or "direct" not in callers):
            where = f"`tools[{i}]`: `allowed_callers`"
            raise InvalidInput(
                f'{where} must include "direct": this server runs no programs; got {format_value(callers)}'
            )
        found |= dict.fromkeys(f"tools.{name}" for name in _TUNING if tool.get(name))
    return [*found]


def parse_tools(value: Any, choice: Any) -> Tools:
    """Parse the tools of a request. Raises InvalidInput naming the field."""
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            raise InvalidInput(f"`tool_choice` must not be given without `tools`; got {format_value(choice)}")
        return Tools()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidInput(f"`tools` must be a list of at most {MAX_TOOLS} functions; got {format_value(value)}")
    offered = tuple(_tool(tool, i) for i, tool in enumerate(value))
    custom = frozenset(each["custom"]["name"] for each in value if "custom" in each)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            offered, choice = _select_allowed(offered, allowed), mode
    if choice == "none":
        return Tools()
    tools = Tools(offered, required=choice == "required", only=_function_name(choice), custom=custom)
    if tools.only and tools.only not in tools.names:
        raise InvalidInput(f"`tool_choice` must name one of `tools`; got {format_value(tools.only)}")
    return tools


def _select_allowed(offered: Sequence[dict[str, Any]], allowed: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools that may be called; the others are not shown to the model."""
    names = {_function_name(tool) for tool in allowed}
    selected = tuple(tool for tool in offered if tool["function"]["name"] in names)
    if not selected or len(names) > len(selected):
        raise InvalidInput(f"`tool_choice` must allow some of `tools`; got {format_value(list(allowed))}")
    return selected


def _tool(tool: Any, at: int) -> dict[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function} if TOOL_NAME.fullmatch(name):
            parameters = function.get("parameters")
            kinds = parameters.get("type") if isinstance(parameters, dict) else None
            if kinds not in (None, "object") and not (isinstance(kinds, list) and "object" in kinds):
                raise InvalidInput(
                    f"`tools[{at}]`: `parameters` must be the JSON schema of an object; got the type "
                    f"{format_value(kinds)}"
                )
            if isinstance(parameters, dict | None):
                return dict(tool)
        case {"type": "custom", "custom": {"name": str(name)} as custom} if TOOL_NAME.fullmatch(name):
            return _function_of(custom, f"`tools[{at}]`")
    expected = '{"type": "function", "function": {"name": ..., "parameters": {a JSON schema}}}'
    raise InvalidInput(f"`tools[{at}]` must be {expected}, {TOOL_NAMES}; got {format_value(tool)}")


def _function_of(custom: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool as a function with its input as the only argument. Raises InvalidInput for a grammar."""
    if (custom.get("format") or {"type": "text"}) != {"type": "text"}:
        raise InvalidInput(
            f'{where}: `format` of a custom tool must be {{"type": "text"}}: its input cannot follow a grammar; a '
            f"function can follow a JSON schema; got {format_value(custom['format'])}"
        )
    described = {"description": custom["description"]} if custom.get("description") is not None else {}
    properties = {CUSTOM_INPUT: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [CUSTOM_INPUT], "additionalProperties": False}
    return {"type": "function", "function": {"name": custom["name"], **described, "parameters": schema}}


def custom_arguments(text: str) -> str:
    """Return the arguments with which a call of a custom tool is shown to the model, as JSON text."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def _function_name(choice: Any) -> str:
    match choice:
        case None | "auto" | "required":
            return ""
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | str(name):  # TGI: a name alone
            return name
    raise InvalidInput(
        '`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; '
        f"got {format_value(choice)}"
    )
