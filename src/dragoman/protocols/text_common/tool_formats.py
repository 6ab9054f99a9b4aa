"""The formats in which models write calls of tools: how a call begins in each, and what may yet become one.

Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Qwen3-Coder     <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
Llama           {"name": ..., "parameters": {...}}, maybe after <|python_tag|>; <function=NAME>{...}</function>
Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}

For each pattern of a beginning there is one of what may become that, by which a text is held back. The length of each
is bounded, so that no text is held, or read again, without end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SPACE = r"[ \t\r\n]{0,512}"
_NAME = r"(?P<name>[A-Za-z0-9_.\-]{1,128})"
_LONGEST_HEAD = 4096


def begun(literal: str) -> str:
    """A pattern of whatever a literal begins with."""
    found = ""
    for character in reversed(literal):
        found = f"(?:{re.escape(character)}{found})?"
    return found


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write calls. `start` reads the opener up to the `{` of an object, which is the arguments where it has
    read a name, and else a call, or behind a name up to the `<` of parameters; `starting` is all that may become one.
    `closer` ends the calls, if they have an end; `going_on` is all that may lead from one call to the next, or to that
    end."""

    opener: str
    start: re.Pattern[str]
    starting: re.Pattern[str]
    closer: re.Pattern[str] | None
    going_on: re.Pattern[str]


def _format(opener: str, closer: str, start: str, starting: str) -> Format:
    return Format(
        opener,
        re.compile(re.escape(opener) + start),
        re.compile(re.escape(opener) + starting),
        re.compile(SPACE + re.escape(closer)) if closer else None,
        re.compile(f"{SPACE}(?:[;,]{SPACE}|{begun(closer)})"),
    )


_OBJECT = r"(?=\{)"
_OBJECTS = f"{SPACE}(?P<list>\\[{SPACE})?{_OBJECT}"
_OBJECTS_STARTING = f"{SPACE}(?:\\[{SPACE})?"
_MISTRAL_NAME = rf"{SPACE}{_NAME} ?(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{SPACE}{_OBJECT}"
_FUNCTION = "<function="
_PARAMETERS = "(?=<parameter=|</function>)"
_TO_PARAMETERS = f"(?:{begun('<parameter=')}|{begun('</function>')})"
_FUNCTION_STARTING = rf"[A-Za-z0-9_.\-]{{0,128}}(?:>{SPACE}{_TO_PARAMETERS})?"

QWEN = "<tool_call>"
PLAIN = _format("", "", _OBJECTS, _OBJECTS_STARTING)
FORMATS: Mapping[str, Format] = {
    found.opener: found
    for found in (
        _format(
            QWEN,
            "</tool_call>",
            f"(?:{_OBJECTS}|{SPACE}{_FUNCTION}{_NAME}>{SPACE}{_PARAMETERS})",
            f"(?:{_OBJECTS_STARTING}|{SPACE}(?:{begun(_FUNCTION)}|{_FUNCTION}{_FUNCTION_STARTING}))",
        ),
        _format("<|python_tag|>", "", _OBJECTS, _OBJECTS_STARTING),
        _format(
            "[TOOL_CALLS]",
            "",
            f"(?:{_OBJECTS}|{_MISTRAL_NAME})",
            rf"(?:{_OBJECTS_STARTING}|{SPACE}[A-Za-z0-9_.\-]{{1,128}}[ \[\]\w]{{0,90}}{SPACE})",
        ),
        _format(_FUNCTION, "</function>", f"{_NAME}>{SPACE}(?:{_OBJECT}|{_PARAMETERS})", _FUNCTION_STARTING),
    )
}
OPENER = re.compile("|".join(map(re.escape, FORMATS)))
OPENING = re.compile("(?:" + "|".join(map(begun, FORMATS)) + r")\Z")

NEXT = re.compile(rf"{SPACE}(?:[;,]{SPACE})?(?=\{{)")
LIST_END = re.compile(rf"{SPACE}\]")

# What stands behind the arguments in their object: its end, or more members, which do not count.
OBJECT_END = re.compile(rf"{SPACE}\}}")
MEMBERS = re.compile(rf'{SPACE},{SPACE}"')
ENDING = re.compile(rf"{SPACE}(?:,{SPACE})?")

_TEXT = r'"[^"\\]{0,200}"'
_COLON = f"{SPACE}:{SPACE}"
_BEFORE = rf'\{{{SPACE}(?:(?:"type"{_COLON}"function"|"id"{_COLON}{_TEXT}){SPACE},{SPACE}){{0,2}}"name"{_COLON}'
_HEAD = re.compile(rf'{_BEFORE}"([^"\\]{{0,200}})"{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)')
_NAMED = re.compile(rf'{_BEFORE}"([^"\\]{{0,200}})"')
# What the object of a call may begin with: a key, and what its value begins with.
_VALUES = {"name": '"', "function": "{", "type": '"function"', "arguments": "", "parameters": "", "id": ""}


def _first(key: str, value: str) -> str:
    of_value = rf"{begun(value)}\Z|{re.escape(value)}"
    return rf'{begun(chr(34) + key + chr(34))}\Z|"{key}"{SPACE}(?:\Z|:{SPACE}(?:{of_value}))'


_MAYBE = re.compile(rf"\{{{SPACE}(?:{'|'.join(_first(key, value) for key, value in _VALUES.items())})")


def head(text: str, at: int) -> tuple[str, int] | None:
    """The name in the object at that place, and where its arguments begin, if it is a call in the order that models
    write it in."""
    found = _HEAD.match(text, at, at + _LONGEST_HEAD)
    return (found[1], found.end()) if found else None


def may_be_call(text: str, at: int, names: frozenset[str]) -> bool:
    """Whether the object that begins at that place may be a call of one of these."""
    if not _MAYBE.match(text, at):
        return False
    named = _NAMED.match(text, at, at + _LONGEST_HEAD)
    return named is None or named[1] in names
