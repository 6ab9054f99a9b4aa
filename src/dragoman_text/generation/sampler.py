"""Choose the next tokens of a batch: sampling with log-probabilities, and beam search."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Text
from dragoman_text.generation.completion_writer import CompletionWriter, EndConditions
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.token_sampler import TokenChoice, TokenSampler
from dragoman_text.generation.vocabulary import Vocabulary


def choose(logits: torch.Tensor, samplers: Sequence[TokenSampler]) -> list[TokenChoice]:
    """Choose a token for each row of logits [rows, vocabulary], FP32.

    Log-probabilities are those of the model, before rules and temperature. An error in one row affects only that row.
    """
    logprobs = torch.log_softmax(logits, -1)
    tokens, values = _most_probable(logits, logprobs)
    errors: dict[int, BaseException] = {}
    ruled = [i for i, sampler in enumerate(samplers) if not sampler.is_greedy]
    for i, row in zip(ruled, logits[ruled].cpu().numpy() if ruled else (), strict=True):
        try:
            tokens[i] = samplers[i].choose(row)
        except BaseException as error:  # also the panic of a library in Rust
            errors[i] = error
    if ruled:
        values = logprobs_of(logprobs, tokens)
    errors |= {i: ValueError("the model's logits are NaN") for i, value in enumerate(values) if value != value}
    tops = top_tokens(logits, logprobs, [sampler.sampling.top_logprobs for sampler in samplers])
    choices = list(map(TokenChoice, tokens, values, tops))
    for i, failure in errors.items():
        choices[i] = TokenChoice(tokens[i], error=failure)
    return choices


def _most_probable(logits: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the argmax of each row, the first of equal ones, and its log-probability."""
    if logits.is_cuda:
        indices = logits.argmax(-1, keepdim=True)
        both = torch.cat((indices.double(), logprobs.gather(-1, indices).double()), 1)  # one copy from the GPU
        rows: list[list[float]] = both.tolist()
        return [int(token) for token, _ in rows], [value for _, value in rows]
    # NumPy's argmax takes a tenth of the time of PyTorch's on a CPU.
    tokens: list[int] = logits.numpy().argmax(-1).tolist()
    return tokens, logprobs_of(logprobs, tokens)


