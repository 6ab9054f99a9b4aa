"""Sample the next tokens of a batch, with log-probabilities."""

from collections.abc import Sequence

import torch

from dragoman.generation.token_sampler import TokenChoice, TokenSampler


def choose(logits: torch.Tensor, samplers: Sequence[TokenSampler]) -> list[TokenChoice]:
    """Choose a token for each row of logits [rows, vocabulary], FP32.

    Log-probabilities are those of the model, before rules and temperature. An error in one row affects only that row.
    """
    logprobs = torch.log_softmax(logits, -1)
    tokens = _argmax(logits)
    errors: dict[int, Exception] = {}
    ruled = [i for i, sampler in enumerate(samplers) if not sampler.is_greedy]
    for i, row in zip(ruled, logits[ruled].cpu().numpy() if ruled else (), strict=True):
        try:
            tokens[i] = samplers[i].choose(row)
        except Exception as error:
            errors[i] = error
    tops = top_tokens(logits, logprobs, [sampler.sampling.top_logprobs for sampler in samplers])
    return [
        TokenChoice(token, logprob, top, _error_if_nan(logprob) or errors.get(i))
        for i, (token, logprob, top) in enumerate(zip(tokens, logprobs_of(logprobs, tokens), tops, strict=True))
    ]


def _argmax(logits: torch.Tensor) -> list[int]:
    """Return the argmax of each row, the first of equal ones."""
    # NumPy's argmax takes a tenth of the time of PyTorch's on a CPU.
    indices = logits.argmax(-1) if logits.is_cuda else logits.numpy().argmax(-1)
    tokens: list[int] = indices.tolist()
    return tokens


def logprobs_of(logprobs: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of one token of each row."""
    indices = torch.tensor(tokens, device=logprobs.device, dtype=torch.long)
    values: list[float] = logprobs.gather(1, indices[:, None])[:, 0].tolist()
    return values


def _error_if_nan(logprob: float) -> Exception | None:
    return ValueError("the model's logits are NaN") if logprob != logprob else None


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
