"""Stop strings: found as text grows, while what may yet become one that is taken off is held back."""

from collections.abc import Sequence


class StopStrings:
    """Watches one text. `found` is the stop string that ended it, "" while none has. With `keep` the text ends behind
    it, so that nothing needs to be held back."""

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = tuple(string for string in strings if string)
        self._keep = keep
        self._watched = ""  # the end of the text so far, in which a stop string may begin
        self.found = ""

    def add(self, text: str) -> str:
        """What of the text so far is certain now, and was not before; after a stop string nothing is."""
        if self.found:
            return ""
        if not self._strings:
            return text
        given = len(self._watched) if self._keep else 0
        self._watched += text
        places = [(self._watched.find(string), -len(string), string) for string in self._strings]
        hits = [place for place in places if place[0] >= 0]
        if hits:
            start, _, self.found = min(hits)
            end = start + (len(self.found) if self._keep else 0)
            certain, self._watched = self._watched[given:end], ""
            return certain
        split = len(self._watched) - self._begun()
        certain, self._watched = self._watched[:split], self._watched[split:]
        return text if self._keep else certain

    def rest(self) -> str:
        """What was held back, once the text has ended otherwise."""
        held, self._watched = "" if self._keep else self._watched, ""
        return held

    def _begun(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for size in range(min(longest, len(self._watched)), 0, -1):
            end = self._watched[-size:]
            if any(string.startswith(end) for string in self._strings):
                return size
        return 0
