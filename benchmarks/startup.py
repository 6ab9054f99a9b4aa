"""Time to import Dragoman and to start a server, and memory of the idle server.

usage: python -m benchmarks.startup [--quick]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.processes import RESULTS, ROOT, dragoman, environment, free_port, http_ready, run_process

_IMPORTS = {
    "import dragoman": "import dragoman",
    "dragoman.Server": "import dragoman; dragoman.Server",
    "scikit-learn and joblib": "import joblib, sklearn.linear_model",
}
_TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each, to check that it works")
    warm_ups, times, settle_s = (0, 1, 0.2) if parser.parse_args(arguments).quick else (1, 7, 2.0)
    results = {"machine": machine.machine(), "versions": machine.versions()}
    results["import_s"] = {name: import_seconds(code, warm_ups, times) for name, code in _IMPORTS.items()}
    results["servers"] = servers(warm_ups, times, settle_s)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "startup.json").write_text(json.dumps(results, indent=2))
    print(machine.describe() + "\n\n" + table(results))


def import_seconds(code: str, warm_ups: int, times: int) -> float:
    """Return the median of the seconds that the code takes in a new interpreter, once its bytecode is cached."""
    command, env = [sys.executable, "-c", _TIMED.format(code)], environment()
    runs = [
        subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True, text=True)
        for _ in range(warm_ups + times)
    ]
    return statistics.median(float(run.stdout) for run in runs[warm_ups:])


def servers(warm_ups: int, times: int, settle_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model_file = Path(folder) / "iris.joblib"
        train(model_file)
        models = {
            "scikit-learn": [str(model_file), "--allow-pickle"],
            "Python function": [str(ROOT / "benchmarks" / "models.py") + ":doubled"],
            "Python class, inline": [str(ROOT / "benchmarks" / "models.py") + ":Identity"],
        }
        log = Path(folder) / "log"
        return {name: measure_start(model, warm_ups, times, settle_s, log) for name, model in models.items()}


def train(target: Path) -> None:
    """Train a small classifier of the iris dataset of scikit-learn."""
    import joblib
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    joblib.dump(LogisticRegression(max_iter=1000).fit(*load_iris(return_X_y=True)), target)


def measure_start(model: Sequence[str], warm_ups: int, times: int, settle_s: float, log: Path) -> dict[str, Any]:
    """Return the time from the start of the process until /v2/health/ready is 200, and the memory after `settle_s`.

    Not measured are `warm_ups` starts before the others: the first one fills Python's cache of bytecode.
    """
    ready_s, memory = [], []
    for number in range(warm_ups + times):
        port = free_port()
        with run_process(dragoman(model[:1], port, free_port(), *model[1:]), log) as server:
            started_s = server.wait_until(lambda port=port: http_ready(port))  # type: ignore[misc]
            if number >= warm_ups:
                ready_s.append(started_s)
                time.sleep(settle_s)
                memory.append(server.memory_mib())
    return {
        "ready_s": statistics.median(ready_s),
        "ready_all_s": ready_s,
        **{key: statistics.median(m[key] for m in memory) for key in memory[0]},
    }


def table(results: dict[str, Any]) -> str:
    lines = ["| import | ms |", "|---|---:|"]
    lines += [f"| `{name}` | {durations_s * 1000:.1f} |" for name, durations_s in results["import_s"].items()]
    lines += ["", "| server with one model | ready after s | processes | idle PSS MiB | idle RSS MiB |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name, s in results["servers"].items():
        cells = [name, f"{s['ready_s']:.2f}", f"{s['processes']:.0f}", f"{s['pss_mib']:.0f}", f"{s['rss_mib']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
