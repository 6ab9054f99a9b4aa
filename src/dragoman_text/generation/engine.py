"""Text engine: each step schedules, computes, samples and appends one token per running sequence."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from dragoman.core.errors import DragomanError
from dragoman.core.foreign_code import public_error
from dragoman.core.metrics import Family
from dragoman_text.generation import sampler
from dragoman_text.generation.adapters import Adapters, LoraWeights
from dragoman_text.generation.completion_writer import CompletionWriter, EndConditions
from dragoman_text.generation.input_processor import EngineLimits
from dragoman_text.generation.job import BatchRow, GenerationJob, Sequence
from dragoman_text.generation.sampler import BeamSearch
from dragoman_text.generation.scheduler import CacheCapacity, Scheduler, StepMetrics, StepWork, queue_metrics
from dragoman_text.generation.speculation import Speculation
from dragoman_text.generation.token_gaps import TokenGaps
from dragoman_text.generation.token_sampler import TokenChoice, TokenSampler
from dragoman_text.generation.vocabulary import Vocabulary

log = logging.getLogger("dragoman.generation")

# Maximum time that a step waits for grammar masks; afterwards other sequences continue without the slow ones.
_GRAMMAR_S = 0.005

_Computed = tuple[list[StepWork], list[BatchRow], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _WaitingForGrammar:
    """A sequence with a chosen token, or a beam search, that waits for its next grammar mask from another thread."""

    job: GenerationJob
    sequence: Sequence | None
    choice: TokenChoice | None
    search: Any = None


class ModelRunner(Protocol):
    """A model in memory."""

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> Adapters: ...

    def run(self, cache: Any, rows: Any) -> torch.Tensor:
        """Compute the rows' tokens; return the wanted logits in order, [wanted, vocabulary], FP32."""


class SequenceMemory(CacheCapacity, Protocol):
    """States of sequences by slot. cache: what the runner reads and writes."""

    @property
    def cache(self) -> Any: ...

    @property
    def allocated_tokens(self) -> int: ...

    def release(self) -> None: ...
    def gather(self, sources: list[int], targets: list[int], length: int) -> None: ...
    def store_prefix(self, sequence: Sequence) -> None: ...
    def clear_prefixes(self) -> None: ...


