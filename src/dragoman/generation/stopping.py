"""Stop strings: found in growing text, holding back text that may become part of one."""

from collections.abc import Sequence


class StopStrings:
    """Searches one completion. `found`: the stop string that ended it, or "".

    With `keep` the stop string is part of the text, so nothing is held back.
    """

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = tuple(string for string in strings if string)
        self._keep = keep
        self._watched = ""  # end of the text so far, where a stop string may begin
        self.found = ""

    def add(self, text: str) -> str:
        """Add text; return the text that is newly certain, nothing after a stop string."""
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
        """Return the text held back, after the completion ended for another reason."""
        held, self._watched = "" if self._keep else self._watched, ""
        return held

    def _begun(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for size in range(min(longest, len(self._watched)), 0, -1):
            end = self._watched[-size:]
            if any(string.startswith(end) for string in self._strings):
                return size
        return 0
