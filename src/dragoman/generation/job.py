"""One prompt on its way through the engine, and the texts that become of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dragoman.core.errors import DragomanError
from dragoman.core.text import PromptInfo, Sampling, Text, Token
from dragoman.generation.choice import Choice
from dragoman.generation.grammar import Guide
from dragoman.generation.sequence import Sequence
from dragoman.generation.writer import Writer


class Outlet(Protocol):
    """Where what becomes of a prompt goes; called in the engine's thread."""

    def info(self, index: int, info: PromptInfo) -> None: ...
    def text(self, text: Text) -> None: ...
    def fault(self, fault: DragomanError) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for one prompt: its text and tokens, checked, and its place `index` in the call.

    `guides` makes a guide through the grammar for each text, where there is one. `seed` is None where nothing is drawn.
    To check the call and to cut its prompts took `checked_s`.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    sampling: Sampling
    length: int
    stream: bool = False
    seed: int | None = None
    guides: Callable[[], Guide] | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    checked_s: float | None = None

    @property
    def width(self) -> int:
        """How many sequences it may become."""
        given = self.sampling
        return given.num_beams if given.num_beams > 1 else max(given.n, given.best_of)


@dataclass(eq=False, slots=True)
class Job:
    """A prompt that the scheduler holds: `sequences`, and for each of them its writer once texts have begun.

    `search` is the beam search, in place of writers, where one is asked for. It came at `since_s` on the monotonic
    clock, and was first looked at when it had waited for `waited_s`, which is below 0 before.
    """

    asked: Asked
    outlet: Outlet
    sequences: list[Sequence] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    writers: dict[Sequence, Writer] = field(default_factory=dict)
    choices: dict[Sequence, int] = field(default_factory=dict)
    ended: list[Writer] = field(default_factory=list)
    prefill: list[Token] = field(default_factory=list)
    told: bool = False
    search: Any = None
    since_s: float = field(default_factory=time.monotonic)
    waited_s: float = -1.0

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        tokens = list(self.asked.tokens)
        self.sequences = [Sequence(tokens, len(tokens), self.asked.sampling.adapter)]

    @property
    def width(self) -> int:
        return self.asked.width if not self.writers else len(self.sequences)

    @property
    def recalls(self) -> bool:
        return not self.wants_prefill

    @property
    def wants_prefill(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.asked.sampling.prompt_logprobs is not None and not self.told

    @property
    def ranked(self) -> bool:
        """Whether the best of more texts than are wanted are given, at the end."""
        return self.asked.sampling.num_beams == 1 and self.asked.width > self.asked.sampling.n

    def restart(self) -> None:
        """Forget what was computed. Texts that have begun go on from their tokens; a beam search begins again."""
        self.spare = []
        self.prefill = []
        if not self.writers:
            self.search = None
            self._begin()

    def looked_at(self) -> None:
        """The engine works on it from now on."""
        if self.waited_s < 0:
            self.waited_s = time.monotonic() - self.since_s

    def tell(self) -> None:
        """Say what became of the prompt, once."""
        if not self.told:
            self.told = True
            asked = self.asked
            told = (self.sequences[0].cached, tuple(self.prefill), max(0.0, self.waited_s))
            info = PromptInfo(asked.text, len(asked.tokens), *told, asked.checked_s, asked.length)
            self.outlet.info(asked.index, info)

    def begin(self, sequence: Sequence, choice: Choice) -> None:
        """Begin what takes time of `take`, in another thread."""
        self.writers[sequence].chooser.begin(choice.token)

    def take(self, sequence: Sequence, choice: Choice) -> bool:
        """Write a choice; gives whether that text is over. Raises ValueError where a grammar does not allow it."""
        writer = self.writers[sequence]
        writer.take(choice)
        if not writer.finish:
            sequence.tokens.append(choice.token)
        else:
            self.ended.append(writer)
        if not self.ranked and (self.asked.stream or writer.finish):
            self.outlet.text(writer.piece(self.asked.index, self.choices[sequence]))
        return bool(writer.finish)

    def rank(self) -> None:
        """Give the best texts, all of them being over."""
        best = sorted(self.ended, key=lambda writer: writer.mean, reverse=True)[: self.asked.sampling.n]
        for place, writer in enumerate(best):
            self.outlet.text(writer.piece(self.asked.index, place))
