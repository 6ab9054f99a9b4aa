"""Streams, the same in every worker pool; a slow reader blocks a model for a limited time."""

import asyncio
from pathlib import Path

import pytest

from dragoman.core.errors import DeadlineExceeded, NotSupported
from workers.workers_harness import PLACEMENTS, call, first_value, make_request, pool_of, wait_until

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


@every_placement
@pytest.mark.parametrize("model", ["Count", "AsyncCount"])
async def test_streams(placement: str, model: str) -> None:
    async with pool_of(placement, model) as pool:
        assert [first_value(chunk) async for chunk in pool.stream(make_request(100))] == list(range(100))
        assert [chunk async for chunk in pool.stream(make_request(0))] == []
        assert first_value(await call(pool, 1)) == 0
        with pytest.raises(NotSupported, match="no response"):
            await call(pool, 0)
        with pytest.raises(NotSupported, match="several responses"):
            await call(pool, 2)


@every_placement
@pytest.mark.parametrize("model", ["Echo", "AsyncEcho"])
async def test_a_plain_response_is_a_stream_of_one_chunk(placement: str, model: str) -> None:
    async with pool_of(placement, model) as pool:
        assert [first_value(chunk) async for chunk in pool.stream(make_request(7))] == [7]


@every_placement
@pytest.mark.parametrize("model", ["Count", "AsyncCount"])
async def test_a_stream_without_reader_pauses_and_is_closed(placement: str, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with pool_of(placement, model) as pool:
        chunks = pool.stream(make_request(100_000, trace=trace))
        assert first_value(await anext(chunks)) == 0
        assert first_value(await anext(chunks)) == 1
        await asyncio.sleep(0.1)  # an unbounded model would yield far more chunks
        assert 2 <= trace.stat().st_size <= 18
        await chunks.aclose()
        await wait_until((tmp_path / "trace.closed").exists)
        assert [first_value(chunk) async for chunk in pool.stream(make_request(3))] == [0, 1, 2]


@every_placement
async def test_a_slow_reader_does_not_block_other_calls(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.2)
    async with pool_of(placement, "Count") as pool:
        chunks = pool.stream(make_request(1000))
        assert first_value(await anext(chunks)) == 0
        assert first_value(await asyncio.wait_for(call(pool, 1), 60)) == 0
        if placement == "inline":  # the model runs only when the reader continues, and blocks no other call
            assert [first_value(chunk) async for chunk in chunks] == list(range(1, 1000))
        else:
            with pytest.raises(DeadlineExceeded, match=r"reader of this stream is too slow: it read nothing for 0.2 s"):
                async for _ in chunks:
                    pass
        await chunks.aclose()
        assert [first_value(chunk) async for chunk in pool.stream(make_request(40))] == list(range(40))


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_reader_that_continues_is_not_cut_off(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.4)
    async with pool_of(placement, "Count") as pool:
        received = []
        async for chunk in pool.stream(make_request(60)):
            received.append(first_value(chunk))
            await asyncio.sleep(0.1 if len(received) < 10 else 0)
        assert received == list(range(60))


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_reader_may_pause_if_the_model_is_not_blocked(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.05)
    async with pool_of(placement, "Count") as pool:
        for count in (10, 16):
            chunks = pool.stream(make_request(count))
            assert [first_value(await anext(chunks)) for _ in range(2)] == [0, 1]
            await asyncio.sleep(0.2)
            assert [first_value(chunk) async for chunk in chunks] == list(range(2, count))
