"""Convert parameter values that a model writes outside JSON, also as `<parameter=KEY>value</parameter>`, to JSON."""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dragoman.core.documents import parse_json
from dragoman.core.patterns import LazyPattern
from dragoman.protocols.wire import replace_surrogates
from dragoman_text.apis.common.tool_formats import DSML, SPACE, prefixes

_INTEGER = LazyPattern(r"[+-]?[0-9]+")
_NUMBER = LazyPattern(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_NUMBER = LazyPattern(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Other names of JSON types in the schemas of tools, by their prefixes, as in vLLM's parser.
_ALIASES = {
    ("int", "uint", "long", "short", "unsigned"): "integer",
    ("num", "float", "double"): "number",
    ("bool", "binary"): "boolean",
    ("obj", "dict"): "object",
    ("arr", "list"): "array",
    ("null",): "null",
}
_MAX_LITERAL_CHARACTERS = 65_536
_ANY = frozenset({"integer", "number", "boolean", "object", "array"})
_MAX_DEPTH = 16


def schema_types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; references are looked up in `root`."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    types = _as_list(schema.get("type"))
    values = _as_list(schema.get("enum")) or _as_list(schema.get("const"))
    names = {_type_name(each) for each in types} or {_type_of(value) for value in values}
    others = [each for name in ("anyOf", "oneOf", "allOf") for each in _as_list(schema.get(name))]
    others.append(_resolve_reference(schema.get("$ref"), root))
    return frozenset(names).union(*(schema_types(each, root, depth + 1) for each in others))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _type_name(kind: Any) -> str:
    name = str(kind).strip().lower()
    return next((json_type for prefix, json_type in _ALIASES.items() if name.startswith(prefix)), "string")


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "string")


def _resolve_reference(pointer: Any, root: Any) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    for name in pointer[2:].split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root


class StreamedValue:
    """One value in chunks: a string is passed on as it comes, any other type when it is complete."""

    def __init__(self, kinds: frozenset[str], *, breaks_lines: bool = True) -> None:
        self._kinds, self._breaks_lines = kinds, breaks_lines
        self._text = ""
        self._started = self._opened = False

    def add(self, text: str) -> str:
        """Return the JSON that is certain now."""
        if text and not self._started:
            self._started, text = True, text.removeprefix("\n") if self._breaks_lines else text
        if self._opened:
            return _escape(text)
        self._text += text
        if self._kinds - {"string", "null"} or "null".startswith(self._text.lower()):
            return ""
        self._opened = True
        return f'"{_escape(self._text)}'

    def end(self) -> str:
        """Return the rest of the JSON; the value is complete."""
        return '"' if self._opened else to_json_value(self._text, self._kinds)


def to_json_value(text: str, kinds: frozenset[str]) -> str:
    """Convert a value to JSON: to the first type of the schema that fits, else to a string.

    `null` is null for any type, as in vLLM's parser.
    """
    if text.lower() == "null":
        return "null"
    for kind, read in _CONVERTERS.items():
        value = read(text) if kind in kinds else None
        if value is not None:
            return value
    return f'"{_escape(text)}"'


def _escape(text: str) -> str:
    return replace_surrogates(json.dumps(text, ensure_ascii=False)[1:-1])


def _integer(text: str) -> str | None:
    text = text.strip()
    number = _number(text)
    if number is None or not float(number).is_integer():
        return None
    return number if _INTEGER.fullmatch(number) else str(int(float(number)))


def _number(text: str) -> str | None:
    text = text.strip()
    if _JSON_NUMBER.fullmatch(text):
        return text if math.isfinite(float(text)) else None
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value = int(text) if _INTEGER.fullmatch(text) else float(text)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return None


def _boolean(text: str) -> str | None:
    text = text.strip().lower()
    return text if text in ("true", "false") else None


def _structure(text: str) -> str | None:
    """Parse an object or a list, in JSON or in Python syntax."""
    for read in (parse_json, _literal):
        try:
            value = read(text)
            if isinstance(value, dict | list):
                return replace_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _literal(text: str) -> Any:
    if len(text) > _MAX_LITERAL_CHARACTERS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the syntax of the text
        return ast.literal_eval(text.strip())


_CONVERTERS: Mapping[str, Callable[[str], str | None]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _structure,
    "array": _structure,
}


_KEY = r"[^<>]{1,256}"


class ParameterMarkup(msgspec.Struct, frozen=True):
    """Markup of the parameters of a call.

    next: matches a key up to its value, or the end of the call, without a `key`; if it matched `string`, that says
        whether the value is text.
    maybe_next: matches what may become that.
    end: matches the end of a value.
    maybe_end: what may become that, at most `longest_end` characters.
    breaks_lines: a line break after the key and before the end of the value is not part of it.
    """

    next: LazyPattern
    maybe_next: LazyPattern
    end: LazyPattern
    maybe_end: LazyPattern
    longest_end: int
    breaks_lines: bool = False


def _markup(
    key: str, key_prefix: str, call_end: str, value_end: str, others: tuple[str, ...], *, breaks_lines: bool = False
) -> ParameterMarkup:
    """Return markup; `others` end a value that the model has forgotten to close."""
    enders = (value_end, *others)
    line = "\n?" if breaks_lines else ""
    forgotten = "|".join(map(re.escape, others))
    end = call_end.removeprefix("(?=").removesuffix(")")
    return ParameterMarkup(
        LazyPattern(rf"{SPACE}(?:{key}|{call_end})"),
        LazyPattern(rf"{SPACE}(?:{key_prefix}|{prefixes(end)})"),
        LazyPattern(rf"{line}(?:{re.escape(value_end)}|(?={forgotten}))"),
        LazyPattern(rf"{line}(?:{'|'.join(map(prefixes, enders))})\Z"),
        1 + max(map(len, enders)),
        breaks_lines,
    )


_GLM_KEY = f"<arg_key>(?P<key>{_KEY})</arg_key>{SPACE}<arg_value>"
_GLM_KEY_PREFIX = (
    f"{prefixes('<arg_key>')}|<arg_key>[^<>]{{0,256}}"
    f"(?:{prefixes('</arg_key>')}|</arg_key>{SPACE}{prefixes('<arg_value>')})"
)
_NAMED = r'name="(?P<key>[^<>"]{1,256})"'
_DSML = f"<{DSML}parameter "
_INVOKE_END = f"</{DSML}invoke>"
_MINIMAX = "<parameter "
# By the name of a format's `parameters`. Models may forget to close a value or the call.
MARKUP: Mapping[str, ParameterMarkup] = {
    "qwen": _markup(
        f"<parameter=(?P<key>{_KEY})>",
        f"<parameter=[^<>]{{0,256}}|{prefixes('<parameter=')}",
        "</function>",
        "</parameter>",
        ("<parameter=", "</function>", "</tool_call>"),
        breaks_lines=True,
    ),
    "glm": _markup(_GLM_KEY, _GLM_KEY_PREFIX, "(?=</tool_call>)", "</arg_value>", ("<arg_key>", "</tool_call>")),
    "dsml": _markup(
        rf'{_DSML}{_NAMED}(?: string="(?P<string>true|false)")?>',
        rf"{_DSML}[^<>]{{0,300}}|{prefixes(_DSML)}",
        _INVOKE_END,
        f"</{DSML}parameter>",
        (_DSML, _INVOKE_END),
    ),
    "minimax": _markup(
        f"{_MINIMAX}{_NAMED}>",
        rf"{_MINIMAX}[^<>]{{0,300}}|{prefixes(_MINIMAX)}",
        "</invoke>",
        "</parameter>",
        (_MINIMAX, "</invoke>"),
    ),
}


class XmlChunk(msgspec.Struct, frozen=True):
    """Result of a chunk: JSON of the arguments, characters consumed (`used`), whether the call is complete."""

    arguments: str
    used: int
    complete: bool


class XmlParameters:
    """Parses the parameters of one call by the schema of its tool; the caller writes the `{` of the arguments."""

    def __init__(self, schema: Mapping[str, Any], markup: ParameterMarkup = MARKUP["qwen"]) -> None:
        self._schema, self._markup = schema, markup
        named = schema.get("properties")
        self._named: Mapping[str, Any] = named if isinstance(named, dict) else {}
        self._value: StreamedValue | None = None
        self._lead = ""  # separator before the next key
        self._complete = False
        self._out: list[str]  # of the chunk

    def feed(self, text: str, *, last: bool, cut: bool) -> XmlChunk:
        """Parse more text; unconsumed text is passed again with more. The `last` chunk may be `cut` off."""
        self._out, at = [], 0
        stop: int | None = 0
        while stop is not None and not self._complete:
            at = stop
            stop = self._key(text, at) if self._value is None else self._end(text, at, self._value)
        used = self._rest(text, at, last=last, cut=cut) if stop is None else stop
        return XmlChunk("".join(self._out), used, self._complete)

    def _key(self, text: str, at: int) -> int | None:
        """Return where the value of the next parameter begins, or the call ends; None if neither is there yet."""
        match = self._markup.next.match(text, at)
        if match is None:
            return None
        if match["key"] is None:
            self._close()
        else:
            key = match["key"].strip()
            self._out.append(f"{self._lead}{replace_surrogates(json.dumps(key, ensure_ascii=False))}: ")
            self._lead = ", "
            self._value = StreamedValue(self._kinds(match, key), breaks_lines=self._markup.breaks_lines)
        return match.end()

    def _kinds(self, match: re.Match[str], key: str) -> frozenset[str]:
        """Return the types of a parameter: those of the schema, unless the markup says whether it is text."""
        is_text = match.groupdict().get("string")
        if is_text == "true":
            return frozenset({"string"})
        kinds = schema_types(self._named.get(key), self._schema)
        return kinds or (_ANY if is_text == "false" else kinds)

    def _end(self, text: str, at: int, value: StreamedValue) -> int | None:
        """Return where a value ends; None if it continues."""
        match = self._markup.end.search(text, at)
        if match is None:
            return None
        self._out += [value.add(text[at : match.start()]), value.end()]
        self._value = None
        return match.end()

    def _close(self) -> None:
        self._out.append("}")
        self._complete = True

    def _rest(self, text: str, at: int, *, last: bool, cut: bool) -> int:
        """Handle the end of the text; return how much was consumed."""
        if self._value is None:
            if self._markup.maybe_next.fullmatch(text, at) and (cut or not last):
                return len(text) if last else at
            self._close()  # forgotten by the model
            return at
        if last and not cut:
            rest = text[at:].removesuffix("\n") if self._markup.breaks_lines else text[at:]
            self._out += [self._value.add(rest), self._value.end()]
            self._close()
            return len(text)
        partial = self._markup.maybe_end.search(text, max(at, len(text) - self._markup.longest_end))
        assert partial is not None, "it may match nothing"
        self._out.append(self._value.add(text[at : partial.start()]))
        return len(text) if last else partial.start()
