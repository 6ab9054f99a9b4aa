"""Launchers of workers on other machines; here the ones that every cluster has: `join` and `command`."""

from dragoman.core.spec import ModelSpec
from dragoman_cluster.launchers.command import CommandLauncher
from dragoman_cluster.launchers.worker_commands import port_and_options, problems
from dragoman_cluster.worker_port import JoinedWorker

__all__ = ["CommandLauncher", "JoinLauncher"]


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
