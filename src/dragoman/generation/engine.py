"""The engine: every step plans, computes, chooses and writes, a token for each text that is under way."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.text import Token
from dragoman.generation import sampler
from dragoman.generation.beams import Beams
from dragoman.generation.choice import Choice
from dragoman.generation.chooser import Chooser
from dragoman.generation.job import Job
from dragoman.generation.limits import Limits
from dragoman.generation.memory import Memory
from dragoman.generation.row import Row
from dragoman.generation.runner import Runner
from dragoman.generation.scheduler import Scheduler, Work
from dragoman.generation.sequence import Sequence
from dragoman.generation.steps import Steps, ahead
from dragoman.generation.vocabulary import Vocabulary
from dragoman.generation.writer import Ends, Writer

log = logging.getLogger("dragoman.generation")

# Other texts wait so long in a step for what a grammar allows next; after that they go on without that text.
_GRAMMAR_S = 0.005

_Computed = tuple[list[Work], list[Row], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Held:
    """What takes no part in steps until another thread has found what a grammar allows next: a text whose next token is
    chosen, or a beam search."""

    job: Job
    sequence: Sequence | None
    choice: Choice | None
    search: Any = None


class Engine:
    """Belongs to one thread, which adds jobs, cancels them and calls `step` as long as there is work."""

    def __init__(
        self, runner: Runner, memory: Memory, vocabulary: Vocabulary, limits: Limits, ends: frozenset[int]
    ) -> None:
        self._runner, self._memory, self._vocabulary, self._ends = runner, memory, vocabulary, ends
        self.scheduler = Scheduler(memory, limits.max_batch, limits.prefill_chunk)
        self._steps = Steps(waits=runner.device.type == "cpu")
        self._held: list[_Held] = []

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def rested(self) -> bool:
        """Whether there is nothing to do, and no memory held for it."""
        return not self.busy and not self._memory.held

    def rest(self) -> None:
        """Give back the memory that no text needs now; beginnings of prompts are kept."""
        self._memory.release()

    def add(self, job: Job) -> None:
        self.scheduler.add(job)

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: its memory is free from now on."""
        self.scheduler.remove(job)
        self._held = [each for each in self._held if each.job is not job]

    def measurements(self, active: int) -> Iterable[Family]:
        """What it has done, and what lies before it of so many prompts; from any thread."""
        yield from self._steps.families()
        yield from ahead(self.scheduler, active)

    def step(self) -> None:
        """One token more for every text under way, and a portion of the prompts that wait for their first."""
        if self._held:
            self._settle()
        works = self.scheduler.plan()
        with self._steps.step(works):
            self._step(works)
            if self._held:
                self._settle()

    def _step(self, planned: list[Work]) -> None:
        searches: dict[Job, dict[Sequence, torch.Tensor]] = {}
        began_s = time.monotonic()
        computed = self._computed(planned)
        if len(computed) == 1 and len(computed[0][0]) == len(planned):
            self._steps.computed(began_s)
        for works, rows, logits in computed:
            texts: list[tuple[Job, Sequence, int]] = []
            stop = 0
            for work, row in zip(works, rows, strict=True):
                job, sequence = cast("Job", work.task), work.sequence
                start, stop = stop, stop + row.wanted
                if job.wants_prefill:
                    self._guarded(job, self._note, job, work, logits[start:stop])
                sequence.computed += work.count
                if sequence.pending or job not in self.scheduler.running or self._holds(sequence):
                    continue
                if job.asked.sampling.num_beams > 1:
                    searches.setdefault(job, {})[sequence] = logits[stop - 1 : stop]
                else:
                    texts += [(job, each, stop - 1) for each in self._started(job, sequence)]
            self._write(texts, logits)
        for job, found in searches.items():
            self._guarded(job, self._search, job, torch.cat([found[each] for each in job.sequences]))

    # --- computing ---------------------------------------------------------------------------------------

    def _computed(self, works: list[Work]) -> list[_Computed]:
        """Works, what each brought and their logits. What cannot be computed together is computed alone, and ends where
        that fails."""
        if not works:
            return []
        rows = [self._row(work) for work in works]
        try:
            return [(works, rows, self._runner.run(self._memory.cache, rows))]
        except Exception as fault:
            if len(works) == 1:
                self._fail(cast("Job", works[0].task), fault)
                return []
            log.exception("a step of %d sequences failed; they are computed one by one", len(works))
        running = self.scheduler.running  # but for those of whom another sequence has just failed
        return [pair for work in works if work.task in running for pair in self._computed([work])]

    def _row(self, work: Work) -> Row:
        sequence, job = work.sequence, cast("Job", work.task)
        job.looked_at()
        start, stop = sequence.computed, sequence.computed + work.count
        wanted = work.count if job.wants_prefill else int(stop == len(sequence.tokens))
        return Row(sequence.slot, start, sequence.tokens[start:stop], wanted, sequence.adapter)

    def _note(self, job: Job, work: Work, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt's tokens that these logits foresee."""
        sequence, known = work.sequence, self._vocabulary
        if sequence.computed == 0:
            job.prefill.append(self._token(sequence.tokens[0], None))
        following = sequence.tokens[sequence.computed + 1 : min(sequence.computed + work.count + 1, sequence.prompt)]
        foreseen = logits[: len(following)]
        logprobs = torch.log_softmax(foreseen, -1)
        tops = sampler.likeliest(foreseen, logprobs, [job.asked.sampling.prompt_logprobs or 0] * len(following))
        for token, logprob, top in zip(following, sampler.picked(logprobs, following), tops, strict=True):
            beside = tuple(self._token(each, found) for each, found in top)
            job.prefill.append(Token(token, known.text(token), logprob, token in known.special, beside))

    def _token(self, token: int, logprob: float | None) -> Token:
        return Token(token, self._vocabulary.text(token), logprob, token in self._vocabulary.special)

    # --- texts -------------------------------------------------------------------------------------------

    def _started(self, job: Job, sequence: Sequence) -> list[Sequence]:
        """The sequences that go on from here: where a prompt has just been read, one for each text asked for."""
        if sequence in job.writers:
            return [sequence]
        self._memory.keep(sequence)
        job.tell()
        begun = [sequence]
        for slot in job.spare:
            self._memory.move(sequence.slot, slot, sequence.computed)
            begun.append(Sequence(list(sequence.tokens), sequence.prompt, sequence.adapter, slot, sequence.computed))
        job.sequences, job.spare = list(begun), []
        for place, each in enumerate(begun):
            job.choices[each] = place
            job.writers[each] = self._writer(job, place)
        return begun

    def _writer(self, job: Job, place: int) -> Writer:
        asked = job.asked
        seed = None if asked.seed is None else (asked.seed + place) % 2**64
        return Writer(
            self._vocabulary, asked.sampling, self._ends_of(job), self._chooser(job, seed), asked.tokens, seed
        )

    def _ends_of(self, job: Job) -> Ends:
        given = job.asked.sampling
        own = frozenset() if given.ignore_eos else self._ends
        return Ends(own, frozenset(given.stop_token_ids), job.asked.length)

    def _chooser(self, job: Job, seed: int | None = None) -> Chooser:
        asked = job.asked
        ends = self._ends_of(job)
        guide = asked.guides() if asked.guides is not None else None
        return Chooser(asked.sampling, seed or 0, asked.tokens, ends.own | ends.asked, asked.bad, guide)

    def _write(self, texts: list[tuple[Job, Sequence, int]], logits: torch.Tensor) -> None:
        """A token for each text, from its row of the logits."""
        if not texts:
            return
        rows = [row for _, _, row in texts]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        choices = sampler.choose(logits, [job.writers[sequence].chooser for job, sequence, _ in texts])
        for (job, sequence, _), choice in zip(texts, choices, strict=True):
            if job not in self.scheduler.running:
                continue  # another text of its prompt has failed
            if choice.fault is not None:
                self._fail(job, choice.fault)
            elif job.asked.guides is None:
                self._take(job, sequence, choice)
            else:
                self._guarded(job, job.begin, sequence, choice)
                self._held.append(_Held(job, sequence, choice))

    def _take(self, job: Job, sequence: Sequence, choice: Choice) -> None:
        if self._guarded(job, job.take, sequence, choice):
            self._over(job, sequence)

    def _over(self, job: Job, sequence: Sequence) -> None:
        """A text is over, and with the last one its prompt."""
        self._memory.keep(sequence)
        if len(job.sequences) > 1:
            self.scheduler.leave(job, sequence)
            return
        self.scheduler.remove(job)
        if job.ranked:
            job.rank()

    # --- beams -------------------------------------------------------------------------------------------

    def _search(self, job: Job, logits: torch.Tensor) -> None:
        """One step of a beam search: its sequences become those that go on."""
        if job.search is None:
            self._memory.keep(job.sequences[0])
            job.tell()
            job.search = Beams(job.asked, self._vocabulary, self._ends_of(job), self._chooser(job))
        job.search.expand(logits)
        if job.asked.guides is None:
            self._advance(job)
        else:
            self._held.append(_Held(job, None, None, job.search))

    def _advance(self, job: Job) -> None:
        parents = job.search.advance()
        if job.search.over:
            self.scheduler.remove(job)
            for text in job.search.texts():
                job.outlet.text(text)
            return
        before = job.sequences
        slots = [*(each.slot for each in before), *job.spare]
        computed = before[0].computed
        self._memory.gather([slots[parent] for parent in parents], slots, computed)
        job.spare = []
        job.sequences = [
            Sequence([*job.asked.tokens, *tokens], len(job.asked.tokens), before[0].adapter, slot, computed)
            for slot, tokens in zip(slots, job.search.running, strict=True)
        ]

    # --- grammars ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Go on with what was held and need not wait any more."""
        held, self._held = self._held, []
        until_s = time.monotonic() + _GRAMMAR_S
        for each in held:
            job = each.job
            if job not in self.scheduler.running:
                if job in self.scheduler.waiting and each.search is None:
                    self._held.append(each)  # it gave way, and goes on from its tokens; a search begins again
                continue
            if each.search is not job.search:
                continue
            waiter = job.writers[each.sequence].chooser if each.sequence is not None else job.search
            done = self._guarded(job, waiter.wait, until_s)
            if done is False:
                self._held.append(each)
            elif done and each.sequence is not None and each.choice is not None:
                self._take(job, each.sequence, each.choice)
            elif done:
                self._guarded(job, self._advance, job)

    def _holds(self, sequence: Sequence) -> bool:
        return any(each.sequence is sequence for each in self._held)

    # --- faults ------------------------------------------------------------------------------------------

    def _guarded(self, job: Job, act: Callable[..., Any], *arguments: Any) -> Any:
        """Act for one job; a fault is its own affair and ends it alone."""
        try:
            return act(*arguments)
        except Exception as fault:
            self._fail(job, fault)
            return None

    def _fail(self, job: Job, fault: Exception) -> None:
        if not isinstance(fault, DragomanError):
            log.error("a text failed", exc_info=fault)
            fault = ModelFailed(f"generation failed: {type(fault).__name__}: {fault}")
        self.scheduler.remove(job)
        job.outlet.fault(fault)
