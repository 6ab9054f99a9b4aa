"""Replicas of a model share the cores."""

import pytest
from workers_harness import ask, first, pool_of

from dragoman.system.coroutines import complete
from dragoman.workers import cores


@pytest.mark.parametrize(("replicas", "threads"), [(1, 12), (2, 6), (5, 2), (12, 1), (100, 1)])
def test_each_has_its_share(monkeypatch: pytest.MonkeyPatch, replicas: int, threads: int) -> None:
    monkeypatch.setattr(cores, "cores", lambda: 12)
    assert cores.share(replicas) == threads


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_linear_algebra_keeps_to_it(place: str) -> None:
    limits = pytest.importorskip("threadpoolctl").threadpool_limits
    before = limits(limits=cores.cores())
    try:
        async with pool_of(place, "Threads", replicas=cores.cores()) as pool:
            assert first(await complete(pool.call(ask()))) == 1
    finally:
        before.restore_original_limits()
