"""Incremental detokenization: chunks never end within a character, and join to the whole text."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Protocol

# Replacement character for bytes that are not (yet) a character.
_UNKNOWN = "\ufffd"


class Detokenizer(Protocol):
    """Converts the tokens of one completion to text."""

    def add(self, token: int) -> str:
        """Add a token; return the characters that are now certain."""

    def rest(self) -> str:
        """Return the remaining text after the last token, with replacement characters for incomplete ones."""

    def copy(self) -> "Detokenizer":
        """Return an independent copy."""


class BytesDetokenizer:
    """Detokenizer of byte-level vocabularies; `table` contains the UTF-8 bytes of each token.

    before: last tokens of the prompt. If they end within a character, its remaining bytes belong to the completion.
    """

    def __init__(self, table: Mapping[int, bytes], before: Sequence[int]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in before:
            self._decoder.decode(table.get(token, b""))

    def add(self, token: int) -> str:
        return self._decoder.decode(self._table.get(token, b""))

    def rest(self) -> str:
        return self._decoder.decode(b"", True)

    def copy(self) -> "BytesDetokenizer":
        twin = BytesDetokenizer(self._table, ())
        twin._decoder.setstate(self._decoder.getstate())
        return twin


class WindowDetokenizer:
    """Detokenizer of other vocabularies: decodes the last tokens with and without the new ones.

    The window begins where the text was last certain, so that special treatment of the start of a text, such as
    removing a space, cancels out. Text ending in a replacement character may be incomplete and is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._known = list(before)
        self._waiting: list[int] = []
        self._text = decode(self._known) if self._known else ""

    def add(self, token: int) -> str:
        self._waiting.append(token)
        whole = self._decode(self._known + self._waiting)
        if whole.endswith(_UNKNOWN) or len(whole) <= len(self._text):
            return ""
        return self._emit(whole)

    def rest(self) -> str:
        return self._emit(self._decode(self._known + self._waiting)) if self._waiting else ""

    def copy(self) -> "WindowDetokenizer":
        twin = copy(self)
        twin._waiting = list(self._waiting)
        return twin

    def _emit(self, whole: str) -> str:
        new = whole[len(self._text) :]
        self._known, self._waiting = self._waiting, []
        self._text = self._decode(self._known)
        return new
