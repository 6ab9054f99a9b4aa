"""Chooses the next tokens of all texts of a step from their logits, with the log-probabilities."""

from collections.abc import Sequence

import torch

from dragoman.generation.choice import Choice
from dragoman.generation.chooser import Chooser


def choose(logits: torch.Tensor, choosers: Sequence[Chooser]) -> list[Choice]:
    """A choice for each row of logits [rows, vocabulary], FP32.

    Log-probabilities are the model's own, before any rule or temperature. What fails for one row fails for it alone.
    """
    sums = torch.logsumexp(logits, -1)
    tokens = logits.argmax(-1).tolist()
    faults: dict[int, Exception] = {}
    for i, chooser in enumerate(choosers):
        if chooser.plain:
            continue
        try:
            tokens[i] = chooser.choose(logits[i].cpu().numpy().copy())
        except Exception as fault:
            faults[i] = fault
    tops = likeliest(logits, sums, [chooser.sampling.top_logprobs for chooser in choosers])
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    logprobs = (chosen - sums).tolist()
    return [
        Choice(token, logprob, top, faults.get(i) or _broken(logprob))
        for i, (token, logprob, top) in enumerate(zip(tokens, logprobs, tops, strict=True))
    ]


def _broken(logprob: float) -> Exception | None:
    return ValueError("the model's logits are not numbers") if logprob != logprob else None


def likeliest(logits: torch.Tensor, sums: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row with their log-probabilities, as many as `counts` says."""
    most = min(max(counts, default=0), logits.shape[1])
    if not most:
        return [()] * len(counts)
    values, places = logits.topk(most, -1)
    pairs = zip(places.tolist(), (values - sums[:, None]).tolist(), counts, strict=True)
    return [tuple(zip(ids[:count], found[:count], strict=True)) for ids, found, count in pairs]
