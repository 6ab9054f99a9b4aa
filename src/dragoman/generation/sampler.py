"""Chooses the next tokens of all texts of a step from their logits, with the log-probabilities."""

from collections.abc import Sequence

import torch

from dragoman.generation.choice import Choice
from dragoman.generation.chooser import Chooser


def choose(logits: torch.Tensor, choosers: Sequence[Chooser]) -> list[Choice]:
    """A choice for each row of logits [rows, vocabulary], FP32.

    Log-probabilities are the model's own, before any rule or temperature. What fails for one row fails for it alone.
    """
    logprobs = torch.log_softmax(logits, -1)
    tokens = _highest(logits)
    faults: dict[int, Exception] = {}
    ruled = [i for i, chooser in enumerate(choosers) if not chooser.plain]
    for i, row in zip(ruled, logits[ruled].cpu().numpy() if ruled else (), strict=True):
        try:
            tokens[i] = choosers[i].choose(row)
        except Exception as fault:
            faults[i] = fault
    tops = likeliest(logits, logprobs, [chooser.sampling.top_logprobs for chooser in choosers])
    return [
        Choice(token, logprob, top, _broken(logprob) or faults.get(i))
        for i, (token, logprob, top) in enumerate(zip(tokens, picked(logprobs, tokens), tops, strict=True))
    ]


def _highest(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row, the first of equals."""
    # NumPy takes a tenth of the time here that PyTorch takes on a CPU.
    found = logits.argmax(-1) if logits.is_cuda else logits.numpy().argmax(-1)
    tokens: list[int] = found.tolist()
    return tokens


def picked(logprobs: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """The log-probability of one token of each row."""
    places = torch.tensor(tokens, device=logprobs.device, dtype=torch.long)
    found: list[float] = logprobs.gather(1, places[:, None])[:, 0].tolist()
    return found


def _broken(logprob: float) -> Exception | None:
    return ValueError("the model's logits are not numbers") if logprob != logprob else None


def likeliest(
    logits: torch.Tensor, logprobs: torch.Tensor, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row with their log-probabilities, as many as `counts` says."""
    most = min(max(counts, default=0), logits.shape[1])
    if not most:
        return [()] * len(counts)
    places = logits.topk(most, -1).indices
    pairs = zip(places.tolist(), logprobs.gather(1, places).tolist(), counts, strict=True)
    return [tuple(zip(ids[:count], found[:count], strict=True)) for ids, found, count in pairs]
