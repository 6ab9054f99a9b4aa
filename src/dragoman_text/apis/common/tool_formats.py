"""Formats in which models write tool calls: patterns of how a call begins, and of its possible beginnings.

Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Qwen3-Coder     <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
Llama           {"name": ..., "parameters": {...}}, maybe after <|python_tag|>; <function=NAME>{...}</function>
Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}
Granite, Phi-4  <|tool_call|>[{...}], <function_call> {...}, functools[{...}]
InternLM        <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>
GLM             <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
DeepSeek        <|tool▁call▁begin|>function<|tool▁sep|>NAME, JSON in a fence; V3.1: NAME<|tool▁sep|>{...};
                V3.2: <|DSML|invoke name="NAME"><|DSML|parameter name="KEY" string="true">VALUE</...></...>
Kimi            <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
MiniMax         <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
pythonic        [NAME(key="value"), ...] at the start, or in <|python_start|>, <|tool_call_start|>, <function_calls>

For each pattern of a beginning there is a pattern of its prefixes, by which text is held back. Their length is bounded,
and so is the text that is held back or parsed again.
"""

import re
from collections.abc import Mapping

import msgspec

from dragoman.core.patterns import LazyPattern
from dragoman_text.limits import MAX_CALL_START_CHARACTERS

SPACE = r"[ \t\r\n]{0,512}"
_NAME = r"(?P<name>[A-Za-z0-9_.\-]{1,128})"


def prefixes(literal: str) -> str:
    """Return a pattern that matches every prefix of a literal."""
    pattern = ""
    for character in reversed(literal):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


class Format(msgspec.Struct, frozen=True):
    """A format of calls.

    start: matches the opener up to the `{` of an object, which is the arguments if it matched a name and else a call,
        or after a name up to the `<` of parameters, or up to a call in Python's syntax if it matched `python`.
    start_prefix: matches what may become a start.
    closer: ends the calls.
    separator_prefix: matches what may lead to the next call or the closer.
    parameters: the markup of parameters.
    """

    opener: str
    start: LazyPattern
    start_prefix: LazyPattern
    closer: LazyPattern | None
    separator_prefix: LazyPattern
    parameters: str = "qwen"


def _format(
    opener: str, closer: str | tuple[str, ...], start: str, start_prefix: str, parameters: str = "qwen"
) -> Format:
    """Return a format. Several closers follow each other; each may be missing, but not all."""
    closers = (closer,) if isinstance(closer, str) else closer
    ends = [f"(?:{SPACE}{re.escape(each)})" for each in closers if each]
    any_end = "|".join("".join((end, *(f"{later}?" for later in ends[i + 1 :]))) for i, end in enumerate(ends))
    partial = [
        "".join(f"{end}?" for end in ends[:i]) + f"(?:{SPACE}{prefixes(each)})" for i, each in enumerate(closers)
    ]
    return Format(
        opener,
        LazyPattern(re.escape(opener) + start),
        LazyPattern(re.escape(opener) + start_prefix),
        LazyPattern(any_end) if ends else None,
        LazyPattern(f"(?:{SPACE}[;,]{SPACE}|{'|'.join(partial)})"),
        parameters,
    )


_OBJECT = r"(?=\{)"
_OBJECTS = f"{SPACE}(?P<list>\\[{SPACE})?{_OBJECT}"
_OBJECTS_PREFIX = f"{SPACE}(?:\\[{SPACE})?"
_MISTRAL_NAME = rf"{SPACE}{_NAME} ?(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{SPACE}{_OBJECT}"
_FUNCTION = "<function="
_PARAMETERS = "(?=<parameter=|</function>)"
_PARAMETERS_PREFIX = f"(?:{prefixes('<parameter=')}|{prefixes('</function>')})"
_FUNCTION_PREFIX = rf"[A-Za-z0-9_.\-]{{0,128}}(?:>{SPACE}{_PARAMETERS_PREFIX})?"

