"""What servers take at rest: time to be ready, memory with one model and with many, and with idle connections."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import load, peers, subjects, workloads
from benchmarks.checked_request import CheckedRequest
from benchmarks.identity import Cores
from benchmarks.peers import PEERS, Served
from benchmarks.processes import ROOT, pin
from benchmarks.subjects import OURS, Subject
from benchmarks.turns import Plan, Row

FUNCTION = str(ROOT / "benchmarks" / "models.py") + ":doubled"
_LIGHT = 4  # connections of the light load


def startup(plan: Plan, wanted: Sequence[str]) -> list[Row]:
    """W7: from the start of the process until it is ready, and memory when it has settled."""
    kinds = {f"{OURS}, inline class": subjects.MODELS[:1], f"{OURS}, function in a process": (FUNCTION,)}
    rows = []
    for name in [*kinds, *wanted]:
        found = [_rested(name, kinds.get(name), plan) for _ in range(plan.rounds)]
        row: Row = {"workload": "startup", "server": name}
        rows.append(row | {key: _middle(f[key] for f in found) for key in found[0]})
        print(rows[-1], file=sys.stderr)
    return rows


def _rested(name: str, models: Sequence[str] | None, plan: Plan) -> Row:
    with tempfile.TemporaryDirectory() as folder, _one(name, models, Path(folder)) as subject:
        time.sleep(0.1 if plan.quick else 2.0)
        return {"ready_s": subject.ready_s, **subject.process.memory_mib()}


def _one(name: str, models: Sequence[str] | None, folder: Path) -> AbstractContextManager[Subject]:
    core = Cores.of_this_machine().server
    if models is not None:
        return subjects.ours(core, folder / "log", models, name)
    return peers.running(name, Served(folder / name, ("Identity",)), core)


def many(plan: Plan, wanted: Sequence[str]) -> list[Row]:
    """W9: many models, each checked once when all are ready."""
    rows = []
    for count in (20,) if plan.quick else (200, 1000):
        names = [f"model{number}" for number in range(count)]
        for name in [OURS, *(n for n in wanted if PEERS[n].form == "oip")]:
            rows.append(row := {"workload": "models", "models": count, "server": name} | _loaded(name, names))
            print(row, file=sys.stderr)
    return rows


def _loaded(name: str, names: Sequence[str]) -> Row:
    core = Cores.of_this_machine().server
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder = Path(home)
        if name == OURS:
            one = subjects.ours(core, folder / "log", [str(_folder_of(folder / "models", names))])
        else:
            one = peers.running(name, Served(folder / name, names), core)
        try:
            subject = stack.enter_context(one)
        except RuntimeError:
            return {"failed": "not ready within two minutes"}
        right = sum(subject.checked(workloads.small_json("models", model)) is not None for model in names)
        if right != len(names):
            return {"failed": f"{len(names) - right} of {len(names)} models gave no right answer"}
        return {"ready_s": round(subject.ready_s, 3), **subject.process.memory_mib()}


def _folder_of(home: Path, names: Sequence[str]) -> Path:
    for name in names:
        (home / name).mkdir(parents=True)
        settings = f'[model]\nruntime = "python"\nuri = "{subjects.MODELS[0]}"\n'
        (home / name / "dragoman.toml").write_text(settings)
    return home


def idle(plan: Plan, wanted: Sequence[str]) -> list[Row]:
    """W10: light load without idle connections, and beside them. Raises FileNotFoundError without a C compiler."""
    count = 100 if plan.quick else 10_000
    return [_idle(name, count, plan) for name in [OURS, "echo", *wanted] if name not in PEERS or _http(name)]


def _http(name: str) -> bool:
    return PEERS[name].form == "oip"


def _idle(name: str, count: int, plan: Plan) -> Row:
    cores = Cores.of_this_machine()
    (workload,) = (w for w in workloads.identity() if w.name == "rest-json-small")
    found = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        for _ in range(plan.rounds):  # afresh each time, for what it took for the last ones it may keep
            with _server(name, folder) as subject:
                checked = subject.checked(workload)
                assert checked is not None
                found.append(_beside(subject, checked, count, plan.seconds, cores.load, folder))
    row: Row = {"workload": "idle", "server": name, "idle": count}
    row |= {key: _middle(f[key] for f in found) for key in found[0]}
    print(row, file=sys.stderr)
    return row


@contextmanager
def _server(name: str, folder: Path) -> Iterator[Subject]:
    core = Cores.of_this_machine().server
    with tempfile.TemporaryDirectory(dir=folder) as home:
        log = Path(home) / "log"
        if name == "echo":
            with subjects.echo(name, core, log) as subject:
                yield subject
        else:
            with _one(name, subjects.MODELS if name == OURS else None, Path(home)) as subject:
                yield subject


def _beside(
    subject: Subject, checked: CheckedRequest, count: int, seconds: float, core: int | None, folder: Path
) -> Row:
    (folder / "question").write_bytes(load.question(checked.workload, checked.port))
    (folder / "answer").write_bytes(checked.body)
    command = [str(load.built("http_load")), str(checked.port), str(_LIGHT), str(seconds), str(folder)]
    subprocess.run(command, preexec_fn=pin(core), capture_output=True, check=True, timeout=120)  # warms up
    alone = subprocess.run(command, preexec_fn=pin(core), capture_output=True, text=True, check=True, timeout=120)
    before = subject.process.memory_mib()["pss_mib"]
    with subprocess.Popen([*command, str(count)], preexec_fn=pin(core), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()  # they are open
        held = subject.process.memory_mib()["pss_mib"]
        beside = _told(running.stdout.read())
    without = _told(alone.stdout)
    return {
        "p50_ms": without["p50_ms"],
        "p50_beside_ms": beside["p50_ms"],
        "p99_beside_ms": beside["p99_ms"],
        "ratio": beside["p50_ms"] / without["p50_ms"],
        "kib_each": (held - before) * 1024 / count,
    }


def _told(text: str) -> Any:
    found = json.loads(text)
    if found["faults"] or not found["answers"]:
        raise RuntimeError(f"{found['faults']} of {found['answers']} answers were not right")
    return found


def _middle(numbers: Any) -> float:
    return float(f"{statistics.median(numbers):.4g}")
