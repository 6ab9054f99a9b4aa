"""Values as JSON texts, of which nothing is lost on the way there and back."""

import json
from typing import Any, NoReturn

_PLAIN = (str, int, float, bool, type(None))


def json_text(value: Any, *, nonfinite: bool = False) -> bytes:
    """The JSON of a value. Raises ValueError where reading it again would give another one.

    `nonfinite` allows NaN and infinities as the words that Python's own parser reads.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=nonfinite, separators=(",", ":"))
        if not isinstance(value, _PLAIN) and json.loads(text) != value:
            raise ValueError("JSON has no form for it that reads the same")
        return text.encode()
    except (TypeError, RecursionError) as bad:
        raise ValueError(str(bad)) from bad


def json_value(text: bytes, *, nonfinite: bool = False) -> Any:
    """The value of a JSON text; ValueError where it is none, or holds text that no answer could repeat."""
    try:
        value = json.loads(text.decode(), parse_constant=None if nonfinite else _refused)
        if b"\\u" in text:  # halves of characters
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as bad:
        raise ValueError("it nests too deep") from bad
    return value


def _refused(word: str) -> NoReturn:
    raise ValueError(f"JSON has no {word}")
