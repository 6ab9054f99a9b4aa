"""Formats in which models write tool calls: patterns of how a call begins, and of its possible beginnings.

Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Qwen3-Coder     <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
Llama           {"name": ..., "parameters": {...}}, maybe after <|python_tag|>; <function=NAME>{...}</function>
Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}

For each pattern of a beginning there is a pattern of its prefixes, by which text is held back. Their length is bounded,
and so is the text that is held back or parsed again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SPACE = r"[ \t\r\n]{0,512}"
_NAME = r"(?P<name>[A-Za-z0-9_.\-]{1,128})"
_MAX_CALL_START = 4096


def prefixes(literal: str) -> str:
    """Return a pattern that matches every prefix of a literal."""
    pattern = ""
    for character in reversed(literal):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


@dataclass(frozen=True, slots=True)
class Format:
    """A format of calls.

    start: matches the opener up to the `{` of an object, which is the arguments if it matched a name and else a call,
    or after a name up to the `<` of parameters. start_prefix: matches what may become a start. closer: ends the calls.
    separator_prefix: matches what may lead to the next call or the closer.
    """

    opener: str
    start: re.Pattern[str]
    start_prefix: re.Pattern[str]
    closer: re.Pattern[str] | None
    separator_prefix: re.Pattern[str]


def _format(opener: str, closer: str, start: str, start_prefix: str) -> Format:
    return Format(
        opener,
        re.compile(re.escape(opener) + start),
        re.compile(re.escape(opener) + start_prefix),
        re.compile(SPACE + re.escape(closer)) if closer else None,
        re.compile(f"{SPACE}(?:[;,]{SPACE}|{prefixes(closer)})"),
    )


_OBJECT = r"(?=\{)"
_OBJECTS = f"{SPACE}(?P<list>\\[{SPACE})?{_OBJECT}"
_OBJECTS_PREFIX = f"{SPACE}(?:\\[{SPACE})?"
_MISTRAL_NAME = rf"{SPACE}{_NAME} ?(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{SPACE}{_OBJECT}"
_FUNCTION = "<function="
_PARAMETERS = "(?=<parameter=|</function>)"
_PARAMETERS_PREFIX = f"(?:{prefixes('<parameter=')}|{prefixes('</function>')})"
_FUNCTION_PREFIX = rf"[A-Za-z0-9_.\-]{{0,128}}(?:>{SPACE}{_PARAMETERS_PREFIX})?"

QWEN = "<tool_call>"
PLAIN = _format("", "", _OBJECTS, _OBJECTS_PREFIX)
FORMATS: Mapping[str, Format] = {
    found.opener: found
    for found in (
        _format(
            QWEN,
            "</tool_call>",
            f"(?:{_OBJECTS}|{SPACE}{_FUNCTION}{_NAME}>{SPACE}{_PARAMETERS})",
            f"(?:{_OBJECTS_PREFIX}|{SPACE}(?:{prefixes(_FUNCTION)}|{_FUNCTION}{_FUNCTION_PREFIX}))",
        ),
        _format("<|python_tag|>", "", _OBJECTS, _OBJECTS_PREFIX),
        _format(
            "[TOOL_CALLS]",
            "",
            f"(?:{_OBJECTS}|{_MISTRAL_NAME})",
            rf"(?:{_OBJECTS_PREFIX}|{SPACE}[A-Za-z0-9_.\-]{{1,128}}[ \[\]\w]{{0,90}}{SPACE})",
        ),
        _format(_FUNCTION, "</function>", f"{_NAME}>{SPACE}(?:{_OBJECT}|{_PARAMETERS})", _FUNCTION_PREFIX),
    )
}
OPENER = re.compile("|".join(map(re.escape, FORMATS)))
OPENING = re.compile("(?:" + "|".join(map(prefixes, FORMATS)) + r")\Z")

NEXT = re.compile(rf"{SPACE}(?:[;,]{SPACE})?(?=\{{)")
LIST_END = re.compile(rf"{SPACE}\]")

# What follows the arguments in their object: its end, or more members, which are ignored.
OBJECT_END = re.compile(rf"{SPACE}\}}")
MEMBERS = re.compile(rf'{SPACE},{SPACE}"')
ENDING = re.compile(rf"{SPACE}(?:,{SPACE})?")

_TEXT = r'"[^"\\]{0,200}"'
_COLON = f"{SPACE}:{SPACE}"
_BEFORE = rf'\{{{SPACE}(?:(?:"type"{_COLON}"function"|"id"{_COLON}{_TEXT}){SPACE},{SPACE}){{0,2}}"name"{_COLON}'
_CALL_START = re.compile(
    rf'{_BEFORE}"([^"\\]{{0,200}})"{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)'
)
_NAMED = re.compile(rf'{_BEFORE}"([^"\\]{{0,200}})"')
# First key of the object of a call, and the beginning of its value.
_VALUES = {"name": '"', "function": "{", "type": '"function"', "arguments": "", "parameters": "", "id": ""}


def _first(key: str, value: str) -> str:
    of_value = rf"{prefixes(value)}\Z|{re.escape(value)}"
    return rf'{prefixes(chr(34) + key + chr(34))}\Z|"{key}"{SPACE}(?:\Z|:{SPACE}(?:{of_value}))'


_MAYBE = re.compile(rf"\{{{SPACE}(?:{'|'.join(_first(key, value) for key, value in _VALUES.items())})")


def parse_call_start(text: str, at: int) -> tuple[str, int] | None:
    """Return the name of the call at this offset and the offset of its arguments; None if it has another form."""
    match = _CALL_START.match(text, at, at + _MAX_CALL_START)
    return (match[1], match.end()) if match else None


def may_be_call(text: str, at: int, names: frozenset[str]) -> bool:
    """Return whether the object at this offset may be a call of one of these names."""
    if not _MAYBE.match(text, at):
        return False
    named = _NAMED.match(text, at, at + _MAX_CALL_START)
    return named is None or named[1] in names
