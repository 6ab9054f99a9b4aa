"""Launchers of workers on other machines: those that join by themselves, and those that a command starts."""

import asyncio
import shlex
import subprocess
import sys
import time
from contextlib import suppress

from dragoman.core.errors import ModelFailed, NotReady
from dragoman.core.options import child_environment
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.workers.child_process import describe_exit, kill
from dragoman_cluster.handshake import SECRET_VARIABLE
from dragoman_cluster.worker_port import JoinedWorker, WorkerPort

# How often a command is checked while its worker has not joined.
_POLL_S = 0.2
_FIELDS = ("address", "host", "port", "ticket", "model", "worker")


class JoinLauncher:
    """Waits for workers that are started outside of the server with `dragoman worker --join`."""

    starts_workers = False

    def __init__(self, spec: ModelSpec) -> None:
        self._model = spec.name
        self._port, _ = port_and_options(spec)

    @property
    def waiting_for(self) -> str:
        return f"workers that join {self._port.address}{problems(self._port, self._model)}"

    async def launch(self) -> JoinedWorker:
        return await self._port.take(self._model)


class CommandLauncher:
    """Runs a command for each worker, which joins from the machine on which the command starts it."""

    starts_workers = True

    def __init__(self, spec: ModelSpec) -> None:
        self._model = spec.name
        self._port, options = port_and_options(spec)
        self._command = WorkerCommand(spec, self._port, options.command)
        if not options.command.strip():
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.command' is missing: expected the command line that "
                "starts a worker, as 'ssh node1 dragoman worker --join {address}'"
            )

    @property
    def waiting_for(self) -> str:
        program = self._command.program
        return f"workers that '{program}' starts to join {self._port.address}{problems(self._port, self._model)}"

    async def launch(self) -> JoinedWorker:
        """Run the command and wait until its worker has joined, however long that takes.

        Raises ModelFailed if the command cannot be run, NotReady if it fails before.
        """
        ticket, joined = self._port.expect()
        try:
            command = subprocess.Popen(  # noqa: ASYNC220, S603 (it returns at once; the operator's own command)
                self._command.arguments(ticket),
                stdin=subprocess.DEVNULL,
                env=worker_environment(self._port),
                process_group=0,
            )
        except OSError as error:
            joined.cancel()
            program = self._command.program
            raise ModelFailed(f"failed to load '{self._model}', cannot run '{program}': {error}") from error
        try:
            worker = await self._wait(command, joined)
        except BaseException:
            joined.cancel()
            await _end_command(command, 0.0)
            raise
        self._port.start_failures.pop(self._model, None)
        worker.end_starter = lambda grace_s: _end_command(command, grace_s)
        return worker

    async def _wait(self, command: "subprocess.Popen[bytes]", joined: "asyncio.Future[JoinedWorker]") -> JoinedWorker:
        """Return the worker of a command. One that ends with 0 may have submitted a job that starts it later."""
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(joined), _POLL_S)
            if command.poll():
                ended = f"its command '{self._command.program}' ended with {describe_exit(command.returncode)}"
                self._port.start_failures[self._model] = f"{ended} before its worker joined"
                raise NotReady(f"failed to load '{self._model}', {ended} before its worker joined")


async def _end_command(command: "subprocess.Popen[bytes]", grace_s: float) -> str:
    """Wait until a command ends, for `grace_s` seconds, then kill its process group; return how it ended."""
    end_s = time.monotonic() + grace_s
    while command.poll() is None and time.monotonic() < end_s:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.02)
    kill(command)
    await asyncio.to_thread(command.wait)
    return f"its command ended with {describe_exit(command.returncode)}"


class WorkerCommand:
    """The setting `placement.command`: a command line with fields as `{address}`. Raises ModelFailed if it is invalid.

    `{worker}` is the command line `python -m dragoman worker --join ADDRESS` with the server's own Python.
    """

    def __init__(self, spec: ModelSpec, port: WorkerPort, text: str) -> None:
        assert spec.launch is not None
        self._model = spec.name
        self._port = port
        self._drain_s = spec.launch.drain_s
        self._text = text
        try:
            self._arguments = shlex.split(text)
            self.line("")
        except (ValueError, LookupError) as error:
            names = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.command': expected a command line with {names}, "
                f"got {text!r}: {error}"
            ) from error

    @property
    def program(self) -> str:
        return self.arguments("")[0]

    def arguments(self, ticket: str) -> list[str]:
        """Return the command line of the worker with a ticket, without a shell."""
        worker, values = self.worker(ticket), self._values(ticket)
        found: list[str] = []
        for argument in self._arguments:
            found += worker if argument == "{worker}" else [argument.format_map(values)]
        return found

    def line(self, ticket: str) -> str:
        """Return the command line of the worker with a ticket, for a shell."""
        return self._text.format_map(self._values(ticket))

    def worker(self, ticket: str) -> list[str]:
        """Return what `{worker}` stands for."""
        address = f"{self._port.address}/{ticket}"
        return [sys.executable, "-m", "dragoman", "worker", "--join", address, "--drain-s", f"{self._drain_s:g}"]

    def _values(self, ticket: str) -> dict[str, str]:
        host, _, port = self._port.address.rpartition(":")
        values = {"host": host, "port": port, "ticket": ticket, "model": self._model}
        return {**values, "address": f"{self._port.address}/{ticket}", "worker": shlex.join(self.worker(ticket))}


def worker_environment(port: WorkerPort) -> dict[str, str]:
    """Return the environment of a command that starts a worker: the server's, with the secret of workers."""
    return {**child_environment(runs_models=True), SECRET_VARIABLE: port.secret}


def problems(port: WorkerPort, model: str) -> str:
    """Return why the last worker of a model was not started, or not accepted, as the end of a sentence."""
    messages = (port.start_failures.get(model, ""), port.last_rejection)
    return "".join(f"; {problem}" for problem in messages if problem)


def port_and_options(spec: ModelSpec) -> tuple[WorkerPort, LaunchOptions]:
    """Return the port of the server and the options of a new launcher. Raises ModelFailed."""
    assert spec.launch is not None
    if spec.worker_port is None:
        raise ModelFailed(
            f"failed to load '{spec.name}', launcher '{spec.launch.launcher}' needs a port that workers join: "
            "start the server with --worker-port"
        )
    if spec.working_directory == "own":
        raise ModelFailed(
            f"failed to load '{spec.name}', working_directory 'own': expected 'shared' with launcher "
            f"'{spec.launch.launcher}', whose workers have the directory that they are started in"
        )
    port: WorkerPort = spec.worker_port
    port.start_failures.pop(spec.name, None)  # of an earlier launcher, perhaps with other settings
    return port, spec.launch
