"""The result of a row is bitwise the same whatever the number of other rows: products, attention, whole models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm

from dragoman_text.generation.attention import AttentionForm, AttentionStep, SlotSpan, can_merge
from dragoman_text.generation.cache import CacheShape, KeyValueCache
from dragoman_text.generation.fused import PackedLinear, can_pack
from dragoman_text.generation.rounding import cancelling
from features.text.generation.helpers import load_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> None:
    dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip("no kernels for packed weights of this dtype")


@DTYPES
@pytest.mark.parametrize("shape", [(64, 4), (96, 8), (8, 96), (160, 320), (320, 160)], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, rows = cancelling(shape[0], 300, shape[1], dtype)
    layer, added = PackedLinear(weight, None), torch.zeros(300, shape[0], dtype=dtype)
    alone = torch.cat([layer(row[None]) for row in rows])
    for begin, stop in ((0, 3), (2, 7), (9, 24), (9, 25), (0, 32), (5, 38), (100, 164), (10, 298), (0, 300)):
        part = slice(begin, stop)
        assert torch.equal(layer(rows[part]), alone[part])
        assert torch.equal(layer.plus(rows[part], added[part]), alone[part])
        assert torch.equal(layer(rows[part][None])[0], alone[part])


@DTYPES
@pytest.mark.parametrize("heads", [(4, 2, 16), (4, 4, 64)], ids=str)
def test_attention_of_a_sequence_does_not_depend_on_the_others(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    query_heads, key_heads, size = heads
    shape, slots, count = CacheShape(1, key_heads, size, size), 34, 20
    merges, generator = can_merge(shape, query_heads, dtype), torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(slots, heads, size, generator=generator).to(dtype)

    query, key = random(query_heads), random(key_heads)
    # Their sums are 0: with the scaling 0 all tokens have the same weight.
    values = cancelling(slots * key_heads * size, 1, count, dtype)[0].view(slots, key_heads, size, count)

    def attend(used: list[int], length: int) -> torch.Tensor:
        cache = KeyValueCache(shape, slots * length, dtype, torch.device("cpu"))
        cache.reserve(slots, length)
        cache.values[0, :, :, :count] = values.transpose(2, 3)
        spans = [SlotSpan(slot, i, count, 1) for i, slot in enumerate(used)]
        return AttentionStep(cache, spans, (), merges)(
            0, AttentionForm(0.0), query[used], key[used], values[used, :, :, -1]
        )

    alone = torch.cat([attend([slot], 32) for slot in range(slots)])
    for used in ([0, 1], list(range(17)), list(range(slots))):
        assert torch.equal(attend(used, 96), alone[used])


@DTYPES
@pytest.mark.parametrize("kernels", ["", "none"])
async def test_the_metadata_say_whether_completions_depend_on_the_batch(
    llama_folder: Path,
    dtype: torch.dtype,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kernels:
        monkeypatch.setenv("KERNELS_FORM", kernels)
    name = str(dtype).removeprefix("torch.")
    with caplog.at_level("INFO", "dragoman.generation"):
        model = load_model(llama_folder, dtype=name)
    assert model.details()["batch_invariant"] is True
    assert "depend on the batch" not in caplog.text
    await model.close()


async def test_rounding_that_depends_on_the_number_of_rows_is_reported(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rounds(states: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return layer_norm(states, *arguments) * (1 + 1e-6 * len(states))

    monkeypatch.setenv("KERNELS_FORM", "none")
    monkeypatch.setattr("dragoman_text.generation.fused.layer_norm", rounds)
    with caplog.at_level("INFO", "dragoman.generation"):
        model = load_model(llama_folder)
    assert model.details()["batch_invariant"] is False
    assert "completions depend on the batch by rounding: sequences=9 packed=True" in caplog.text
    await model.close()
