"""Parse JSON documents of protocols without typed tensors, within limits."""

from typing import Any

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import THREAD
from dragoman.formats import fast_json
from dragoman.formats.json_numbers import pieces
from dragoman.formats.json_scan import check_json, explain_encoding
from dragoman.formats.policy import Buffer, Policy

# A document with more members is parsed at once: to split them takes longer than to parse them.
_MANY_MEMBERS = 1000


def parse_json(text: Buffer, policy: Policy) -> Any:
    """Parse JSON within the limits of `check_json`. Raises InvalidInput."""
    return _parse(bytes(text), policy, elements=True)


def parse_document(text: Buffer, policy: Policy) -> Any:
    """As `parse_json` for documents with arrays of numbers, whose elements do not count as values."""
    return _parse(bytes(text), policy, elements=False)


def explain_invalid(text: bytes, error: ValueError) -> str:
    """Return why a text is not JSON. The parser's words for bytes that are not UTF-8 are about surrogates."""
    return explain_encoding(text) or str(error)


def _parse(text: bytes, policy: Policy, *, elements: bool) -> Any:
    check_json(text, policy, elements=elements)
    try:
        is_simple = len(text) <= THREAD or text.count(b":") > _MANY_MEMBERS
        return fast_json.loads(text) if is_simple else _parse_long(text)
    except fast_json.JSONDecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {explain_invalid(text, error)}") from error


def _parse_long(text: bytes) -> Any:
    """Parse a document that may have long lists of numbers: no other thread runs while one text is parsed."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return {name: _parse_field(bytes(memoryview(field))) for name, field in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, fast_json.JSONDecodeError):
        return fast_json.loads(text)  # not an object, or not valid: the position in the error is that of the document


def _parse_field(text: bytes) -> Any:
    if len(text) <= THREAD or text[:1] != b"[" or text.find(b"[", 1) >= 0 or b"{" in text or b'"' in text:
        return fast_json.loads(text)
    values: list[Any] = []
    for piece in pieces(memoryview(text)[1:-1]):
        values += fast_json.loads(b"".join((b"[", piece, b"]")))
    return values
