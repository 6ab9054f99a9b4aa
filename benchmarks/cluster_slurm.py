"""UM-Bridge's load balancer and a Dragoman server with workers in jobs, on a SLURM cluster of this machine."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import umbridge

from benchmarks.processes import ROOT, dragoman, free_port, http_ready, run_process

BALANCER, OURS = "load balancer of UM-Bridge", "dragoman, workers in jobs"
POINT = [[1.0, -2.0, 0.5, 4.0]]
_BUILDS = (
    ("load-balancer", ["-Wno-unused-result", "-I../lib/", "LoadBalancer.cpp", "-pthread"]),
    ("is_port_free", ["-I../lib/", "is_port_free.cpp", "-pthread"]),
)
_SECRET = "the secret of the benchmark"


def compare_schedulers(folder: Path, umbridge_folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each; without SLURM, its test helpers or the sources of the balancer none, with a message."""
    helpers = ROOT / "tests"
    if not (helpers / "cluster" / "local_clusters.py").exists() or not (umbridge_folder / "hpc").exists():
        print(f"without SLURM: {umbridge_folder} is not a checkout of UM-Bridge/umbridge", file=sys.stderr)
        return []
    sys.path.insert(0, str(helpers))
    import pytest

    from features.cluster.local_clusters import local_slurm

    try:
        with local_slurm(folder / "slurm") as configuration:
            environment = {**os.environ, "SLURM_CONF": configuration}
            rows = [_measure(OURS, partial(_dragoman, folder, environment), 0.5 if quick else 3.0)]
            rows.append(
                _measure(BALANCER, partial(_balancer, folder, environment, umbridge_folder), 5 if quick else 15)
            )
            return rows
    except pytest.skip.Exception as reason:
        print(f"without SLURM: {reason}", file=sys.stderr)
        return []


def _measure(name: str, start: Callable[[], contextlib.AbstractContextManager[str]], seconds: float) -> dict[str, Any]:
    """Measure the time from the start of the server to its first answer, then calls of one and of four callers."""
    began_s = time.monotonic()
    with start() as url:
        model = umbridge.HTTPModel(url, "Double")
        _check(model)
        first_s = time.monotonic() - began_s
        return {
            "subject": name,
            "first_s": first_s,
            "rate_1": _rate(model, 1, seconds),
            "rate_4": _rate(model, 4, seconds),
        }


def _check(model: Any) -> None:
    found = model(POINT)
    if found != [[2.0, -4.0, 1.0, 8.0]]:
        raise AssertionError(f"a wrong answer: {found}")


def _rate(model: Any, callers: int, seconds: float) -> float:
    began_s = time.monotonic()

    def caller(_: int) -> int:
        calls = 0
        while time.monotonic() - began_s < seconds:
            _check(model)
            calls += 1
        return calls

    with ThreadPoolExecutor(callers) as executor:
        return sum(executor.map(caller, range(callers))) / (time.monotonic() - began_s)


@contextlib.contextmanager
def _dragoman(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    home, secret, port = folder / "simulators" / "Double", folder / "slurm-secret", free_port()
    home.mkdir(parents=True)
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    (home / "dragoman.toml").write_text(
        f'[model]\nuri = "{ROOT}/benchmarks/simulators.py:Double"\n'
        f'[model.placement]\nlauncher = "slurm"\nreplicas = 2\n'
    )
    flags = ["--worker-port", str(free_port()), "--worker-host", "127.0.0.1", "--worker-secret-file", str(secret)]
    server = dragoman([str(home.parent)], port, -1, *flags)
    with _with_environment(environment), run_process(server, folder / "slurm-server.log") as process:
        process.wait_until(partial(http_ready, port))
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _balancer(folder: Path, environment: dict[str, str], source: Path) -> Iterator[str]:
    hpc, port = folder / "hpc", free_port()
    (hpc / "slurm_scripts").mkdir(parents=True)
    _build(source / "hpc")
    for name, _ in _BUILDS:
        shutil.copy(source / "hpc" / name, hpc)
    # What its documentation asks the user to change: the partition and the command of the model.
    job = (source / "hpc" / "slurm_scripts" / "job.sh").read_text().replace("--partition=devel", "--partition=all")
    command = f'PYTHONPATH="{ROOT}:{ROOT}/src" {sys.executable} -m benchmarks.simulators $port &'
    (hpc / "slurm_scripts" / "job.sh").write_text(job.replace("./testmodel &", command))
    arguments = ["./load-balancer", "--scheduler=slurm", f"--port={port}"]
    with _with_environment(environment), run_process(arguments, folder / "balancer.log", cwd=hpc) as process:
        process.wait_until(partial(_lists_models, f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}"


def _build(hpc: Path) -> None:
    for name, arguments in _BUILDS:
        if not (hpc / name).exists():
            subprocess.run(["g++", "-O2", "-std=c++17", *arguments, "-o", name], cwd=hpc, check=True)


def _lists_models(url: str) -> bool:
    return "Double" in umbridge.supported_models(url)


@contextlib.contextmanager
def _with_environment(environment: dict[str, str]) -> Iterator[None]:
    """Let child processes inherit these variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
