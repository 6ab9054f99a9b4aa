"""Jobs: work that outlives the request that began it, and the server.

A job is a row in the state store and a folder. What it does is its kind, which a feature registers. A job that has not
ended when the server stops, or is killed, is run again when the next one starts: its kind goes on from what it finds in
the folder. Jobs belong to the key that made them.

| state | the kind | becomes |
|---|---|---|
| active | runs it, from the start of the server on | ended |
| ended | has set its result | deleted |
"""

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dragoman.core.callers import Caller
from dragoman.core.state_store import StateTable

log = logging.getLogger("dragoman.jobs")

TABLE_VERSION = 1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its row has it.

    number: order of creation. models: the only models that its caller may use, or None. created_s: Unix time.
    data: what its kind needs to know, as JSON values.
    """

    id: str
    kind: str
    number: int
    caller: Caller
    models: frozenset[str] | None
    created_s: float
    ended: bool = False
    data: Mapping[str, Any] = {}


class JobKind(Protocol):
    """What jobs of a kind do."""

    async def run(self, job: Job) -> None:
        """Run a job to its end and end it by `Jobs.put`. Cancelled when the server stops or the job is deleted."""


class Jobs:
    """The jobs of a server, in the rows of a table, with a folder for each in `folder`."""

    def __init__(self, table: StateTable, folder: Path) -> None:
        self._table, self._folder = table, folder
        self._jobs: dict[tuple[str, str], Job] = {}
        self._kinds: dict[str, JobKind] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_running = False
        self._last_number = 0
        for key, job in sorted(table.read(Job).items(), key=lambda row: row[1].number):
            self._jobs[key] = job
            self._last_number = job.number
        known = {job.id for job in self._jobs.values()}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in known:  # the server was killed before its row was saved
                shutil.rmtree(path, ignore_errors=True)

    def register(self, name: str, kind: JobKind) -> None:
        self._kinds[name] = kind

    def start(self) -> None:
        """Run the jobs that have not ended."""
        self._is_running = True
        for job in self._jobs.values():
            self._run(job)

    async def close(self) -> None:
        """Cancel what runs; it is run again after the next start."""
        self._is_running = False
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job, which is created if it does not exist. Raises OSError."""
        path = self._folder / job_id
        path.mkdir(mode=0o700, exist_ok=True, parents=True)
        return path

    def find(self, job_id: str, owner: str, kind: str) -> Job | None:
        job = self._jobs.get((owner, job_id))
        return job if job is not None and job.kind == kind else None

    def of(self, kind: str, owner: str | None = None) -> list[Job]:
        """Return the jobs of a kind, of one owner or of all, oldest first."""
        return [job for job in self._jobs.values() if job.kind == kind and owner in (None, job.caller.owner)]

    def put(self, job: Job) -> None:
        """Add or change a job, and run a new one."""
        self._jobs[job.caller.owner, job.id] = job
        self._table.put(job.id, job, job.caller.owner)
        self._run(job)

    async def saved(self) -> bool:
        """Wait until the changes so far are as safe as they will be; return False if the disk cannot be written."""
        return await self._table.flush() or not self._table.outlives_server

    async def delete(self, job: Job) -> None:
        """Cancel a job and delete what there is of it."""
        self._jobs.pop((job.caller.owner, job.id), None)
        self._table.delete(job.id, job.caller.owner)
        if (task := self._tasks.get(job.id)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._folder / job.id, ignore_errors=True)

    def _run(self, job: Job) -> None:
        kind = self._kinds.get(job.kind)  # none if its feature is not installed
        if self._is_running and not job.ended and kind is not None and job.id not in self._tasks:
            task = self._tasks[job.id] = asyncio.get_running_loop().create_task(self._guard(kind, job))
            task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    async def _guard(self, kind: JobKind, job: Job) -> None:
        try:
            await kind.run(job)
        except Exception:
            log.exception("a job failed unexpectedly and is run again when the server starts: job=%s", job.id)
