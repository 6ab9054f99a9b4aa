"""Grammars as they are written for llguidance, by value: each with its whole text or error, as kept in `grammars.txt`.

Set DRAGOMAN_TEST_WRITE=1 to write the file anew after a change that is meant, and read what `git diff` shows.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman_text.generation import exact_numbers, gbnf, json_schema, structural_tags

FILE = Path(__file__).parent / "grammars.txt"
LARGE = 2**53 + 1


def _outcome(write: Callable[[], Any]) -> str:
    try:
        return str(write())
    except ValueError as error:
        return f"error: {error}"


# --- GBNF ------------------------------------------------------------------------------------------------------------

GBNF = (
    'root ::= "a"',
    'root ::= "a" | "b" |\n other ::= "c"',
    'root ::= a b\na ::= [a-z]+\nb ::= "z"? # last',
    "root ::= ( | a)\na ::= .",
    'root ::= a-1 _b\na-1 ::= "x"\n_b::="y"',
    'root ::= "\\n\\r\\t\\"\\\\\\x41\\u00e9\\U0001F600\\q"',
    'root ::= "\x7f\u2028"',
    "root ::= [^a-z-] [-a] [a-] [\\]\\\\] [\\x41-\\x5a] [\u00e9]",
    'root ::= "a"{2} "b"{1,} "c"{,3} "d"{1,3} "e"{ 2 , 4 } "f"* "g"+',
    'other ::= root\nroot ::= "a"',
    "",
    "  # nothing\n",
    '"a"',
    "x y",
    'other ::= "a"',
    'root ::= "a"\nroot ::= "b"',
    "root ::= missing | absent",
    "root ::= []",
    "root ::= [^]",
    'root ::= "a"{}',
    'root ::= "a"{,}',
    'root ::= (= "a")',
    'root ::= "a\n"',
    'root ::= "a"\n\n ~ unexpected text that is long',
    'root ::= "\\ud800"',
    'root ::= "\\U00110000"',
    'root ::= "\\U0010ffff"',
)

# --- structural tags -------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object"}
WORD = {"type": "const_string", "value": "w"}
ANY = {"type": "any_text"}
TAG = {"type": "tag", "begin": "<a>", "content": WORD, "end": "</a>"}
OTHER = {"begin": "<b>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</b>"}
FORMS: tuple[Any, ...] = (
    WORD,
    ANY,
    TAG,
    {**TAG, "end": ""},
    {"type": "tag", "begin": "<a>", "content": ANY},
    {**TAG, "content": ANY},
    {**TAG, "end": 5},
    {**TAG, "begin": ""},
    {**TAG, "content": None},
    {"type": "json_schema", "json_schema": SCHEMA},
    {"type": "json_schema", "json_schema": {"const": LARGE}},
    {"type": "json_schema"},
    {"type": "regex", "pattern": "a/b\\/c\n\\\\/"},
    {"type": "regex", "pattern": 5},
    {"type": "grammar", "grammar": 'root ::= "a"'},
    {"type": "grammar", "grammar": ""},
    {"type": "sequence", "elements": [WORD]},
    {"type": "sequence", "elements": [WORD, TAG, ANY]},
    {"type": "sequence", "elements": [ANY, WORD]},
    {"type": "sequence", "elements": []},
    {"type": "sequence"},
    {"type": "or", "elements": [WORD, ANY]},
    {"type": "or", "elements": [WORD]},
    *({"type": kind, "content": WORD} for kind in ("optional", "plus", "star", "repeat")),
    {"type": "plus", "content": ANY},
    {"type": "repeat", "content": WORD, "min": 0, "max": 3},
    {"type": "repeat", "content": WORD, "min": 1, "max": -1},
    {"type": "repeat", "content": WORD, "min": 1, "max": -2},
    {"type": "repeat", "content": WORD, "min": True, "max": 2},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG, OTHER]},
    {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [TAG, OTHER]},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "at_least_one": True},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "stop_after_first": True},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "stop_after_first": True, "at_least_one": True},
    {"type": "triggered_tags", "triggers": [""], "tags": [TAG]},
    {"type": "triggered_tags", "triggers": [5], "tags": [TAG]},
    {"type": "triggered_tags", "triggers": ["<b"], "tags": [{**TAG, "begin": "<a" + "x" * 50}]},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [5]},
    {"type": "triggered_tags", "triggers": ["<"], "tags": []},
    {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]}, WORD]},
    {**TAG, "content": {"type": "triggered_tags", "triggers": ["<"], "tags": [OTHER]}},
    {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", "},
    {"type": "tags_with_separator", "tags": [TAG], "separator": "", "at_least_one": True},
    {"type": "tags_with_separator", "tags": [TAG], "stop_after_first": True},
    {"type": "tags_with_separator", "tags": [TAG], "stop_after_first": True, "at_least_one": True},
    {"type": "tags_with_separator", "tags": [TAG], "separator": 5},
    {"type": "tags_with_separator", "tags": [5]},
    {"type": "verse"},
    {},
    5,
)
STRUCTURES: tuple[Any, ...] = (
    {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]},
    {"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<"]},
    {"structures": [{"schema": SCHEMA}], "triggers": ["<"]},
    {"structures": [5], "triggers": ["<"]},
    {"structures": [], "triggers": []},
    {"structures": 5, "triggers": ["<"]},
    {},
    [],
)

# --- JSON schemas ----------------------------------------------------------------------------------------------------

NUMBER = {"const": LARGE}
SCHEMAS: tuple[Any, ...] = (
    {},
    True,
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {}}, "required": "a"},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"type": "object", "properties": {}},
    {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
    {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {"items": {"properties": {"c": {}}}}}}]},
    {"allOf": [{"properties": {"a": {}}}]},
    {"$defs": {"a": {"properties": {"b": {}}}}, "definitions": {"c": {"properties": {"d": {}}}}, "$ref": "#/$defs/a"},
    {
        "prefixItems": [{"properties": {"a": {}}}, True],
        "items": False,
        "additionalProperties": {"properties": {"b": {}}},
    },
    {
        "patternProperties": {"^(a|b)$": {"type": "integer"}, "^c-d$": True, "^x": {}},
        "properties": {"a": {"minimum": 1}},
    },
    {"patternProperties": {"^(?:a)$": {"type": "integer"}}, "properties": {"a": True}},
    {"patternProperties": {"^a$": {"type": "integer"}}, "properties": {"a": {"type": "integer"}}},
    {"const": {"patternProperties": {"^a$": 1}}},
    {"x-guidance": {"whitespace_flexible": False}},
    {"x-guidance": {"whitespace_pattern": "[ \\n]{0,3}", "item_separator": " , ", "key_separator": ":"}},
    {"x-guidance": {"whitespace_pattern": "a"}},
    {"x-guidance": {"item_separator": ";"}},
    {"x-guidance": {"key_separator": 5}},
    {"x-guidance": {"lenient": 1}},
    {"x-guidance": {"lenient": True, "coerce_one_of": False}},
    {"x-guidance": {"own": 1}},
    {"x-guidance": 5},
    {"$ref": "#"},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"type": ["array", "null"], "minItems": 1, "items": {"$ref": "#"}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "patternProperties": {"x": {}}, "required": ["a"]},
    {"anyOf": [{"$ref": "#"}, {"const": 1}]},
    {"oneOf": [{"$ref": "#"}]},
    {"allOf": [{"$ref": "#"}, {"const": 1}]},
    {"$ref": "#/$defs/a~1b/0", "$defs": {"a/b": [{"$ref": "#/$defs/a~1b/1"}, {"type": "null"}]}},
    {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}},
    {"$ref": "#/$defs/none"},
    {"$ref": "https://x.org/schema"},
    NUMBER,
    {"const": -LARGE},
    {"const": 2**53},
    {"const": True},
    {"enum": [LARGE, 1, "\u00e9", None, [LARGE], {"a": LARGE}]},
    {"enum": [LARGE, 5.0, 5.5, True, "a"], "type": ["integer", "string"]},
    {"enum": [LARGE, 5, 6, 7], "minimum": 5, "maximum": LARGE, "exclusiveMinimum": 5, "exclusiveMaximum": 7},
    {"enum": [LARGE], "maximum": 5},
    {"enum": [LARGE], "pattern": "a"},
    {"enum": [LARGE], "title": "t", "description": "d", "default": 1, "format": "f"},
    {"type": "integer", "minimum": LARGE},
    {"type": "integer", "maximum": -LARGE},
    {"type": "integer", "minimum": -LARGE, "maximum": LARGE},
    {"type": "integer", "minimum": 10**16, "maximum": 10**16 + 105},
    {"type": "integer", "exclusiveMinimum": LARGE, "exclusiveMaximum": LARGE + 2},
    {"type": "integer", "exclusiveMinimum": LARGE, "exclusiveMaximum": LARGE + 1},
    {"type": "integer", "minimum": 1.5, "maximum": 1e17},
    {"type": "number", "minimum": LARGE},
    {"type": "number", "maximum": -LARGE},
    {"type": "number", "minimum": 0, "maximum": LARGE},
    {"type": "number", "exclusiveMinimum": -LARGE},
    {"type": ["integer", "null"], "minimum": LARGE},
    {"type": "string", "minimum": LARGE},
    {"minimum": LARGE},
    {"minimum": LARGE, "pattern": "a"},
    {"type": "object", "properties": {"a": NUMBER, "\u00e9": {"type": "string"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": NUMBER, "c": {}}, "required": ["b"]},
    {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"], "additionalProperties": False},
    {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": {}},
    {"type": "object", "properties": {"a": NUMBER}, "required": ["b"]},
    {"type": "array", "items": NUMBER},
    {"type": "array", "items": NUMBER, "minItems": 1},
    {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": NUMBER, "maxItems": 0},
    {"type": "array", "items": NUMBER, "maxItems": 1},
    {"type": "array", "prefixItems": [NUMBER]},
    {"anyOf": [NUMBER, {"type": "string"}, False]},
    {"anyOf": [NUMBER, {"type": "string"}]},
    {"type": "object", "properties": {"a": NUMBER, "b": {"anyOf": [False, False]}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, NUMBER]}}},
    {"oneOf": [{"minimum": LARGE}, {"$ref": "#/$defs/a"}], "type": "integer", "$defs": {"a": {"type": "null"}}},
    {"allOf": [NUMBER]},
    {"not": NUMBER},
    {"$ref": "#/definitions/a", "definitions": {"a": NUMBER}},
    {"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": NUMBER}},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": NUMBER, "b": {}}},
    {
        "type": "object",
        "properties": {"id": NUMBER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["id"],
    },
    {**NUMBER, "x-guidance": {"whitespace_flexible": False}},
    {"type": "array", "items": NUMBER, "x-guidance": {"whitespace_flexible": False, "item_separator": ", "}},
    {"type": "array", "items": NUMBER, "x-guidance": {"whitespace_pattern": ""}},
    {"type": "array", "items": NUMBER, "x-guidance": {"key_separator": " : ", "item_separator": ","}},
)


def texts() -> Iterator[str]:
    for text in GBNF:
        yield f"gbnf {text!r}\n{_outcome(lambda text=text: gbnf.to_lark(text))}"  # type: ignore[misc]
    for value in (*({"format": form} for form in FORMS), *STRUCTURES):
        text = json.dumps(value)
        yield f"tags {text}\n{_outcome(lambda text=text: structural_tags.to_grammars(text))}"  # type: ignore[misc]
    compact = json.dumps({"format": OTHER | {"type": "tag"}})
    yield f"tags compact\n{structural_tags.to_grammars(compact, compact=True)}"
    for schema in SCHEMAS:
        text = json.dumps(schema)
        for is_compact in (False, True):
            found = _outcome(lambda: " ".join(json_schema.json_grammar(text, compact=is_compact)))  # noqa: B023
            yield f"schema {'compact ' if is_compact else ''}{text}\n{found}"
        if isinstance(schema, dict):
            large = exact_numbers.has_large_numbers(schema)
            yield f"large {large}, finite {json_schema.has_finite_instance(schema)}"
            yield json.dumps(json_schema.close_objects(schema))
    for text in ("[" * 5000 + "]" * 5000, "{", '{"a": NaN}', ""):
        found = _outcome(lambda text=text: json_schema.json_grammar(text))  # type: ignore[misc]
        yield f"schema {text[:20]}\n{found[:200]}"


def test_texts_of_grammars() -> None:
    found = [line for text in texts() for line in text.splitlines()]
    if "DRAGOMAN_TEST_WRITE" in os.environ:
        FILE.write_text("".join(f"{line}\n" for line in found))
    assert found == FILE.read_text().splitlines()


@pytest.mark.parametrize(("least", "most"), [(1, 9), (10**15, 10**16), (0, 0), (95, 105), (100, 999), (8, 1200)])
def test_digits_of_a_range(least: int, most: int) -> None:
    """The rule of a range is short: it does not list the numbers."""
    schema = {"type": "integer", "minimum": least, "maximum": most, "exclusiveMaximum": 2**70}
    rule = exact_numbers.to_lark(schema, {"whitespace_flexible": False})
    assert rule.startswith("start: rule_")
    assert len(rule) < 250
