"""The launcher `command`: a command line for each worker, which starts it on this machine or on another one."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.workers.child_process import describe_exit, kill
from dragoman_cluster.launchers.jobs import JobLauncher, JobState
from dragoman_cluster.launchers.worker_commands import WorkerCommand, problems, worker_environment

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SUBMITTED = describe_exit(0)
# How long the worker of an earlier server's command that has ended may look for this server: it tries every 2 s.
_REJOIN_S = 5.0


class CommandLauncher(JobLauncher):
    """Runs a command for each worker. A job is its process group: `PID/START/BOOT` with the time of its start, since
    numbers of processes are used again.

    A command that has ended with 0 may have submitted a job that starts the worker later. Of a command that an earlier
    server has started, only its end can be seen: its worker may run without it, and has some seconds to come back.
    """

    job_name = "command"
    first_poll_s = max_poll_s = 0.2

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._command = WorkerCommand(spec, self.port, self.options.command)
        if not self.options.command.strip():
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.command' is missing: expected the command line that "
                "starts a worker, as 'ssh node1 dragoman worker --join {address}'"
            )
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._missing_s: dict[str, float] = {}  # when a command of an earlier server was first found to have ended

    def label(self, job: str) -> str:
        return f"its command '{self._command.program}'"

    @property
    def waiting_for(self) -> str:
        program = self._command.program
        return f"workers that '{program}' starts to join {self.port.address}{problems(self.port, self.model)}"

    def has_failed(self, state: JobState) -> bool:
        return state.phase == "ended" and state.text != _SUBMITTED

    async def submit(self, ticket: str) -> str:
        """Run the command. Raises ModelFailed if that is not possible."""
        try:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 (it returns at once; the operator's own command)
                self._command.arguments(ticket),
                stdin=subprocess.DEVNULL,
                env=worker_environment(self.port),
                process_group=0,
            )
        except OSError as error:
            program = self._command.program
            raise ModelFailed(f"failed to load '{self.model}', cannot run '{program}': {error}") from error
        job = f"{process.pid}/{_start_of(process.pid)}/{_boot()}"
        self._started[job] = process
        return job

    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        return {job: self._state(job) for job in jobs}

    def _state(self, job: str) -> JobState:
        process = self._started.get(job)
        if process is not None:
            code = process.poll()
            return JobState("running", "runs") if code is None else JobState("ended", describe_exit(code))
        if _runs(job):
            return JobState("running", "of an earlier server")
        missing_s = self._missing_s.setdefault(job, time.monotonic())
        is_awaited = time.monotonic() - missing_s < _REJOIN_S
        return JobState("running" if is_awaited else "ended", "an unknown exit code")

    async def cancel(self, job: str) -> None:
        process = self._started.get(job)
        if process is not None:
            kill(process)
            await asyncio.to_thread(process.wait)
        elif _runs(job):
            with suppress(OSError):
                os.killpg(_pid(job), signal.SIGKILL)

    def release(self, job: str) -> None:
        self._started.pop(job, None)
        self._missing_s.pop(job, None)


def _pid(job: str) -> int:
    return int(job.partition("/")[0])


def _runs(job: str) -> bool:
    """Return whether the process of a job runs, and is not another one with the same number."""
    pid, start, boot = job.split("/")
    return boot == _boot() and bool(start) and start == _start_of(int(pid))


def _start_of(pid: int) -> str:
    """Return when a process was started, in ticks since the start of the machine; "" if it has ended, or not Linux."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # proc(5): field 22, where that of the state is 3


def _boot() -> str:
    """Return the id of the present start of this machine, "" if unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
