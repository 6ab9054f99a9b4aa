"""What an operator says of an engine: check_options against the fields of a dataclass."""

from collections.abc import Mapping
from typing import Any, TypeVar

from dragoman.core.errors import ModelFailed

Options = TypeVar("Options")
Choices = Mapping[str, tuple[str, ...]]


def check_options(
    kind: type[Options], given: Mapping[str, Any], least: Mapping[str, float], choices: Choices, what: str
) -> Options:
    """Build options of a class whose fields all have defaults; a value must have the type of its default.

    least: minimum of numbers. choices: allowed strings. what: the engine, for messages. Raises ModelFailed for an
    unknown name or an invalid value.
    """
    defaults: Any = kind()
    known = list(defaults.__dataclass_fields__)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ModelFailed(f"unknown parameter '{name}'; {what} knows {', '.join(known)}")
        wanted: Any = type(getattr(defaults, name))
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted:
            raise ModelFailed(f"parameter '{name}': expected {wanted.__name__}, got {value!r}")
        if name in least and value < least[name]:
            raise ModelFailed(f"parameter '{name}': expected at least {least[name]}, got {value!r}")
        if name in choices and value not in choices[name]:
            raise ModelFailed(f"parameter '{name}': expected one of {', '.join(choices[name])}, got {value!r}")
        values[name] = value
    return kind(**values)
