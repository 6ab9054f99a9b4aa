"""Large numbers in JSON schemas: grammars in the format of Lark in which they are literal text or exact ranges.

llguidance keeps the numbers of a schema as doubles, so an integer beyond 2**53 in "const", "enum" or a bound would be
rounded, and the rounded value enforced. The parts of a schema that contain such numbers are written as rules; all other
parts remain JSON schemas inside them.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dragoman_text.generation.gbnf import literal

# Integers up to this one are exact as doubles.
_EXACT = 1 << 53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords that constrain nothing.
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "$comment", "$id", "$schema", "$anchor", "format"),
        *("deprecated", "readOnly", "writeOnly", "$defs", "definitions", "x-guidance", "nullable"),
    )
)
# Those of each kind of schema that can be written as rules.
_OF_NUMBERS = frozenset(("type", *_BOUNDS))
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_OF_ARRAYS = frozenset(("type", "items", "minItems", "maxItems"))
_SPACE = r"[ \t\r\n]*"
_SEPARATORS = (("item", ","), ("key", ":"))
_FRACTION = r"(\.[0-9]+)?"
_UNSATISFIABLE = "no JSON text satisfies the schema"


def has_large_numbers(schema: Any) -> bool:
    """Return whether a schema, or one of its parts or definitions, has a number that llguidance would round."""
    if isinstance(schema, list):
        return any(map(has_large_numbers, schema))
    if not isinstance(schema, Mapping):
        return False
    definitions = (schema.get(name) for name in ("$defs", "definitions"))
    parts = [*_parts(schema), *(each for some in definitions if isinstance(some, Mapping) for each in some.values())]
    return _has_own(schema) or any(map(has_large_numbers, parts))


def to_lark(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the grammar of a schema, whose white space and separators follow llguidance's options ("x-guidance").

    Raises ValueError naming the keywords that cannot be combined with large numbers.
    """
    writer = _Writer(schema, options)
    start = writer.write(schema)
    return "\n".join([f"start: {start}", *writer.rules])


