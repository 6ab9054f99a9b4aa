"""The launcher `slurm`: a batch job for each worker."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed, NotReady
from dragoman.core.spec import ModelSpec
from dragoman_cluster.launchers.jobs import TEMPORARY, JobLauncher, JobState
from dragoman_cluster.launchers.worker_commands import WorkerCommand, worker_environment

# The worker takes the place of the job's shell, so that it gets signals of `--signal=B:`, and the model's own `srun`
# has all resources of the job.
_COMMAND = "exec {worker}"
_PROGRAM_S = 60.0
_OUTPUT_BYTES = 4096
_WAITING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED"]
)
_RUNNING = frozenset(["RUNNING", "COMPLETING", "SIGNALING", "STOPPED", "RESIZING"])


class SlurmLauncher(JobLauncher):
    """Submits a job with `sbatch` for each worker.

    The job's script is the file of `placement.script`, if there is one, and then `placement.command`. `resources` are
    options of `sbatch`. The worker itself leaves before the time limit of the job.
    """

    job_name = "SLURM job"
    has_titles = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._command = WorkerCommand(spec, self.port, self.options.command or _COMMAND)
        self._flags = [_flag(name, value, spec.name) for name, value in self.options.resources.items()]
        self._lines = "" if not self.options.script else _read_script(self.options.script, spec.name)
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise ModelFailed(
                    f"failed to load '{spec.name}', launcher 'slurm' needs '{program}', which is not found: start the "
                    "server where SLURM's programs are installed, as on a login node"
                )

    async def submit(self, ticket: str) -> str:
        lines = self._lines if self._lines.startswith("#!") else f"#!/bin/sh\n{self._lines}"
        script = f"{lines}\n{self._command.line(ticket)}\n"
        # A job that is started again by SLURM would come with a ticket that is used up.
        flags = ["--parsable", "--no-requeue", f"--job-name={self.title}", *self._flags]
        try:
            answer = await self._run("sbatch", *flags, script=script)
        except NotReady as error:
            if TEMPORARY.search(error.message):
                raise
            raise ModelFailed(error.message) from error
        return answer.strip().partition(";")[0]

    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        asked = ",".join(jobs)
        try:
            answer = await self._run("squeue", "--noheader", "--states=all", f"--jobs={asked}", "--format=%i|%T|%r")
        except NotReady as error:
            if "Invalid job id" in error.message:  # the only one asked for has ended long ago
                return {}
            raise
        states = {}
        for line in answer.splitlines():
            job, state, reason = line.strip().split("|", 2)
            states[job] = _job_state(state, reason)
        return states

    async def cancel(self, job: str) -> None:
        with suppress(NotReady):
            await self._run("scancel", job)

    async def describe_failure(self, job: str) -> str:
        """Return the last line of the job's output, if this machine can read it."""
        with suppress(NotReady, OSError):
            answer = await self._run("scontrol", "show", "job", "--oneliner", job)
            if match := re.search(r" StdErr=(\S+)", answer):
                return f": {(await asyncio.to_thread(_last_line, Path(match[1])) or 'no output')[:300]}"
        return ""

    async def _run(self, program: str, *arguments: str, script: str = "") -> str:
        """Return the output of one of SLURM's programs. Raises NotReady with its error message."""
        try:
            process = await asyncio.to_thread(
                subprocess.run,
                [program, *arguments],
                input=script,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROGRAM_S,
                env=worker_environment(self.port),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NotReady(f"failed to load '{self.model}', {program} failed: {error}") from error
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            reason = lines[-1].strip() if lines else f"exit code {process.returncode}"
            raise NotReady(f"failed to load '{self.model}', {program} failed: {reason}")
        return process.stdout


def _last_line(file: Path) -> str:
    """Return the last line of a file that is not empty. Raises OSError."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _OUTPUT_BYTES))
        lines = stream.read().decode(errors="replace").split("\n")
    return next(filter(None, map(str.strip, reversed(lines))), "")


def _job_state(state: str, reason: str) -> JobState:
    if state in _WAITING:
        return JobState("waiting", f"{state} ({reason})")
    return JobState("running" if state in _RUNNING else "ended", state)


def _flag(name: str, value: Any, model: str) -> str:
    """Return an option of sbatch. Raises ModelFailed."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]+", name) or not isinstance(value, str | int | float):
        raise ModelFailed(
            f"failed to load '{model}', setting 'placement.resources.{name}': expected a long option of sbatch, as "
            f'partition = "gpu", got {value!r}'
        )
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


def _read_script(file: str, model: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFailed(f"failed to load '{model}', setting 'placement.script' cannot be read: {error}") from error
