"""Threads that use one server at once: every response is the one of its request, and nothing is lost in a count.

The interpreter changes threads every microsecond here. On a free-threaded Python the lock is off (`PYTHON_GIL=0`): see
docs/python-versions.md.
"""

import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import dragoman
from e2e.server_process import running_server, wait_until

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
CLIENTS, CALLS = 8, 8

_MODELS = """
import sys

import numpy as np

import dragoman

sys.setswitchinterval(1e-6)


def squares(x: np.ndarray) -> np.ndarray:
    # In Python, not in NumPy, which would keep the lock.
    return np.array([value * value for value in x.tolist()])


@dragoman.model(batched=True)
def merged(x: np.ndarray) -> np.ndarray:
    return np.array([value + 1 for value in x.tolist()])


def lock() -> np.ndarray:
    return np.array([getattr(sys, "_is_gil_enabled", lambda: True)()])
"""


def test_responses_and_counts_of_threads(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(_MODELS)
    environment = {"PYTHON_GIL": "0"} if FREE_THREADED else {}
    models = [f"models.py:{name}" for name in ("squares", "merged", "lock")]
    with running_server(
        *models, "--placement", "thread", "--replicas", "4", folder=tmp_path, environment=environment
    ) as server:
        with dragoman.Client(f"http://{server.url}") as shared:
            (enabled,) = shared.infer("lock", {}).values()
            assert enabled.tolist() == [not FREE_THREADED]

            def call(client: int) -> list[tuple[Any, Any]]:
                """Return the responses of one thread with the numbers that it expects."""
                found = []
                for number in range(CALLS):
                    x = np.arange(client * 1000 + number, client * 1000 + number + 40.0)
                    for model, expected in (("squares", x * x), ("merged", x + 1)):
                        (values,) = shared.infer(model, {"x": x}).values()
                        found.append((values.tolist(), expected.tolist()))
                return found

            with ThreadPoolExecutor(CLIENTS) as threads:
                for responses in threads.map(call, range(CLIENTS)):
                    for values, expected in responses:
                        assert values == expected

        def total(family: str, model: str) -> float:
            lines = server.request("GET", "/metrics")[1].decode().splitlines()
            begin, labels = f"dragoman_{family}_total{{", f'model="{model}"'
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin) and labels in line)

        def is_counted(model: str) -> bool:
            return total("calls", model) >= CLIENTS * CALLS

        # A response may be sent before it is counted.
        for model in ("squares", "merged"):
            wait_until(partial(is_counted, model), f"the calls of {model}")
            assert total("calls", model) == CLIENTS * CALLS
        wait_until(lambda: total("rows", "merged") >= CLIENTS * CALLS * 40, "the rows")
        assert total("rows", "merged") == CLIENTS * CALLS * 40
