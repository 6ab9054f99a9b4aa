"""One text as it is written: its tokens, its characters, and when and why it ends."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from dragoman.core.text import FinishReason, Sampling, Text, Token
from dragoman.generation.choice import Choice
from dragoman.generation.chooser import Chooser
from dragoman.generation.stopping import StopStrings
from dragoman.generation.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a text: the model's own tokens, the caller's, and a number of tokens."""

    own: frozenset[int]
    asked: frozenset[int]
    length: int

    def of(self, token: int) -> FinishReason:
        if token in self.own:
            return "eos_token"
        return "stop_sequence" if token in self.asked else ""


class Writer:
    """Takes the choices for one text and gives pieces of it. `before` are the tokens of its prompt."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: Sampling,
        ends: Ends,
        chooser: Chooser,
        before: Sequence[int],
        seed: int | None = None,
    ) -> None:
        self.chooser = chooser
        self.finish: FinishReason = ""
        self.total = 0.0
        self._vocabulary, self._sampling, self._ends, self._seed = vocabulary, sampling, ends, seed
        self._letters = vocabulary.detokenizer(
            before, skip_special=sampling.skip_special_tokens, spaces=sampling.spaces_between_special_tokens
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop)
        self._stop: str | int | None = None
        self._count = 0
        self._tokens: list[Token] = []
        self._new: list[str] = []
        self._given: list[str] = []

    def copy(self) -> "Writer":
        """One that goes its own way from here."""
        twin = copy(self)
        twin.chooser, twin._letters, twin._stops = self.chooser.copy(), self._letters.copy(), copy(self._stops)
        twin._tokens, twin._new, twin._given = list(self._tokens), list(self._new), list(self._given)
        return twin

    @property
    def ids(self) -> list[int]:
        """Its tokens since the last piece."""
        return [token.id for token in self._tokens]

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens."""
        return self.total / max(1, self._count)

    def take(self, choice: Choice) -> None:
        """Write a token, which may end the text. Raises ValueError where a grammar does not allow it."""
        token = choice.token
        self._count += 1
        self.total += choice.logprob
        self._tokens.append(self._token(choice))
        self.chooser.took(token)
        reason = self._ends.of(token)
        if reason:
            self._end(reason, token, self._letters.add(token) if self._sampling.include_stop else "")
            return
        self._write(self._letters.add(token))
        if self._stops.found:
            self._end("stop_sequence", self._stops.found)
        elif self.chooser.ended:
            self._end("eos_token", None)
        elif self._count >= self._ends.length:
            self._end("length", None)

    def piece(self, prompt: int, choice: int) -> Text:
        """What is new since the piece before."""
        text = "".join(self._new)
        self._given.append(text)
        tokens, self._tokens, self._new = tuple(self._tokens), [], []
        whole = "".join(self._given) if self.finish else ""
        return Text(prompt, choice, text, tokens, self._count, self.finish, self._stop, whole, self._seed)

    def _write(self, letters: str) -> None:
        if self._count > self._sampling.min_new_tokens:
            letters = self._stops.add(letters)
        if letters:
            self._new.append(letters)

    def _end(self, reason: FinishReason, stop: str | int | None, letters: str = "") -> None:
        self.finish, self._stop = reason, stop
        if reason == "stop_sequence" and isinstance(stop, str):
            return
        self._write(letters + self._letters.rest())
        if self._stops.found:  # the last characters, certain only now, complete a stop string
            self.finish, self._stop = "stop_sequence", self._stops.found
        else:
            self._new.append(self._stops.rest())

    def _token(self, choice: Choice) -> Token:
        known, special = self._vocabulary.text, self._vocabulary.special
        top = tuple(Token(token, known(token), logprob, token in special) for token, logprob in choice.top)
        return Token(choice.token, known(choice.token), choice.logprob, choice.token in special, top)
