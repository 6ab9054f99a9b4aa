"""Servers to measure: ours, echo servers and peers, each a running process with the request format it accepts."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.checked_request import CheckedRequest, check_request
from benchmarks.processes import ROOT, Process, dragoman, free_port, http_ready, listens, run_process
from benchmarks.workloads import Response, Wire, Workload
from dragoman.formats.grpc_messages import ModelInferRequest

Form = Literal["oip", "plain", "echo"]
OURS = "dragoman"
MODELS = tuple(f"{ROOT / 'benchmarks' / 'models.py'}:{name}" for name in ("Identity", "IdentityImage"))
ECHOES = {"echo": "http", "buffered echo": "http-buffered", "echo grpc.aio": "grpc"}


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A server that is ready. `form` is its request format, `ready_s` the duration of its start."""

    name: str
    process: Process
    ports: Mapping[Wire, int]
    form: Form
    ready_s: float

    def check(self, workload: Workload) -> CheckedRequest | None:
        """Return the request in the format of this server, with its correct response; None if a peer cannot answer it.

        Raises ValueError if the response of an echo or of our server is wrong.
        """
        checked = with_id(workload) if self.form != "plain" else plain_json(workload)
        if checked is None or checked.wire not in self.ports:
            return None
        try:
            return check_request(checked, self.ports[checked.wire], echo=self.form == "echo")
        except (ValueError, KeyError):
            if self.form == "echo" or self.name.startswith(OURS):
                raise
            return None


@contextmanager
def our_server(core: int | None, log: Path, models: Sequence[str] = MODELS, name: str = OURS) -> Iterator[Subject]:
    """Our server with its default settings."""
    http, grpc = free_port(), free_port()
    with run_process(dragoman(models, http, grpc), log, core) as process:
        ready_s = process.wait_until(lambda: http_ready(http))
        yield Subject(name, process, {"http": http, "grpc": grpc}, "oip", ready_s)


@contextmanager
def echo_server(name: str, core: int | None, log: Path) -> Iterator[Subject]:
    """A server that returns the bytes of the request."""
    kind, port = ECHOES[name], free_port()
    with run_process([sys.executable, "-m", "benchmarks.echo", kind, str(port)], log, core) as process:
        ready_s = process.wait_until(lambda: listens(port))
        wire: Wire = "grpc" if kind == "grpc" else "http"
        yield Subject(name, process, {wire: port}, "echo", ready_s)


def with_id(workload: Workload) -> Workload:
    """Return the request with an id. Some servers would generate one, and no two responses would be equal."""
    if workload.wire == "grpc":
        message = ModelInferRequest.FromString(workload.body)
        message.id = "1"
        return replace(workload, body=message.SerializeToString())
    head = json.loads(workload.body[: _head_size(workload)])
    head = json.dumps({"id": "1", **head}, separators=(",", ":")).encode()
    headers = {name: str(len(head)) if "header-content" in name else text for name, text in workload.headers.items()}
    return replace(workload, headers=headers, body=head + workload.body[_head_size(workload) :])


def _head_size(workload: Workload) -> int:
    return int(workload.headers.get("inference-header-content-length", len(workload.body)))


def plain_json(workload: Workload) -> Workload | None:
    """Return a JSON request with the numbers only, for servers without a protocol; None for other workloads."""
    if workload.wire != "http" or _head_size(workload) != len(workload.body):
        return None
    (tensor,) = json.loads(workload.body)["inputs"]
    array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])

    def is_correct(response: Response) -> bool:
        found: Any = json.loads(response.body)["output"]
        return np.array_equal(np.array(found, np.float32), array)

    body = json.dumps({"input": array.tolist()}, separators=(",", ":")).encode()
    return replace(workload, path="/predict", body=body, is_correct=is_correct)
