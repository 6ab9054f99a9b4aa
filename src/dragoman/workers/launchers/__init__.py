"""Launchers of workers on other machines: those that join by themselves, and those that a command starts."""

import asyncio
import shlex
import subprocess
from contextlib import suppress

from dragoman.core.errors import ModelFailed, NotReady
from dragoman.core.options import child_environment
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.workers.child_process import describe_exit
from dragoman.workers.handshake import SECRET_VARIABLE
from dragoman.workers.worker_port import JoinedWorker, WorkerPort, end_command

# How often a command is checked while its worker has not joined.
_POLL_S = 0.2
_FIELDS = ("address", "host", "port", "ticket", "model")


class JoinLauncher:
    """Takes workers that somebody starts with `dragoman worker --join`."""

    starts_workers = False

    def __init__(self, spec: ModelSpec) -> None:
        self._model = spec.name
        self._port, _ = _port_and_launch(spec)

    @property
    def waiting_for(self) -> str:
        return f"workers that join {self._port.address}"

    async def launch(self) -> JoinedWorker:
        return await self._port.take(self._model)


class CommandLauncher:
    """Starts a command for each worker, which joins from wherever the command brings it."""

    starts_workers = True

    def __init__(self, spec: ModelSpec) -> None:
        self._model = spec.name
        self._port, options = _port_and_launch(spec)
        try:
            self._arguments = shlex.split(options.command)
            self._fill("")
        except (ValueError, LookupError) as error:
            names = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.command': expected a command line with {names}, "
                f"got {options.command!r}: {error}"
            ) from error
        if not self._arguments:
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.command' is missing: expected the command line that "
                "starts a worker, as 'ssh node1 dragoman worker --join {address}'"
            )

    @property
    def waiting_for(self) -> str:
        return f"workers that '{self._arguments[0]}' starts to join {self._port.address}"

    async def launch(self) -> JoinedWorker:
        """Run the command and wait until its worker has joined, however long that takes.

        Raises ModelFailed if the command cannot be run, NotReady if it fails before.
        """
        ticket, joined = self._port.expect()
        try:
            command = subprocess.Popen(  # noqa: ASYNC220, S603 (it returns at once; the operator's own command)
                self._fill(ticket),
                stdin=subprocess.DEVNULL,
                env={**child_environment(runs_models=True), SECRET_VARIABLE: self._port.secret},
                process_group=0,
            )
        except OSError as error:
            joined.cancel()
            raise ModelFailed(f"failed to load '{self._model}', cannot run '{self._arguments[0]}': {error}") from error
        try:
            worker = await self._wait(command, joined)
        except BaseException:
            joined.cancel()
            await end_command(command, 0.0)
            raise
        worker.command = command
        return worker

    async def _wait(self, command: "subprocess.Popen[bytes]", joined: "asyncio.Future[JoinedWorker]") -> JoinedWorker:
        """Return the worker of a command. One that ends with 0 may have submitted a job that starts it later."""
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(joined), _POLL_S)
            if command.poll():
                raise NotReady(
                    f"failed to load '{self._model}', its command '{self._arguments[0]}' ended with "
                    f"{describe_exit(command.returncode)} before its worker joined"
                )

    def _fill(self, ticket: str) -> list[str]:
        host, _, port = self._port.address.rpartition(":")
        address = f"{self._port.address}/{ticket}"
        values = {"address": address, "host": host, "port": port, "ticket": ticket, "model": self._model}
        return [argument.format_map(values) for argument in self._arguments]


def _port_and_launch(spec: ModelSpec) -> tuple[WorkerPort, LaunchOptions]:
    """Return the port of the server and the options of a launcher. Raises ModelFailed."""
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
    return port, spec.launch
