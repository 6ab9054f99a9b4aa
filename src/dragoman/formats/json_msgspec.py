"""JSON by msgspec as orjson reads and writes it, for the Pythons that orjson has no wheels for."""

import dataclasses
import datetime
import enum
import re
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from dragoman.formats.json_scan import nests_deeper

Fragment = msgspec.Raw
_INTEGERS = range(-(2**63), 2**64)
# Texts without such a run of digits have no integer beyond 64 bits.
LONG_INTEGER = re.compile(rb"[0-9]{19}")
_MAX_DEPTH = 1024
_WRITTEN_BY_MSGSPEC = (datetime.datetime, datetime.date, datetime.time, uuid.UUID, msgspec.Raw)


class JSONDecodeError(ValueError):
    """Text that is not valid JSON."""


def dumps(value: Any, default: Callable[[Any], Any] | None = None, *, any_keys: bool = False) -> bytes:
    """Serialize a value as `fast_json.dumps` does. msgspec takes more than orjson, such as bytes and sets, and knows
    no arrays and no subclasses: this makes plain values first."""
    return msgspec.json.encode(_plain(value, default, any_keys))


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Parse JSON as `fast_json.loads` does: integers beyond 64 bits become floats."""
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        if nests_deeper(data, _MAX_DEPTH):  # since Python 3.14 msgspec stops only where the stack ends
            raise JSONDecodeError("depth limit exceeded")
        value = msgspec.json.decode(data)
        return _with_floats(value) if LONG_INTEGER.search(data) else value
    except (ValueError, OverflowError, RecursionError) as error:
        raise JSONDecodeError(str(error)) from error


def _plain(value: Any, default: Callable[[Any], Any] | None, any_keys: bool) -> Any:
    match value:
        case None | bool():
            return value
        case np.generic() | np.ndarray():
            scalar = isinstance(value, np.generic)
            if value.dtype.kind in "biuf" and (scalar or (value.ndim and value.flags.c_contiguous)):
                # The fewest digits that identify a small float have to be looked for as such.
                small = value.dtype.kind == "f" and value.dtype.itemsize < 8
                return (value.astype(np.float32).astype(str).astype(np.float64) if small else value).tolist()
        case enum.Enum():
            return _plain(value.value, default, any_keys)
        case str():
            return str.__str__(value)
        case int():
            if int(value) not in _INTEGERS:
                raise TypeError("Integer exceeds 64-bit range")
            return int(value)
        case list() | tuple():
            return [_plain(item, default, any_keys) for item in value]
        case dict():
            return {_key(key, any_keys): _plain(item, default, any_keys) for key, item in value.items()}
        case float() if type(value) is float:
            return value
        case _ if isinstance(value, _WRITTEN_BY_MSGSPEC):
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
            return {name: _plain(getattr(value, name), default, any_keys) for name in fields}
    if default is None:
        raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
    return _plain(default(value), default, any_keys)


def _key(key: Any, any_keys: bool) -> Any:
    if type(key) is str:
        return key
    if not any_keys:
        raise TypeError("Dict key must be str")
    match key:
        case None:
            return "null"
        case bool():
            return "true" if key else "false"
        case enum.Enum():
            return _key(key.value, any_keys)
        case str() | int() | float() | datetime.datetime() | datetime.date() | datetime.time() | uuid.UUID():
            return key
    raise TypeError(f"Dict key must be text, a number, a time or a UUID, got {type(key).__name__}")


def _with_floats(value: Any) -> Any:
    match value:
        case int():
            return value if value in _INTEGERS else float(value)
        case list():
            return [_with_floats(item) for item in value]
        case dict():
            return {key: _with_floats(item) for key, item in value.items()}
    return value
