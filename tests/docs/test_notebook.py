"""The tutorial runs in a kernel of Jupyter, whose event loop its cells must not block."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dragoman_demo import language_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"
# In a process of its own: the libraries of Jupyter raise warnings, which are errors here.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells = [cell for cell in notebook.cells if not {*sys.argv[2:]} & {*cell.metadata.get("tags", ())}]
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
print(nbformat.writes(notebook))
"""


def test_the_notebook_serves_what_it_says(tmp_path: Path) -> None:
    """Its chat is left out where the language model was not downloaded before."""
    has_chat = language_model.prepare(language_model.cache_folder()) is not None
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK), *([] if has_chat else ["chat"])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    outputs = [o for cell in json.loads(done.stdout)["cells"] for o in cell.get("outputs", ())]
    printed = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
    assert "accuracy: 0.9" in printed
    assert "one flower: [0]" in printed
    assert ("capital of France is Paris" in printed) == has_chat
    tables = shown(outputs, "text/html")
    assert [table.count("<table") > 0 for table in tables] == [True] * 4
    assert "predict_proba" in tables[2]
    assert "probabilities" in tables[3]
    (plot,) = shown(outputs, "image/png")
    assert len(plot) > 10_000


def shown(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    """Return what the cells show in a format."""
    return ["".join(o["data"][kind]) for o in outputs if kind in o.get("data", {})]


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