class GenerationEngine:
    """Engine of one model. One thread adds and cancels jobs and calls `step` while there is work."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: SequenceMemory,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        ends: frozenset[int],
        speculation: Speculation | None = None,
    ) -> None:
        self._runner, self._memory, self._vocabulary, self._ends = runner, memory, vocabulary, ends
        self.scheduler = Scheduler(memory, limits.max_batch, limits.prefill_chunk)
        self._steps = StepMetrics(waits=runner.device.type == "cpu")
        self._gaps = TokenGaps()
        self._waiting: list[_WaitingForGrammar] = []
        self._speculation = speculation

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is no work and no cache memory is allocated."""
        return not self.has_work and not self._memory.allocated_tokens

    def release_memory(self) -> None:
        """Free the key-value cache; the prefix cache is kept."""
        if self._speculation is not None:
            self._speculation.keep(())
        self._memory.release()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Sequences in progress continue, and are stored when they end."""
        self._memory.clear_prefixes()

    def add_adapter(self, key: str, weights: Mapping[str, LoraWeights], name: str) -> None:
        """Add a LoRA adapter for later jobs, which select it by the key; `name` is that in errors.

        Raises ModelFailed if it does not fit the model.
        """
        self._runner.adapters.add(key, weights, name)

    def remove_adapter(self, key: str) -> None:
        """Remove a LoRA adapter that no job uses."""
        self._runner.adapters.remove(key)

    def add(self, job: GenerationJob) -> None:
        self.scheduler.add(job)

    def cancel(self, job: GenerationJob) -> None:
        self.scheduler.remove(job)
        self._waiting = [each for each in self._waiting if each.job is not job]

    def measurements(self, active: int) -> Iterable[Family]:
        """Return metrics of steps and queue for `active` prompts; thread-safe."""
        yield from self._steps.families()
        yield from self._gaps.families()
        yield from queue_metrics(self.scheduler, active)
        if self._speculation is not None:
            yield from self._speculation.families()

    def step(self) -> None:
        """Generate one token for each running sequence and compute a chunk of waiting prompts."""
        if self._waiting:
            self._resume_waiting()
        if self._speculation is not None:
            self._draft(self._speculation)
        works = self.scheduler.plan()
        with self._steps.step(works):
            self._step(works)
            if self._waiting:
                self._resume_waiting()

    def _step(self, planned: list[StepWork]) -> None:
        searches: dict[GenerationJob, dict[Sequence, torch.Tensor]] = {}
        began_s = time.monotonic()
        computed = self._compute(planned)
        if len(computed) == 1 and len(computed[0][0]) == len(planned):
            self._steps.record_step(began_s)
        for works, rows, logits in computed:
            texts: list[tuple[GenerationJob, Sequence, int]] = []
            stop, waiting = 0, {each.sequence for each in self._waiting}
            for work, row in zip(works, rows, strict=True):
                job, sequence = cast("GenerationJob", work.task), work.sequence
                start, stop = stop, stop + row.wanted
                if job.needs_prompt_logprobs:
                    self._run_for(job, self._store_prompt_logprobs, job, work, logits[start:stop])
                sequence.computed += work.count - row.drafts
                if sequence.computed < len(sequence.tokens) or sequence in waiting or job not in self.scheduler.running:
                    continue
                first = stop - 1 - row.drafts
                if sequence in job.writers:
                    texts.append((job, sequence, first))
                elif job.request.sampling.num_beams > 1:
                    searches.setdefault(job, {})[sequence] = logits[stop - 1 : stop]
                else:
                    texts += [(job, each, first) for each in self._start_sequences(job, sequence)]
            self._write(texts, logits)
        for job, by_sequence in searches.items():
            self._run_for(job, self._search, job, torch.cat([by_sequence[each] for each in job.sequences]))

    # --- computing ---------------------------------------------------------------------------------------

    def _compute(self, works: list[StepWork]) -> list[_Computed]:
        """Return scheduled work, its rows and their logits. If a step fails, its rows are computed one by one, and only
        those that fail alone end with an error."""
        if not works:
            return []
        rows = [self._row(work) for work in works]
        try:
            return [(works, rows, self._runner.run(self._memory.cache, rows))]
        except BaseException as error:  # also the panic of a library in Rust
            if len(works) == 1:
                self._fail(cast("GenerationJob", works[0].task), error)
                return []
            log.exception("a step of %d sequences failed; they are computed one by one", len(works))
        running = self.scheduler.running  # excludes jobs of which another sequence just failed
        return [pair for work in works if work.task in running for pair in self._compute([work])]

    def _row(self, work: StepWork) -> BatchRow:
        sequence, job = work.sequence, cast("GenerationJob", work.task)
        if job.waited_s < 0:
            job.waited_s = time.monotonic() - job.since_s
        start, stop = sequence.computed, sequence.computed + work.count
        if sequence.drafts and sequence.decoding:
            tokens = [*sequence.tokens[start:], *sequence.drafts]
            counts = sequence.prompt, len(sequence.drafts)
            return BatchRow(sequence.slot, start, tokens, len(tokens), sequence.adapter, *counts)
        tokens, wanted = sequence.tokens[start:stop], 1 if stop == len(sequence.tokens) else 0
        if job.needs_prompt_logprobs:
            wanted = work.count
        return BatchRow(sequence.slot, start, tokens, wanted, sequence.adapter, sequence.prompt, 0, sequence.features)

    def _store_prompt_logprobs(self, job: GenerationJob, work: StepWork, logits: torch.Tensor) -> None:
        """Store log-probabilities of the prompt tokens that follow these rows."""
        sequence, vocabulary = work.sequence, self._vocabulary
        if sequence.computed == 0:
            job.prefill.append(vocabulary.token(sequence.tokens[0], None))
        following = sequence.tokens[sequence.computed + 1 : min(sequence.computed + work.count + 1, sequence.prompt)]
        predicted = logits[: len(following)]
        logprobs = torch.log_softmax(predicted, -1)
        tops = sampler.top_tokens(predicted, logprobs, [job.request.sampling.prompt_logprobs or 0] * len(following))
        for token, logprob, top in zip(following, sampler.logprobs_of(logprobs, following), tops, strict=True):
            job.prefill.append(vocabulary.token(token, logprob, top))

    # --- sequences ----------------------------------------------------------------------------------------

    def _start_sequences(self, job: GenerationJob, sequence: Sequence) -> list[Sequence]:
        """Return the sequences to continue after the last prompt token, one for each requested completion."""
        self._memory.store_prefix(sequence)
        job.send_info()
        started = [sequence]
        for slot in job.spare:
            self._memory.move(sequence.slot, slot, sequence.computed)
            started.append(sequence.branch(list(sequence.tokens), slot))
        job.sequences, job.spare = list(started), []
        for choice, each in enumerate(started):
            job.choices[each] = choice
            job.writers[each] = self._writer(job, choice)
        return started

    def _writer(self, job: GenerationJob, choice: int) -> CompletionWriter:
        request = job.request
        seed = None if request.seed is None else (request.seed + choice) % 2**64
        return CompletionWriter(
            self._vocabulary,
            request.sampling,
            self._end_conditions(job),
            self._chooser(job, seed),
            request.continued_tokens,
            seed,
        )

    def _end_conditions(self, job: GenerationJob) -> EndConditions:
        sampling = job.request.sampling
        eos = frozenset() if sampling.ignore_eos else self._ends
        return EndConditions(eos, frozenset(sampling.stop_token_ids), job.request.length)

    def _chooser(self, job: GenerationJob, seed: int | None = None) -> TokenSampler:
        request = job.request
        ends = self._end_conditions(job)
        guide = request.guides() if request.guides is not None else None
        return TokenSampler(
            request.sampling, seed or 0, request.continued_tokens, ends.eos | ends.requested, request.bad, guide
        )

    def _write(self, texts: list[tuple[GenerationJob, Sequence, int]], logits: torch.Tensor) -> None:
        """Sample a token for each sequence from its row of the logits, and from the next ones while the drafts hold."""
        drafts = {sequence: (row, sequence.drafts) for _, sequence, row in texts if sequence.drafts}
        while texts:
            self._write_tokens(texts, logits)
            if not drafts:
                return
            texts = [
                (job, sequence, row + 1)
                for job, sequence, row in texts
                if sequence in drafts
                and self._accepts_draft(job, sequence, drafts[sequence][1], row - drafts[sequence][0])
            ]

    def _accepts_draft(self, job: GenerationJob, sequence: Sequence, drafts: list[int], index: int) -> bool:
        """Return whether a sequence continues and its last token is the draft of this index, which is computed."""
        going = job in self.scheduler.running and sequence in job.sequences and sequence.pending == 1
        accepted = going and index < len(drafts) and sequence.tokens[-1] == drafts[index]
        if accepted:
            sequence.computed += 1
        elif self._speculation is not None:
            self._speculation.record(sequence.rate, len(drafts), index)
        return accepted

    def _write_tokens(self, texts: list[tuple[GenerationJob, Sequence, int]], logits: torch.Tensor) -> None:
        rows = [row for _, _, row in texts]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        choices = sampler.choose(logits, [job.writers[sequence].chooser for job, sequence, _ in texts])
        for (job, sequence, _), choice in zip(texts, choices, strict=True):
            if job not in self.scheduler.running:
                continue  # another sequence of its job failed
            if choice.error is not None:
                self._fail(job, choice.error)
            elif job.request.guides is None:
                self._take(job, sequence, choice)
            else:
                self._run_for(job, job.begin, sequence, choice)
                self._waiting.append(_WaitingForGrammar(job, sequence, choice))

    def _draft(self, speculation: Speculation) -> None:
        """Draft tokens of decoding sequences, except those with a grammar or a beam search."""
        jobs = [cast("GenerationJob", task) for task in self.scheduler.running]
        drafting, rows = [], 0
        for job in jobs:
            for sequence in job.sequences:
                sequence.drafts = []
                rows += sequence.decoding
                if sequence.decoding and sequence in job.writers and job.request.guides is None:
                    remaining = job.request.length - (len(sequence.tokens) - sequence.prompt)
                    drafting.append((sequence, sequence.tokens, sequence.rate, remaining))
        try:
            speculation.keep({sequence for sequence, *_ in drafting})
            for (sequence, *_), drafts in zip(drafting, speculation.propose(drafting, rows), strict=True):
                sequence.drafts = drafts
        except BaseException:
            log.exception("drafts cannot be computed; speculative decoding is switched off")
            self._speculation = None

    def _take(self, job: GenerationJob, sequence: Sequence, choice: TokenChoice) -> None:
        self._gaps.count(job.writers[sequence])
        try:
            is_finished = job.take(sequence, choice)
        except BaseException as error:
            self._fail(job, error)
            return
        if is_finished:
            self._finish_sequence(job, sequence)

    def _finish_sequence(self, job: GenerationJob, sequence: Sequence) -> None:
        self._memory.store_prefix(sequence)
        if len(job.sequences) > 1:
            self.scheduler.remove_sequence(job, sequence)
            return
        self.scheduler.remove(job)
        if job.is_ranked:
            job.rank()

    # --- beams -------------------------------------------------------------------------------------------

    def _search(self, job: GenerationJob, logits: torch.Tensor) -> None:
        """Perform one step of a beam search."""
        if job.search is None:
            self._memory.store_prefix(job.sequences[0])
            job.send_info()
            job.search = BeamSearch(job.request, self._vocabulary, self._end_conditions(job), self._chooser(job))
        job.search.expand(logits)
        if job.request.guides is None:
            self._advance(job)
        else:
            self._waiting.append(_WaitingForGrammar(job, None, None, job.search))

    def _advance(self, job: GenerationJob) -> None:
        parents = job.search.advance()
        if job.search.is_finished:
            self.scheduler.remove(job)
            for text in job.search.texts():
                job.sink.text(text)
            return
        first = job.sequences[0]
        slots = [*(each.slot for each in job.sequences), *job.spare]
        self._memory.gather([slots[parent] for parent in parents], slots, first.computed)
        job.spare = []
        job.sequences = [
            first.branch([*job.request.tokens, *tokens], slot)
            for slot, tokens in zip(slots, job.search.running, strict=True)
        ]

    # --- grammars ----------------------------------------------------------------------------------------

    def _resume_waiting(self) -> None:
        """Continue sequences whose grammar mask is available."""
        waiting, self._waiting = self._waiting, []
        until_s = time.monotonic() + _GRAMMAR_S
        for each in waiting:
            job = each.job
            if job not in self.scheduler.running:
                if job in self.scheduler.waiting and each.search is None:
                    self._waiting.append(each)  # preempted: it continues from its tokens, a search restarts
                continue
            if each.search is not job.search:
                continue
            waiter = job.writers[each.sequence].chooser if each.sequence is not None else job.search
            finished = self._run_for(job, waiter.wait, until_s)
            if finished is False:
                self._waiting.append(each)
            elif finished and each.sequence is not None and each.choice is not None:
                self._take(job, each.sequence, each.choice)
            elif finished:
                self._run_for(job, self._advance, job)

    # --- errors -------------------------------------------------------------------------------------------

    def _run_for(self, job: GenerationJob, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function for one job; an exception ends only that job."""
        try:
            return act(*arguments)
        except BaseException as error:
            self._fail(job, error)
            return None

    def _fail(self, job: GenerationJob, error: BaseException) -> None:
        if not isinstance(error, DragomanError):
            log.error("a generation failed", exc_info=error)
        self.scheduler.remove(job)
        job.sink.error(public_error(error, "generation failed"))
