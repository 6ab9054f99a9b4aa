"""Prepare JSON schemas for grammars: bound white space and properties, keep large numbers exact, reject schemas without
finite instances."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from dragoman.core.documents import parse_json
from dragoman_text.generation import exact_numbers

# White space between the parts of JSON: none, a space, or a line break with indentation. JSON allows more, which small
# models may repeat to the end.
_SPACE = r"(?: |\r?\n(?: {0,16}|\t{0,8}))?"

# The one form of JSON with the parameter `compact_json`: that of Python's json, which models have read most.
_COMPACT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Keys of "x-guidance": those for which the text stays JSON with any value, and those whose value must match a pattern.
_SWITCHES = ("whitespace_flexible", "coerce_one_of", "lenient", "json_allow_general_unicode_escapes")
_BLANK = r"(?:\\[ntr]|[ \t\r\n])"
_FORMS = {
    "whitespace_pattern": re.compile(rf"(?:{_BLANK}|\[{_BLANK}+\]|\(\?:|[()|?*+]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})*"),
    "item_separator": re.compile(r"[ \t\r\n]*,[ \t\r\n]*"),
    "key_separator": re.compile(r"[ \t\r\n]*:[ \t\r\n]*"),
}
# Maximum number of passes over the schema; parts that are still undecided count as finite.
_ROUNDS = 32

_Schema = Mapping[str, Any]


def json_grammar(text: str, *, compact: bool = False) -> tuple[str, str]:
    """Return the grammar of a JSON schema: "json_schema" or, if it has large numbers, "lark", and its text.

    White space is bounded, unless the schema specifies it itself; `compact`: it has one form. Raises ValueError if the
    schema is not a JSON object, cannot be satisfied by a finite text, allows text that is not JSON, or has large
    numbers where they cannot be enforced.
    """
    try:
        schema = parse_json(text)
        if not isinstance(schema, dict):
            raise ValueError("expected a JSON schema as an object")
        options = _checked_options(schema.get("x-guidance", {}))
        if not has_finite_instance(schema):
            raise ValueError('no finite JSON text satisfies the schema: its "$ref" is cyclic')
        if compact:
            options = {**_COMPACT, **options}
        elif not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
            options = {"whitespace_pattern": _SPACE, **options}
        schema = {**_name_patterns(close_objects(schema)), "x-guidance": options}
        if exact_numbers.has_large_numbers(schema):
            return "lark", exact_numbers.to_lark(schema, options)
        return "json_schema", json.dumps(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


# Keywords that bound the further properties of an object, and those with which several schemas apply to one object.
_BOUNDS = frozenset(("additionalProperties", "patternProperties", "minProperties", "maxProperties"))
_COMBINATIONS = ("anyOf", "oneOf", "$ref", "const", "enum")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without further properties in objects that list theirs, unless it says something about them.

    Every text is still valid for the original. Small models would otherwise add properties up to the last token. A
    schema that applies several schemas to one object is returned unchanged, since each would exclude the others.
    """
    try:
        return _close(schema)
    except _Combined:
        return schema


class _Combined(Exception):
    """Several schemas apply to one object."""


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    names = schema.keys() & {"properties", "required"}
    if "allOf" in schema or (names and any(name in schema for name in _COMBINATIONS)):
        raise _Combined
    closed = dict(schema)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _close_value(value) for key, value in schema[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems", "items", "additionalProperties"):
        if name in schema:
            value = schema[name]
            closed[name] = [*map(_close_value, value)] if isinstance(value, list) else _close_value(value)
    if isinstance(properties, dict) and properties and schema.keys().isdisjoint(_BOUNDS):
        required = schema.get("required", [])
        if isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required):
            closed["additionalProperties"] = False
    return closed


def _close_value(value: Any) -> Any:
    return _close(value) if isinstance(value, dict) else value


# A pattern of property names that lists them.
_NAMES = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$", re.ASCII)


