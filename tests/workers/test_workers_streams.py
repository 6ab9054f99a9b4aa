"""Streams are the same in every pool, and a reader holds a model up for a while at most."""

import asyncio
from pathlib import Path

import pytest
from workers_harness import PLACES, ask, first, pool_of, until

from dragoman.core.errors import DeadlineExceeded, NotSupported
from dragoman.system.coroutines import complete

everywhere = pytest.mark.parametrize("place", PLACES)


@everywhere
@pytest.mark.parametrize("model", ["Count", "AsyncCount"])
async def test_streams(place: str, model: str) -> None:
    async with pool_of(place, model) as pool:
        assert [first(piece) async for piece in pool.stream(ask(100))] == list(range(100))
        assert [piece async for piece in pool.stream(ask(0))] == []
        assert first(await complete(pool.call(ask(1)))) == 0
        with pytest.raises(NotSupported, match="no response"):
            await complete(pool.call(ask(0)))
        with pytest.raises(NotSupported, match="several responses"):
            await complete(pool.call(ask(2)))


@everywhere
@pytest.mark.parametrize("model", ["Echo", "AsyncEcho"])
async def test_a_plain_answer_is_a_stream_of_one(place: str, model: str) -> None:
    async with pool_of(place, model) as pool:
        assert [first(piece) async for piece in pool.stream(ask(7))] == [7]


@everywhere
@pytest.mark.parametrize("model", ["Count", "AsyncCount"])
async def test_a_stream_that_nobody_reads_stops_and_is_closed(place: str, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with pool_of(place, model) as pool:
        pieces = pool.stream(ask(100_000, trace=trace))
        assert first(await anext(pieces)) == 0
        assert first(await anext(pieces)) == 1
        await asyncio.sleep(0.1)  # time in which a model without a bound would get far
        assert 2 <= trace.stat().st_size <= 18
        await pieces.aclose()
        await until((tmp_path / "trace.closed").exists)
        assert [first(piece) async for piece in pool.stream(ask(3))] == [0, 1, 2]


@everywhere
async def test_a_reader_who_is_too_slow_does_not_keep_the_model_from_others(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.2)
    async with pool_of(place, "Count") as pool:
        pieces = pool.stream(ask(1000))
        assert first(await anext(pieces)) == 0
        assert first(await asyncio.wait_for(complete(pool.call(ask(1))), 10)) == 0
        if place == "inline":  # where the model only goes on when it is asked to, and keeps nobody waiting
            assert [first(piece) async for piece in pieces] == list(range(1, 1000))
        else:
            with pytest.raises(DeadlineExceeded, match=r"reader of this stream is too slow: it read nothing for 0.2 s"):
                async for _ in pieces:
                    pass
        await pieces.aclose()
        assert [first(piece) async for piece in pool.stream(ask(40))] == list(range(40))


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_a_reader_who_goes_on_is_not_cut_off(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.4)
    async with pool_of(place, "Count") as pool:
        taken = []
        async for piece in pool.stream(ask(60)):
            taken.append(first(piece))
            await asyncio.sleep(0.1 if len(taken) < 10 else 0)
        assert taken == list(range(60))


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_a_reader_may_take_its_time_where_the_model_does_not_wait(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.workers.pool.STALL_S", 0.05)
    async with pool_of(place, "Count") as pool:
        for count in (10, 16):
            pieces = pool.stream(ask(count))
            assert [first(await anext(pieces)) for _ in range(2)] == [0, 1]
            await asyncio.sleep(0.2)
            assert [first(piece) async for piece in pieces] == list(range(2, count))
