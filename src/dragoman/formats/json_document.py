"""Parse JSON documents of protocols without typed tensors, within limits."""

from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.formats import fast_json
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Buffer, Policy


def parse_json(text: Buffer, policy: Policy) -> Any:
    """Parse JSON within the limits of `check_json`. Raises InvalidInput."""
    return _parse(bytes(text), policy, elements=True)


def parse_document(text: Buffer, policy: Policy) -> Any:
    """As `parse_json` for documents with arrays of numbers, whose elements do not count as values."""
    return _parse(bytes(text), policy, elements=False)


def _parse(text: bytes, policy: Policy, *, elements: bool) -> Any:
    check_json(text, policy, elements=elements)
    try:
        return fast_json.loads(text)
    except fast_json.JSONDecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {error}") from error
