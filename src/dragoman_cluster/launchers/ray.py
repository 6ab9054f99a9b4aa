"""The launcher `ray`: an actor for each worker. Ray places and ends processes; calls do not pass through it.

Ray is imported in a driver, a child process of the server that is started with the first worker and ended after the
last one, because `ray.init` replaces the handlers of signals and starts threads. The driver ends with the server. Its
actors are detached: that of the next server finds them by their names. Those in a placement group end with the driver,
because a group that is detached would hold its resources for ever if no other server came. As a program, this module
is that driver.
"""

import asyncio
import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from traceback import format_exception
from typing import Any

from dragoman.core.errors import ModelFailed, NotReady
from dragoman.core.options import child_environment
from dragoman.core.spec import ModelSpec
from dragoman.system.parent_exit import signal_on_parent_exit
from dragoman_cluster.handshake import SECRET_VARIABLE
from dragoman_cluster.launchers.jobs import JobLauncher, JobState
from dragoman_cluster.launchers.worker_commands import WorkerCommand

_STRATEGIES = ("DEFAULT", "SPREAD")
_GROUP_STRATEGIES = ("PACK", "STRICT_PACK", "STRICT_SPREAD")
_NAMESPACE = "dragoman"
_OUTPUT_BYTES = 4096
# How long an actor whose worker has ended reports that, unless a driver ends it before.
_REPORTING_S = 20.0
# Requests to an actor at the same time: two of each driver.
_ACTOR_THREADS = 8
# A driver that does not respond for this long has no connection to a cluster; Ray itself tries for minutes.
_RESPONSE_S = 30.0
_CONNECT_S = 5.0


