"""JSON with integers of any size: `fast_json` makes floats of those beyond 64 bits, and does not write them."""

import json
from typing import Any

from dragoman.core.documents import parse_json
from dragoman.formats import fast_json
from dragoman.formats.json_msgspec import LONG_INTEGER


def load_json(text: bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, or has an integer of more digits than Python converts."""
    value = fast_json.loads(text)
    return parse_json(text) if LONG_INTEGER.search(text) else value


def dump_json(value: Any) -> bytes:
    """Serialize a value."""
    try:
        return fast_json.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
