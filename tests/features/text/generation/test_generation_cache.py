"""The key-value cache: contents survive resizing, the budget is kept, memory is never NaN."""

import pytest

torch = pytest.importorskip("torch")

from dragoman_text.generation.cache import CacheShape, KeyValueCache  # noqa: E402


def fill(cache: KeyValueCache, slot: int, length: int) -> None:
    cache.keys[:, slot, :, :length] = slot + 1
    cache.values[:, slot, :, :length] = -slot - 1


def test_growing_keeps_contents_and_stays_within_the_budget() -> None:
    cache = KeyValueCache(CacheShape(2, 3, 4, 5), 1024, torch.float32, torch.device("cpu"))
    assert (cache.slots, cache.length) == (0, 0)
    for slots, length in ((1, 10), (2, 70), (3, 70), (5, 100), (4, 200), (16, 64)):
        assert cache.fits(slots, length)
        cache.reserve(slots, length)
        assert cache.slots >= slots
        assert cache.length >= length
        assert cache.slots * cache.length <= 1024
        fill(cache, slots - 1, 8)
        assert bool((cache.keys[:, slots - 1, :, :8] == slots).all())
    assert not cache.fits(16, 65)
    assert bool(torch.isfinite(cache.keys).all())
    cache.release()
    assert cache.keys.numel() == 0


def test_slots_are_copied_and_reordered() -> None:
    cache = KeyValueCache(CacheShape(1, 1, 2, 2), 1024, torch.float32, torch.device("cpu"))
    cache.reserve(3, 64)
    for slot in range(3):
        fill(cache, slot, 4)
    cache.gather([2, 0, 0], [0, 1, 2], 4)
    assert [int(cache.keys[0, slot, 0, 0, 0]) for slot in range(3)] == [3, 1, 1]
    cache.copy(0, 2, 2)
    assert cache.values[0, 2, 0, :4, 0].tolist() == [-3, -3, -1, -1]
    block = cache.read(0, 1, 3)
    cache.write(1, 0, block)
    assert cache.keys[0, 1, 0, :3, 0].tolist() == [3, 3, 1]
