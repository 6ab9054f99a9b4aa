"""Memory of a server of several processes with one model, whose weights each process copies, or all map from a file.

usage: python -m benchmarks.shared_weights [--quick] [--mib 300] [--only mapped] [--page]

PSS counts a page that N processes map as 1/N of a page in each, so its sum is the memory that the server takes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, save_model
from sklearn.decomposition import PCA

from benchmarks import machine
from benchmarks.processes import RESULTS, Process, dragoman, free_port, http_ready, run_process

Row = dict[str, Any]
PAGE = RESULTS / "shared-weights.md"
MODES = {
    "one process": ("thread", []),
    "--processes 2": ("thread", ["--processes", "2"]),
    "--replicas 2": ("process", ["--replicas", "2"]),
}
# Copies are loaded after the server is ready; then its memory does not change.
_PAUSE_S = 2.0

_MODEL = """
from pathlib import Path

import numpy as np

import dragoman
from dragoman import FP32, TensorSpec


class Weights(dragoman.Model):
    inputs = (TensorSpec("x", FP32, (-1, {size})),)
    outputs = (TensorSpec("y", FP32, (-1, {size})),)

    def load(self):
        self.weights = np.load(Path(__file__).with_name("weights.npy"), mmap_mode={mode!r})

    def infer(self, call):
        return {{"y": call.inputs["x"].data @ self.weights}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    mib = 8 if options.quick else options.mib
    rows = []
    for name in FORMS:
        if options.only in name:
            rows += [measure(name, mode, mib) for mode in MODES]
    text = report(rows, mib)
    print(text)
    if options.page and not options.quick:
        PAGE.write_text(page_with(PAGE.read_text(), text))
    return 0


def measure(name: str, mode: str, mib: int) -> Row:
    """Return the memory of a server once it has loaded all copies of the model."""
    placement, flags = MODES[mode]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "m"
        folder.mkdir()
        parameters = FORMS[name](folder, int((mib * 2**20 / 4) ** 0.5))
        (folder / "dragoman.toml").write_text(f'[model]\nplacement = "{placement}"\n{parameters}')
        port = free_port()
        command = dragoman([str(folder)], port, free_port(), "--allow-pickle", *flags)
        with run_process(command, Path(temporary) / "log") as server:
            server.wait_until(partial(http_ready, port), 300)
            return {"weights": name, "mode": mode, **_settled_memory(server)}


def _settled_memory(server: Process) -> Mapping[str, float]:
    """Return the memory when it has not changed for a while: copies are loaded after the server is ready."""
    before = server.memory_mib()
    while True:
        time.sleep(_PAUSE_S)
        now = server.memory_mib()
        if abs(now["pss_mib"] - before["pss_mib"]) < 1:
            return now
        before = now


# --- weights -----------------------------------------------------------------------------------------------------


def _write_numpy(folder: Path, size: int, *, mode: str | None) -> str:
    np.save(folder / "weights.npy", _weights(size))
    (folder / "model.py").write_text(_MODEL.format(size=size, mode=mode))
    return 'uri = "model.py:Weights"\n'


def _write_joblib(folder: Path, size: int, *, is_mapped: bool) -> str:
    model = PCA()
    model.components_, model.mean_ = _weights(size), np.zeros(size, np.float32)
    model.explained_variance_, model.n_components_, model.n_features_in_ = np.ones(size, np.float32), size, size
    joblib.dump(model, folder / "model.joblib")
    return "[model.parameters]\nmmap = true\n" if is_mapped else ""


def _write_onnx(folder: Path, size: int, *, is_prepacked: bool) -> str:
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])] for name in "xy"]
    weights = numpy_helper.from_array(_weights(size), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *sides, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    target = folder.parent / "source.onnx" if is_prepacked else folder / "model.onnx"
    save_model(model, str(target), save_as_external_data=True, location=target.with_suffix(".weights").name)
    if is_prepacked:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(folder / "model.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "model.weights")
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        onnxruntime.InferenceSession(target, options)
    return ""


def _weights(size: int) -> Any:
    return np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)


FORMS: Mapping[str, Callable[[Path, int], str]] = {
    "NumPy array, copied": partial(_write_numpy, mode=None),
    "NumPy array, mapped": partial(_write_numpy, mode="r"),
    "joblib, copied": partial(_write_joblib, is_mapped=False),
    "joblib, mapped": partial(_write_joblib, is_mapped=True),
    "ONNX with weights beside it": partial(_write_onnx, is_prepacked=False),
    "ONNX with prepacked weights, mapped": partial(_write_onnx, is_prepacked=True),
}

# --- report ------------------------------------------------------------------------------------------------------

_MARKS = ("<!-- from benchmarks.shared_weights -->\n", "<!-- end -->")


def report(rows: Sequence[Row], mib: int) -> str:
    lines = [f"{machine.describe()}", "", f"Weights of {mib} MiB.", ""]
    lines += [f"| PSS in MiB | {' | '.join(MODES)} |", f"|---|{'---:|' * len(MODES)}"]
    for name in dict.fromkeys(row["weights"] for row in rows):
        cells = [f"{row['pss_mib']:,.0f} ({row['processes']:.0f})" for row in rows if row["weights"] == name]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text: str, report_text: str) -> str:
    """Return the text of the page with the table between its marks."""
    before, _, rest = text.partition(_MARKS[0])
    return f"{before}{_MARKS[0]}\n{report_text}\n\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_weights", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="8 MiB, to check that it works")
    parser.add_argument("--mib", type=int, default=300, help="size of the weights")
    parser.add_argument("--only", default="", help="forms of weights with this in their name")
    parser.add_argument("--page", action="store_true", help="write the table into its page")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
