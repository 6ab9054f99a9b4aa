"""`dragoman doctor` on scripts of custom KServe models."""

import json
from pathlib import Path

import pytest

from dragoman.cli import main

KSERVE = """
import kserve
from kserve import Model, ModelServer
from kserve.model_repository import ModelRepository
from kserve.storage import Storage


class Mine(Model):
    def load(self):
        Storage.download("/models")

    async def predict(self, payload, headers=None):
        for each in payload["instances"]:
            yield str(each) + headers["x-user"]


class Models(ModelRepository):
    async def load(self, name): ...


if __name__ == "__main__":
    kserve.model_server.app.add_middleware(object)
    ModelServer(workers=2, registered_models=Models()).start([Mine("mine")])
"""


def test_scripts_of_kserve_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(KSERVE)
    assert main(["doctor", "--dry-run", str(tmp_path), "--json"]) == 1
    remarks = [r for r in json.loads(capsys.readouterr().out) if r["location"] == "script.py"]
    assert {r["subject"]: r["effect"] for r in remarks} == {
        "Models.load": "missing",
        "Mine.predict": "different",
        "Mine.predict, headers": "different",
        "add_middleware": "unused",
        "ModelServer(workers)": "unused",
    }
    assert all(r["note"] for r in remarks)


def test_a_script_of_kserve_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parent / "scripts" / "one_class.py"
    assert main(["doctor", str(script), "--json"]) == 0
    remarks = json.loads(capsys.readouterr().out)
    assert [(r["subject"], r["effect"], r["note"]) for r in remarks if r["location"] == "dragoman serve"] == [
        ("model 'one_class'", "same", "loaded")
    ]
