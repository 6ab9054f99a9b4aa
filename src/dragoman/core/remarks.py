"""Remarks of `dragoman doctor` on files of other servers, and tables of the fields that such files have."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.core.errors import InvalidInput

# same: as before. different: supported, with a difference. unused: ignored, and not needed. missing: ignored, not
# supported. rejected: the server does not start. untried: no error was found, but the model was not loaded.
Effect = Literal["same", "different", "unused", "missing", "rejected", "untried"]


class Remark(msgspec.Struct, frozen=True):
    """Support of one field or import: the file, its name, the effect, and a note with the alternative."""

    location: str
    subject: str
    effect: Effect
    note: str


PICKLE_NOTE = "pickle files can run code when loaded: start with --allow-pickle if you trust them"


class Field(msgspec.Struct, frozen=True):
    """Support of a field: its effect, a note for users, the name of our setting, and its default in that server."""

    effect: Effect
    note: str = ""
    setting: str = ""
    default: Any = None


UNKNOWN_FIELD = Field("unused", "unknown field")


def field_remarks(
    given: Mapping[str, Any],
    table: Mapping[str, Field],
    location: str | Path,
    prefix: str = "",
    *,
    unknown: Field = UNKNOWN_FIELD,
) -> Iterator[Remark]:
    """Return the support of each field, except unsupported ones that have their default value."""
    for name, value in given.items():
        field = table.get(name, unknown)
        if name not in table or field.effect in ("same", "different") or not _is_default(value, field.default):
            yield Remark(str(location), prefix + name, field.effect, field.note)


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value is None or the default; environment variables have `false` for False."""
    return value is None or str(value).lower() == str(default).lower()


def report(log: logging.Logger, remarks: Iterable[Remark]) -> None:
    """Log the fields that are ignored. Raises InvalidInput for a rejected one."""
    for each in remarks:
        if each.effect == "rejected":
            raise InvalidInput(f"{each.location}: '{each.subject}' is not supported: {each.note}")
        if each.effect in ("unused", "missing"):
            log.warning("%s: '%s' is ignored: %s", each.location, each.subject, each.note)
