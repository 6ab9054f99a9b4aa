"""Forms of messages: find out by rendering what a chat template shows, and write a conversation in that form.

Templates differ: some take the arguments of a tool call as an object, some as text; some test whether the content of a
message with calls is null; some know no tools, no system messages, or one call at a time. In the wrong form they raise
an error, or a part of the conversation disappears from the prompt. What a template cannot show is written as text.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dragoman.core.documents import parse_json
from dragoman.core.text import PartsText

# Messages and tools to the text of a prompt.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
Empty = Literal["omitted", "null", "empty"]
Arguments = Literal["object", "text"]
Ids = Literal["any", "short", "function"]
_Messages = list[dict[str, Any]]

# In the order in which they are tried: first what transformers passes to a template.
_EMPTY: tuple[Empty, ...] = ("omitted", "null", "empty")
_ARGUMENTS: tuple[Arguments, ...] = ("object", "text")
_IDS: tuple[Ids, ...] = ("any", "short", "function")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a chat template shows of a conversation, and in which form it takes it.

    texts, parts: it shows content that is a string, content that is a list of parts.
    system: it shows a system message at the start. late_system: also a later one.
    tools: it describes the tools to the model. calls: it shows tool calls and their results.
    arguments: the form of a call's arguments. names: results need the name of their function.
    ids: the ids of calls that it takes: "any", "short" (nine letters or digits, Mistral), or "function" (of the form
        functions.NAME:0, from which the template of Kimi K2 takes the name).
    parallel: it shows several calls of one message. text_beside_calls: also the text of such a message.
    call_content, content: what stands for missing content in a message with calls, and in one without.
    empty_beside_calls: an empty text may stand for it too. text_arguments: it also shows arguments that are text.
    reasoning: it shows the reasoning of the current turn.
    """

    texts: bool = True
    parts: bool = False
    system: bool = True
    late_system: bool = True
    tools: bool = True
    calls: bool = True
    arguments: Arguments = "object"
    names: bool = False
    ids: Ids = "any"
    parallel: bool = True
    text_beside_calls: bool = True
    call_content: Empty = "omitted"
    content: Empty = "omitted"
    empty_beside_calls: bool = True
    text_arguments: bool = False
    reasoning: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the form for the metadata of a model."""
        return {
            "content": [name for name, shown in (("text", self.texts), ("parts", self.parts)) if shown],
            "system_messages": "anywhere" if self.late_system else "first" if self.system else "none",
            "tools": self.tools,
            "tool_calls": self.calls,
            "parallel_tool_calls": self.calls and self.parallel,
            **({"tool_arguments": self.arguments, "null_content": self.call_content} if self.calls else {}),
            "reasoning": self.reasoning,
        }


# Takes everything as it is.
AS_SENT = MessageForm()


# --- probe -----------------------------------------------------------------------------------------------

_TOOL = {
    "type": "function",
    "function": {
        "name": "zqfunction",
        "description": "zqdescription",
        "parameters": {
            "type": "object",
            "properties": {"zqkey": {"type": "string", "description": "zqmeaning"}},
            "required": ["zqkey"],
        },
    },
}
_USER = {"role": "user", "content": "zquestion"}
_ANSWER = {"role": "assistant", "content": "zqanswer"}
_LATER = {"role": "user", "content": "zqlater"}
_SYSTEM = {"role": "system", "content": "zqsystem"}


def probe(render: Render) -> MessageForm:
    """Return the form of a template. `render` raises what the template raises."""
    form = _probe_content(render)
    form = replace(
        form,
        system=_shows(render, [_SYSTEM, _USER], form, "zqsystem", "zquestion"),
        tools=_shows(render, [_USER], form, "zqfunction", "zqdescription", "zqkey", "zqmeaning", tools=[_TOOL]),
    )
    late = [_USER, _ANSWER, _SYSTEM, _LATER]
    second = [_SYSTEM, {"role": "system", "content": "zqsecond"}, _USER]
    late_system = _shows(render, late, form, "zqsystem", "zqlater") and _shows(render, second, form, "zqsecond")
    form = replace(form, late_system=form.system and late_system)
    return _probe_calls(render, form)


def shows_parts(render: Render) -> bool:
    """Return whether a template shows the texts of content that is a list of parts, not the list itself."""
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("zqone", "zqtwo")]}]
    return _shows(render, parts, AS_SENT, "zqone", "zqtwo", without=("'type'", '"type"'))


def _probe_content(render: Render) -> MessageForm:
    parts = shows_parts(render)
    form = replace(AS_SENT, parts=parts, texts=not parts or _shows(render, [_USER], AS_SENT, "zquestion"))
    reasoning = {"role": "assistant", "reasoning_content": "zqreasoning"}
    for content in _EMPTY:
        candidate = replace(form, content=content)
        if _shows(render, [_USER, reasoning, _LATER], candidate, "zqlater", after="zquestion", without=("None",)):
            return candidate
    return replace(form, content="empty")


def _probe_calls(render: Render, form: MessageForm) -> MessageForm:
    tools = [_TOOL] if form.tools else []
    one = _loop(1)

    def shows(form: MessageForm, messages: _Messages, *texts: str) -> bool:
        without = ("'zqkey'", '\\"zqkey', "None")
        return _shows(render, messages, form, *texts, tools=tools, after="zquestion", without=without)

    for arguments, content, names, ids in itertools.product(_ARGUMENTS, _EMPTY, (False, True), _IDS):
        candidate = replace(
            form,
            arguments=arguments,
            call_content=content,
            names=names,
            ids=ids,
            empty_beside_calls=False,
            parallel=True,
            text_beside_calls=True,
        )
        if shows(candidate, one, "zqfunction", "zqkey", "zqvalue1", "zqresult1"):
            break
    else:
        return replace(form, calls=False)
    empty = replace(candidate, call_content="empty")
    text = replace(candidate, arguments="text")
    beside = [_USER, {**one[1], "content": "zqtext"}, *one[2:]]
    thinking = [_USER, {**one[1], "reasoning_content": "zqreasoning"}, *one[2:]]
    return replace(
        candidate,
        empty_beside_calls=shows(empty, one, "zqfunction", "zqkey", "zqvalue1", "zqresult1"),
        text_arguments=shows(text, one, "zqfunction", "zqkey", "zqvalue1", "zqresult1"),
        parallel=shows(candidate, _loop(2), "zqvalue1", "zqvalue2", "zqresult1", "zqresult2"),
        text_beside_calls=shows(candidate, beside, "zqtext", "zqvalue1", "zqresult1"),
        reasoning=shows(candidate, thinking, "zqreasoning"),
    )


def _loop(count: int) -> _Messages:
    """Return a question, a message with calls, and their results."""
    calls = [
        {
            "id": f"call_zq0000000000000000000{i}",
            "type": "function",
            "function": {"name": "zqfunction", "arguments": json.dumps({"zqkey": f"zqvalue{i}"})},
        }
        for i in range(1, count + 1)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"zqresult{i}"} for i, call in enumerate(calls, 1)
    ]
    return [_USER, {"role": "assistant", "tool_calls": calls}, *results]


def _shows(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    form: MessageForm,
    *texts: str,
    tools: Sequence[Mapping[str, Any]] = (),
    after: str = "",
    without: Iterable[str] = (),
) -> bool:
    """Return whether the prompt of messages in a form has some texts after another one, and is without others, by which
    values of Python or quoted JSON would show."""
    try:
        prompt = render(adapt(messages, form), tools)
    except Exception:  # templates can raise any exception
        return False
    prompt = prompt[prompt.find(after) :]
    return all(text in prompt for text in texts) and not any(text in prompt for text in without)


# --- adapt -----------------------------------------------------------------------------------------------


def adapt(messages: Sequence[Mapping[str, Any]], form: MessageForm) -> _Messages:
    """Return messages of OpenAI's API, with arguments of calls as JSON text, in the form of a template.

    What it does not show is written as text: calls in the message of the assistant, system messages and results of
    tools in front of the user's next text.
    """
    copies = [_adapt_reasoning(message) for message in messages]
    copies = _with_ids(copies, form)
    copies = _adapt_system(copies, form)
    copies = _adapt_calls(copies, form) if form.calls else _calls_as_text(copies)
    return [_adapt_content(message, form) for message in copies]


def with_tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> _Messages:
    """Return messages whose system message describes the tools, for a template that does not."""
    lines = [json.dumps(_description(tool), ensure_ascii=False) for tool in tools]
    text = "\n".join((_TOOLS_BEFORE, *lines, _TOOLS_AFTER))
    if messages and messages[0]["role"] == "system":
        return [_with_text(messages[0], text, after=True), *map(dict, messages[1:])]
    return [{"role": "system", "content": text}, *map(dict, messages)]


_TOOLS_BEFORE = "You can call these functions, each described by a JSON object:"
_TOOLS_AFTER = (
    "To call a function, write a JSON object with its name and arguments, and wait for its result:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)


def _description(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}


def _adapt_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message, with its reasoning under both names that templates read."""
    reasoning = message.get("reasoning_content")
    return dict(message) if reasoning is None else {"thinking": reasoning, **message}


