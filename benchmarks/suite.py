"""The workloads of the suite, W1 to W12, with the servers and the results of each."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers, resources, subjects, tails, token_streams, workloads
from benchmarks.identity import Cores
from benchmarks.peers import CLASSIFIER, PEERS, PeerConfig
from benchmarks.processes import RESULTS, ROOT
from benchmarks.subjects import OURS, Subject
from benchmarks.turns import Plan, Row, rounds, summary
from benchmarks.workloads import Response, Workload

Run = Callable[[Plan, Sequence[str]], list[Row]]


@dataclass(frozen=True, slots=True)
class Bench:
    """One workload: its title, and the function that measures its rows for the given peers."""

    title: str
    rows: Run


def _identities(names: Sequence[str], echoes: Sequence[str], plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """Measure our server, echoes and peers with requests of the identity models."""
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        found = [stack.enter_context(subjects.our_server(cores.server, folder / "ours.log"))]
        found += [stack.enter_context(subjects.echo_server(e, cores.server, folder / f"{e}.log")) for e in echoes]
        models = ("Identity", "IdentityImage")
        found += _peers(stack, peer_names, models, folder, cores, any(n.startswith("rest-json") for n in names))
        checked = [w for w in workloads.identity() if w.name in names]
        return summary([row for w in checked for row in rounds(plan, w, found, cores, folder)])


def _peers(
    stack: ExitStack, peer_names: Sequence[str], models: Sequence[str], folder: Path, cores: Cores, json_too: bool
) -> Iterator[Subject]:
    for name in peer_names:
        if json_too or PEERS[name].form == "oip":
            yield stack.enter_context(peers.run_peer(name, PeerConfig(folder / name, models), cores.server))


def _classifiers(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W5: a scikit-learn pipeline, by default and without batching; the peer with batching and without."""
    cores = Cores.of_this_machine()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, found = Path(name), []
        subprocess.run([sys.executable, str(peers.HERE / "train.py"), str(folder / "c.joblib")], check=True)
        for label, size in (("dragoman", 0), ("dragoman, no batching", 1)):
            home = _write_classifier(folder / label, folder / "c.joblib", size)
            one = subjects.our_server(cores.server, folder / f"{label}.log", [str(home), "--allow-pickle"], label)
            found.append(stack.enter_context(one))
        for peer in (n for n in peer_names if n.startswith("mlserver")):
            for batching in (True, False):
                config = PeerConfig(folder / f"{peer}-{batching}", (CLASSIFIER,), batching)
                subject = stack.enter_context(peers.run_peer(peer, config, cores.server))
                found.append(_with_name(subject, peer if batching else f"{peer}, no batching"))
        return summary(list(rounds(plan, classifier(), found, cores, folder)))


def _write_classifier(folder: Path, model_file: Path, size: int) -> Path:
    (folder / CLASSIFIER).mkdir(parents=True)
    settings = f'[model]\nuri = "{model_file}"\nruntime = "sklearn"\nmax_batch_size = {size}\n'
    (folder / CLASSIFIER / "dragoman.toml").write_text(settings)
    return folder


def _with_name(subject: Subject, name: str) -> Subject:
    return Subject(name, subject.process, subject.ports, subject.form, subject.ready_s)


def classifier() -> Workload:
    """Return a request with a row of the training data that belongs to class 0 (malignant)."""
    from sklearn.datasets import load_breast_cancer

    row = load_breast_cancer(return_X_y=True)[0][:1]
    tensor = {"name": "input", "datatype": "FP64", "shape": [1, 30], "data": row.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    path = f"/v2/models/{CLASSIFIER}/infer"
    return Workload("sklearn", "http", path, {"content-type": "application/json"}, body, _is_class_0)


def _is_class_0(response: Response) -> bool:
    found: Any = json.loads(response.body)["outputs"][0]["data"]
    return found in ([0], [[0]])


def _simulators(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W6: the UM-Bridge benchmark."""
    results = _run_benchmark("umbridge", plan, *_flags(plan))
    return summary(results["rows"])


def _flags(plan: Plan) -> list[str]:
    connections = ",".join(map(str, plan.connections))
    return ["--connections", connections, "--rounds", str(plan.rounds), "--seconds", str(plan.seconds)]


def _codecs(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W8: the codec benchmark."""
    rows = _run_benchmark("codecs", plan)["rows"]
    found = []
    for key in dict.fromkeys((r["case"], r["side"], r["encoding"]) for r in rows):
        mine = [r for r in rows if (r["case"], r["side"], r["encoding"]) == key]
        row: Row = {"workload": key[0], "server": f"{key[1]}, {key[2]}"}
        row |= {k: round(statistics.median(r[k] for r in mine), 3) for k in ("encode_ms", "decode_ms")}
        found.append(row)
    return [row | _codec_ratios(row, found) for row in found]


def _codec_ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Return the ratios of the times of other servers to those of a row: both directions together."""
    others = [r for r in rows if r["workload"] == row["workload"] and not r["server"].startswith(OURS)]
    total = row["encode_ms"] + row["decode_ms"]
    ratios = {r["server"]: round((r["encode_ms"] + r["decode_ms"]) / total, 3) for r in others}
    return {"ratios": ratios, "cpu_ratios": {}} if row["server"].startswith(OURS) else {}


def _run_benchmark(module: str, plan: Plan, *flags: str) -> Any:
    """Run a benchmark that has its own command, and return its results."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *(["--quick"] if plan.quick else []), *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((RESULTS / f"{module}.json").read_text())


SUITE = {
    "w1": Bench("REST JSON, 16 numbers", partial(_identities, ["rest-json-small"], ["echo"])),
    "w2": Bench("REST JSON, 150,528 numbers", partial(_identities, ["rest-json-large"], ["echo"])),
    "w3": Bench(
        "REST binary, 64 bytes and 600 KB",
        partial(_identities, ["rest-binary-small", "rest-binary-large"], ["echo", "buffered echo"]),
    ),
    "w4": Bench(
        "gRPC, 16 numbers raw and typed, and 600 KB raw",
        partial(_identities, ["grpc-raw-small", "grpc-typed-small", "grpc-raw-large"], ["echo grpc.aio"]),
    ),
    "w5": Bench("scikit-learn, 30 features, REST JSON", _classifiers),
    "w6": Bench("UM-Bridge", _simulators),
    "w7": Bench("time until ready, one small model", resources.startup),
    "w8": Bench("content types, in process", _codecs),
    "w9": Bench("200 and 1,000 small models", resources.many_models),
    "w10": Bench("10,000 idle connections beside light load", resources.idle),
    "w11": Bench("random arrivals, three sizes of JSON", tails.measure),
    "w12": Bench("token streams, 20 tokens per second each", token_streams.measure),
}
