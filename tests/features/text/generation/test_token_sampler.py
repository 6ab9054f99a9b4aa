"""Which tokens each parameter of sampling leaves, and the rules before it, for one row of logits."""

from typing import Any

import numpy as np
import pytest

from dragoman.core.text import Sampling
from dragoman_text.generation.token_sampler import TokenSampler

SHARES = (0.4, 0.3, 0.15, 0.1, 0.05)


def logits() -> Any:
    return np.log(np.array(SHARES, np.float32))


def sampler(seed: int = 0, prompt: tuple[int, ...] = (), bad: Any = (), **fields: Any) -> TokenSampler:
    return TokenSampler(Sampling(**fields), seed, prompt, frozenset((4,)), bad)


def drawn(**fields: Any) -> set[int]:
    chosen = sampler(do_sample=True, **fields)
    return {chosen.choose(logits()) for _ in range(300)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),  # of the largest share
        ({"min_p": 0.6}, {0, 1}),
        ({"typical_p": 0.25}, {1}),  # the one nearest to the entropy
        ({"typical_p": 0.65}, {0, 1}),
        ({"top_k": 3, "min_p": 0.6}, {0, 1}),
        ({"top_k": 3, "typical_p": 0.25}, {1}),
        ({"temperature": 1e-40}, {0}),
        ({"temperature": 0.02}, {0}),
        ({"allowed_token_ids": (2, 3)}, {2, 3}),
        ({"logit_bias": {3: 100.0}}, {3}),
    ],
)
def test_the_tokens_that_are_left(fields: dict[str, Any], expected: set[int]) -> None:
    assert drawn(**fields) == expected


def test_temperature_changes_the_shares() -> None:
    for temperature, expected in ((1.0, SHARES[0]), (0.5, 0.16 / 0.285), (2.0, 0.4**0.5 / sum(s**0.5 for s in SHARES))):
        chosen = sampler(do_sample=True, temperature=temperature)
        share = sum(chosen.choose(logits()) == 0 for _ in range(4000)) / 4000
        assert share == pytest.approx(expected, abs=0.035)  # more than four standard deviations


def test_rules_apply_without_sampling() -> None:
    assert sampler().choose(logits()) == 0
    assert sampler(allowed_token_ids=(3,)).choose(logits()) == 3
    assert sampler(logit_bias={0: -100.0}).choose(logits()) == 1
    assert sampler(bad=[(0,)]).choose(logits()) == 1
    assert sampler(prompt=(0,), repetition_penalty=3.0).choose(logits()) == 1
    assert sampler(min_new_tokens=1, allowed_token_ids=(3, 4), logit_bias={4: 9.0}).choose(logits()) == 3
    assert sampler(allowed_token_ids=(3, 4), logit_bias={4: 9.0}).choose(logits()) == 4
    with pytest.raises(ValueError, match="no token is left that the parameters allow"):
        sampler(min_new_tokens=1, allowed_token_ids=(4,)).choose(logits())


def test_the_same_seed_draws_the_same_tokens() -> None:
    first, again, other = (sampler(seed, do_sample=True) for seed in (7, 7, 8))
    rows = [[each.choose(logits()) for _ in range(50)] for each in (first, again, other)]
    assert (rows[0] == rows[1], rows[0] == rows[2]) == (True, False)
    twin = first.copy()
    assert [twin.choose(logits()) for _ in range(50)] == [first.choose(logits()) for _ in range(50)]
