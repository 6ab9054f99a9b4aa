"""One completion: its tokens, its text, and when and why it ends."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from dragoman.core.text import FinishReason, Sampling, Text, Token
from dragoman_text.generation.token_sampler import TokenChoice, TokenSampler
from dragoman_text.generation.vocabulary import UNKNOWN, Vocabulary


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
        released = len(self._watched) if self._keep else 0
        self._watched += text
        positions = [(self._watched.find(string), -len(string), string) for string in self._strings]
        hits = [position for position in positions if position[0] >= 0]
        if hits:
            start, _, self.found = min(hits)
            end = start + (len(self.found) if self._keep else 0)
            certain, self._watched = self._watched[released:end], ""
            return certain
        split = len(self._watched) - self._partial_match_length()
        certain, self._watched = self._watched[:split], self._watched[split:]
        return text if self._keep else certain

    def rest(self) -> str:
        """Return the text held back, after the completion ended for another reason."""
        text, self._watched = "" if self._keep else self._watched, ""
        return text

    def _partial_match_length(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for size in range(min(longest, len(self._watched)), 0, -1):
            end = self._watched[-size:]
            if any(string.startswith(end) for string in self._strings):
                return size
        return 0


@dataclass(frozen=True, slots=True)
class EndConditions:
    """End tokens of the model, stop tokens of the request, and the maximum number of tokens of a completion."""

    eos: frozenset[int]
    requested: frozenset[int]
    length: int

    def of(self, token: int) -> FinishReason:
        if token in self.eos:
            return "eos_token"
        return "stop_sequence" if token in self.requested else ""


class CompletionWriter:
    """Collects the tokens of one completion, `count` so far; returns it in chunks. `before`: tokens of the prompt.

    last_s: when the last token came, by the monotonic clock; see `TokenGaps`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: Sampling,
        ends: EndConditions,
        chooser: TokenSampler,
        before: Sequence[int],
        seed: int | None = None,
    ) -> None:
        self.chooser = chooser
        self.finish: FinishReason = ""
        self.total = self.last_s = 0.0
        self._vocabulary, self._sampling, self._ends, self._seed = vocabulary, sampling, ends, seed
        self._detokenizer = vocabulary.detokenizer(
            before, skip_special=sampling.skip_special_tokens, spaces=sampling.spaces_between_special_tokens
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop)
        self._stop: str | int | None = None
        self.count = 0
        self._tokens: list[Token] = []
        self._new: list[str] = []
        self._given: list[str] = []

    def copy(self) -> "CompletionWriter":
        twin = copy(self)
        twin.chooser, twin._detokenizer, twin._stops = self.chooser.copy(), self._detokenizer.copy(), copy(self._stops)
        twin._tokens, twin._new, twin._given = list(self._tokens), list(self._new), list(self._given)
        return twin

    @property
    def ids(self) -> list[int]:
        """Tokens since the last chunk."""
        return [token.id for token in self._tokens]

    @property
    def mean(self) -> float:
        """Mean log-probability of the tokens."""
        return self.total / max(1, self.count)

    def take(self, choice: TokenChoice) -> None:
        """Append a token, which may end the completion. Raises ValueError if the grammar forbids it."""
        token = choice.token
        self.count += 1
        self.total += choice.logprob
        self._tokens.append(self._vocabulary.token(token, choice.logprob, choice.top))
        self.chooser.accept(token)
        reason = self._ends.of(token)
        if reason:
            self._end(reason, token, self._detokenizer.add(token) if self._sampling.include_stop else "")
            return
        self._write(self._detokenizer.add(token))
        if self._stops.found:
            self._end("stop_sequence", self._stops.found)
        elif self.chooser.is_ended:
            self._end("eos_token", None)
        elif self.count >= self._ends.length:
            self._end("length", None)

    def chunk(self, prompt: int, choice: int) -> Text:
        """Return tokens and text since the last chunk."""
        text = "".join(self._new)
        self._given.append(text)
        tokens, self._tokens, self._new = tuple(self._tokens), [], []
        whole_text = "".join(self._given) if self.finish else ""
        return Text(prompt, choice, text, tokens, self.count, self.finish, self._stop, whole_text, self._seed)

    def _write(self, letters: str) -> None:
        if self.count > self._sampling.min_new_tokens:
            letters = self._stops.add(letters)
        if letters:
            self._new.append(letters)

    def _end(self, reason: FinishReason, stop: str | int | None, letters: str = "") -> None:
        self.finish, self._stop = reason, stop
        if reason == "stop_sequence" and isinstance(stop, str):
            return
        rest = self._detokenizer.rest()
        # A limit may cut a character of several tokens: its first bytes are no text, and nobody could go on from it.
        self._write(letters + (rest.rstrip(UNKNOWN) if reason == "length" else rest))
        if self._stops.found:  # the last characters, decoded only now, complete a stop string
            self.finish, self._stop = "stop_sequence", self._stops.found
        else:
            self._new.append(self._stops.rest())