class RayLauncher(JobLauncher):
    """Creates an actor for each worker, in the cluster of `RAY_ADDRESS` or of this machine.

    `resources`: `cpus`, `gpus` (fractions share one), `memory` in bytes, the names of custom resources, and `strategy`:
    SPREAD (the default), DEFAULT, or PACK, STRICT_PACK and STRICT_SPREAD, which reserve a placement group for all
    workers.
    """

    job_name = "Ray actor"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if importlib.util.find_spec("ray") is None:
            raise ModelFailed(
                f"failed to load '{spec.name}', launcher 'ray' needs the package ray: pip install 'dragoman[ray]'"
            )
        self._command = WorkerCommand(spec, self.port, "{worker}")
        self._resources = _check_resources(self.options.resources, spec.name)
        self._count = max(1, spec.replicas)
        self.outlives_server = self._resources["strategy"] in _STRATEGIES
        if self.options.keep and not self.outlives_server:
            raise ModelFailed(
                f"failed to load '{spec.name}', setting 'placement.keep': expected strategy "
                f"{' or '.join(_STRATEGIES)}, got {self._resources['strategy']}, whose actors end with the server"
            )
        self._driver: _Driver | None = None
        self._jobs: set[str] = set()

    def label(self, job: str) -> str:
        return f"{self.job_name} {job.rpartition('-')[2]}"

    async def submit(self, ticket: str) -> str:
        job = f"dragoman-{self.model}-{ticket}"
        values = {
            "arguments": self._command.worker(ticket)[1:],
            "secret": self.port.secret,
            "count": self._count,
            "is_detached": self.outlives_server,
        }
        try:
            await self._request("submit", {"job": job, "resources": self._resources, **values}, [job])
        except BaseException:
            self.release(job)
            raise
        return job

    async def states(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        asked = [*jobs]
        states = await self._request("states", {"jobs": asked, "resources": self._resources}, asked)
        return {job: JobState(phase, text) for job, (phase, text) in states.items()}

    async def cancel(self, job: str) -> None:
        with suppress(NotReady):
            await self._request("cancel", {"job": job}, [job])

    def release(self, job: str) -> None:
        self._jobs.discard(job)
        if not self._jobs and self._driver is not None:
            driver, self._driver = self._driver, None
            threading.Thread(target=driver.close, name="dragoman-ray").start()

    async def _request(self, method: str, values: dict[str, Any], jobs: Iterable[str]) -> Any:
        """Return the result of a method of the driver, which stays until these jobs are released. Raises NotReady."""
        self._jobs.update(jobs)
        driver = self._driver = self._driver or _Driver()
        try:
            return await asyncio.to_thread(driver.request, method, values)
        except _DriverError as error:
            if driver.is_lost and self._driver is driver:  # another one finds the actors
                self._driver = None
                threading.Thread(target=driver.close, name="dragoman-ray").start()
            raise NotReady(f"failed to load '{self.model}', Ray: {error}") from error


def _check_resources(resources: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the resources of a worker. Raises ModelFailed."""
    strategies = (*_STRATEGIES, *_GROUP_STRATEGIES)
    for name, value in resources.items():
        expected = f"one of {', '.join(strategies)}" if name == "strategy" else "a number, 0 or more"
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not (value in strategies if name == "strategy" else is_number):
            raise ModelFailed(
                f"failed to load '{model}', setting 'placement.resources.{name}': expected {expected}, got {value!r}"
            )
    return {"cpus": 1, "strategy": "SPREAD", **resources}


class _DriverError(Exception):
    """An error in the driver, or its end."""


class _Driver:
    """The child process that is Ray's driver: requests and responses are lines of JSON through its pipes.

    is_lost: it has ended, or does not respond.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dragoman_cluster.launchers.ray"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(runs_models=True),
            process_group=0,  # Ctrl-C ends the server, which ends this
        )

    def request(self, method: str, values: dict[str, Any]) -> Any:
        """Return the result of a method. Blocks. Raises _DriverError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps([method, values]).encode() + b"\n")
                self._process.stdin.flush()
                if not select.select([self._process.stdout], [], [], _RESPONSE_S)[0]:
                    self.is_lost = True
                    self._process.kill()
                    address = os.environ.get("RAY_ADDRESS", "auto")
                    raise _DriverError(f"the cluster at {address} has not responded for {_RESPONSE_S:g} s")
                line = self._process.stdout.readline()
            except (OSError, ValueError) as error:  # it has ended, or was closed
                self.is_lost = True
                raise _DriverError(f"its driver has ended: {error}") from error
        if not line:
            self.is_lost = True
            raise _DriverError("its driver has ended")
        result, error_text = json.loads(line)
        if error_text:
            raise _DriverError(error_text)
        return result

    def close(self) -> None:
        """End the process, and with it the actors that are not detached. Blocks for some time."""
        with self._lock, suppress(OSError):
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


# --- in the driver -----------------------------------------------------------------------------------------------


class _Actor:
    """Runs a worker as a child process, which ends with the actor.

    It starts by itself when it is placed, though the driver that has created it may be gone, and ends some time after
    the worker.
    """

    def __init__(self, arguments: list[str], secret: str) -> None:
        self._ended = threading.Event()
        self._end = (0, "")
        threading.Thread(target=self._run, args=(arguments, secret), daemon=True).start()

    def is_placed(self) -> bool:
        return True

    def wait(self) -> tuple[int, str]:
        """Wait until the worker has ended; return its exit code and the last line of its output."""
        self._ended.wait()
        return self._end

    def _run(self, arguments: list[str], secret: str) -> None:
        """Run the worker; in a thread that lives as long as it, because its signal comes at the end of the thread."""

        def end_with_actor() -> None:
            signal_on_parent_exit(signal.SIGTERM)

        try:
            with tempfile.TemporaryFile() as output:
                process = subprocess.Popen(  # noqa: S603
                    [sys.executable, *arguments],
                    stdin=subprocess.DEVNULL,
                    stderr=output,
                    env={**os.environ, SECRET_VARIABLE: secret},
                    preexec_fn=end_with_actor,
                )
                code = process.wait()
                output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
                lines = output.read().decode(errors="replace").split("\n")
            self._end = code, next(filter(None, map(str.strip, reversed(lines))), "no output")
        except Exception as error:
            self._end = 1, f"the worker cannot be started: {error}"
        self._ended.set()
        time.sleep(_REPORTING_S)
        os._exit(0)


def _check_address(address: str) -> None:
    """Raise ConnectionError if nothing listens at `HOST:PORT`, which Ray would report after some minutes."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or "/" in host:  # as `auto`, or an address of Ray's client
        return
    from ray.util import get_node_ip_address

    # Ray takes the address of this machine in the network for a loopback address.
    hosts = [host, get_node_ip_address()] if host in ("localhost", "127.0.0.1", "::1") else [host]
    errors = []
    for each in hosts:
        try:
            socket.create_connection((each, int(port)), _CONNECT_S).close()
        except OSError as error:
            errors.append(error)
    if len(errors) == len(hosts):
        raise ConnectionError(f"nothing listens at {address}: {errors[0]}")


def _describe(error: Exception) -> str:
    """Return the first line of an error, and why the cluster has refused the driver if that is deep inside."""
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    if match := re.search(r"AuthenticationError: (?:RPC error: )?([^.\n]{1,200})", "".join(format_exception(error))):
        reason += f": {match[1]}; set RAY_AUTH_MODE=token and the token of the cluster"
    return reason


class _Actors:
    """The actors of one launcher."""

    def __init__(self) -> None:
        import ray

        address = os.environ.get("RAY_ADDRESS", "auto")
        _check_address(address)
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False
        )
        self._ray = ray
        self._actors: dict[str, tuple[Any, Any, Any, dict[str, float]]] = {}  # actor, placed, ended, resources
        self._group: Any = None
        self._next_bundle = 0

    def submit(
        self, job: str, arguments: list[str], secret: str, resources: dict[str, Any], count: int, is_detached: bool
    ) -> None:
        """Create an actor, which starts a worker as soon as it is placed."""
        needed = _amounts(resources)
        custom = {key: value for key, value in needed.items() if key not in _RAY_NAMES.values()}
        options = {
            "num_cpus": needed.get("CPU", 0),
            "num_gpus": needed.get("GPU", 0),
            "memory": needed.get("memory"),
            "resources": custom,
            "name": job,
            "lifetime": "detached" if is_detached else None,
            "max_concurrency": _ACTOR_THREADS,
            "max_restarts": 0,  # the server starts another one
            "scheduling_strategy": self._strategy(resources["strategy"], needed, count),
        }
        self._watch(job, self._ray.remote(_Actor).options(**options).remote(arguments, secret), needed)

    def _watch(self, job: str, actor: Any, needed: dict[str, float]) -> None:
        self._actors[job] = actor, actor.is_placed.remote(), actor.wait.remote(), needed

    def _find(self, job: str, needed: dict[str, float]) -> bool:
        """Return whether there is such an actor, perhaps of an earlier driver."""
        if job not in self._actors:
            with suppress(ValueError):
                self._watch(job, self._ray.get_actor(job), needed)
        return job in self._actors

    def _strategy(self, strategy: str, needed: dict[str, float], count: int) -> Any:
        if strategy in _STRATEGIES:
            return strategy
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._group is None:
            self._group = placement_group([needed] * count, strategy=strategy)
        bundle, self._next_bundle = self._next_bundle % count, self._next_bundle + 1
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def states(self, jobs: list[str], resources: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Return phase and text of the state of each actor; end those whose workers have ended, to free resources."""
        needed = _amounts(resources)
        states = {job: self._state(*self._actors[job]) for job in jobs if self._find(job, needed)}
        for job, (phase, _) in states.items():
            if phase == "ended":
                self.cancel(job)
        return states

    def _state(self, _actor: Any, placed: Any, ended: Any, needed: dict[str, float]) -> tuple[str, str]:
        if self._ray.wait([ended], timeout=0)[0]:
            try:
                code, line = self._ray.get(ended)
            except self._ray.exceptions.RayError as error:
                return "ended", str(error).strip().split("\n")[0][:300]
            return "ended", f"exit code {code}: {line[:300]}"
        if self._ray.wait([placed], timeout=0)[0]:
            return "running", "placed"
        return "waiting", f"not placed: {self._reason(needed)}"

    def _reason(self, needed: dict[str, float]) -> str:
        text = ", ".join(f"{name} {amount:g}" for name, amount in needed.items() if amount)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            return f"all nodes with {text} are in use"
        return f"none of {len(nodes)} nodes has {text}"

    def cancel(self, job: str) -> None:
        """End an actor, with its worker."""
        if self._find(job, {}):
            self._ray.kill(self._actors.pop(job)[0])


_RAY_NAMES = {"cpus": "CPU", "gpus": "GPU", "memory": "memory"}


def _amounts(resources: Mapping[str, Any]) -> dict[str, float]:
    """Return amounts of resources by Ray's names."""
    return {_RAY_NAMES.get(key, key): float(value) for key, value in resources.items() if key != "strategy"}


def main() -> None:
    """Serve requests, which are lines of the standard input, until it ends or the server is killed."""
    signal_on_parent_exit(signal.SIGKILL)
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there
    actors: _Actors | None = None
    for line in sys.stdin:
        method, values = json.loads(line)
        try:
            actors = actors or _Actors()
            call: Callable[..., Any] = getattr(actors, method)
            response = [call(**values), ""]
        except Exception as error:
            response = [None, _describe(error)]
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    main()
