"""Check and measure Dragoman on a machine with a GPU: texts, speed, CUDA graphs, models of tensors, shared memory.

usage: python -m benchmarks.gpu [--into FILE] [--only PARTS] [--rehearse]

It needs Python 3.11 or newer, PyTorch and transformers; other packages are installed into a temporary folder from
benchmarks/gpu/wheels, which ./scripts/gpu-wheels fills. The result is one JSON file. Each part runs in its own process
with a deadline, and one that fails does not stop the others. --rehearse runs all parts on the CPU with tiny models.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import prepare
from benchmarks.processes import RESULTS, ROOT

LIMIT_S = 470.0  # of all parts
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: the device, the sizes of models, numbers of clients, tokens of each, rounds.

    large: size of the model that is measured with one client.
    """

    device: str
    size: str
    large: str
    clients: tuple[int, ...]
    new: int
    rounds: int
    copy_bytes: int
    architectures: int
    new_texts: int


GPU = Plan("cuda", "1B", "8B", (1, 8, 32, 128), 128, 2, 1 << 32, 6, 24)
REHEARSAL = Plan("cpu", "tiny", "small", (1, 4), 8, 1, 1 << 22, 2, 8)
Part = Callable[[Plan, Path], dict[str, Any]]


def _device(plan: Plan, folder: Path) -> dict[str, Any]:
    from benchmarks.gpu import device

    return {**device.describe(plan.device), "limits": device.limits(plan.device, plan.copy_bytes)}


def _texts(dtype: str) -> Part:
    def run(plan: Plan, folder: Path) -> dict[str, Any]:
        from benchmarks.gpu import models, texts

        names = tuple(models.ARCHITECTURES)
        return texts.check(folder / dtype, dtype, plan.device, plan.new_texts, names[: plan.architectures])

    return run


def _llama(plan: Plan, folder: Path, size: str, *, graphs: bool = True) -> Path:
    """Return the folder of a model whose speed is measured, made at the first use."""
    from benchmarks.gpu import models

    path = folder / f"llama-{size}"
    if not (path / "tokenizer.json").exists():
        models.save_llama(path, size, plan.device)
    parameters = {"device": plan.device, "dtype": "bfloat16", "max_batch": max(plan.clients), "max_context": 512}
    models.write_parameters(path, **parameters, cuda_graphs=graphs, packed=False, threads=1)
    return path


def _server(*, graphs: bool = True, large: bool = False) -> Part:
    def run(plan: Plan, folder: Path) -> dict[str, Any]:
        from benchmarks.gpu import speed

        path = _llama(plan, folder, plan.large if large else plan.size, graphs=graphs)
        log, clients = folder / f"server-{path.name}-{graphs}.log", plan.clients[:1] if large else plan.clients
        try:
            return speed.measure_server(path, log, clients, plan.new, plan.rounds, 60.0)
        finally:
            print(log.read_text(errors="replace")[-3000:] if log.exists() else "the server has no log")

    return run


def _steps(*, graphs: bool = True, large: bool = False) -> Part:
    def run(plan: Plan, folder: Path) -> dict[str, Any]:
        from benchmarks.gpu import steps

        path, clients = _llama(plan, folder, plan.large if large else plan.size), plan.clients[: 1 if large else None]
        return steps.measure(path, plan.device, clients, graphs=graphs, length=128)

    return run


def _transformers(plan: Plan, folder: Path) -> dict[str, Any]:
    from benchmarks.gpu import speed

    return speed.measure_transformers(_llama(plan, folder, plan.size), plan.device, plan.clients, plan.new, 40.0)


def _tensors(name: str) -> Part:
    def run(plan: Plan, folder: Path) -> dict[str, Any]:
        from benchmarks.gpu import models_of_tensors

        found: dict[str, Any] = getattr(models_of_tensors, name)(folder / name, plan.device)
        return found

    return run


