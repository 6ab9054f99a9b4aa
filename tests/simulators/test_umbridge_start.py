"""What UM-Bridge clients see of a server that starts: names of models, and when they are listed."""

import threading
from pathlib import Path
from typing import Any

import pytest
import umbridge

from e2e.served import started
from simulators.conftest import SIMULATORS

GATED = """
import os, pathlib, time
import dragoman

@dragoman.vector_function(inputs=[1], derivatives=None)
def gated(x):
    return x

while not pathlib.Path(os.environ["TEST_GATE"]).exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_info_waits_for_models_that_still_load(tmp_path: Path, front_ends: str) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    models = [str(tmp_path / "gated.py"), f"{SIMULATORS}:Double", f"{tmp_path / 'gated.py'}:missing"]
    gate = tmp_path / "gate"
    found: list[Any] = []
    with started(*models, "--front-ends", front_ends, environment={"TEST_GATE": str(gate)}) as served:
        url = f"http://{served.until_live().url}"
        asking = threading.Thread(target=lambda: found.append(umbridge.supported_models(url)))
        asking.start()
        served.until_status("/v2/models/Double/ready", 200)
        assert served.status("/v2/models/gated/ready") != 200
        assert served.ask("POST", "/Evaluate", {"name": "Double", "input": [[1, 2, 3, 4]]})[0] == 200
        gate.touch()
        asking.join(60)
    assert found == [["Double", "gated"]]
