"""Which JSON schemas a finite value can satisfy: cycles of references."""

from typing import Any

import pytest

from dragoman_text.generation.json_schema import has_finite_instance


def node(**fields: Any) -> dict[str, Any]:
    return {"type": "object", **fields}


LEAF = {"type": "integer"}
SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (LEAF, True),
        ({}, True),
        (SELF, False),
        (node(properties={"next": SELF}), True),  # which is not required
        (node(properties={"next": SELF}, required=["next"]), False),
        (node(required=["next"], additionalProperties=SELF), False),
        (node(properties={"next": {"anyOf": [SELF, {"type": "null"}]}}, required=["next"]), True),
        (node(properties={"next": {"oneOf": [SELF, SELF]}}, required=["next"]), False),
        (node(properties={"next": {"allOf": [LEAF, SELF]}}, required=["next"]), False),
        (node(properties={"next": {"type": ["object", "null"], **SELF}}, required=["next"]), False),
        ({"type": "array", "items": SELF}, True),
        ({"type": "array", "items": SELF, "minItems": 1}, False),
        ({"type": ["array", "string"], "items": SELF, "minItems": 1}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": LEAF}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, False),
        ({"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": {"$ref": "#/$defs/a~1b~0c"}}}, False),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a%20b"}}}, False),
        ({"$ref": "#/anyOf/0", "anyOf": [{"$ref": "#/anyOf/0"}, LEAF]}, False),
        ({"$ref": "#/anyOf/1", "anyOf": [{"$ref": "#/anyOf/0"}, LEAF]}, True),
        ({"$ref": "#/anyOf/2", "anyOf": [LEAF]}, True),  # which the compiler rejects
        ({"$ref": "https://schema.example/a"}, True),
        ({"$ref": 5}, True),
    ],
)
def test_cycles_of_references(schema: dict[str, Any], expected: bool) -> None:
    assert has_finite_instance(schema) is expected
