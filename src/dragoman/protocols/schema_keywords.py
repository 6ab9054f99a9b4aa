"""Keywords of JSON Schema that structured output cannot enforce: find and remove them before a schema is compiled."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

from dragoman.core.documents import parse_json

# Keywords that the grammar compiler has no rule for.
_NOT_ENFORCED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "uniqueItems",
)
# Values of these keywords that constrain nothing.
_NEUTRAL: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "int32", "int64")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
# Look-around, back-references and word boundaries, or an escape or character class to skip.
_PATTERN_PART = re.compile(r"(?P<bad>\(\?<?[=!]|\(\?P=|\\[1-9kbB])|\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
# Most schemas have none of these and need no second look.
_MENTIONS = re.compile(rf'"(?:{"|".join(_NOT_ENFORCED)}|format|pattern|oneOf|multipleOf|m(?:in|ax)Properties)"')
# llguidance counts the digits of a multiple in 32 bits.
_MAX_STEP = ((1 << 32) - 1) // 10
# Longer schemas are left to the compiler, which by default rejects shorter ones.
_MAX_CHARACTERS = 1 << 20
# Maximum number of pairs of alternatives of "oneOf" that are compared, in one schema.
_MAX_PAIRS = 2048
_MAX_DEPTH = 8


def remove_unenforced(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a JSON schema without keywords that cannot be enforced, and the names of those.

    "oneOf" is compiled as "anyOf"; it is named unless its alternatives are disjoint.
    """
    if len(text) > _MAX_CHARACTERS or not _MENTIONS.search(text):
        return text, ()
    schema: dict[str, Any] = parse_json(text)
    removal = _Removal(schema)
    reduced = removal.reduce(schema)
    if removal.has_one_of:
        options = schema.get("x-guidance")
        options = options if isinstance(options, dict) else {}
        reduced = {**reduced, "x-guidance": {"coerce_one_of": True, **options}}
    elif not removal.changed:
        return text, ()
    return json.dumps(reduced), tuple(removal.names)


class _Removal:
    """State of one removal. names: keywords that are not enforced, in the order in which they were found."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._pairs = 0
        self._values: dict[int, set[str] | None] = {}
        # The least common multiple of the steps so far, since several may apply to one number, and its digits.
        self._step, self._digits = Fraction(1), 0
        self.names: dict[str, None] = {}
        self.has_one_of = self.changed = False

    def reduce(self, schema: dict[str, Any]) -> dict[str, Any]:
        dropped = dict.fromkeys(self._keywords_to_drop(schema))
        reduced = {name: value for name, value in schema.items() if name not in dropped}
        self.changed = self.changed or bool(dropped)
        if isinstance(schema.get("oneOf"), list):
            self.has_one_of = True
            if not self._are_disjoint(schema["oneOf"]):
                self.names["oneOf"] = None
        for name in _MAPS:
            if isinstance(reduced.get(name), dict):
                reduced[name] = {key: self._reduce_any(value) for key, value in reduced[name].items()}
        for name in _LISTS:
            if isinstance(reduced.get(name), list):
                reduced[name] = [self._reduce_any(value) for value in reduced[name]]
        for name in _SCHEMAS:
            if name in reduced:
                reduced[name] = self._reduce_any(reduced[name])
        return reduced

    def _reduce_any(self, value: Any) -> Any:
        return self.reduce(value) if isinstance(value, dict) else value

    def _keywords_to_drop(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield the keywords of a schema to drop, and note those whose absence allows more texts."""
        for name in _NOT_ENFORCED:
            if name in schema:
                if schema[name] is not _NEUTRAL.get(name):
                    self.names[name] = None
                yield name
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            self.names["format"] = None
            yield "format"
        if isinstance(schema.get("pattern"), str) and _has_unsupported_part(schema["pattern"]):
            self.names["pattern"] = None
            yield "pattern"
        if "multipleOf" in schema and not self._is_exact_step(schema["multipleOf"]):
            self.names["multipleOf"] = None
            yield "multipleOf"
        yield from self._counts_to_drop(schema)

    def _is_exact_step(self, step: Any) -> bool:
        """Return whether llguidance, which counts in doubles and in 32 bits, enforces a step as it is."""
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            return True  # rejected with its own message
        exact = abs(Fraction(Decimal(repr(step))))
        digits, double = 0, abs(float(step))
        while double != math.floor(double) and digits < 20:
            double, digits = double * 10, digits + 1
        numerator = math.lcm(exact.numerator, self._step.numerator)
        common = Fraction(numerator, math.gcd(exact.denominator, self._step.denominator))
        most_digits = max(digits, self._digits)
        if double != exact * 10**digits or common * 10**most_digits > _MAX_STEP:
            return False
        self._step, self._digits = common or self._step, most_digits
        return True

    def _counts_to_drop(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield bounds on the number of properties: with optional ones, only those that hold anyway are enforced."""
        properties, required = _properties(schema), schema.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        if properties.keys() <= set(required):
            return
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        if _is_count(most):
            if not (is_closed and most >= len(properties)):
                self.names["maxProperties"] = None
            yield "maxProperties"
        if _is_count(least):
            if least > len(set(required)) and not (is_closed and least == 1):
                self.names["minProperties"] = None
                yield "minProperties"
            elif least <= len(set(required)):
                yield "minProperties"

    # --- oneOf -------------------------------------------------------------------------------------------

    def _are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Return whether no value can satisfy two of the schemas, as far as their types and constants show."""
        return all(self._exclude(a, b, _MAX_DEPTH) for i, a in enumerate(schemas) for b in schemas[:i])

    def _exclude(self, a: Any, b: Any, depth: int) -> bool:
        self._pairs += 1
        if self._pairs > _MAX_PAIRS:
            return False
        a, b = self._resolve(a), self._resolve(b)
        if not depth or not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        values_a, values_b = self._constants(a), self._constants(b)
        if values_a is not None and values_b is not None:
            return values_a.isdisjoint(values_b)
        types = _types(a) & _types(b)
        if not types:
            return True
        if types != {"object"}:
            return False
        needed = [
            set(map(str, schema["required"] if isinstance(schema.get("required"), list) else ())) for schema in (a, b)
        ]
        properties = [_properties(schema) for schema in (a, b)]
        common = needed[0] & needed[1] & properties[0].keys() & properties[1].keys()
        return any(self._exclude(properties[0][name], properties[1][name], depth - 1) for name in sorted(common)[:16])

    def _constants(self, schema: Mapping[str, Any]) -> set[str] | None:
        if id(schema) not in self._values:
            self._values[id(schema)] = _constants(schema)
        return self._values[id(schema)]

    def _resolve(self, schema: Any) -> Any:
        """Follow "$ref" to a JSON pointer in this schema."""
        for _ in range(_MAX_DEPTH):
            pointer = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(pointer, str) or not pointer.startswith("#/"):
                return schema
            schema = self._root
            for part in pointer[2:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(part) if isinstance(schema, Mapping) else None
        return schema


def _has_unsupported_part(pattern: str) -> bool:
    return any(part["bad"] for part in _PATTERN_PART.finditer(pattern))


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _constants(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the only values that a schema allows, as JSON; None if it does not list them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_ALL_TYPES = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
_TYPES_OF: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of values that a schema may allow; "number" is "integer" and "fraction"."""
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names
    types = _ALL_TYPES
    if isinstance(names, list):
        types &= {*filter(_ALL_TYPES.__contains__, names), *(("integer", "fraction") if "number" in names else ())}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= {_TYPES_OF.get(type(_plain(value)), "fraction") for value in values}
    return types
