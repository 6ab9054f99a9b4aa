"""Weights that are mapped from files are in memory once, however many processes serve the model."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import joblib
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, save_model
from sklearn.decomposition import PCA

from dragoman.system.cpus import cores
from e2e.server_process import running_server, started_server, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(cores() < 2, reason="one process per core"),
]

SIZE = 5000
WEIGHTS_KIB = SIZE * SIZE * 4 / 1024

MAPPED = """
from pathlib import Path

import numpy as np

import dragoman
from dragoman import FP32, TensorSpec


class Mapped(dragoman.Model):
    inputs = (TensorSpec("x", FP32, (-1, {size})),)
    outputs = (TensorSpec("y", FP32, (-1, {size})),)
    placement = "{placement}"

    def load(self):
        self.weights = np.load(Path(__file__).with_name("weights.npy"), mmap_mode="r")

    def infer(self, call):
        return {{"y": call.inputs["x"].data @ self.weights}}
"""


def write_numpy(folder: Path, placement: str) -> None:
    np.save(folder / "weights.npy", np.zeros((SIZE, SIZE), np.float32))
    (folder / "model.py").write_text(MAPPED.format(size=SIZE, placement=placement))
    (folder / "dragoman.toml").write_text('[model]\nuri = "model.py:Mapped"\n')


def write_sklearn(folder: Path, placement: str) -> None:
    model = PCA()
    count = SIZE // 2  # as many bytes in double precision, which is that of the inputs: no call copies the weights
    model.components_ = np.zeros((count, SIZE))
    model.mean_, model.explained_variance_ = np.zeros(SIZE), np.ones(count)
    model.n_components_, model.n_features_in_ = count, SIZE
    joblib.dump(model, folder / "model.joblib")
    (folder / "dragoman.toml").write_text(
        f'[model]\nuri = "model.joblib"\nplacement = "{placement}"\n[model.parameters]\nmmap = true\n'
    )


def write_onnx(folder: Path, placement: str) -> None:
    """Write a graph whose weights are beside it in the form in which this processor multiplies them."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SIZE])] for name in "xy"]
    weights = numpy_helper.from_array(np.zeros((SIZE, SIZE), np.float32), "w")
    graph = helper.make_graph(nodes, "g", *sides, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    source = folder.parent / "source.onnx"
    save_model(model, str(source), save_as_external_data=True, location="source.weights")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "model.onnx")
    for name, value in {
        "session.optimized_model_external_initializers_file_name": "model.weights",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(name, value)
    onnxruntime.InferenceSession(source, options)
    (folder / "dragoman.toml").write_text(f'[model]\nplacement = "{placement}"\n')


def pss_of_weights_kib(pid: int) -> float:
    """Return the memory of the mappings of a process and its descendants that can hold the weights.

    PSS counts a page that N processes map as 1/N of a page in each.
    """
    mappings = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
    sizes = [{kind: int(kib) for kind, kib in re.findall(r"^(Size|Pss): +(\d+) kB", each, re.M)} for each in mappings]
    children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    below = sum(pss_of_weights_kib(int(child)) for each in children for child in each)
    return below + sum(each["Pss"] for each in sizes if each.get("Size", 0) > WEIGHTS_KIB * 0.9)


@pytest.mark.parametrize("write", [write_numpy, write_sklearn, write_onnx])
@pytest.mark.parametrize(("placement", "flags"), [("thread", ["--processes", "2"]), ("process", ["--replicas", "2"])])
def test_weights_are_in_memory_once(
    write: Callable[[Path, str], None], placement: str, flags: Sequence[str], tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    write(folder, placement)
    with running_server(str(folder), "--allow-pickle", *flags) as server:
        if "--processes" in flags:
            copies = re.compile(r"^dragoman_server_process_models\{.*\} 1(?:\.0)?$", re.M)
            wait_until(lambda: len(copies.findall(server.request("GET", "/metrics")[1].decode())) == 2, "copies")
        (tensor,) = server.request("GET", "/v2/models/shared")[1]["inputs"]
        inputs = [{**tensor, "shape": [1, SIZE], "data": [1.0] * SIZE}]
        for _ in range(8):
            status, body, _ = server.request("POST", "/v2/models/shared/infer", {"inputs": inputs})
            assert (status, sum(body["outputs"][0]["data"])) == (200, 0.0)
        assert pss_of_weights_kib(server.popen.pid) < 1.2 * WEIGHTS_KIB


def test_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    model = PCA().fit(np.eye(3))
    joblib.dump(model, tmp_path / "model.joblib", compress=3)
    (tmp_path / "dragoman.toml").write_text("[model]\n[model.parameters]\nmmap = true\n")
    with started_server(str(tmp_path), "--allow-pickle") as server:
        assert server.wait_for_exit() != 0
        assert "'model.joblib' has no arrays that can be mapped: save it by joblib.dump without" in server.log()
