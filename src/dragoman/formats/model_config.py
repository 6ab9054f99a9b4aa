"""Triton's model configuration: the text format of `config.pbtxt`, with the line of each field, and its JSON form."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.formats import grpc_messages as m

WIDE_INTEGERS = (2, 4)  # FieldDescriptor.CPPTYPE_INT64 and CPPTYPE_UINT64
_TOKEN = re.compile(r"""\s+|\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|.""", re.DOTALL)
_NO_SUCH_FIELD = re.compile(r'has no field named "([^"]+)"')
_OPENING, _CLOSING = "{<[", "}>]"
_MAX_DEPTH = 64  # of messages and lists; Triton's have a tenth of it
_MAX_UNKNOWN = 100  # fields that are skipped and named before the file is rejected


class ConfigFile(msgspec.Struct, frozen=True):
    """A parsed `config.pbtxt`. message: the ModelConfig. unknown: names and lines of fields that are not in its schema.

    lines: the line of each field, by its path, such as `input[1].dims`; indices of 0 are left out.
    """

    name: str
    message: Any
    unknown: tuple[tuple[str, int], ...] = ()
    lines: Mapping[str, int] = msgspec.field(default_factory=dict)

    def error(self, path: str, text: str) -> InvalidInput:
        """Return an error at a field. The line is that of the field, or of the nearest field around it."""
        return InvalidInput(f"{self.name}:{self.line(path)}: field '{path}': {text}")

    def line(self, path: str) -> int:
        around = path.replace("[0]", "")
        while around and around not in self.lines:
            around = around.rpartition(".")[0]
        return self.lines.get(around, 1)


def parse_config(text: str, name: str) -> ConfigFile:
    """Parse the text format. Unknown fields are left out. Raises InvalidInput with the line and column of an error."""
    from google.protobuf import text_format

    lines = _lines(text, name)
    unknown: list[tuple[str, int]] = []
    for _ in range(_MAX_UNKNOWN):
        try:
            return ConfigFile(name, text_format.Parse(text, m.ModelConfig()), tuple(unknown), lines)
        except text_format.ParseError as error:
            line, column = error.GetLine() or 1, error.GetColumn() or 1
            match = _NO_SUCH_FIELD.search(str(error))
            if match is None:
                raise InvalidInput(f"{name}:{line}:{column}: {_reason(error)}") from error
            unknown.append((match[1], line))
            text = _without_field(text, line, column)
    raise InvalidInput(f"{name}: expected the fields of Triton's ModelConfig, got over {_MAX_UNKNOWN} other fields")


def config_from_json(fields: Mapping[str, Any], name: str) -> Any:
    """Return the ModelConfig of its JSON form. Raises InvalidInput."""
    from google.protobuf.json_format import ParseDict, ParseError  # few servers need it, and each start would wait

    try:
        return ParseDict(dict(fields), m.ModelConfig())
    except ParseError as error:
        raise InvalidInput(f"{name}: {error}") from error


def config_json(config: Any) -> dict[str, Any]:
    """Return a ModelConfig as JSON with Triton's names: all plain fields, and 64-bit integers as numbers."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(fields, config.DESCRIPTOR)


def _with_numbers(fields: dict[str, Any], message: Any) -> dict[str, Any]:
    """Return the JSON of a message with its 64-bit integers as numbers, which protobuf writes as strings."""
    return {name: _value(value, message.fields_by_name[name]) for name, value in fields.items()}


def _value(value: Any, field: Any) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return {key: _value(each, entry.fields_by_name["value"]) for key, each in value.items()}
    if isinstance(value, list):
        return [_scalar(each, field) for each in value]
    return _scalar(value, field)


def _scalar(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    return int(value) if field.cpp_type in WIDE_INTEGERS else value


# --- positions in the text -------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    """Return the message of an error without its position."""
    return re.sub(r"^\d+:\d+ : ", "", str(error))


def _tokens(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield position and text of each token from a position on, without blanks and comments."""
    for match in _TOKEN.finditer(text, start):
        symbol = match[0]
        if not symbol.isspace() and not symbol.startswith("#"):
            yield match.start(), symbol


def _without_field(text: str, line: int, column: int) -> str:
    """Return the text with the field at a position blanked, so that all others keep their lines."""
    start = sum(len(each) for each in text.splitlines(keepends=True)[: line - 1]) + column - 1
    tokens = _tokens(text, start)
    _, name = next(tokens)
    end, depth, is_valued = start + len(name), 0, False
    for position, symbol in tokens:
        if not depth and is_valued and symbol[0] not in "\"'":  # adjacent strings are one value
            break
        if symbol in _OPENING:
            depth += 1
        elif symbol in _CLOSING:
            if not depth:
                break
            depth -= 1
        end = position + len(symbol)
        is_valued = symbol != ":" and not depth
        if is_valued and symbol in _CLOSING:
            break
    blank = "".join(c if c == "\n" else " " for c in text[start:end])
    return text[:start] + blank + text[end:]


def _lines(text: str, file: str) -> dict[str, int]:
    """Return the line of each field, by its path; elements of repeated messages have indices.

    Raises InvalidInput for deep nesting.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    stack: list[tuple[str, bool]] = []  # path of the message or list around, and whether it is a list
    name, line, last = "", 1, 0
    for position, symbol in _tokens(text):
        line, last = line + text.count("\n", last, position), position
        around, is_list = stack[-1] if stack else ("", False)
        prefix = around.rpartition(".")[0] if is_list else around
        if len(stack) > _MAX_DEPTH:
            raise InvalidInput(f"{file}:{line}: expected at most {_MAX_DEPTH} messages within each other, got more")
        if symbol == "[":
            stack.append((f"{prefix}.{name}".lstrip("."), True))
        elif symbol in "{<":
            path = around if is_list else f"{prefix}.{name}".lstrip(".")
            number = counts.get(path, 0)
            counts[path] = number + 1
            path += f"[{number}]" if number else ""
            lines.setdefault(path, line)
            stack.append((path, False))
        elif symbol in _CLOSING:
            if stack:
                stack.pop()
        elif not is_list and re.match(r"[A-Za-z_]\w*$", symbol):
            name = symbol  # also enum values: a field of that name does no harm
            lines.setdefault(f"{around}.{name}".lstrip("."), line)
    return lines