# With the seconds that each may take.
PARTS: Mapping[str, tuple[Part, float]] = {
    "device": (_device, 60.0),
    "texts-float32": (_texts("float32"), 90.0),
    "texts-bfloat16": (_texts("bfloat16"), 90.0),
    "steps": (_steps(), 90.0),
    "server": (_server(), 110.0),
    "steps-without-graphs": (_steps(graphs=False), 60.0),
    "torch": (_tensors("torch_model"), 40.0),
    "shared-memory": (_tensors("shared_memory"), 40.0),
    "onnx": (_tensors("onnx"), 40.0),
    "steps-large": (_steps(large=True), 100.0),
    "server-large": (_server(large=True), 100.0),
    "transformers": (_transformers, 80.0),
    "server-without-graphs": (_server(graphs=False), 100.0),
}
# A rehearsal tells nothing about time, and may run beside other work.
_REHEARSAL_FACTOR = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    plan = REHEARSAL if options.rehearse else GPU
    if options.part:
        found = PARTS[options.part][0](plan, options.folder)
        options.into.write_text(json.dumps(found))
        return 0
    names = tuple(options.only.split(",")) if options.only else tuple(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"--only: expected some of {', '.join(PARTS)}, got '{unknown[0]}'")
    result = run_parts(names, options.into, rehearse=options.rehearse, limit_s=options.limit)
    print(table(result))
    return 1 if any("failed" in part for part in result["parts"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=RESULTS / "gpu.json", metavar="FILE", help="the result")
    parser.add_argument("--only", metavar="PARTS", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def run_parts(names: Sequence[str], into: Path, *, rehearse: bool, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run parts one after the other and return the result, which is written after each of them."""
    began_s, factor = time.monotonic(), _REHEARSAL_FACTOR if rehearse else 1.0
    result: dict[str, Any] = {"rehearsal": rehearse, "parts": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment, missing = prepare(folder / "site")
        result["missing_packages"] = missing
        for name in names:
            left_s = limit_s * factor - (time.monotonic() - began_s)
            command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--folder", str(folder)]
            command += ["--rehearse"] if rehearse else []
            if left_s < 10:
                result["parts"][name] = {"failed": "not run: no time was left"}
            else:
                result["parts"][name] = _run(command, folder / name, environment, min(PARTS[name][1] * factor, left_s))
            into.parent.mkdir(parents=True, exist_ok=True)
            result["seconds"] = round(time.monotonic() - began_s, 1)
            into.write_text(json.dumps(result, indent=1) + "\n")
            part = result["parts"][name]
            print(
                f"{name}: {part.get('took_s', 0)} s {part.get('failed', part.get('not_available', 'ok'))}", flush=True
            )
    return result


def _run(command: Sequence[str], target: Path, environment: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run one part in its own process group; return its result, or why there is none, with its last lines."""
    began_s = time.monotonic()
    output = target.with_suffix(".output")
    with output.open("wb") as file:
        child = subprocess.Popen(
            [*command, "--into", str(target.with_suffix(".json"))],
            stdout=file,
            stderr=file,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(child)  # and its servers
    found: dict[str, Any] = {}
    if code == 0:
        found = json.loads(target.with_suffix(".json").read_text())
    else:
        found["failed"] = f"it took more than {limit_s:.0f} s" if code is None else f"it ended with the status {code}"
    found["took_s"] = round(time.monotonic() - began_s, 1)
    if "failed" in found:
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        found["last_lines"] = [line[:300] for line in lines[-_LAST_LINES:]]
    return found


def _kill(child: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def table(result: Mapping[str, Any]) -> str:
    """Return the results as tables in Markdown."""
    parts = result["parts"]
    lines = ["| part | seconds | result |", "|---|---:|---|"]
    for name, part in parts.items():
        outcome = part.get("failed") or part.get("not_available") or "ok"
        lines.append(f"| {name} | {part.get('took_s', 0)} | {outcome} |")
    lines += _texts_table(parts) + _speed_table(parts) + _steps_table(parts)
    return "\n".join(lines)


def _texts_table(parts: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        "| texts | dtype | equal | rounding | wrong | forward | CUDA graphs |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        for name, row in parts.get(f"texts-{dtype}", {}).get("texts", {}).items():
            cells = [row.get(key, "") for key in ("equal", "rounding", "wrong")]
            cells += [row.get("error") or row.get("forward", ""), row.get("cuda_graphs", "")]
            lines.append(f"| {name} | {dtype} | " + " | ".join(map(str, cells)) + " |")
    return lines


def _speed_table(parts: Mapping[str, Any]) -> list[str]:
    lines = ["", "| | clients | tokens/s | first token ms | between tokens ms | of the limit |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name in ("server", "server-without-graphs", "transformers", "server-large"):
        for row in parts.get(name, {}).get("rows", ()):
            share = _share(limit_step_s(parts, large=name.endswith("large")), row, row["gap_ms"])
            numbers = f"{row['tokens_per_s']:.0f} | {row['first_ms']:.1f} | {row['gap_ms']:.2f}"
            lines.append(f"| {name} | {row['clients']} | {numbers} | {share} |")
    return lines


def _share(limit_s: float, row: Mapping[str, Any], step_ms: float) -> str:
    """Return the share of the limit for one stream: with more, keys and values are read too."""
    return f"{1e3 * limit_s / step_ms:.2f}" if limit_s and row.get("clients", row.get("sequences")) == 1 else ""


def limit_step_s(parts: Mapping[str, Any], *, large: bool = False) -> float:
    """Return the time in which the device reads the weights once; 0 if it is not known."""
    size = parts.get("steps-large" if large else "steps", {}).get("weight_bytes", 0)
    speed = parts.get("device", {}).get("limits", {}).get("copy_gb_per_s", 0)
    return size / speed / 1e9 if size and speed else 0.0


def _steps_table(parts: Mapping[str, Any]) -> list[str]:
    lines = ["", "| | sequences | step ms | with the choice of tokens ms | reading the weights ms | of the limit |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name in ("steps", "steps-without-graphs", "steps-large"):
        limit_s = limit_step_s(parts, large=name.endswith("large"))
        for row in parts.get(name, {}).get("rows", ()):
            share = _share(limit_s, row, row["step_ms"])
            numbers = f"{row['step_ms']:.3f} | {row['with_choice_ms']:.3f} | {1e3 * limit_s:.3f}"
            lines.append(f"| {name} | {row['sequences']} | {numbers} | {share} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
