"""The example notebook runs in a kernel of Jupyter, whose event loop its cells must not block."""

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "train_serve_plot.ipynb"
# In a process of its own: the libraries of Jupyter raise warnings, which are errors here.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(nbformat.writes(notebook))
"""


def test_the_notebook_trains_serves_and_plots(tmp_path: Path) -> None:
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(done.stdout)["cells"] if cell["cell_type"] == "code"]
    printed = "".join("".join(o["text"]) for cell in cells for o in cell["outputs"] if o["output_type"] == "stream")
    assert "input FP64 (-1, 2)" in printed
    assert "accuracy: 0.9" in printed
    images = [o["data"]["image/png"] for cell in cells for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(images) == 1
    assert len("".join(images[0])) > 10_000


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