def _with_ids(messages: _Messages, form: MessageForm) -> _Messages:
    """Give ids to calls and results that have none, and the names of their functions to results that need them."""
    ids: dict[str, str] = {}  # in the form of the template
    names: dict[str, str] = {}
    waiting: list[str] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = []
            message["tool_calls"] = [dict(call) for call in calls]
            for call in message["tool_calls"]:
                name = call["function"]["name"]
                id_ = str(call.get("id") or f"call{len(ids):05}")
                ids[id_] = call["id"] = _id_in_form(id_, name, len(ids), form)
                names[call["id"]] = name
                waiting.append(call["id"])
        elif message["role"] == "tool":
            sent = message.get("tool_call_id")
            id_ = ids.get(str(sent), str(sent)) if sent else next(iter(waiting), "")
            waiting = [each for each in waiting if each != id_]
            if id_:
                message["tool_call_id"] = id_
            if form.names and id_ in names:
                message.setdefault("name", names[id_])
    return messages


def _id_in_form(id_: str, name: str, index: int, form: MessageForm) -> str:
    if form.ids == "short" and not _SHORT_ID.fullmatch(id_):
        return hashlib.blake2b(id_.encode(errors="replace")).hexdigest()[:9]
    if form.ids == "function" and f"{name}:" not in id_:
        return f"functions.{name}:{index}"
    return id_