# A call in Python's syntax, in a list, or without one inside of markup.
_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_.]{0,127}"
PYTHON_NAME = rf"(?P<python>{_IDENTIFIER})\("
PYTHON_NAME_PREFIX = rf"(?:{_IDENTIFIER})?"
_PYTHON = rf"{SPACE}(?=\[{SPACE}{PYTHON_NAME})"
_PYTHON_PREFIX = rf"{SPACE}(?:\[{SPACE}{PYTHON_NAME_PREFIX})?"
_PYTHON_LINE = rf"{SPACE}(?=(?:\[{SPACE})?{PYTHON_NAME})"
_PYTHON_LINE_PREFIX = rf"{SPACE}(?:\[{SPACE})?{PYTHON_NAME_PREFIX}"
_GLM = rf"{SPACE}(?P<glm>[A-Za-z0-9_.\-]{{1,128}}){SPACE}(?=<arg_key>|</tool_call>)"
_GLM_PREFIX = rf"{SPACE}[A-Za-z0-9_.\-]{{1,128}}{SPACE}(?:{prefixes('<arg_key>')}|{prefixes('</tool_call>')})"
_BAR = "\N{FULLWIDTH VERTICAL LINE}"  # in the markup of DeepSeek
DSML = f"{_BAR}DSML{_BAR}"
_SEP = f"<{_BAR}tool▁sep{_BAR}>"
_DEEPSEEK = f"{SPACE}(?:function{_SEP})?{SPACE}{_NAME}{SPACE}(?:{_SEP}{SPACE})?(?:```json{SPACE})?{_OBJECT}"
_DEEPSEEK_PREFIX = (
    rf"{SPACE}(?:{prefixes('function' + _SEP)}|"
    rf"(?:function{_SEP})?{SPACE}[A-Za-z0-9_.\-]{{0,128}}{SPACE}(?:{prefixes(_SEP)}|"
    rf"(?:{_SEP}{SPACE})?(?:{prefixes('```json')}|```json{SPACE})))"
)
_DEEPSEEK_END = ("```", f"<{_BAR}tool▁call▁end{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI = rf"{SPACE}(?P<id>(?:functions\.)?{_NAME}:[0-9]{{1,6}}){SPACE}{re.escape(_KIMI_ARGUMENTS)}{SPACE}{_OBJECT}"
_KIMI_PREFIX = (
    rf"{SPACE}[A-Za-z0-9_.:\-]{{0,160}}{SPACE}"
    f"(?:{prefixes(_KIMI_ARGUMENTS)}|{re.escape(_KIMI_ARGUMENTS)}{SPACE})"
)
_KIMI_END = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_INVOKE = rf'{_NAME}">'
_INVOKE_PREFIX = r'[A-Za-z0-9_.\-]{0,128}"?'


def _invocations(tag: str, sections: tuple[str, ...], parameters: str) -> list[Format]:
    """Return the formats of `<invoke name="NAME">`, alone or first in a section."""
    openers = (*(f"<{section}>\n" for section in sections), *(f"<{section}>" for section in sections), "")
    ends = tuple(f"</{section}>" for section in sections)
    return [_format(f'{opener}<{tag} name="', ends, _INVOKE, _INVOKE_PREFIX, parameters) for opener in openers]


QWEN = "<tool_call>"
PLAIN = _format("", "", f"(?:{_OBJECTS}|{_PYTHON})", f"(?:{_OBJECTS_PREFIX}|{_PYTHON_PREFIX})")
FORMATS: Mapping[str, Format] = {
    found.opener: found
    for found in (
        _format(
            QWEN,
            "</tool_call>",
            f"(?:{_OBJECTS}|{SPACE}{_FUNCTION}{_NAME}>{SPACE}{_PARAMETERS}|{_GLM})",
            f"(?:{_OBJECTS_PREFIX}|{SPACE}(?:{prefixes(_FUNCTION)}|{_FUNCTION}{_FUNCTION_PREFIX})|{_GLM_PREFIX})",
        ),
        _format("<|tool_call|>", "<|/tool_call|>", _OBJECTS, _OBJECTS_PREFIX),
        _format("<function_call>", "</function_call>", _OBJECTS, _OBJECTS_PREFIX),
        _format("functools", "", rf"(?P<list>\[{SPACE}){_OBJECT}", rf"(?:\[{SPACE})?"),
        _format("<|action_start|><|plugin|>", "<|action_end|>", _OBJECTS, _OBJECTS_PREFIX),
        *(
            _format(f"{section}<{_BAR}tool▁call▁begin{_BAR}>", _DEEPSEEK_END, _DEEPSEEK, _DEEPSEEK_PREFIX)
            for section in (f"<{_BAR}tool▁calls▁begin{_BAR}>", "")
        ),
        *(
            _format(f"{section}<|tool_call_begin|>", _KIMI_END, _KIMI, _KIMI_PREFIX)
            for section in ("<|tool_calls_section_begin|>", "")
        ),
        *_invocations(f"{DSML}invoke", (f"{DSML}function_calls", f"{DSML}tool_calls"), "dsml"),
        *_invocations("invoke", ("minimax:tool_call",), "minimax"),
        *(
            _format(opener, closer, f"(?:{_OBJECTS}|{_PYTHON_LINE})", f"(?:{_OBJECTS_PREFIX}|{_PYTHON_LINE_PREFIX})")
            for opener, closer in (
                ("<|python_start|>", "<|python_end|>"),
                ("<|tool_call_start|>", "<|tool_call_end|>"),
                ("<function_calls>", "</function_calls>"),
            )
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
OPENER = LazyPattern(f"(?=[<f\\[])(?:{'|'.join(map(re.escape, FORMATS))})")
LONGEST_OPENER = max(map(len, FORMATS))
OPENING = LazyPattern("(?:" + "|".join(map(prefixes, FORMATS)) + r")\Z")

NEXT = LazyPattern(rf"{SPACE}(?:[;,]{SPACE})?(?=\{{)")
LIST_END = LazyPattern(rf"{SPACE}\]")

# What follows the arguments in their object: its end, or more members, which are ignored.
OBJECT_END = LazyPattern(rf"{SPACE}\}}")
MEMBERS = LazyPattern(rf'{SPACE},{SPACE}"')
ENDING = LazyPattern(rf"{SPACE}(?:,{SPACE})?")

_TEXT = r'"[^"\\]{0,200}"'
_COLON = f"{SPACE}:{SPACE}"
_BEFORE = rf'\{{{SPACE}(?:(?:"type"{_COLON}"function"|"id"{_COLON}{_TEXT}){SPACE},{SPACE}){{0,2}}"name"{_COLON}'
_CALL_START = LazyPattern(
    rf'{_BEFORE}"([^"\\]{{0,200}})"{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)'
)
_NAMED = LazyPattern(rf'{_BEFORE}"([^"\\]{{0,200}})"')
# First key of the object of a call, and the beginning of its value.
_VALUES = {"name": '"', "function": "{", "type": '"function"', "arguments": "", "parameters": "", "id": ""}


def _first(key: str, value: str) -> str:
    of_value = rf"{prefixes(value)}\Z|{re.escape(value)}"
    return rf'{prefixes(chr(34) + key + chr(34))}\Z|"{key}"{SPACE}(?:\Z|:{SPACE}(?:{of_value}))'


_MAYBE = LazyPattern(rf"\{{{SPACE}(?:{'|'.join(_first(key, value) for key, value in _VALUES.items())})")


def parse_call_start(text: str, at: int) -> tuple[str, int] | None:
    """Return the name of the call at this offset and the offset of its arguments; None if it has another form."""
    match = _CALL_START.match(text, at, at + MAX_CALL_START_CHARACTERS)
    return (match[1], match.end()) if match else None


def may_be_call(text: str, at: int, names: frozenset[str]) -> bool:
    """Return whether the object at this offset may be a call of one of these names."""
    if not _MAYBE.match(text, at):
        return False
    named = _NAMED.match(text, at, at + MAX_CALL_START_CHARACTERS)
    return named is None or named[1] in names
