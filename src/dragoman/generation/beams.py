"""Beam search over one prompt, step by step, as the transformers library does it."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dragoman.core.text import Text
from dragoman.generation.choice import Choice
from dragoman.generation.chooser import Chooser
from dragoman.generation.job import Asked
from dragoman.generation.sampler import likeliest
from dragoman.generation.vocabulary import Vocabulary
from dragoman.generation.writer import Ends, Writer

# The score of what is ruled out.
_OUT = -1e9


@dataclass(frozen=True, slots=True)
class _Beam:
    """A text that is a candidate: what was chosen, its chooser, and the sum of its (ruled) log-probabilities."""

    choices: tuple[Choice, ...]
    chooser: Chooser
    score: float


class Beams:
    """Keeps the `num_beams` likeliest texts at every length.

    Of each step's candidates, those among the first `num_beams` that end are finished, with the score
    (sum of log-probabilities) / length ** length_penalty; the best others go on. `early_stopping` tells when to stop:
    True, as soon as there are enough finished ones; False, when the best that runs scores no better at its length than
    the worst finished one; "never", when it cannot at any length.
    """

    def __init__(self, asked: Asked, vocabulary: Vocabulary, ends: Ends, chooser: Chooser) -> None:
        self._asked, self._vocabulary, self._ends = asked, vocabulary, ends
        self._beams = [_Beam((), chooser, 0.0)]
        self._finished: list[_Beam] = []
        self._length = 0
        self.over = False

    @property
    def running(self) -> list[list[int]]:
        """The tokens of the texts that go on."""
        return [[choice.token for choice in beam.choices] for beam in self._beams]

    def advance(self, logits: torch.Tensor) -> list[int]:
        """Take the logits of the running texts' next tokens, [texts, vocabulary]; gives the text that each new one
        continues."""
        given = self._asked.sampling
        logprobs = torch.log_softmax(logits, -1)
        ruled = self._ruled(logprobs)
        kept = max(2, 1 + len(self._ends.own | self._ends.asked)) * given.num_beams
        scores = ruled + np.array([beam.score for beam in self._beams], np.float32)[:, None]
        order = torch.from_numpy(scores.reshape(-1)).topk(min(kept, scores.size)).indices.tolist()
        tops = likeliest(logits, logprobs, [given.top_logprobs] * len(self._beams))
        self._length += 1
        candidates = []
        for place in order:
            if scores.flat[place] <= _OUT / 2:
                break  # the grammar allows no more, or they are copies
            parent, token = divmod(place, scores.shape[1])
            choice = Choice(token, float(logprobs[parent, token]), tops[parent])
            before = self._beams[parent]
            beam = _Beam((*before.choices, choice), before.chooser, float(scores[parent, token]))
            candidates.append((parent, beam, self._ending(beam)))
        self._collect(candidates)
        going = [(parent, beam) for parent, beam, ending in candidates if not ending][: given.num_beams]
        self.over = not going or self._settled(going[0][1].score)
        if self.over:
            return []
        while len(going) < given.num_beams:  # where a grammar leaves few ways, copies that cannot win fill the places
            going.append((going[0][0], replace(going[0][1], score=_OUT)))
        self._beams = [self._forked(beam) for _, beam in going]
        return [parent for parent, _ in going]

    def texts(self) -> list[Text]:
        """The best texts, the best one first."""
        best = self._finished[: self._asked.sampling.n]
        return [self._told(beam, place) for place, beam in enumerate(best)]

    # ------------------------------------------------------------------------------------------------------

    def _ruled(self, logprobs: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        rows = logprobs.cpu().numpy().copy()
        for row, beam in zip(rows, self._beams, strict=True):
            beam.chooser.rule(row)
        return rows

    def _forked(self, beam: _Beam) -> _Beam:
        chooser = beam.chooser.copy()
        chooser.took(beam.choices[-1].token)
        return _Beam(beam.choices, chooser, beam.score)

    def _ending(self, beam: _Beam) -> bool:
        if self._length >= self._ends.length or self._ends.of(beam.choices[-1].token):
            return True
        stops = self._asked.sampling.stop
        if not stops:
            return False
        text = self._vocabulary.decode([choice.token for choice in beam.choices], skip_special=True)
        return any(stop in text for stop in stops)

    def _collect(self, candidates: list[tuple[int, _Beam, bool]]) -> None:
        """Finished ones among the likeliest `num_beams` candidates compete with those finished before."""
        given = self._asked.sampling
        full = given.early_stopping is True and len(self._finished) >= given.num_beams
        if full:
            return
        divisor = self._length**given.length_penalty
        for _, beam, ending in candidates[: given.num_beams]:
            if ending:
                self._finished.append(_Beam(beam.choices, beam.chooser, beam.score / divisor))
        self._finished.sort(key=lambda beam: beam.score, reverse=True)
        del self._finished[given.num_beams :]

    def _settled(self, best: float) -> bool:
        """Whether no text that runs is hoped to become better than the finished ones."""
        given = self._asked.sampling
        if len(self._finished) < given.num_beams:
            return False
        if given.early_stopping is True:
            return True
        longest = given.early_stopping == "never" and given.length_penalty > 0
        length = self._ends.length if longest else self._length
        hoped: float = best / length**given.length_penalty
        return hoped <= self._finished[-1].score

    def _told(self, beam: _Beam, place: int) -> Text:
        asked = self._asked
        chooser = Chooser(asked.sampling, 0, asked.tokens, self._ends.own, ())
        writer = Writer(self._vocabulary, asked.sampling, self._ends, chooser, asked.tokens)
        for choice in beam.choices:
            if not writer.finish:
                writer.take(choice)
        return writer.piece(asked.index, place)
