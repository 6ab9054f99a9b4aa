"""Stop strings: found as text grows, while what may yet become one is held back."""

from collections.abc import Sequence


class StopStrings:
    """Watches one text. `found` is the stop string that ended it, "" while none has."""

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = tuple(string for string in strings if string)
        self._keep = keep
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """What of the text so far is certain now; after a stop string nothing is."""
        if self.found:
            return ""
        if not self._strings:
            return text
        self._held += text
        places = [(self._held.find(string), -len(string), string) for string in self._strings]
        hits = [place for place in places if place[0] >= 0]
        if hits:
            start, _, self.found = min(hits)
            certain, self._held = self._held[: start + (len(self.found) if self._keep else 0)], ""
            return certain
        split = len(self._held) - self._hold()
        certain, self._held = self._held[:split], self._held[split:]
        return certain

    def rest(self) -> str:
        """What was held back, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _hold(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(string.startswith(end) for string in self._strings):
                return size
        return 0
