"""Launchers that start a job for each worker: what SLURM, HyperQueue, Ray and commands have in common."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dragoman.core.errors import DragomanError, ModelFailed, NotReady
from dragoman.core.spec import ModelSpec
from dragoman.workers.supervisor import StartDelayed
from dragoman_cluster.launchers.worker_commands import port_and_options, problems
from dragoman_cluster.worker_port import JoinedWorker, KeptJob

log = logging.getLogger("dragoman.worker")

# How long a job may take to end after its worker, before it is cancelled.
_ENDING_S = 2.0


# Messages of schedulers after which the same job may be accepted later.
TEMPORARY = re.compile(
    r"contact|connect|time.?d?.?out|temporar|try again|submit limit|MaxSubmit|communication|respon|config source|"
    r"unavailable|GCS",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class JobState:
    """The state of a job. text: the scheduler's own words, as `PENDING (Resources)`."""

    phase: Literal["waiting", "running", "ended"]
    text: str


class JobLauncher(ABC):
    """Submits a job for each worker and cancels it when the worker is no longer needed.

    A job outlives a server that is killed, and one that stops if `placement.keep` is set. The next server with the same
    state store adopts it: `submit` therefore returns an id from which a new launcher knows the job.

    job_name: what the scheduler calls a job, as `SLURM job`. first_poll_s, max_poll_s: the scheduler is asked for
    states at most this often, at first and later. outlives_server: False if jobs end with the server. has_titles: the
    scheduler's programs list jobs by `title`. A subclass implements `submit`, `states` and `cancel`.
    """

    job_name = ""
    first_poll_s = 0.5
    max_poll_s = 10.0
    outlives_server = True
    starts_workers = True
    has_titles = False

    def __init__(self, spec: ModelSpec) -> None:
        self.model = spec.name
        self.port, self.options = port_and_options(spec)
        if self.options.keep and not self.port.has_store:
            raise ModelFailed(
                f"{self._failure_prefix}setting 'placement.keep': expected a server with --state, from which the next "
                "one knows the jobs"
            )
        self._states: dict[str, JobState] = {}  # of jobs whose workers have not joined
        self._polled_s = 0.0
        self._submitted_s = 0.0
        self._lock = asyncio.Lock()

    @abstractmethod
    async def submit(self, ticket: str) -> str:
        """Submit the job of the worker with a ticket; return its id. Raises ModelFailed, or NotReady if it may work
        later."""

    @abstractmethod
    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        """Return the states of jobs; those that the scheduler no longer knows are left out. Raises NotReady."""

    @abstractmethod
    async def cancel(self, job: str) -> None:
        """Cancel a job that waits or runs, as far as possible."""

    def release(self, job: str) -> None:  # noqa: B027 (most have nothing to do)
        """Forget a job that has ended or was cancelled."""

    def label(self, job: str) -> str:
        """Return how messages name a job."""
        return f"{self.job_name} {job}"

    @property
    def title(self) -> str:
        """The name of each job of the model, for the scheduler."""
        return f"dragoman-{self.model}"

    def has_failed(self, state: JobState) -> bool:
        """Return whether a job in this state will not start its worker any more."""
        return state.phase == "ended"

    async def describe_failure(self, job: str) -> str:
        """Return what is known about a job that has ended before its worker joined, as the end of a sentence."""
        return ""

    @property
    def waiting_for(self) -> str:
        waiting = [f"{self.label(job)} is {s.text}" for job, s in self._states.items() if s.phase == "waiting"]
        started = [f"{self.label(job)} ({s.text})" for job, s in self._states.items() if s.phase == "running"]
        if waiting:
            others = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            reason = f"resources: {waiting[0]}{others}"
        elif started:
            reason = f"the worker of {started[0]} to join {self.port.address}"
        else:
            reason = f"workers that {self.job_name}s start to join {self.port.address}"
        return f"{reason}{problems(self.port, self.model)}"

    async def launch(self) -> JoinedWorker:
        """Submit a job, or adopt one of an earlier server, and wait until its worker has joined, however long that
        takes.

        Raises ModelFailed if it cannot be submitted, StartDelayed if the scheduler does not answer now, NotReady if it
        ends before.
        """
        while (adopted := self.port.adopt(self.model, self.job_name)) is not None:
            ticket, job, joined = adopted
            log.info("model '%s': %s of an earlier server is adopted", self.model, self.label(job))
            self._submitted_s, self._states[job] = time.monotonic(), JobState("waiting", "adopted")
            try:
                return await self._launch(ticket, joined, job)
            except NotReady as error:  # it has ended meanwhile
                log.warning("%s", error.message)
        return await self._launch(*self.port.expect())

    async def _launch(self, ticket: str, joined: "asyncio.Future[JoinedWorker]", job: str = "") -> JoinedWorker:
        """Return the worker of a job, which is submitted if there is none."""
        try:
            if not job:
                job = await self._submit(ticket)
                if self.outlives_server:
                    self.port.note_job(ticket, KeptJob(self.model, self.job_name, job))
            worker = await self._wait(job, joined)
        except BaseException as error:
            joined.cancel()
            if isinstance(error, DragomanError):
                self.port.start_failures[self.model] = error.message.removeprefix(self._failure_prefix)
            if job and not (self.options.keep and self.port.keeps_workers):
                self.port.forget_job(ticket)
                await self._give_up(job)
            raise
        finally:
            self._states.pop(job, None)
        self.port.start_failures.pop(self.model, None)
        worker.end_starter, worker.is_job_kept = partial(self._end, job, ticket), self.options.keep
        return worker

    @property
    def _failure_prefix(self) -> str:
        return f"failed to load '{self.model}', "

    async def _submit(self, ticket: str) -> str:
        """Submit a job. If this task is cancelled meanwhile, the job is cancelled too."""
        self._submitted_s = time.monotonic()
        submitting = asyncio.ensure_future(self.submit(ticket))
        try:
            job = await asyncio.shield(submitting)
        except NotReady as error:
            if TEMPORARY.search(error.message):
                raise StartDelayed(error.message) from error
            raise
        except asyncio.CancelledError:
            with suppress(DragomanError):
                await self._give_up(await submitting)
            raise
        self._states[job] = JobState("waiting", "submitted")
        title = f" as '{self.title}'" if self.has_titles else ""
        log.info("model '%s': %s is submitted%s", self.model, self.label(job), title)
        return job

    async def _wait(self, job: str, joined: "asyncio.Future[JoinedWorker]") -> JoinedWorker:
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(joined), self.first_poll_s)
            await self._poll()
            if self.has_failed(self._states[job]) and not joined.done():
                details = await self.describe_failure(job)
                ended = f"{self.label(job)} ended with {self._states[job].text} before its worker joined"
                raise NotReady(f"{self._failure_prefix}{ended}{details}")

    async def _poll(self) -> None:
        """Update the states of the jobs, unless that was done a short time ago."""
        async with self._lock:
            now_s = time.monotonic()
            interval_s = min(self.max_poll_s, max(self.first_poll_s, (now_s - self._submitted_s) / 10))
            if now_s - self._polled_s < interval_s or not self._states:
                return
            asked = [*self._states]
            try:
                states = await self.states(asked)
            except NotReady as error:
                self.port.start_failures[self.model] = error.message.removeprefix(self._failure_prefix)
                return
            finally:
                self._polled_s = time.monotonic()
            for job in asked:
                if job in self._states:
                    self._states[job] = states.get(job, JobState("ended", "an unknown state"))

    async def _end(self, job: str, ticket: str, grace_s: float) -> str:
        """Wait until the job of a worker that is gone has ended, or cancel it; return how it ended."""
        self.port.forget_job(ticket)
        end_s = time.monotonic() + max(grace_s, _ENDING_S)
        delay_s = 0.1
        try:
            while time.monotonic() < end_s:
                state = (await self.states([job])).get(job)
                if state is None or state.phase == "ended":
                    self.release(job)
                    return f"{self.label(job)} ended with {'an unknown state' if state is None else state.text}"
                await asyncio.sleep(delay_s)
                delay_s *= 2
        except NotReady as error:
            log.warning("the state of %s is not known: %s", self.label(job), error.message)
        await self._give_up(job)
        return f"{self.label(job)} was cancelled"

    async def _give_up(self, job: str) -> None:
        await self.cancel(job)
        self.release(job)
