"""Compare the answers of Dragoman and MLServer 1.7.1 to the same requests, over REST and gRPC.

usage: python -m benchmarks.mlserver_parity [--only TEXT] [--verbose]

Installs MLServer and its runtimes into an environment of their own below benchmarks/results/venvs, trains small models,
starts both servers on one folder, and prints for each request "identical", or "differs" with the reason. Exit status 1
if answers differ without a known reason. Compared are the status, outputs with names, datatypes, shapes, data and
parameters, and the id of the request; not compared are the order of keys, nulls, ids that a server generates, and
texts of errors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import triton_to_np_dtype

from benchmarks.mlserver_parity.models import write_models
from benchmarks.mlserver_parity.requests import Case, cases
from benchmarks.processes import RESULTS, dragoman, free_port, http_ready, run_process

RELEASE = "1.7.1"
RUNTIMES = ("sklearn", "xgboost", "lightgbm", "catboost", "mlflow")
# Version bounds that the release needs but does not declare.
PACKAGES = (f"mlserver=={RELEASE}", *(f"mlserver-{name}=={RELEASE}" for name in RUNTIMES), "uvloop<0.22", "pandas<3")
_CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_STATUS = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the requests whose title contains this text")
    parser.add_argument("--verbose", action="store_true", help="print both answers where they differ")
    parser.add_argument("--python", type=Path, help="interpreter of an environment that has MLServer")
    options = parser.parse_args()
    python = options.python or _install()
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder, logs = Path(name) / "models", Path(name)
        write_models(folder)
        theirs, ours = Server.on_free_ports(), Server.on_free_ports()
        settings = {
            "host": "127.0.0.1",
            "http_port": theirs.http,
            "grpc_port": theirs.grpc,
            "metrics_port": free_port(),
        }
        (folder / "settings.json").write_text(json.dumps({**settings, "parallel_workers": 0, "debug": False}))
        flags = ("--allow-pickle", "--forward-headers", "x-parity", "--host", "127.0.0.1")
        for server, command in (
            (theirs, [str(python.parent / "mlserver"), "start", str(folder)]),
            (ours, dragoman([str(folder)], ours.http, ours.grpc, *flags)),
        ):
            process = servers.enter_context(run_process(command, logs / f"{server.http}.log"))
            process.wait_until(partial(http_ready, server.http), 180)
        return _compare(theirs, ours, options.only, options.verbose)


def _install() -> Path:
    """Create the environment of MLServer, unless it exists. Return its interpreter."""
    home = RESULTS / "venvs" / "mlserver-parity"
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
        stamp.write_text("\n".join(PACKAGES))
    return python


@dataclass(frozen=True, slots=True)
class Server:
    """The ports of a server."""

    http: int
    grpc: int

    @classmethod
    def on_free_ports(cls) -> "Server":
        return cls(free_port(), free_port())


def _compare(theirs: Server, ours: Server, only: str, verbose: bool) -> int:
    """Print a line for each request and the sums. Return the number of unexplained differences, at most 1."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in cases():
        for protocol in case.protocols:
            title = f"{protocol}  {case.model or case.method}: {case.name}"
            if only not in title:
                continue
            answers = [_answer(server, case, protocol) for server in (theirs, ours)]
            if answers[0] == answers[1]:
                result = "identical"
            else:
                result = "differs" if case.reason else "differs without a known reason"
                reasons[case.reason or "unknown"] += 1
            counts[result] += 1
            print(f"{result:10} {title}" + (f": {case.reason}" if case.reason and result == "differs" else ""))
            if verbose and result != "identical":
                print(f"    MLServer {_shown(answers[0])}\n    Dragoman {_shown(answers[1])}")
    print(f"\n{sum(counts.values())} requests: {', '.join(f'{n} {name}' for name, n in counts.most_common())}")
    for reason, count in reasons.most_common():
        print(f"  {count:3} {reason}")
    return min(1, counts["differs without a known reason"])


def _shown(answer: Any) -> str:
    return json.dumps(answer, default=str)[:600]


# --- requests ----------------------------------------------------------------------------------------------------


def _answer(server: Server, case: Case, protocol: str) -> Any:
    """Return status and content of an answer in a form that is equal for equal answers."""
    if protocol == "grpc":
        return _grpc_answer(server, case)
    path, method, body = case.path, case.method, case.body
    if case.model:
        path, method = f"/v2/models/{case.model}/infer", "POST"
    content = None if method == "GET" else json.dumps(body).encode()
    headers = {"content-type": "application/json", **case.headers}
    request = urllib.request.Request(f"http://127.0.0.1:{server.http}{path}", content, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, kind, text = response.status, response.headers.get_content_type(), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return str(error.reason)
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return status, [_normalized(json.loads(event), case) for event in events]
    if kind == "application/json" and text and "docs" not in path:
        return status, _normalized(json.loads(text), case)
    return status, kind if text else ""


def _grpc_answer(server: Server, case: Case) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            response = stub.ModelInfer(_message(case), timeout=60, metadata=tuple(case.headers.items()))
        except grpc.RpcError as error:
            return _STATUS.get(error.code().name, error.code().name)
    outputs = [_output(tensor, response, at) for at, tensor in enumerate(response.outputs)]
    fields = {"model_name": response.model_name, "model_version": response.model_version, "id": response.id}
    return 200, _normalized({**fields, "parameters": _values(response.parameters), "outputs": outputs}, case)


def _message(case: Case) -> Any:
    body = case.body or {}
    message = service_pb2.ModelInferRequest(model_name=case.model, id=body.get("id", ""))
    _set_parameters(message.parameters, body.get("parameters", {}))
    for one in body.get("inputs", ()):
        tensor = message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        _set_parameters(tensor.parameters, one.get("parameters", {}))
        data = [each.encode() if isinstance(each, str) else each for each in one["data"]]
        getattr(tensor.contents, _CONTENTS[one["datatype"]]).extend(data)
    for one in body.get("outputs", ()):
        _set_parameters(message.outputs.add(name=one["name"]).parameters, one.get("parameters", {}))
    return message


def _set_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(target[name], kind, value)


def _values(parameters: Any) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def _output(tensor: Any, response: Any, at: int) -> dict[str, Any]:
    if response.raw_output_contents:
        raw = response.raw_output_contents[at]
        data = _elements(raw) if tensor.datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
        values = list(data)
    else:
        values = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(tensor.shape),
        "parameters": _values(tensor.parameters),
        "data": [each.decode("latin-1") if isinstance(each, bytes) else np.asarray(each).item() for each in values],
    }


def _elements(raw: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return found


# --- comparison --------------------------------------------------------------------------------------------------


def _normalized(value: Any, case: Case) -> Any:
    """Return a response without nulls, empty fields and an id that the server made, and FP32 rounded to FP32."""
    if isinstance(value, dict):
        found = {k: _normalized(v, case) for k, v in value.items() if v not in (None, {}, [], "") or k == "data"}
        if found.get("datatype") == "FP32" and "data" in found:
            found["data"] = [None if each is None else float(np.float32(each)) for each in found["data"]]
        if "model_name" in found and not (case.body or {}).get("id"):
            found.pop("id", None)
        return found
    return [_normalized(each, case) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