def logprobs_of(logprobs: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of one token of each row."""
    rows = list(range(len(tokens)))
    # NumPy takes a third of the time of PyTorch on a CPU.
    chosen = logprobs[rows, tokens] if logprobs.is_cuda else logprobs.numpy()[rows, tokens]
    values: list[float] = chosen.tolist()
    return values


def top_tokens(
    logits: torch.Tensor, logprobs: torch.Tensor, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """Return the top tokens of each row with their log-probabilities, `counts[i]` of row i."""
    largest = min(max(counts, default=0), logits.shape[1])
    if not largest:
        return [()] * len(counts)
    indices = logits.topk(largest, -1).indices
    pairs = zip(indices.tolist(), logprobs.gather(1, indices).tolist(), counts, strict=True)
    return [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in pairs]


# Score of forbidden candidates.
_OUT = -1e9


@dataclass(frozen=True, slots=True)
class _Beam:
    """A candidate and the sum of its log-probabilities after rules."""

    writer: CompletionWriter
    score: float


class BeamSearch:
    """Keeps the `num_beams` best sequences at every length.

    Candidates among the first `num_beams` that end are finished, with the score (sum of log-probabilities) /
    length ** length_penalty; the best others continue. `early_stopping` determines the end: True: enough are finished;
    False: the best running one scores no better at its length than the worst finished one; "never": it cannot at any
    length.
    """

    def __init__(
        self, request: PromptRequest, vocabulary: Vocabulary, ends: EndConditions, chooser: TokenSampler
    ) -> None:
        self._request, self._ends = request, ends
        self._beams = [
            _Beam(CompletionWriter(vocabulary, request.sampling, ends, chooser, request.continued_tokens), 0.0)
        ]
        self._finished: list[_Beam] = []
        self._candidates: list[tuple[int, _Beam, TokenChoice]] = []
        self._length = 0
        self.is_finished = False

    @property
    def running(self) -> list[list[int]]:
        return [beam.writer.ids for beam in self._beams]

    def expand(self, logits: torch.Tensor) -> None:
        """Find the best continuations by the logits of the next tokens [sequences, vocabulary].

        Raises ValueError if they are NaN.
        """
        sampling = self._request.sampling
        logprobs = torch.log_softmax(logits, -1)
        if bool(logprobs.isnan().any()):
            raise ValueError("the model's logits are NaN")
        ruled = self._apply_rules(logprobs)
        count = max(2, 1 + len(self._ends.eos | self._ends.requested)) * sampling.num_beams
        scores = ruled + np.array([beam.score for beam in self._beams], np.float32)[:, None]
        order = torch.from_numpy(scores.reshape(-1)).topk(min(count, scores.size)).indices.tolist()
        tops = top_tokens(logits, logprobs, [sampling.top_logprobs] * len(self._beams))
        self._length += 1
        for index in order:
            if scores.flat[index] <= _OUT / 2:
                break  # forbidden by the grammar, or copies
            parent, token = divmod(index, scores.shape[1])
            choice = TokenChoice(token, float(logprobs[parent, token]), tops[parent])
            writer = self._beams[parent].writer.copy()
            writer.chooser.begin(token)
            self._candidates.append((parent, _Beam(writer, float(scores[parent, token])), choice))

    def wait(self, until_s: float) -> bool:
        """Wait for grammar masks of candidates until a time; return whether they are available."""
        return all(beam.writer.chooser.wait(until_s) for _, beam, _ in self._candidates)

    def advance(self) -> list[int]:
        """Continue the best candidates; return the index of the parent of each."""
        sampling = self._request.sampling
        expanded, self._candidates = self._candidates, []
        for _, beam, choice in expanded:
            beam.writer.take(choice)
        candidates = [(parent, beam) for parent, beam, _ in expanded]
        self._collect([beam for _, beam in candidates[: sampling.num_beams]])
        going = [(parent, beam) for parent, beam in candidates if not beam.writer.finish][: sampling.num_beams]
        self.is_finished = not going or self._is_decided(going[0][1].score)
        if self.is_finished:
            return []
        while len(going) < sampling.num_beams:  # copies that cannot win, if a grammar allows few
            going.append((going[0][0], _Beam(going[0][1].writer, _OUT)))
        self._beams = [beam for _, beam in going]
        return [parent for parent, _ in going]

    def texts(self) -> list[Text]:
        """Return the best completions, best first. Raises ValueError or InvalidInput if there are too few."""
        count = self._request.sampling.n
        if not self._finished:
            raise ValueError("no token is left that the parameters allow")
        if len(self._finished) < count:
            available = len(self._finished)
            raise InvalidInput(
                f"n: expected at most {available}, since the parameters allow no further text, got {count}"
            )
        return [beam.writer.chunk(self._request.index, choice) for choice, beam in enumerate(self._finished[:count])]

    # ------------------------------------------------------------------------------------------------------

    def _apply_rules(self, logprobs: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        rows = logprobs.cpu().numpy().copy()
        for row, beam in zip(rows, self._beams, strict=True):
            beam.writer.chooser.apply_rules(row)
        return rows

    def _collect(self, best: list[_Beam]) -> None:
        """Add finished ones among the best candidates to those finished before."""
        sampling = self._request.sampling
        if sampling.early_stopping is True and len(self._finished) >= sampling.num_beams:
            return
        self._finished += [
            _Beam(beam.writer, self._by_length(beam.score, self._length)) for beam in best if beam.writer.finish
        ]
        self._finished.sort(key=lambda beam: beam.score, reverse=True)
        del self._finished[sampling.num_beams :]

    def _by_length(self, score: float, length: int) -> float:
        try:
            divisor = float(length**self._request.sampling.length_penalty)
        except OverflowError:
            divisor = math.inf
        return score / max(divisor, sys.float_info.min)

    def _is_decided(self, best: float) -> bool:
        """Return whether running sequences are not expected to become better than the finished ones."""
        sampling = self._request.sampling
        if len(self._finished) < sampling.num_beams:
            return False
        if sampling.early_stopping is True:
            return True
        longest = sampling.early_stopping == "never" and sampling.length_penalty > 0
        length = self._ends.length if longest else self._length
        return self._by_length(best, length) <= self._finished[-1].score
