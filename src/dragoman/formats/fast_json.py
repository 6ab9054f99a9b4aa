"""JSON of plain values and NumPy arrays: by orjson, or where that has no wheels by msgspec, more slowly.

Arrays of numbers are written as nested lists with the fewest digits that identify each float in its own datatype; NaN
and infinities as null. Integers beyond 64 bits are not written, and are read as floats: see `exact_json`.
"""

from collections.abc import Callable
from typing import Any

try:
    import orjson
    from orjson import Fragment, JSONDecodeError, loads
except ImportError:
    from dragoman.formats.json_msgspec import Fragment, JSONDecodeError, dumps, loads  # type: ignore[assignment]
else:
    _ANY_KEYS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

    def dumps(value: Any, default: Callable[[Any], Any] | None = None, *, any_keys: bool = False) -> bytes:
        """Serialize a value. `default` replaces what JSON does not have; `any_keys` allows keys that are no strings.

        Raises TypeError if a value is not serializable.
        """
        return orjson.dumps(value, default, _ANY_KEYS if any_keys else orjson.OPT_SERIALIZE_NUMPY)


__all__ = ["Fragment", "JSONDecodeError", "dumps", "loads"]