def _adapt_system(messages: _Messages, form: MessageForm) -> _Messages:
    """Return messages without system messages that the template does not show."""
    if form.late_system or not any(message["role"] == "system" for message in messages):
        return messages
    count = 0
    if form.system:
        count = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    first, rest = messages[:count], messages[count:]
    if len(first) > 1:
        first = [{**first[0], "content": "\n\n".join(_text_of(each.get("content")) for each in first)}]
    writer = _UserTexts(first)
    for message in rest:
        if message["role"] == "system":
            writer.add_text(_text_of(message.get("content")))
        else:
            writer.add(message)
    return writer.end()


def _calls_as_text(messages: _Messages) -> _Messages:
    """Return messages with calls in the text of the assistant, and results in front of the user's next text."""
    writer = _UserTexts([])
    for message in messages:
        if message["role"] == "tool":
            writer.add_text(f"<tool_response>\n{_text_of(message.get('content'))}\n</tool_response>")
            continue
        calls = [call["function"] for call in message.pop("tool_calls", None) or ()]
        texts = [
            f'<tool_call>\n{{"name": {json.dumps(call["name"], ensure_ascii=False)}, '
            f'"arguments": {call["arguments"]}}}\n</tool_call>'
            for call in calls
        ]
        if texts:
            text = _text_of(message.get("content"))
            message["content"] = "\n".join([text, *texts] if text else texts)
        writer.add(message)
    return writer.end()


class _UserTexts:
    """Collects messages; texts that no message of its own can have go in front of the user's next one."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._texts: list[str] = []

    def add_text(self, text: str) -> None:
        self._texts.append(text)

    def add(self, message: dict[str, Any]) -> None:
        if self._texts and message["role"] == "user":
            text, self._texts = "\n\n".join(self._texts), []
            message = _with_text(message, text)
        self._flush()
        self._messages.append(message)

    def end(self) -> _Messages:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        if self._texts:
            self._messages.append({"role": "user", "content": "\n\n".join(self._texts)})
            self._texts = []


def _with_text(message: Mapping[str, Any], text: str, *, after: bool = False) -> dict[str, Any]:
    """Return a message with a further text before, or after, its own."""
    content = message.get("content")
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return {**message, "content": [*content, part] if after else [part, *content]}
    texts = [text, content or ""] if not after else [content or "", text]
    return {**message, "content": "\n\n".join(filter(None, texts))}


def _adapt_calls(messages: _Messages, form: MessageForm) -> _Messages:
    """Return messages with calls as the template takes them."""
    adapted: _Messages = []
    results: dict[str, dict[str, Any]] = {}
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            if message.get("tool_call_id", "") not in results:
                adapted.append(message)
            continue
        results = {}
        calls = message.get("tool_calls")
        if not calls:
            adapted.append(message)
            continue
        message = {**message, "tool_calls": [_adapt_call(call, form) for call in calls]}
        text = message.get("content")
        if text and not form.text_beside_calls:
            adapted.append({name: value for name, value in message.items() if name != "tool_calls"})
            message, text = {"role": message["role"], "tool_calls": message["tool_calls"]}, None
        if not text and not (text == "" and form.empty_beside_calls):
            message["content"] = _MISSING[form.call_content]
        if form.parallel or len(calls) == 1:
            adapted.append(message)
            continue
        following = itertools.takewhile(lambda each: each["role"] == "tool", messages[at + 1 :])
        results = {each.get("tool_call_id", ""): each for each in following}
        for i, call in enumerate(message["tool_calls"]):
            alone = message if i == 0 else {"role": message["role"], "content": _MISSING[form.call_content]}
            adapted.append({**alone, "tool_calls": [call]})
            adapted += [results[call["id"]]] if call["id"] in results else []
    return adapted


# Stands for content that is left out.
_OMITTED = object()
_MISSING: Mapping[Empty, Any] = {"omitted": _OMITTED, "null": None, "empty": ""}


def _adapt_call(call: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    text = call["function"]["arguments"] or "{}"
    arguments: Any = text
    if form.arguments == "object":
        try:
            value = parse_json(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            arguments = value
        elif not form.text_arguments:
            arguments = {"invalid_json": text}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _adapt_content(message: dict[str, Any], form: MessageForm) -> dict[str, Any]:
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        content = _MISSING[form.content]
    if content is _OMITTED:
        message.pop("content", None)
        return message
    if form.parts and isinstance(content, PartsText):
        content = [{"type": "text", "text": text} for text in content.parts]
    elif not form.texts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    message["content"] = content
    return message


def _text_of(content: Any) -> str:
    """Return the text of content, without images."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("text"))
    return str(content or "")