def _name_patterns(schema: Any) -> Any:
    """Return the schema with "properties" instead of "patternProperties" whose pattern lists names, such as "^a$".

    If such a name is a property too, no other one matches the pattern, and llguidance would come to a dead end after a
    comma.
    """
    if isinstance(schema, list):
        return [_name_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = {name: value if name in ("const", "enum") else _name_patterns(value) for name, value in schema.items()}
    properties, patterns = named.get("properties", {}), named.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return named
    listed = {pattern: match[1] or match[2] for pattern in patterns if (match := _NAMES.fullmatch(pattern))}
    if not listed:
        return named
    for pattern, names in listed.items():
        for name in names.split("|"):
            own, other = properties.get(name), patterns[pattern]
            both = other if own is None or own is True or own == other else {"allOf": [own, other]}
            properties = {**properties, name: both}
    rest = {pattern: value for pattern, value in patterns.items() if pattern not in listed}
    return {**named, "properties": properties, "patternProperties": rest}


def _checked_options(options: Any) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise ValueError(f'"x-guidance": expected an object, got {type(options).__name__}')
    for name, value in options.items():
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f'"x-guidance": expected true or false for "{name}", got {value!r}')
        elif name not in _FORMS:
            raise ValueError(f'"x-guidance": expected one of {", ".join((*_SWITCHES, *_FORMS))}, got "{name}"')
        elif not isinstance(value, str) or not _FORMS[name].fullmatch(value):
            raise ValueError(f'"x-guidance": "{name}" would allow text that is not JSON, got {value!r}')
    return options


def has_finite_instance(schema: _Schema) -> bool:
    """Return whether a finite JSON value can satisfy the schema, considering only cyclic references.

    Least fixed point over all subschemas: one is finite if those that it requires are. Other keywords count as
    satisfiable; the grammar compiler detects contradictions.
    """
    schemas = {id(schema): schema}
    order = [schema]
    for node in order:  # grows during iteration
        for part in _dependencies(node, schema):
            if id(part) not in schemas:
                schemas[id(part)] = part
                order.append(part)
    finite: set[int] = set()
    for _ in range(_ROUNDS):
        before = len(finite)
        for node in reversed(order):
            if id(node) not in finite and _is_finite(node, schema, finite):
                finite.add(id(node))
        if id(schema) in finite:
            return True
        if len(finite) == before:
            return False
    return True


def _dependencies(node: _Schema, root: _Schema) -> Iterator[_Schema]:
    """Yield the subschemas that decide whether this one is finite."""
    target = _resolve_reference(node, root)
    if target is not None:
        yield target
    for name in ("anyOf", "oneOf", "allOf"):
        yield from _subschemas(node, name)
    yield from _required_properties(node)
    yield from _required_items(node)


def _is_finite(node: _Schema, root: _Schema, finite: set[int]) -> bool:
    if "const" in node or "enum" in node:
        return True
    target = _resolve_reference(node, root)
    if target is not None and id(target) not in finite:
        return False
    for name in ("anyOf", "oneOf"):
        options = node.get(name)
        if not isinstance(options, list) or not options or not all(isinstance(each, dict) for each in options):
            continue
        if not any(id(each) in finite for each in options):
            return False
    if any(id(each) not in finite for each in _subschemas(node, "allOf")):
        return False
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds:
        return True
    needed = {"object": _required_properties, "array": _required_items}
    return any(
        kind not in needed or all(id(each) in finite for each in needed[kind](node))
        for kind in kinds
        if isinstance(kind, str)
    )


def _resolve_reference(node: _Schema, root: _Schema) -> _Schema | None:
    """Return the target of "$ref"; None if there is none, or it is not a JSON pointer into this schema."""
    pointer = node.get("$ref")
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        return None
    target: Any = root
    for name in unquote(pointer).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target if isinstance(target, dict) else None


def _subschemas(node: _Schema, name: str) -> list[_Schema]:
    value = node.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _required_properties(node: _Schema) -> Iterator[_Schema]:
    """Yield the schemas of required properties of an object."""
    names, properties, others = node.get("required"), node.get("properties"), node.get("additionalProperties")
    properties = properties if isinstance(properties, dict) else {}
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str):
            continue
        schema = properties.get(name, others if "patternProperties" not in node else None)
        if isinstance(schema, dict):
            yield schema


def _required_items(node: _Schema) -> Iterator[_Schema]:
    """Yield the schemas of required items of an array."""
    least, first, others = node.get("minItems"), node.get("prefixItems"), node.get("items")
    if not isinstance(least, int):
        return
    first = first if isinstance(first, list) else []
    yield from (each for each in first[:least] if isinstance(each, dict))
    if least > len(first) and isinstance(others, dict):
        yield others