class _Writer:
    """rules: lines of Lark."""

    def __init__(self, root: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._root = root
        pattern = options.get("whitespace_pattern", _SPACE) if options.get("whitespace_flexible", True) else ""
        self._space = "space" if pattern else ""  # its rule
        self._comma, self._colon = (self._sign(options.get(f"{kind}_separator", sign)) for kind, sign in _SEPARATORS)
        self._definitions = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
        self._references: dict[str, str] = {}
        self._contains: dict[int, tuple[Any, bool]] = {}  # by the id of a schema: the schema, and the result
        self.rules: list[str] = [f"space: /{pattern}/?"] if pattern else []

    def write(self, schema: Any) -> str:
        """Return the name of a rule for a schema."""
        if not isinstance(schema, Mapping) or not self._has_large(schema):
            if schema is False:
                raise ValueError(_UNSATISFIABLE)
            return self._plain(schema if isinstance(schema, Mapping) else {})
        if "$ref" in schema:
            self._check(schema, frozenset(("$ref",)))
            return self._reference(str(schema["$ref"]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                self._check(schema, frozenset((name, "type")))
                own = {"type": schema["type"]} if "type" in schema else {}
                possible = [each for each in schema[name] if each is not False]
                return self._choice([self.write(_with_type(each, own)) for each in possible])
        if "const" in schema or "enum" in schema:
            return self._values(schema)
        types = schema.get("type", [*_TYPES])
        types = [types] if isinstance(types, str) else list(types)
        return self._choice([self._typed(schema, str(kind)) for kind in types])

    def _typed(self, schema: Mapping[str, Any], kind: str) -> str:
        match kind:
            case "integer" | "number" if any(map(_is_large, _bounds(schema))):
                return self._numbers(schema, is_integer=kind == "integer")
            case "object" if any(map(self._has_large, _parts(schema, _MAPS, (), _SCHEMAS[1:]))):
                return self._object(schema)
            case "array" if any(map(self._has_large, _parts(schema, (), _LISTS[3:], _SCHEMAS))):
                return self._array(schema)
        of_numbers = kind in ("integer", "number")
        plain = {name: each for name, each in schema.items() if of_numbers or name not in _BOUNDS} | {"type": kind}
        if self._has_large(plain):
            self._check(schema, _OF_NUMBERS | _OF_OBJECTS | _OF_ARRAYS)
        return self._plain(plain)

    def _plain(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({**self._definitions, **schema})}")

    # --- values and numbers ------------------------------------------------------------------------------------

    def _values(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for the values of "const" or "enum" that the other keywords allow."""
        name = "const" if "const" in schema else "enum"
        self._check(schema, frozenset((name, *_OF_NUMBERS)))
        values = [schema[name]] if name == "const" else schema[name]
        allowed = [value for value in values if _allows(schema, value)]
        if not allowed:
            raise ValueError(_UNSATISFIABLE)
        large = [literal(json.dumps(value, ensure_ascii=False)) for value in allowed if _is_rounded(value)]
        plain = [value for value in allowed if not _is_rounded(value)]
        return self._choice([*large, *([self._plain({"enum": plain})] if plain else [])])

    def _numbers(self, schema: Mapping[str, Any], *, is_integer: bool) -> str:
        self._check(schema, _OF_NUMBERS)
        least, most = _range(schema)
        if least is not None and most is not None and least > most:
            raise ValueError(f"no number is from {least} to {most}")
        whole = "|".join(_integers(least, most))
        if is_integer:
            return self._rule(f"/{whole}/")
        # With a fraction: beside it the whole part must leave room up to the bound.
        positive = "|".join(_integers(max(least or 0, 0), None if most is None else most - 1))
        negative = "|".join(_integers(None if least is None else least + 1, min(most or 0, 0), zero="-0"))
        fractions = [f"({part}){_FRACTION}" for part in (positive, negative) if part]
        return self._rule(f"/{'|'.join([whole, *fractions])}/")

    # --- objects and arrays --------------------------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for an object with its properties in their order, and no others."""
        self._check(schema, _OF_OBJECTS)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties") not in (None, False) or not set(required) <= properties.keys():
            raise ValueError(
                'numbers beyond 2**53 cannot be enforced in an object with other properties than those in "properties"'
            )
        fields = [
            (f"{literal(json.dumps(name, ensure_ascii=False))} {self._colon} {self.write(each)}", name in required)
            for name, each in properties.items()
        ]
        return self._rule(f'"{{" {self._space} {self._sequence(fields)} {self._space} "}}"')

    def _array(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, _OF_ARRAYS)
        item, least, most = self.write(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = "" if most == 0 else f"{item} ({self._comma} {item}){more}"
        return self._rule(f'"[" {self._space} {items if least or not items else f"({items})?"} {self._space} "]"')

    def _sequence(self, fields: Sequence[tuple[str, bool]]) -> str:
        """Return the symbols for fields in their order, separated by commas; a field is required or optional."""
        first = later = ""  # what may follow, without and with fields before it
        for field, is_required in reversed(fields):
            alone, after = f"{field} {later}", f"{self._comma} {field} {later}"
            first = self._rule(alone if is_required else f"{alone} | {first}" if first else f"({alone})?")
            later = self._rule(after if is_required else f"{after} | {later}" if later else f"({after})?")
        return first

    def _sign(self, sign: str) -> str:
        return f"{self._space} {literal(sign)} {self._space}"

    # --- rules -------------------------------------------------------------------------------------------------

    def _reference(self, pointer: str) -> str:
        if pointer not in self._references:
            target = self._resolve(pointer)
            name = self._references[pointer] = f"reference_{len(self._references)}"
            self.rules.append(f"{name}: {self.write(target)}")
        return self._references[pointer]

    def _resolve(self, pointer: str) -> Any:
        target: Any = self._root
        for part in pointer.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target[int(part)] if isinstance(target, list) and part.isdecimal() else target.get(part)
        return target

    def _has_large(self, schema: Any) -> bool:
        """Return whether a schema, one of its parts or what they refer to has large numbers."""
        if not isinstance(schema, Mapping):
            return False
        if id(schema) not in self._contains:
            self._contains[id(schema)] = schema, False  # of a reference to itself
            pointer = schema.get("$ref")
            parts = [*_parts(schema), *([self._resolve(pointer)] if isinstance(pointer, str) else [])]
            self._contains[id(schema)] = schema, _has_own(schema) or any(map(self._has_large, parts))
        return self._contains[id(schema)][1]

    def _check(self, schema: Mapping[str, Any], supported: frozenset[str]) -> None:
        others = sorted(schema.keys() - supported - _ANNOTATIONS)
        if others:
            names = ", ".join(f'"{name}"' for name in others)
            raise ValueError(
                f"numbers beyond 2**53 cannot be enforced beside {names}: send them as strings, or leave these out"
            )

    def _choice(self, options: Sequence[str]) -> str:
        return options[0] if len(options) == 1 else self._rule(" | ".join(options))

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _with_type(schema: Any, own: Mapping[str, Any]) -> Any:
    """Return an alternative with the type that is stated beside the alternatives, unless it has its own."""
    return {**own, **schema} if isinstance(schema, Mapping) and "$ref" not in schema else schema


def _parts(
    schema: Mapping[str, Any],
    maps: Sequence[str] = _MAPS,
    lists: Sequence[str] = _LISTS,
    schemas: Sequence[str] = _SCHEMAS,
) -> Iterator[Any]:
    """Yield the subschemas of a schema, without its definitions."""
    for name in maps:
        if isinstance(schema.get(name), Mapping):
            yield from schema[name].values()
    for name in lists:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in schemas:
        if isinstance(schema.get(name), Mapping):
            yield schema[name]


def _has_own(schema: Mapping[str, Any]) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return any(map(_is_large, _bounds(schema))) or (isinstance(values, list) and any(map(_is_rounded, values)))


def _bounds(schema: Mapping[str, Any]) -> list[Any]:
    return [schema.get(name) for name in _BOUNDS]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_large(bound: Any) -> bool:
    return _is_number(bound) and abs(bound) > _EXACT


def _is_rounded(value: Any) -> bool:
    """Return whether a value has an integer that a double cannot represent."""
    if isinstance(value, Mapping):
        return any(map(_is_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_is_rounded, value))
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether the type and the bounds of a schema allow a value."""
    types = schema.get("type", [*_TYPES])
    types = [types] if isinstance(types, str) else types
    if not _is_number(value):
        of_value = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}[type(value)]
        return of_value in types
    if "number" not in types and not ("integer" in types and (isinstance(value, int) or value.is_integer())):
        return False
    least, most, above, below = _bounds(schema)
    return (
        (not _is_number(least) or value >= least)
        and (not _is_number(most) or value <= most)
        and (not _is_number(above) or value > above)
        and (not _is_number(below) or value < below)
    )


def _range(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that the bounds allow, None without a bound."""
    least, most, above, below = _bounds(schema)
    lower = [math.ceil(least)] if _is_number(least) else []
    lower += [math.floor(above) + 1] if _is_number(above) else []
    upper = [math.floor(most)] if _is_number(most) else []
    upper += [math.ceil(below) - 1] if _is_number(below) else []
    return max(lower, default=None), min(upper, default=None)


def _integers(least: int | None, most: int | None, zero: str = "") -> Iterator[str]:
    """Yield regular expressions of the integers in a range, negative ones and then others. `zero`: text for 0 if the
    range ends there, for the whole part of a negative fraction."""
    if least is None or least < 0:
        smallest = None if least is None else -least
        largest = 1 if most is None or most >= 0 else -most
        yield from (f"-{part}" for part in _natural(largest, smallest))
        if zero and (most is None or most >= 0):
            yield zero
    if not zero and (most is None or most >= 0):
        yield from _natural(max(least or 0, 0), most)


def _natural(least: int, most: int | None) -> Iterator[str]:
    """Yield regular expressions of the integers from `least`, not negative, to `most`."""
    if most is None:
        digits = len(str(least))
        yield from _natural(least, 10**digits - 1)
        yield f"[1-9][0-9]{{{digits},}}"
        return
    while least <= most:
        digits = len(str(least))
        end = min(most, 10**digits - 1)
        yield from _of_length(str(least), str(end))
        least = 10**digits


def _of_length(least: str, most: str) -> Iterator[str]:
    """Yield regular expressions of the integers between two of the same number of digits."""
    common = next((i for i, (a, b) in enumerate(zip(least, most, strict=True)) if a != b), len(least))
    head, low, high = least[:common], least[common:], most[common:]
    if not low:
        yield head
        return
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        yield f"{head}{_digits(low[0], high[0])}{_any(rest)}"
        return
    yield from (f"{head}{part}" for part in _of_length(low, low[0] + "9" * rest))
    if int(high[0]) - int(low[0]) > 1:
        yield f"{head}{_digits(str(int(low[0]) + 1), str(int(high[0]) - 1))}{_any(rest)}"
    yield from (f"{head}{part}" for part in _of_length(high[0] + "0" * rest, high))


def _digits(first: str, last: str) -> str:
    return first if first == last else f"[{first}-{last}]"


def _any(count: int) -> str:
    return "" if not count else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"
