"""What launchers have in common: the command line of a worker, its environment, and the port that it joins."""

import shlex
import sys

from dragoman.core.errors import ModelFailed
from dragoman.core.options import child_environment
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman_cluster.handshake import SECRET_VARIABLE
from dragoman_cluster.worker_port import WorkerPort

_FIELDS = ("address", "host", "port", "ticket", "model", "worker")


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
