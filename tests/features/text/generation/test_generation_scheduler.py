"""The scheduler: order of arrival, chunks of prompts, preemption, slots; and the prefix cache."""

from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from dragoman.core.callers import ANYONE, Caller
from dragoman.core.calls import Generate
from dragoman.core.errors import NotSupported
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Sampling, merge_chunks
from dragoman.core.text_engine_calls import ResetPrefixCache
from dragoman_text.generation.cache import BLOCK, PrefixCache
from dragoman_text.generation.job import Sequence
from dragoman_text.generation.scheduler import Scheduler
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import generation


@dataclass(eq=False)
class Prompt:
    length: int
    width: int = 1
    uses_prefix_cache: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    caller: Caller = ANYONE

    def __post_init__(self) -> None:
        self.sequences = [Sequence([1] * self.length, self.length)]

    def restart(self) -> None:
        self.__post_init__()


@dataclass
class FakeCache:
    budget: int
    prefix: int = 0
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    cleared: list[tuple[int, int]] = field(default_factory=list)

    def fits(self, slots: int, length: int) -> bool:
        return slots * length <= self.budget

    def reserve(self, slots: int, length: int) -> None:
        assert self.fits(slots, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.moves.append((source, target, length))

    def clear(self, slot: int, length: int) -> None:
        self.cleared.append((slot, length))

    def load_prefix(self, sequence: Sequence) -> int:
        return min(self.prefix, len(sequence.tokens) - 1)


def step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Plan and execute one step; return (slot, count) of each sequence."""
    works = scheduler.plan()
    for work in works:
        work.sequence.computed += work.count
        if not work.sequence.pending:
            work.sequence.tokens.append(1)
    return [(work.sequence.slot, work.count) for work in works]


def test_decoding_continues_with_chunks_of_prompts() -> None:
    scheduler = Scheduler(FakeCache(10_000), max_batch=4, chunk=8)
    scheduler.add(Prompt(3))
    scheduler.add(Prompt(20))
    assert step(scheduler) == [(0, 3)], "the rest of the chunk is too short for 8 tokens"
    assert step(scheduler) == [(0, 1), (1, 8)]
    assert step(scheduler) == [(0, 1), (1, 8)]
    scheduler.add(Prompt(2))
    assert step(scheduler) == [(0, 1), (1, 4), (2, 2)], "the rest of the long prompt, and the next one"
    assert step(scheduler) == [(0, 1), (1, 1), (2, 1)]


def test_admission_in_order_of_arrival_within_capacity() -> None:
    scheduler = Scheduler(FakeCache(100), max_batch=2, chunk=1000)
    first, second, third = Prompt(40), Prompt(10, width=2), Prompt(10)
    for each in (first, second, third):
        scheduler.add(each)
    step(scheduler)
    assert list(scheduler.running) == [first]
    assert list(scheduler.waiting) == [second, third]
    scheduler.remove(first)
    step(scheduler)
    assert list(scheduler.running) == [second]
    assert second.spare == [1]


def test_the_newest_task_is_preempted() -> None:
    scheduler = Scheduler(FakeCache(44), max_batch=4, chunk=1000)
    first, second = Prompt(20), Prompt(20)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(5):
        step(scheduler)
    assert list(scheduler.running) == [first]
    assert list(scheduler.waiting) == [second]
    assert second.sequences[0].slot == -1
    assert scheduler.preempted == 1
    scheduler.remove(first)
    step(scheduler)
    assert list(scheduler.running) == [second]


def test_sequences_move_to_lower_free_slots() -> None:
    memory = FakeCache(10_000)
    scheduler = Scheduler(memory, max_batch=8, chunk=1000)
    tasks = [Prompt(4) for _ in range(8)]
    for each in tasks:
        scheduler.add(each)
    step(scheduler)
    for each in tasks[1:7]:
        scheduler.remove(each)
    step(scheduler)
    assert [task.sequences[0].slot for task in scheduler.running] == [0, 1]
    assert memory.moves == [(7, 1, 4)]
    new = Prompt(4)
    scheduler.add(new)
    step(scheduler)
    assert new.sequences[0].slot == 2
    assert scheduler.active == 3


def test_cached_prefixes_are_not_computed() -> None:
    scheduler = Scheduler(FakeCache(1000, prefix=6), max_batch=8, chunk=1000)
    scheduler.add(Prompt(10))
    assert step(scheduler) == [(0, 4)]


async def test_a_reset_forgets_prefixes_but_not_calls_in_progress(llama: LanguageModel) -> None:
    prompt = "The prefix of this prompt is stored. " * 6
    expected = [await generation(llama, prompt, max_new_tokens=30) for _ in range(2)]
    assert [each.prompts[0].cached > 0 for each in expected] == [False, True]
    call = Generate(prompts=(prompt,), sampling=Sampling(max_new_tokens=30), stream=True)
    async with aclosing(llama.generate(call)) as chunks:
        received = [await anext(chunks)]
        await llama.reset_prefix_cache(ResetPrefixCache())
        received += [chunk async for chunk in chunks]
    assert merge_chunks(received).texts == expected[1].texts
    await llama.reset_prefix_cache(ResetPrefixCache())
    again = [await generation(llama, prompt, max_new_tokens=30) for _ in range(2)]
    assert [each.prompts[0].cached > 0 for each in again] == [False, True]
    assert [each.texts[0].text for each in again] == [each.texts[0].text for each in expected]


async def test_replicas_have_prefix_caches_of_their_own() -> None:
    with pytest.raises(NotSupported, match="only for a model with one replica"):
        await LanguageModel(ModelSpec(name="m", replicas=2)).reset_prefix_cache(ResetPrefixCache())


def test_prefixes_are_found_by_tokens_and_adapter() -> None:
    prefixes = PrefixCache(4)
    tokens = list(range(3 * BLOCK + 5))
    prefixes.add(tokens, ("", ""), lambda start, stop: (start, stop))
    assert len(prefixes) == 3
    assert prefixes.find(tokens, ("", "")) == [(0, 16), (16, 32), (32, 48)]
    assert prefixes.find(tokens[: 2 * BLOCK], ("", "")) == [(0, 16)], "at least one token is computed"
    assert prefixes.find(tokens, ("other", "")) == []
    assert prefixes.find([5, *tokens], ("", "")) == []
    prefixes.add([*tokens[:BLOCK], *[9] * 2 * BLOCK], ("", ""), lambda start, stop: ("b", start, stop))
    assert len(prefixes) == 4, "the least used is dropped"
    assert prefixes.find(tokens, ("", "")) == [(0, 16), (16, 32)]


ALICE, BOB = Caller("key:alice", "alice"), Caller("key:bob", "bob")


def run_until(scheduler: Scheduler, tokens: int, steps: int) -> list[str]:
    """Execute steps; remove each task that has generated so many tokens. Return the owners in order of their end."""
    ends = []
    for _ in range(steps):
        step(scheduler)
        for task in list(scheduler.running):
            (sequence,) = task.sequences
            if len(sequence.tokens) - sequence.prompt >= tokens:
                scheduler.remove(task)
                ends.append(task.caller.name)
    return ends


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        ((ALICE, BOB), "alice bob alice bob alice bob alice bob"),
        ((ALICE, replace(BOB, priority="high")), "alice bob alice bob bob alice bob bob"),
        ((replace(ALICE, priority="low"), replace(BOB, priority="high")), "alice bob bob alice bob bob bob bob"),
        ((ALICE, ALICE), "alice alice alice alice alice alice alice alice"),
    ],
)
def test_owners_share_by_tokens(callers: tuple[Caller, Caller], expected: str) -> None:
    """A task is 10 tokens of a prompt and 4 steps that count twice; with 10 of them served, the other owner comes."""
    scheduler = Scheduler(FakeCache(10_000), max_batch=1, chunk=1000)
    first, second = callers
    for _ in range(20):
        scheduler.add(Prompt(10, caller=first))
    step(scheduler)
    for _ in range(20):
        scheduler.add(Prompt(10, caller=second))
    assert " ".join(run_until(scheduler, 5, 60)[:8]) == expected


def test_owners_share_by_tokens_not_by_prompts() -> None:
    scheduler = Scheduler(FakeCache(10_000), max_batch=1, chunk=1000)
    for _ in range(40):
        scheduler.add(Prompt(90, caller=ALICE))  # 90 tokens, and 5 that count twice
        scheduler.add(Prompt(10, caller=BOB))  # 20
    ends = run_until(scheduler, 5, 150)
    assert ends.count("bob") == 5 * ends.count("alice")


def test_an_owner_without_slots_gets_one_of_an_owner_with_more_than_its_part() -> None:
    scheduler = Scheduler(FakeCache(10_000), max_batch=4, chunk=1000)
    many = [Prompt(4, caller=ALICE) for _ in range(8)]
    for each in many:
        scheduler.add(each)
    step(scheduler)
    quiet = [Prompt(4, caller=BOB) for _ in range(3)]
    for each in quiet:
        scheduler.add(each)
        step(scheduler)
    assert list(scheduler.running) == [*many[:2], *quiet[:2]], "each has its half, and the third of the second waits"
    assert scheduler.preempted == 2
    assert list(scheduler.waiting)[:2] == many[2:4], "preempted tasks come first"
    for each in quiet:
        scheduler.remove(each)
    step(scheduler)
    assert list(scheduler.running) == many[:4], "what the other leaves is used"


def test_a_task_that_would_leave_its_owner_less_than_its_part_goes_on() -> None:
    scheduler = Scheduler(FakeCache(10_000), max_batch=4, chunk=1000)
    wide, first, second = Prompt(4, width=3, caller=ALICE), Prompt(4, caller=BOB), Prompt(4, caller=BOB)
    for each in (wide, first, second):
        scheduler.add(each)
        step(scheduler)
    assert list(scheduler.running) == [wide, first]
    assert scheduler.preempted == 0


def test_the_prompt_of_an_owner_with_few_slots_is_computed_first() -> None:
    scheduler = Scheduler(FakeCache(100_000), max_batch=8, chunk=8)
    for _ in range(6):
        scheduler.add(Prompt(80, caller=ALICE))
    step(scheduler)
    quiet = Prompt(8, caller=BOB)
    scheduler.add(quiet)
    step(scheduler)
    assert quiet.sequences[0].pending == 1, "its first token is there"


def test_memory_that_runs_out_is_taken_of_the_owner_with_most_of_it() -> None:
    scheduler = Scheduler(FakeCache(66), max_batch=8, chunk=1000)
    first, second, third = Prompt(20, caller=ALICE), Prompt(20, caller=ALICE), Prompt(20, caller=BOB)
    for each in (first, second, third):
        scheduler.add(each)
    for _ in range(5):
        step(scheduler)
    assert list(scheduler.running) == [first, third]
