"""Numbers in JSON schemas that doubles cannot represent: exact in every generated text, or rejected."""

import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Grammar
from dragoman.protocols.parameters import enforceable
from dragoman.protocols.wire import Policy
from dragoman_text.generation import grammar_worker
from dragoman_text.generation.exact_numbers import has_large_numbers, to_lark

llguidance = pytest.importorskip("llguidance")

LARGE = 1234567890123456789
HALF = 2**53


def matcher(schema: Mapping[str, Any], *, compact: bool = False) -> Any:
    text = grammar_worker.grammar_text("json_schema", json.dumps(schema), compact=compact)
    return grammar_worker.matcher(_tokenizer(), text)


def _tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


def accepts(matcher: Any, text: str) -> bool:
    """Return whether the grammar allows a whole text."""
    copy, tokens = matcher.deep_copy(), _tokenizer().tokenize_str(text)
    return bool(copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens) and copy.is_accepting())


OBJECT = {"type": "object", "properties": {"a": {"const": LARGE}}, "required": ["a"]}
REFERENCE = {
    "type": "array",
    "minItems": 1,
    "maxItems": 3,
    "items": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"n": {"const": "f"}}}]},
    "$defs": {
        "A": {
            "type": "object",
            "properties": {"id": {"const": 2**64 + 1}, "next": {"$ref": "#/$defs/A"}},
            "required": ["id"],
        }
    },
}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"const": LARGE}, [f"{LARGE}"], ["1234567890123456768", f"{LARGE}.0"]),
        ({"const": -HALF - 1}, [f"{-HALF - 1}"], [f"{-HALF}", f"{-HALF - 2}"]),
        ({"enum": [LARGE, 1, "z", None]}, [f"{LARGE}", "1", '"z"', "null"], [f"{LARGE - 21}", "2"]),
        ({"enum": [LARGE, 5, LARGE + 2], "type": "integer", "maximum": LARGE}, [f"{LARGE}", "5"], [f"{LARGE + 2}"]),
        ({"const": [LARGE, {"k": LARGE}]}, [f'[{LARGE}, {{"k": {LARGE}}}]'], ['[1, {"k": 1}]']),
        (
            OBJECT,
            [f'{{"a": {LARGE}}}', f'{{"a":{LARGE}}}', f'{{\n "a": {LARGE}\n}}'],
            ["{}", f'{{"a": {LARGE}, "b": 1}}'],
        ),
        (
            {
                "properties": {"x": {"const": LARGE}, "y": {"const": HALF + 1}, "z": {"type": "string"}},
                "type": "object",
            },
            [
                "{}",
                f'{{"x":{LARGE}}}',
                f'{{"y": {HALF + 1}}}',
                f'{{"x":{LARGE}, "y":{HALF + 1}, "z":"q"}}',
                '{"z": ""}',
            ],
            [f'{{"x":{HALF + 1}}}', f'{{"y":{HALF + 1},}}', f'{{"y":{HALF + 1},"x":{LARGE}}}', '{"z": 1}'],
        ),
        (
            REFERENCE,
            [f'[{{"id":{2**64 + 1},"next":{{"id":{2**64 + 1}}}}}, {{"n":"f"}}]'],
            ["[]", f'[{{"id":{2**64}}}]'],
        ),
        ({"type": "integer", "minimum": HALF + 1}, [f"{HALF + 1}", "9" * 40], [f"{HALF}", "1", "-1"]),
        ({"type": "integer", "exclusiveMaximum": HALF + 2}, [f"{HALF + 1}", "0", "-" + "9" * 40], [f"{HALF + 2}"]),
        ({"type": "integer", "minimum": -(2**70)}, [f"{-(2**70)}", "0"], [f"{-(2**70) - 1}"]),
        ({"type": "integer", "minimum": 1e19}, ["1" + "0" * 19], ["9223372036854775807"]),
        (
            {"type": "number", "maximum": 2**60},
            ["1.5", f"{2**60}", f"{2**60 - 1}.9", "-2.5"],
            [f"{2**60}.5", f"{2**60 + 1}"],
        ),
        ({"type": "number", "minimum": -(2**60) - 1}, ["-1.5", "-0.5", "0.25"], [f"{-(2**60) - 1}.5"]),
        ({"type": ["integer", "null"], "maximum": HALF + 3}, ["null", "-5", f"{HALF + 3}"], [f"{HALF + 4}", '"a"']),
        ({"minimum": HALF + 1}, ['"a"', "null", "[1]", f"{HALF + 1}"], [f"{HALF}", "1"]),
        ({"default": LARGE, "examples": [LARGE], "type": "integer", "maximum": 3}, ["3"], ["4", f"{LARGE}"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_large_numbers_are_exact(schema: dict[str, Any], allowed: list[str], forbidden: list[str]) -> None:
    compiled = matcher(schema)
    assert [text for text in allowed if not accepts(compiled, text)] == []
    assert [text for text in forbidden if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"allOf": [{"const": LARGE}]}, '"allOf"'),
        ({"type": "object", "patternProperties": {"x": {"const": LARGE}}}, '"patternProperties"'),
        ({"type": "object", "additionalProperties": {"const": LARGE}}, "other properties than those"),
        ({"type": "integer", "maximum": LARGE, "multipleOf": 5}, '"multipleOf"'),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"const": LARGE}}}, '"minimum"'),
        ({**OBJECT, "minProperties": 1}, '"minProperties"'),
        ({"type": "integer", "minimum": LARGE, "maximum": LARGE - 1}, "no number is from"),
        ({"const": LARGE, "type": "string"}, "no JSON text satisfies"),
    ],
)
def test_large_numbers_beside_other_keywords_are_rejected(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ValueError, match=re.escape(keyword)):
        matcher(schema)


