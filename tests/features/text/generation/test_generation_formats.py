"""Formats of grammars: GBNF, structural tags, and JSON schemas with keywords that cannot be enforced."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Grammar
from dragoman.protocols.schema_keywords import remove_unenforced
from dragoman_text.apis.common.tools import Tools, message_or_calls
from dragoman_text.generation import grammar_worker
from dragoman_text.generation.grammar import GrammarService


def _byte_tokens() -> dict[int, str]:
    """Return the byte-level character of each byte, as GPT-2 defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


VOCABULARY = {"<end>": 0, **{character: byte + 1 for byte, character in _byte_tokens().items()}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """A tokenizer of single bytes; token 0 ends a text."""
    made = Tokenizer(WordLevel(VOCABULARY, unk_token="<end>"))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    made.add_special_tokens(["<end>"])
    return LLTokenizer(made.to_str(), n_vocab=len(VOCABULARY), eos_token=[0])


def accepts(tokenizer: LLTokenizer, kind: str, grammar: str, text: str) -> bool:
    matcher = grammar_worker.matcher(tokenizer, grammar_worker.grammar_text(kind, grammar))
    return all(matcher.consume_token(byte + 1) for byte in text.encode()) and bool(matcher.is_accepting())


JSON_RULES = r"""
root   ::= object   # a comment with "quotes"
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "rejected"),
    [
        ('root ::= a b\na ::= [a-z]+\nb ::= "z"', "abz", "ab"),  # rules of characters, not greedy terminals
        ('root ::= w ("," w)*\nw ::= [a-z,]+', "a,b", "a;b"),
        (r'root ::= "caf\u00e9" [\u00e0-\u00ff]', "caféà", "cafea"),
        (r'root ::= "\U0001F600\x41" .', "😀A\n", "😀A"),
        ("root ::= [^a-c-]{2}", "xy", "x-"),
        (r"root ::= [\]\-a]+", "a]-", "b"),
        ('root ::= "a" | root "b"', "abb", "b"),
        ('root ::= ("x" |) "y"', "y", "x"),
        ('root ::= foo-bar fooBar start\nfoo-bar ::= "a"\nfooBar ::= "b"\nstart ::= "c"', "abc", "ab"),
        ('root ::= "a"{2,} [/]', "aaa/", "a/"),
        ('root ::= "a"{,2} "b"{2}', "abb", "aaabb"),
        (JSON_RULES, '{"a": [1, 2.5e3, "x\\n"], "b": {}}', '{"a": [1,, 2]}'),
    ],
)
def test_gbnf(tokenizer: LLTokenizer, grammar: str, accepted: str, rejected: str) -> None:
    assert accepts(tokenizer, "gbnf", grammar, accepted)
    assert not accepts(tokenizer, "gbnf", grammar, rejected)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= (= "a") "b"', r"look-ahead assertions '\(= ...\)' are not supported"),
        ('a ::= "b"', "expected a rule 'root'"),
        ("root ::= other", "rule 'other' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
        ('root ::= "a"\nb ::= "c', "line 2: unexpected"),
        ("root ::= []", "character class must not be empty"),
        (r'root ::= "\uD800"', "is not a character"),
        ('root ::= "a"{}', "needs a number"),
        ('root ::= "a" )', "expecting rule"),
        ("root ::= root", "no text was found"),
        ('root ::= ((("a"{1000}){1000}){1000}){1000}', "too|limit"),
    ],
)
def test_invalid_gbnf(grammars: GrammarService, grammar: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^grammar: .*({message})"):
        grammars.guide(Grammar("gbnf", grammar))


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def _triggered(**options: Any) -> dict[str, Any]:
    tag = {"begin": "<a>", "content": NUMBER, "end": "</a>"}
    return {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], **options}}


def _separated(**options: Any) -> dict[str, Any]:
    tag = {"type": "tag", "begin": "(", "content": NUMBER, "end": ")"}
    return {"format": {"type": "tags_with_separator", "tags": [tag], "separator": ",", **options}}


THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
AB = {"type": "const_string", "value": "ab"}


@pytest.mark.parametrize(
    ("tags", "accepted", "rejected"),
    [
        (TAGS, "x <f=a>1</f> y<f=b>true</f>", "x <f=b>1</f>"),
        (TAGS, "no tag", "<f=c>"),
        (_triggered(), "x<a>1</a>y<a>2</a>", "x<b>"),
        (_triggered(at_least_one=True), "<a>1</a>y", "y"),
        (_triggered(stop_after_first=True), "x<a>1</a>", "x<a>1</a>y"),
        (_triggered(at_least_one=True, stop_after_first=True), "<a>1</a>", "x"),
        (_separated(), "(1),(2)", "(1)(2)"),
        (_separated(at_least_one=True, stop_after_first=True), "(1)", "(1),(2)"),
        ({"format": {"type": "sequence", "elements": [THINK, NUMBER]}}, "<think>a\nb</think>12", "<think>a"),
        ({"format": {"type": "or", "elements": [AB, {"type": "regex", "pattern": "[0-9]+/x"}]}}, "12/x", "12x"),
        ({"format": {"type": "grammar", "grammar": 'root ::= [a-z]+ b\nb ::= "z"'}}, "abz", "ab"),
        ({"format": {"type": "repeat", "min": 2, "max": 3, "content": AB}}, "abab", "ab"),
        ({"format": {"type": "repeat", "min": 1, "max": -1, "content": AB}}, "ab" * 9, ""),
        ({"format": {"type": "optional", "content": AB}}, "", "abab"),
        ({"format": {"type": "plus", "content": AB}}, "abab", ""),
    ],
)
def test_structural_tags(tokenizer: LLTokenizer, tags: Any, accepted: str, rejected: str) -> None:
    assert accepts(tokenizer, "structural_tag", json.dumps(tags), accepted)
    assert not accepts(tokenizer, "structural_tag", json.dumps(tags), rejected)


def test_a_message_in_its_format_or_calls_of_tools(tokenizer: LLTokenizer) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
    offered = tuple(
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("weather", city), ("other", nested))
    )
    message = Grammar(
        "json_schema",
        '{"type": "object", "properties": {"x": {"$ref": "#/$defs/i"}},'
        '"$defs": {"i": {"type": "integer"}}, "required": ["x"], "additionalProperties": false}',
    )
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    for single in (False, True):
        both = message_or_calls(message, Tools(offered).call_grammar(), single=single)
        assert both is not None
        accepted = [
            '{"x": 5}',
            call,
            '{"name": "other", "parameters": {"a": null}}',
            f"<tool_call>\n{call}\n</tool_call>",
            f"<tool_call>{call}</tool_call>",
        ]
        two = f"<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call>"
        rejected = ['{"x": "a"}', call.replace("Oslo", "Rome"), call.replace("weather", "none"), f"<tool_call>{call}"]
        (rejected if single else accepted).append(two)
        for text in accepted:
            assert accepts(tokenizer, both.kind, both.text, text), text
        for text in [*rejected, "free text", f'{call}{{"x": 5}}']:
            assert not accepts(tokenizer, both.kind, both.text, text), text
    pattern = message_or_calls(Grammar("regex", "[a-c]+/"), Tools(offered).call_grammar(), single=False)
    assert pattern is not None
    assert accepts(tokenizer, pattern.kind, pattern.text, "abc/")
    assert accepts(tokenizer, pattern.kind, pattern.text, call)
    assert message_or_calls(Grammar("choice", '["a"]'), Tools(offered).call_grammar(), single=False) is None


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"format": {"type": "dispatch"}}, "expected a format of type const_string, .*, got 'dispatch'"),
        ({}, 'expected "format", or "structures" and "triggers"'),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, AB]}}, "any_text: expected it at the end"),
        ({"format": {"type": "sequence", "elements": [_triggered()["format"], AB]}}, "triggered_tags: expected them"),
        ({**TAGS, "triggers": ["["]}, "expected a begin with one of the triggers"),
        ({"format": {"type": "tag", "begin": 1}}, 'expected text as "begin", got 1'),
        ({"format": {"type": "json_schema"}}, "expected a JSON schema"),
        ({"format": {"type": "repeat", "min": "a", "content": AB}}, 'expected an integer as "min"'),
    ],
)
def test_invalid_structural_tags(grammars: GrammarService, tags: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^grammar: .*{message}"):
        grammars.guide(Grammar("structural_tag", json.dumps(tags)))


OPTIONAL = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
BY_KIND = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "array", "uniqueItems": False}, ()),
        (OVERLAPPING, ("oneOf",)),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
        ({"oneOf": [{"enum": ["a", 1]}, {"enum": ["b", 1.0]}]}, ("oneOf",)),
        ({"oneOf": [{"enum": [1]}, {"enum": [True]}]}, ()),
        ({"oneOf": [{"enum": [1.5]}, {"type": "integer"}]}, ()),
        ({"oneOf": BY_KIND}, ()),
        ({"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}], "$defs": dict(zip("01", BY_KIND, strict=True))}, ()),
        ({"oneOf": [{"properties": each["properties"]} for each in BY_KIND]}, ("oneOf",)),
        ({"not": {"type": "string"}}, ("not",)),
        ({"type": "object", "if": {}, "then": {}, "else": {}}, ("if", "then", "else")),
        (
            {"type": "array", "contains": {}, "minContains": 1, "maxContains": 2},
            ("contains", "minContains", "maxContains"),
        ),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, ("propertyNames",)),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"type": "object", "dependentSchemas": {"a": {}}}, ("dependentSchemas",)),
        ({"type": "object", "dependencies": {"a": ["b"]}}, ("dependencies",)),
        ({"type": "object", "unevaluatedProperties": False}, ("unevaluatedProperties",)),
        ({"type": "array", "unevaluatedItems": False}, ("unevaluatedItems",)),
        ({"type": "string", "format": "password"}, ("format",)),
        ({"type": "string", "format": "date"}, ()),
        ({"type": "string", "pattern": "^(?!a)b"}, ("pattern",)),
        ({"type": "string", "pattern": r"(a)\1"}, ("pattern",)),
        ({"type": "string", "pattern": r"\bword\b"}, ("pattern",)),
        ({"type": "string", "pattern": r"[(?=]\\1(?:b)"}, ()),
        ({**OPTIONAL, "maxProperties": 1}, ("maxProperties",)),
        ({**OPTIONAL, "maxProperties": 2}, ()),
        ({**OPTIONAL, "minProperties": 1}, ()),
        ({**OPTIONAL, "minProperties": 2}, ("minProperties",)),
        ({**OPTIONAL, "minProperties": 1, "required": ["a"]}, ()),
        ({**OPTIONAL, "minProperties": 1, "additionalProperties": True}, ("minProperties",)),
        ({"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "null"}}, ()),
        ({"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": "x"}}}, ()),
        ({"type": "array", "items": [{"not": {}}], "additionalItems": {"uniqueItems": True}}, ("not", "uniqueItems")),
        ({"anyOf": [{"type": "array", "items": {"format": "path"}}, {"allOf": [{"not": {}}]}]}, ("format", "not")),
    ],
    ids=lambda value: None if isinstance(value, tuple) else json.dumps(value)[:60],
)
def test_keywords_that_cannot_be_enforced_are_removed(schema: Any, names: tuple[str, ...]) -> None:
    text, removed = remove_unenforced(json.dumps(schema))
    assert removed == names
    # The compiler, which rejects keywords that it does not know, agrees that the rest is enforced.
    failed, warnings = LLMatcher.validate_grammar_with_warnings(grammar_worker.grammar_text("json_schema", text))
    assert not failed
    assert [warning for warning in warnings if not warning.startswith("oneOf")] == []


def test_bounds_on_properties_are_enforced(tokenizer: LLTokenizer) -> None:
    text, _ = remove_unenforced(json.dumps({**OPTIONAL, "minProperties": 1}))
    assert not accepts(tokenizer, "json_schema", text, "{}")
    assert accepts(tokenizer, "json_schema", text, '{"b": 1}')


_A, _B = {"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}


@pytest.mark.parametrize(
    ("schema", "value", "accepted"),
    [
        ({"type": "object", **_A}, {"a": 1, "c": 0}, False),
        ({"type": "object", **_A}, {"a": 1}, True),
        ({"type": "object", "properties": {"c": {"type": "object", **_A}}}, {"c": {"a": 1, "d": 0}}, False),
        (
            {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {**_A, "type": "object"}}},
            [{"d": 0}],
            False,
        ),
        ({"type": "object", **_A, "additionalProperties": True}, {"a": 1, "c": 0}, True),
        ({"type": "object", **_A, "patternProperties": {"^c$": {}}}, {"a": 1, "c": 0}, True),
        ({"type": "object", **_A, "minProperties": 1, "required": ["a"]}, {"a": 1, "c": 0}, True),
        ({"type": "object", **_A, "required": ["c"]}, {"a": 1, "c": 0}, True),
        ({"type": "object", "properties": {}}, {"c": 0}, True),
        ({"type": "object", "properties": {"properties": {"const": 1}}}, {"properties": 1}, True),
        ({"allOf": [{"type": "object", **_A}, {"type": "object", **_B}]}, {"a": 1, "b": 2}, True),
        ({"type": "object", **_A, "anyOf": [_B]}, {"a": 1, "b": 2}, True),
        ({"type": "object", **_A, "$ref": "#/$defs/x", "$defs": {"x": _B}}, {"a": 1, "b": 2}, True),
        ({"type": "object", "$ref": "#/$defs/x", "required": ["b"], "$defs": {"x": _A}}, {"a": 1, "b": 2}, True),
        ({**_A, "const": {"a": 1, "b": 2}}, {"a": 1, "b": 2}, True),
        ({"const": {"properties": {"a": 1}}}, {"properties": {"a": 1}}, True),
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_objects_have_only_the_properties_of_their_schema(
    tokenizer: LLTokenizer, schema: Any, value: Any, accepted: bool
) -> None:
    assert accepts(tokenizer, "json_schema", json.dumps(schema), json.dumps(value)) is accepted


def test_many_alternatives_are_not_compared_without_bound() -> None:
    loop = {
        "type": "object",
        "required": list("abcdefgh"),
        "properties": {name: {"$ref": "#/$defs/x"} for name in "abcdefgh"},
    }
    schema = {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": loop, "y": loop}}
    assert remove_unenforced(json.dumps(schema))[1] == ("oneOf",)
    assert remove_unenforced(json.dumps({"oneOf": [{"const": i} for i in range(40)]}))[1] == ()
    assert remove_unenforced(json.dumps({"oneOf": [{"const": i} for i in range(20_000)]}))[1] == ("oneOf",)
