"""The launcher `hyperqueue`: a task for each worker."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dragoman.core.documents import read_json
from dragoman.core.errors import ModelFailed, NotReady, error_text
from dragoman.core.foreign_code import is_interruption
from dragoman.core.spec import ModelSpec
from dragoman.system.threads import call_in_thread
from dragoman_cluster.launchers.jobs import JobLauncher, JobState
from dragoman_cluster.launchers.worker_commands import WorkerCommand

A = TypeVar("A")

_PROGRAM_S = 30.0


class HyperQueueLauncher(JobLauncher):
    """Submits a job of one task for each worker to the server of `HQ_SERVER_DIR`, or the user's own.

    The id of a job is `NUMBER@SERVER`: a new HyperQueue server counts from 1 again.
    `resources`: `cpus`, and the names of other resources, such as `gpus/nvidia`.
    """

    job_name = "HyperQueue job"
    has_titles = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if importlib.util.find_spec("hyperqueue") is None:
            raise ModelFailed(
                f"failed to load '{spec.name}', launcher 'hyperqueue' needs the package hyperqueue: "
                "pip install 'dragoman[hyperqueue]'"
            )
        self._command = WorkerCommand(spec, self.port, self.options.command or "{worker}")
        self._folder = os.environ.get("HQ_SERVER_DIR")
        self._client: Any = None
        self._client_lock = asyncio.Lock()
        for name, value in self.options.resources.items():
            if not isinstance(value, int | float | str) or isinstance(value, bool):
                raise ModelFailed(
                    f"failed to load '{spec.name}', setting 'placement.resources.{name}': expected an amount, "
                    f"got {value!r}"
                )

    async def submit(self, ticket: str) -> str:
        return await self._run(lambda client: self._submit_task(client, ticket))

    def _submit_task(self, client: Any, ticket: str) -> str:
        from hyperqueue import Job
        from hyperqueue.ffi.protocol import ResourceRequest

        resources = dict(self.options.resources)
        job = Job(name=self.title)
        # The secret comes through the standard input: others may read arguments and HyperQueue's description of a task.
        job.program(
            [*self._command.arguments(ticket), "--secret-file", "/dev/stdin"],
            env={name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ},
            stdin=self.port.secret,
            stdout=None,
            resources=ResourceRequest(cpus=resources.pop("cpus", 1), resources=resources),
        )
        # Not `client.submit`, which does the same and writes a line of its own to the root logger.
        number = client.connection.submit_job(job._build(client))
        return f"{number}@{self._server()}"

    def _server(self) -> str:
        """Return the id of the HyperQueue server, "" if its file cannot be read. Blocks."""
        folder = Path(self._folder) if self._folder else Path.home() / ".hq-server"
        with suppress(OSError, ValueError, TypeError, LookupError):
            return str(read_json(folder / "hq-current" / "access.json")["server_uid"])
        return ""

    def label(self, job: str) -> str:
        return f"{self.job_name} {_number(job)}"

    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        return await self._run(lambda client: self._states_of(client, [*jobs]))

    def _states_of(self, client: Any, jobs: list[str]) -> dict[str, JobState]:
        server = self._server()
        numbers = {_number(job): job for job in jobs if job.endswith(f"@{server}")}
        if not numbers:
            return {}
        found: dict[int, Any] = {}

        def stop(statuses: dict[int, Any]) -> None:
            found.update(statuses)
            raise _StatusesError

        # The package has no function for it, but one that waits for jobs and reports their counts meanwhile.
        with suppress(_StatusesError):
            client.connection.wait_for_jobs([*numbers], stop)
        ended = [number for number in numbers if number in found and found[number]["completed"]]
        failed = client.connection.get_failed_tasks(ended) if ended else {}
        return {
            job: _state(found[number], failed.get(number, {})) for number, job in numbers.items() if number in found
        }

    async def cancel(self, job: str) -> None:
        """Cancel a job with the program `hq`, if there is one; otherwise its worker ends as soon as it starts."""
        program = shutil.which("hq")
        if program is not None and job.endswith(f"@{await asyncio.to_thread(self._server)}"):
            folder = [] if self._folder is None else [f"--server-dir={self._folder}"]
            command = [program, *folder, "job", "cancel", str(_number(job))]
            with suppress(OSError, subprocess.SubprocessError):
                await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=_PROGRAM_S)

    async def _run(self, function: Callable[[Any], A]) -> A:
        """Return the result of a function of the client, which runs in a thread. Raises NotReady."""
        async with self._client_lock:
            try:
                return await call_in_thread(self._call, function)
            except BaseException as error:  # also a panic of the package, which is written in Rust
                if is_interruption(error):
                    raise
                self._client = None  # the next time, it connects to a server that was started meanwhile
                reason = error_text(error).strip().split("\n")[0][:300]
                raise NotReady(f"failed to load '{self.model}', HyperQueue: {reason}") from error

    def _call(self, function: Callable[[Any], A]) -> A:
        from hyperqueue import Client

        if self._client is None:
            self._client = Client(self._folder)
        return function(self._client)


class _StatusesError(Exception):
    """Ends the function that waits for jobs."""


def _number(job: str) -> int:
    return int(job.partition("@")[0])


def _state(status: Mapping[str, Any], failed: Mapping[int, Any]) -> JobState:
    """Return the state of a job of one task, by its counts and its failed tasks."""
    if not status["completed"]:
        return JobState("waiting", "queued, or has just started")
    for context in failed.values():
        return JobState("ended", context.error.strip().split("\n")[0][:300])
    return JobState("ended", "success" if status["finished"] else "cancellation")
