"""Tokens become text as they come: never half a character, and the pieces add up to the whole."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Protocol

# What a decoder writes for bytes that are no character, or not yet.
_UNKNOWN = "\ufffd"


class Detokenizer(Protocol):
    """One text's tokens become its characters."""

    def add(self, token: int) -> str:
        """The characters that are certain with this token."""

    def rest(self) -> str:
        """What the last tokens leave, once no more come: a replacement character for each that is broken."""

    def copy(self) -> "Detokenizer":
        """One that goes its own way from here."""


class BytesDetokenizer:
    """For byte-level vocabularies, whose tokens are bytes of UTF-8: `table` has those of each token.

    `before` are the prompt's last tokens: what they began of a character is no text of ours, but its rest is.
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
    """For any other: decodes a window of the last tokens with and without the new ones; the difference is new.

    A window begins where text was last certain, so that what a decoder does at the start of a text (as dropping a
    space) falls out of the difference. Text that ends in a replacement character may be half of one, and waits.
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
        return self._given(whole)

    def rest(self) -> str:
        return self._given(self._decode(self._known + self._waiting)) if self._waiting else ""

    def copy(self) -> "WindowDetokenizer":
        twin = copy(self)
        twin._waiting = list(self._waiting)
        return twin

    def _given(self, whole: str) -> str:
        new = whole[len(self._text) :]
        self._known, self._waiting = self._waiting, []
        self._text = self._decode(self._known)
        return new
