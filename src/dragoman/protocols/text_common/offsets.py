"""Character offsets of tokens in a completion, also in a stream."""

from collections.abc import Sequence

from dragoman.core.text import Token

# So many tokens in a row that are not found in the text never will be.
_MOST_LOST = 64
_HALF = "\N{REPLACEMENT CHARACTER}"


class Offsets:
    """Counts the characters before each token of one text, from `at` on.

    A text in pieces has the same offsets as the whole: text lags behind its tokens where it may yet become a stop
    string, and so a token's own text stands for what is not known yet. It never leads, so that no token stands before
    what was known when it came.
    """

    def __init__(self, at: int = 0) -> None:
        self._at = at  # the end of the last token that was found
        self._text = ""  # what is known of the text behind it
        self._lost: list[Token] = []  # the tokens behind it

    def of(self, text: str, tokens: Sequence[Token], *, last: bool) -> list[int]:
        """Return the offsets of the tokens of a chunk; the last chunk holds nothing back."""
        known = self._at + len(self._text)
        self._text += text
        old, behind = len(self._lost), [*self._lost, *tokens]
        offsets: list[int] = []
        at = ahead = first = 0
        held = False
        for i, token in enumerate(behind):
            found = self._text.find(token.text, at) if token.text and not held else -1
            if found < 0:
                offsets.append(self._at + at if last else max(known, self._at + at + ahead))
                whole = not token.special and _HALF not in token.text
                ahead += len(token.text) if whole else 0
                held |= whole and token.text.startswith(self._text[at:])  # what follows is not known either
                continue
            # A character that is split over tokens is that of the last of them.
            split = i > first and not behind[i - 1].special
            offsets.append(self._at + (found if split else at))
            at, ahead, first = found + len(token.text), 0, i + 1
        self._at, self._text, self._lost = self._at + at, self._text[at:], behind[first:]
        if len(self._lost) > _MOST_LOST:
            self._at, self._text, self._lost = self._at + len(self._text), "", []
        return offsets[old:]


def rest_of(text: str, tokens: Sequence[Token]) -> int:
    """Return the offset of the last tokens of a completion."""
    at = len(text)
    for token in reversed(tokens):
        found = text.rfind(token.text, 0, at) if token.text else -1
        at = at if found < 0 else found
    return at
