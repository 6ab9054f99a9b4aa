"""Time until a server is ready, and its memory with one model, with many models, and with idle connections."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import load, peers, subjects, workloads
from benchmarks.checked_request import CheckedRequest
from benchmarks.identity import Cores
from benchmarks.peers import PEERS, PeerConfig
from benchmarks.processes import ROOT, pin
from benchmarks.startup import train
from benchmarks.subjects import OURS, Subject
from benchmarks.turns import Plan, Row

FUNCTION = str(ROOT / "benchmarks" / "models.py") + ":doubled"
_ACTIVE_CONNECTIONS = 4  # connections of the light load


def startup(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W7: time and CPU time of all processes from the start until it is ready, and memory two seconds later."""
    with tempfile.TemporaryDirectory() as folder:
        model_file = Path(folder) / "iris.joblib"
        train(model_file)
        kinds: dict[str, Sequence[str]] = {
            f"{OURS}, inline class": subjects.MODELS[:1],
            f"{OURS}, function in a process": (FUNCTION,),
            f"{OURS}, scikit-learn": (str(model_file), "--allow-pickle"),
        }
        return _startup(kinds, plan, peer_names)


def _startup(kinds: Mapping[str, Sequence[str]], plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    rows = []
    for name in [*kinds, *peer_names]:
        with tempfile.TemporaryDirectory() as folder, _start(name, kinds.get(name), Path(folder)):
            pass  # fills Python's cache of bytecode
        found = [_measure_idle(name, kinds.get(name), plan) for _ in range(plan.rounds)]
        row: Row = {"workload": "startup", "server": name}
        row |= {key: _median(f[key] for f in found) for key in found[0]}
        rows.append(row | {"ready_s_spread": [end(f["ready_s"] for f in found) for end in (min, max)]})
        print(rows[-1], file=sys.stderr)
    return rows


def _measure_idle(name: str, models: Sequence[str] | None, plan: Plan) -> Row:
    with tempfile.TemporaryDirectory() as folder, _start(name, models, Path(folder)) as subject:
        cpu_s = subject.process.cpu_s()
        time.sleep(0.1 if plan.quick else 2.0)
        return {"ready_s": subject.ready_s, "ready_cpu_s": cpu_s, **subject.process.memory_mib()}


def _start(name: str, models: Sequence[str] | None, folder: Path) -> AbstractContextManager[Subject]:
    core = Cores.of_this_machine().server
    if models is not None:
        return subjects.our_server(core, folder / "log", models, name)
    return peers.run_peer(name, PeerConfig(folder / name, ("Identity",)), core)


def many_models(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W9: many models, one checked request to each when all are ready."""
    rows = []
    for count in (20,) if plan.quick else (200, 1000):
        names = [f"model{number}" for number in range(count)]
        for name in [OURS, *(n for n in peer_names if PEERS[n].form == "oip")]:
            rows.append(row := {"workload": "models", "models": count, "server": name} | _measure_many(name, names))
            print(row, file=sys.stderr)
    return rows


def _measure_many(name: str, names: Sequence[str]) -> Row:
    core = Cores.of_this_machine().server
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder = Path(home)
        if name == OURS:
            one = subjects.our_server(core, folder / "log", [str(_write_models(folder / "models", names))])
        else:
            one = peers.run_peer(name, PeerConfig(folder / name, names), core)
        try:
            subject = stack.enter_context(one)
        except RuntimeError:
            return {"failed": "not ready within two minutes"}
        ready_cpu_s = subject.process.cpu_s()
        correct, first_ms = 0, []
        for model in names:
            workload, began_s = workloads.small_json("models", model), time.perf_counter()
            correct += subject.check(workload) is not None
            first_ms.append((time.perf_counter() - began_s) * 1000)
        if correct != len(names):
            return {"failed": f"{len(names) - correct} of {len(names)} models gave a wrong response"}
        row: Row = {"ready_s": round(subject.ready_s, 3), "ready_cpu_s": ready_cpu_s, "first_ms": _median(first_ms)}
        return row | subject.process.memory_mib()


def _write_models(home: Path, names: Sequence[str]) -> Path:
    for name in names:
        (home / name).mkdir(parents=True)
        settings = f'[model]\nruntime = "python"\nuri = "{subjects.MODELS[0]}"\n'
        (home / name / "dragoman.toml").write_text(settings)
    return home


def idle(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W10: light load without and with idle connections. Raises FileNotFoundError without a C compiler."""
    count = 100 if plan.quick else 10_000
    return [
        _idle(name, count, plan)
        for name in [OURS, "echo", *peer_names]
        if name not in PEERS or _is_open_inference(name)
    ]


def _is_open_inference(name: str) -> bool:
    return PEERS[name].form == "oip"


def _idle(name: str, count: int, plan: Plan) -> Row:
    cores = Cores.of_this_machine()
    (workload,) = (w for w in workloads.identity() if w.name == "rest-json-small")
    found = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        for _ in range(plan.rounds):  # a new server each time, because freed memory may stay allocated
            with _server(name, folder) as subject:
                checked = subject.check(workload)
                assert checked is not None
                found.append(_measure_with_idle(subject, checked, count, plan.seconds, cores.load, folder))
    row: Row = {"workload": "idle", "server": name, "idle": count}
    row |= {key: _median(f[key] for f in found) for key in found[0]}
    row["p50_beside_ms_spread"] = [end(f["p50_beside_ms"] for f in found) for end in (min, max)]
    print(row, file=sys.stderr)
    return row


@contextmanager
def _server(name: str, folder: Path) -> Iterator[Subject]:
    core = Cores.of_this_machine().server
    with tempfile.TemporaryDirectory(dir=folder) as home:
        log = Path(home) / "log"
        if name == "echo":
            with subjects.echo_server(name, core, log) as subject:
                yield subject
        else:
            with _start(name, subjects.MODELS if name == OURS else None, Path(home)) as subject:
                yield subject


def _measure_with_idle(
    subject: Subject, checked: CheckedRequest, count: int, seconds: float, core: int | None, folder: Path
) -> Row:
    (folder / "request").write_bytes(checked.workload.http_request())
    (folder / "response").write_bytes(checked.body)
    command = [
        str(load.build_generator("http_load")),
        str(checked.port),
        str(_ACTIVE_CONNECTIONS),
        str(seconds),
        str(folder),
    ]
    subprocess.run(command, preexec_fn=pin(core), capture_output=True, check=True, timeout=120)  # warm-up
    alone = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
    before = subject.process.memory_mib()["pss_mib"]
    with subprocess.Popen([*command, str(count)], preexec_fn=pin(core), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()  # the idle connections are open
        memory_mib = subject.process.memory_mib()["pss_mib"]
        with_idle = load.parse_result(running.stdout.read(), subject.name)
    without = load.parse_result(alone.stdout, subject.name)
    return {
        "p50_ms": without["p50_ms"],
        "p50_beside_ms": with_idle["p50_ms"],
        "p99_beside_ms": with_idle["p99_ms"],
        "ratio": with_idle["p50_ms"] / without["p50_ms"],
        "kib_each": (memory_mib - before) * 1024 / count,
    }


def _median(numbers: Any) -> float:
    return float(f"{statistics.median(numbers):.4g}")
