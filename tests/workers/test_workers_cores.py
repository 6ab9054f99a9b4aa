"""Replicas of a model share the cores."""

import pytest

from dragoman.system import threads
from workers.workers_harness import call, first_value, pool_of


@pytest.mark.parametrize(("replicas", "count"), [(1, 12), (2, 6), (5, 2), (12, 1), (100, 1)])
def test_threads_per_replica_divide_the_cores(monkeypatch: pytest.MonkeyPatch, replicas: int, count: int) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 12)
    assert threads.threads_per_replica(replicas) == count


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_linear_algebra_of_a_replica_uses_its_share_of_the_cores(placement: str) -> None:
    limits = pytest.importorskip("threadpoolctl").threadpool_limits
    before = limits(limits=threads.cores())
    try:
        async with pool_of(placement, "Threads", replicas=threads.cores()) as pool:
            assert first_value(await call(pool)) == 1
    finally:
        before.restore_original_limits()