def test_ranges_of_integers() -> None:
    """Each range that the digits of its bounds make special: compared with the integers themselves."""
    rng = random.Random(1)
    small = [*range(-130, 131), *range(990, 1012), *range(-1012, -990), 99_999, 100_000]
    bounds = [None, -1000, -101, -100, -99, -10, -9, -1, 0, 1, 9, 10, 11, 99, 100, 101, 109, 110, 999, 1000]
    for least, most in rng.sample([*itertools.product(bounds, bounds)], 60):
        if least is not None and most is not None and least > most:
            continue
        # The rules are those for large numbers; a third, large bound that changes nothing selects them.
        schema = {"type": "integer", "exclusiveMaximum": 2**80}
        schema |= {name: value for name, value in (("minimum", least), ("maximum", most)) if value is not None}
        (rule,) = re.findall(r": /(.*)/$", to_lark(schema, {}), re.MULTILINE)[-1:]
        matching = [each for each in small if re.fullmatch(rule, str(each))]
        assert matching == [
            each for each in small if (least is None or each >= least) and (most is None or each <= most)
        ]


def test_small_numbers_are_left_to_the_compiler() -> None:
    schemas: list[Any] = [{"const": HALF}, {"enum": [1.5, 1e22]}, {"minimum": -HALF}, {"properties": {"minimum": {}}}]
    assert not any(map(has_large_numbers, schemas))


def test_the_one_compact_form() -> None:
    for schema in (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {"enum": [7, LARGE]}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    ):
        compiled = matcher(schema, compact=True)
        assert accepts(compiled, '{"a": 7, "b": 2}')
        for other in ('{"a":7,"b":2}', '{ "a": 7, "b": 2 }', '{"a": 7,\n"b": 2}'):
            assert not accepts(compiled, other)
        assert accepts(matcher(schema), '{"a":7,"b":2}')
    own = {"type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ","}}
    assert accepts(matcher(own, compact=True), "[1,2]")


# --- steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 0.5, 0.1, 0.01, 0.3, 1.1, 4.35, 400_000_000])
def test_steps_that_are_enforced(step: float) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "number", "multipleOf": step}))
    assert enforceable("format", grammar, Policy()) == (grammar, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.07},
        {"type": "integer", "multipleOf": 4_294_967_295},
        {"type": "integer", "multipleOf": 10**18 + 1},
        {"allOf": [{"type": "integer", "multipleOf": 100_000}, {"multipleOf": 99_999}]},
    ],
)
def test_steps_that_the_compiler_would_change_are_named(schema: dict[str, Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    _, names = enforceable("format", grammar, Policy())
    assert names == ["format.multipleOf"]
    with pytest.raises(InvalidInput, match=r'must not contain keywords .* got "multipleOf"'):
        enforceable("format", grammar, Policy(), strict=True)


# --- names as patterns, and reasons ------------------------------------------------------------------------------

STEP = {"type": "integer", "minimum": 0, "maximum": 95, "multipleOf": 5}


@pytest.mark.parametrize("more", [{}, {"required": ["s"]}, {"additionalProperties": False}])
@pytest.mark.parametrize("pattern", ["^s$", "^(s|t)$", "^(?:s|t)$"])
def test_patterns_that_list_names_leave_no_dead_end(pattern: str, more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"s": STEP}, "patternProperties": {pattern: {"type": "integer"}}, **more}
    compiled = matcher(schema)
    assert accepts(compiled, '{"s": 5}')
    assert not accepts(compiled, '{"s": 6}')
    if "additionalProperties" in more:
        tokens = _tokenizer().tokenize_str('{"s": 5,')
        assert (compiled.validate_tokens(tokens) == len(tokens)) == ("t" in pattern)
        assert accepts(compiled, '{"s": 5, "t": 6}') == ("t" in pattern)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "regex parse error: unclosed group"),
        ("regex", "a{5,2}", "the start must be <= the end"),
        ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "regex parse error: unclosed group"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', r"minimum \(5\) is greater than maximum"),
    ],
)
def test_errors_say_the_reason(kind: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason if "\\" in reason else re.escape(reason)):
        grammar_worker.matcher(_tokenizer(), grammar_worker.grammar_text(kind, text))
