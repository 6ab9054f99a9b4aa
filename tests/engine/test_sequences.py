"""Sequences of stateful models: state, order, slots, idle time-out, batches, workers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import INT64, Infer, SequenceOptions, Tensor
from dragoman.core.calls import Request
from dragoman.core.errors import DeadlineExceeded, DragomanError, InvalidInput, Overloaded, WorkerLost
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine
from dragoman.engine.model_files import repository_settings
from dragoman.engine.repository import Repository
from stateful_models import Countdown, Rows, Total

START = "must specify the START flag on the first request of the sequence"


def request(
    x: int, id_: object = 0, flags: str = "", model: str = "Total", shape: tuple[int, ...] = (1,)
) -> Request[Any]:
    parameters: dict[str, Any] = {"sequence_id": id_} if id_ else {}
    parameters |= {f"sequence_{flag}": True for flag in flags.split()}
    return Request(Infer({"x": Tensor(np.full(shape, x), INT64)}, parameters=parameters), model)


async def total(engine: Engine, x: int, id_: object = 0, flags: str = "", model: str = "Total") -> int:
    shape = (1, 1) if model == "Rows" else (1,)
    response = await engine.call(request(x, id_, flags, model, shape))
    return int(response.answer.outputs["total"].data.reshape(-1)[0])


@pytest.fixture
def gate() -> Iterator[asyncio.Event]:
    Rows.gate = asyncio.Event()
    yield Rows.gate
    Rows.gate.set()


def engine_of(kind: type, options: SequenceOptions, **settings: Any) -> Engine:
    spec = ModelSpec(name=kind.__name__, target=kind, runtime="python", sequences=options, **settings)
    return Engine(Repository([spec]))


async def test_each_sequence_has_its_own_state() -> None:
    async with dragoman.open_engine(Total, placement="inline") as engine:
        assert [await total(engine, x, 5, flags) for x, flags in ((1, "start"), (2, ""))] == [1, 3]
        assert await total(engine, 10, "5", "start") == 10  # text and number are different sequences
        assert await total(engine, 4, 5, "end") == 7
        assert await total(engine, 1, "5") == 11
        with pytest.raises(InvalidInput, match=START):
            await total(engine, 1, 5)
        assert await total(engine, 100, "5", "start") == 100  # ends the one that was live


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": 0, "sequence_start": True}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": ""}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": 3}, f"^inference request for sequence 3 to model 'Total' {START}$"),
        ({"sequence_id": "a"}, f"^inference request for sequence a to model 'Total' {START}$"),
        ({"sequence_id": -1}, "'sequence_id': expected a positive integer below 2\\^64 or text, got -1"),
        ({"sequence_id": 1 << 64}, "'sequence_id': expected a positive integer below 2\\^64 or text, got 18446744"),
        ({"sequence_id": True}, "'sequence_id': expected a positive integer below 2\\^64 or text, got True"),
        ({"sequence_id": 1.5}, "'sequence_id': expected a positive integer below 2\\^64 or text, got 1.5"),
        ({"sequence_id": "é" * 65}, "string correlation ID cannot be longer than 128 characters"),
        ({"sequence_id": 3, "sequence_start": 1}, "'sequence_start': expected true or false, got 1"),
        ({"sequence_id": 3, "sequence_start": True, "sequence_end": "x"}, "'sequence_end': expected true or false"),
    ],
)
async def test_invalid_parameters(parameters: dict[str, Any], message: str) -> None:
    async with dragoman.open_engine(Total, placement="inline") as engine:
        with pytest.raises(InvalidInput, match=message):
            await engine.infer("Total", {"x": np.array([1])}, parameters=parameters)


async def test_an_error_of_the_model_does_not_end_the_sequence() -> None:
    async with dragoman.open_engine(Total, placement="thread") as engine:
        assert await total(engine, 1, 5, "start") == 1
        with pytest.raises(InvalidInput, match="no -1"):
            await total(engine, -1, 5)
        assert await total(engine, 1, 5) == 2


async def test_direct_sequences_wait_for_a_slot_until_one_ends_or_is_idle() -> None:
    options = SequenceOptions(strategy="direct", max_sequences=3, idle_s=0.3)
    async with engine_of(Total, options, placement="inline") as engine:
        assert await total(engine, 1, 1, "start") == 1
        waiting = [asyncio.ensure_future(total(engine, 10 * i, i, "start")) for i in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="expected at most 3 sequences"):
            await total(engine, 1, 4, "start")
        assert await asyncio.gather(*waiting) == [20, 30]  # 1 and then 2 have been idle
        with pytest.raises(InvalidInput, match=START):
            await total(engine, 1, 1)


async def test_a_sequence_that_ends_frees_its_slot() -> None:
    async with engine_of(Total, SequenceOptions(strategy="direct"), placement="inline") as engine:
        for i in range(1, 5):
            assert await total(engine, i, i, "start end") == i


async def test_batches_have_one_request_of_each_sequence(gate: asyncio.Event) -> None:
    async with engine_of(Rows, SequenceOptions(), max_batch_size=3) as engine:
        sent = [engine.call(request(10**i, i, "start", "Rows", (1, 1))) for i in range(1, 5)]
        sent += [engine.call(request(1, i, "end", "Rows", (1, 1))) for i in range(1, 5)]
        answers = [asyncio.ensure_future(each) for each in sent]
        await asyncio.sleep(0)
        gate.set()
        outputs = [(await answer).answer.outputs for answer in answers]
        assert [int(each["total"].data[0, 0]) for each in outputs] == [10, 100, 1000, 10000, 11, 101, 1001, 10001]
        assert max(int(each["rows"].data[0, 0]) for each in outputs) == 3
        with pytest.raises(InvalidInput, match="batch-size 1 due to requirements of sequence batcher"):
            await engine.call(request(1, 9, "start", "Rows", (2, 1)))


async def test_a_cancelled_request_ends_its_sequence(gate: asyncio.Event) -> None:
    async with engine_of(Rows, SequenceOptions(strategy="direct"), max_batch_size=1) as engine:
        first, second, third = (
            asyncio.ensure_future(total(engine, x, 1, flags, "Rows")) for x, flags in ((1, "start"), (2, ""), (4, ""))
        )
        other = asyncio.ensure_future(total(engine, 8, 2, "start", "Rows"))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        assert await first == 1
        with pytest.raises(InvalidInput, match="an earlier request of it was cancelled"):
            await third
        assert await other == 8
        with pytest.raises(InvalidInput, match=START):
            await total(engine, 4, 1, "", "Rows")


async def test_a_deadline_while_it_waits_for_a_slot_ends_a_sequence() -> None:
    async with engine_of(Total, SequenceOptions(strategy="direct"), placement="inline") as engine:
        assert await total(engine, 1, 1, "start") == 1
        late = request(1, 2, "start")
        with pytest.raises(DeadlineExceeded):
            await engine.call(Request(late.call, "Total", deadline_s=asyncio.get_running_loop().time() + 0.02))
        assert await total(engine, 2, 1, "end") == 3
        assert await total(engine, 4, 3, "start") == 4  # the slot is free


async def test_streams_have_their_turn_in_the_sequence() -> None:
    async with dragoman.open_engine(Countdown) as engine:
        for flags, expected in (("start", [1]), ("", [2, 1]), ("end", [3, 2, 1])):
            chunks = [chunk async for chunk in engine.stream(request(1, 7, flags, "Countdown"))]
            assert [int(chunk.answer.outputs["n"].data[0]) for chunk in chunks] == expected
        with pytest.raises(InvalidInput, match=START):
            await anext(engine.stream(request(1, 7, "", "Countdown")))


async def test_a_stream_that_is_not_read_to_its_end_ends_the_sequence() -> None:
    async with dragoman.open_engine(Countdown) as engine:
        async for _ in engine.stream(request(1, 7, "start", "Countdown")):
            pass
        stream = engine.stream(request(1, 7, "", "Countdown"))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidInput, match=START):
            await anext(engine.stream(request(1, 7, "", "Countdown")))


async def test_a_sequence_stays_on_its_worker_and_is_lost_with_it() -> None:
    async with engine_of(Total, SequenceOptions(), placement="process", replicas=2) as engine:

        async def process(x: int, id_: int, flags: str = "") -> tuple[int, int]:
            outputs = (await engine.call(request(x, id_, flags))).answer.outputs
            return int(outputs["total"].data[0]), int(outputs["process"].data[0])

        firsts = await asyncio.gather(*(process(i, i, "start") for i in range(1, 5)))
        assert len({pid for _, pid in firsts}) == 2
        for _ in range(3):
            again = await asyncio.gather(*(process(0, i) for i in range(1, 5)))
            assert again == firsts
        with pytest.raises(WorkerLost):
            await process(-2, 1)
        results: list[Any] = []
        for i, (count, pid) in enumerate(firsts, 1):
            try:
                results.append(await process(0, i) == (count, pid))
            except DragomanError as error:
                results.append(str(error))
        lost = [result for result in results if result is not True]
        assert len(lost) == 2
        assert all(START in text and "its worker was restarted" in text for text in lost)
        assert results[0] is not True


def test_settings_of_sequences(tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text('[models.m.sequences]\nstrategy = "direct"\nidle_s = 2\n')
    assert repository_settings(tmp_path)["m"]["sequences"] == SequenceOptions(strategy="direct", idle_s=2.0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[models.m]\nsequences = 3", "setting 'sequences': expected a table, got 3"),
        ("[models.m.sequences]\nidle = 3", "unknown setting 'sequences.idle'; did you mean 'idle_s'"),
        (
            '[models.m.sequences]\nstrategy = "newest"',
            "setting 'strategy': expected one of oldest, direct",
        ),
        ("[models.m.sequences]\nmax_sequences = 0", "'max_sequences': expected at least 1, got 0"),
    ],
)
def test_invalid_settings_of_sequences(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "dragoman.toml").write_text(table)
    with pytest.raises(InvalidInput, match=message):
        repository_settings(tmp_path)
