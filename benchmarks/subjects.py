"""What is measured: our server, bare echoes and peers, each a running process with the form of question it takes."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.checked_request import CheckedRequest, check_request
from benchmarks.processes import ROOT, Process, dragoman, free_port, http_ready, listens, started
from benchmarks.workloads import Answer, Wire, Workload
from dragoman.formats.oip_messages import ModelInferRequest

Form = Literal["oip", "plain", "echo"]
OURS = "dragoman"
MODELS = tuple(f"{ROOT / 'benchmarks' / 'models.py'}:{name}" for name in ("Identity", "IdentityImage"))
ECHOES = {"echo": "http", "buffered echo": "http-buffered", "echo grpc.aio": "grpc"}


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A server that is ready: `form` is that of the questions it takes, `ready_s` how long its start took."""

    name: str
    process: Process
    ports: Mapping[Wire, int]
    form: Form
    ready_s: float

    def checked(self, workload: Workload) -> CheckedRequest | None:
        """The question as this server takes it, with its right answer; None where a peer cannot answer it.

        Raises ValueError where an echo or our own server answers wrongly.
        """
        checked = with_id(workload) if self.form != "plain" else plain(workload)
        if checked is None or checked.wire not in self.ports:
            return None
        try:
            return check_request(checked, self.ports[checked.wire], echo=self.form == "echo")
        except (ValueError, KeyError):
            if self.form == "echo" or self.name.startswith(OURS):
                raise
            return None


@contextmanager
def ours(core: int | None, log: Path, models: Sequence[str] = MODELS, name: str = OURS) -> Iterator[Subject]:
    """Our server with its default settings."""
    http, grpc = free_port(), free_port()
    with started(dragoman(models, http, grpc), log, core) as process:
        ready_s = process.until(lambda: http_ready(http))
        yield Subject(name, process, {"http": http, "grpc": grpc}, "oip", ready_s)


@contextmanager
def echo(name: str, core: int | None, log: Path) -> Iterator[Subject]:
    """Bytes in, bytes out."""
    kind, port = ECHOES[name], free_port()
    with started([sys.executable, "-m", "benchmarks.ceilings", kind, str(port)], log, core) as process:
        ready_s = process.until(lambda: listens(port))
        wire: Wire = "grpc" if kind == "grpc" else "http"
        yield Subject(name, process, {wire: port}, "echo", ready_s)


def with_id(workload: Workload) -> Workload:
    """The question with an id, for some servers would else make up one for each answer, and no two be the same."""
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


def plain(workload: Workload) -> Workload | None:
    """The numbers alone, as servers without a protocol of their own take them; only what is JSON."""
    if workload.wire != "http" or _head_size(workload) != len(workload.body):
        return None
    (tensor,) = json.loads(workload.body)["inputs"]
    array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])

    def right(answer: Answer) -> bool:
        found: Any = json.loads(answer.body)["output"]
        return np.array_equal(np.array(found, np.float32), array)

    body = json.dumps({"input": array.tolist()}, separators=(",", ":")).encode()
    return replace(workload, path="/predict", body=body, right=right)
