"""The launcher `hyperqueue`: a task for each worker."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from dragoman.core.errors import ModelFailed, NotReady, error_text
from dragoman.core.foreign_code import is_interruption
from dragoman.core.spec import ModelSpec
from dragoman.system.threads import call_in_thread
from dragoman_cluster.launchers import WorkerCommand
from dragoman_cluster.launchers.jobs import JobLauncher, JobState

A = TypeVar("A")

_PROGRAM_S = 30.0


class HyperQueueLauncher(JobLauncher):
    """Submits a job of one task for each worker to the server of `HQ_SERVER_DIR`, or the user's own.

    `resources`: `cpus`, and the names of other resources, such as `gpus/nvidia`.
    """

    job_name = "HyperQueue job"
    reports_success = False

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
        job = Job(name=f"dragoman-{self.model}")
        # The secret comes through the standard input: others may read arguments and HyperQueue's description of a task.
        job.program(
            [*self._command.arguments(ticket), "--secret-file", "/dev/stdin"],
            env={name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ},
            stdin=self.port.secret,
            stdout=None,
            resources=ResourceRequest(cpus=resources.pop("cpus", 1), resources=resources),
        )
        return str(client.submit(job).id)

    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        """Return the states of jobs; HyperQueue's package reports only which ones have failed."""
        numbers = [int(job) for job in jobs]
        failed = await self._run(lambda client: client.connection.get_failed_tasks(numbers))
        states = {str(job): JobState("waiting", "queued, or has just started") for job in numbers}
        for job, tasks in failed.items():
            for context in tasks.values():
                states[str(job)] = JobState("ended", context.error.strip().split("\n")[0][:300])
        return states

    async def cancel(self, job: str) -> None:
        """Cancel a job with the program `hq`, if there is one; otherwise its worker ends as soon as it starts."""
        program = shutil.which("hq")
        if program is not None:
            folder = [] if self._folder is None else [f"--server-dir={self._folder}"]
            command = [program, *folder, "job", "cancel", job]
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
