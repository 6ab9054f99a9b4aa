"""The pages of docs/recipes work as written: files, commands, and the lines that a reader should see."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from e2e.forked_process import TEXT
from e2e.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "docs" / "recipes").glob("*.md") if path.name != "README.md")
_BLOCK = re.compile(r"(?:`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.S | re.M)
# The recipes whose server runs a language model, or an encoder of transformers.
_TEXT = ("chat-with-tools", "embeddings-for-rag", "smollm2-on-a-laptop")
# Packages that a recipe installs and the tests do without.
_NEEDS = {"score-a-parquet-file": "pyarrow"}


def write_detector(folder: Path) -> None:
    """Write a stand-in for an exported YOLO, which finds the same dog twice in any picture, and a photo."""
    import onnx
    from onnx import helper, numpy_helper
    from PIL import Image

    found = np.zeros((1, 84, 8400), np.float32)
    found[0, :4, :2] = [[320, 322], [320, 318], [200, 204], [100, 100]]
    found[0, 4 + 16, :2] = 0.9, 0.8
    nodes = [
        helper.make_node("ReduceSum", ["images"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Add", ["found", "nothing"], ["output0"]),
    ]
    constants = [numpy_helper.from_array(found, "found"), numpy_helper.from_array(np.float32(0), "zero")]
    inputs = [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1, 3, 640, 640])]
    outputs = [helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, [1, 84, 8400])]
    graph = helper.make_graph(nodes, "yolo", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(
        model, {"task": "detect", "names": str({i: "dog" if i == 16 else f"kind {i}" for i in range(80)})}
    )
    onnx.save(model, folder / "yolov8n.onnx")
    Image.new("RGB", (640, 640), "grey").save(folder / "photo.jpg")


class Reader:
    """Do what a page says: write its files, run its `bash` blocks, and keep all that is printed.

    Servers run in the background, the next one in place of the last. `pip install` is left out.
    """

    def __init__(self, folder: Path, imports: tuple[str, ...]) -> None:
        self.folder = folder
        self.imports = imports
        self.printed = ""
        self.server: ServerProcess | None = None
        self.port = 0

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, commands: str) -> None:
        lines = [line for line in commands.splitlines() if not line.startswith("pip install")]
        if lines and lines[0].startswith("dragoman serve"):
            assert len(lines) == 1, "a server has a block of its own"
            self.serve(shlex.split(lines[0], comments=True)[2:])
        elif lines:
            self.shell("\n".join(lines))

    def serve(self, arguments: list[str]) -> None:
        self.stop()
        self.server = ServerProcess.on_free_ports(
            *arguments, "--grpc-port", "-1", folder=self.folder, imports=self.imports
        )
        self.port = self.server.http_port
        self.server.wait_for_log("Ctrl-C stops")

    def shell(self, commands: str) -> None:
        for path in (*self.folder.glob("*.py"), *self.folder.glob("*.sh")):
            path.write_text(self.local(path.read_text()))
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.local(commands)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.printed += process.stdout + process.stderr
        assert process.returncode == 0, f"{commands}\n{process.stdout}{process.stderr}"

    def local(self, text: str) -> str:
        return re.sub(r"127\.0\.0\.1:(8080|1[2-9]\d\d\d)", f"127.0.0.1:{self.port or 8080}", text)

    def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            self.printed += server.log()
            server.kill()


@pytest.fixture
def reader(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Reader]:
    name = request.node.callspec.id
    pytest.importorskip(_NEEDS.get(name, "numpy"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if name == "yolo-with-the-console":
        write_detector(tmp_path)
    reader = Reader(tmp_path, TEXT if name in _TEXT else ())
    yield reader
    reader.stop()


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return the name of the file, the language and the text of each code block of a page."""
    return _BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_works_as_written(page: Path, reader: Reader) -> None:
    for name, language, text in blocks(page):
        if name:
            reader.write(name, text)
        elif language == "bash":
            reader.run(text)
    reader.stop()
    shown = [line.strip() for name, language, text in blocks(page) if language == "text" for line in text.splitlines()]
    missing = [line for line in shown if line and line != "..." and line not in reader.printed]
    assert missing == [], reader.printed


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_is_short_and_complete(page: Path) -> None:
    """A page begins with what comes out, and ends with what to change and where to read on."""
    text = page.read_text()
    assert 40 <= len(text.splitlines()) <= 90
    assert re.search(r"\A# .+\n\n.+?\n\n(```text|!\[)", text, re.S)
    assert re.search(r"^## Change it for your own use$", text, re.M)
    assert re.search(r"^## Read on$", text, re.M)
