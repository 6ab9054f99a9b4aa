"""Results are bitwise independent of the batch; sampling rules that sort one bin are exact."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dragoman_text.generation import token_sampler  # noqa: E402
from dragoman_text.generation.attention import AttentionForm, AttentionStep, SlotSpan  # noqa: E402
from dragoman_text.generation.cache import CacheShape, KeyValueCache  # noqa: E402
from dragoman_text.generation.fused import PackedLinear, can_pack  # noqa: E402

HEADS, SIZE = 2, 16
CPU = torch.device("cpu")


def attend(dtype: Any, others: list[int], stop: int, window: int = 0) -> Any:
    """Attend with the last token of a sequence of `stop` tokens, beside sequences of the lengths `others`."""
    cache = KeyValueCache(CacheShape(1, HEADS, SIZE, SIZE), 1 << 20, dtype, CPU)
    lengths = [*others, stop]
    cache.reserve(len(lengths), max(lengths))
    rng = torch.Generator().manual_seed(7)
    own = torch.randn(3, HEADS, stop, SIZE, generator=rng).to(dtype)
    cache.keys[0, :, :, : max(others, default=0)] = 0.5
    cache.keys[0, -1, :, :stop], cache.values[0, -1, :, :stop] = own[0], own[1]
    query = torch.randn(len(lengths), HEADS, SIZE, generator=torch.Generator().manual_seed(len(others))).to(dtype)
    query[-1] = own[2, :, 0]
    last = torch.stack([own[0][:, -1]] * len(lengths)), torch.stack([own[1][:, -1]] * len(lengths))
    step = AttentionStep(cache, [SlotSpan(slot, slot, length - 1, 1) for slot, length in enumerate(lengths)], [])
    with torch.inference_mode():
        return step(0, AttentionForm(0.25, window), query, *last)[-1]


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("stop", [1, 31, 33, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_attention_is_the_same_alone_and_in_a_batch(dtype: Any, stop: int, window: int) -> None:
    expected = attend(dtype, [], stop, window)
    assert bool(torch.isfinite(expected).all())
    for others in ([stop], [40, 200, 7], [5, 5, 5, 1500], [1000] * 9):
        assert torch.equal(attend(dtype, others, stop, window), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_products_are_the_same_alone_and_in_a_batch(dtype: Any) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("no kernels for reordered weights of that type")
    rng = torch.Generator().manual_seed(3)
    weight, rows = torch.randn(96, 256, generator=rng).to(dtype), torch.randn(40, 256, generator=rng).to(dtype)
    linear = PackedLinear(weight, None)
    expected = linear(rows)
    assert torch.allclose(expected.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.3)
    for count in (1, 2, 3, 4, 5, 8, 31):
        assert torch.equal(linear(rows[:count]), expected[:count])
    added = torch.randn(40, 96, generator=rng).to(dtype)
    sums = linear.plus(rows, added)
    assert torch.allclose(sums.float(), (expected + added).float(), rtol=0.02, atol=0.1)
    for count in (4, 5, 8, 31):
        assert torch.equal(linear.plus(rows[:count], added[:count]), sums[:count])
    assert linear(rows[None, :1]).shape == (1, 1, 96)
    assert linear(rows[:0]).shape == (0, 96)


def test_slots_shrink_when_long_sequences_end() -> None:
    cache = KeyValueCache(CacheShape(2, HEADS, SIZE, SIZE), 1 << 20, torch.float32, CPU)
    cache.reserve(4, 3000)
    cache.keys[:, 3, :, :50] = 4.0
    cache.reserve(2, 50)
    assert cache.slots == 4
    assert cache.length <= 128
    assert bool((cache.keys[:, 3, :, :50] == 4).all())
    length = cache.length
    cache.reserve(4, 40)
    assert cache.length == length, "small changes do not resize the cache"


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.999, 1 - 1e-9])
def test_sorting_one_bin_keeps_the_tokens_of_a_full_sort(mass: float) -> None:
    rng = np.random.default_rng(5)
    for case in range(60):
        row = (rng.standard_normal(rng.integers(1, 2000)) * 10 ** rng.uniform(-2, 2)).astype(np.float32)
        row = np.round(row) if case % 3 == 0 else row
        row[1::2] = -np.inf if case % 4 == 0 else row[1::2]
        powers = np.exp(row.astype(np.float64) - row.max())
        order = np.argsort(-row)
        cumulative = np.cumsum(powers[order])
        last = min(int(np.searchsorted(cumulative, mass * cumulative[-1])), len(row) - 1)
        nucleus = row.copy()
        token_sampler.top_p(nucleus, mass)
        threshold = row[order[last]]
        differing = (nucleus == -np.inf) != ((row < threshold) | (row == -np.inf))
        # Where rounding decides, sums in another order may take one token more or less.
        assert powers[differing].sum() <= 1e-5 * cumulative[-1]
