"""Remarks of `dragoman doctor` on files of other servers."""

from dataclasses import dataclass
from typing import Literal

# same: as before. different: supported, with a difference. unused: ignored, and not needed. missing: ignored, not
# supported. rejected: the server does not start. untried: no error was found, but the model was not loaded.
Effect = Literal["same", "different", "unused", "missing", "rejected", "untried"]


@dataclass(frozen=True, slots=True)
class Remark:
    """Support of one field or import: the file, its name, the effect, and a note with the alternative."""

    location: str
    subject: str
    effect: Effect
    note: str


PICKLE_NOTE = "pickle files can run code when loaded: start with --allow-pickle if you trust them"
