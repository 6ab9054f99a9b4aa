"""Model names in UM-Bridge, and when they are listed at startup."""

import threading
from pathlib import Path
from typing import Any

import pytest
import umbridge

from dragoman import errors
from dragoman.engine.repository import DiskRepository
from dragoman.engine_setup import load_errors
from e2e.server_process import started_server
from features.simulators.conftest import SIMULATORS

GATED = """
import os, pathlib, time
import dragoman

@dragoman.vector_function(inputs=[1], derivatives=None)
def gated(x):
    return x

while not pathlib.Path(os.environ["TEST_GATE"]).exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_info_waits_for_models_that_are_loading(tmp_path: Path, processes: str) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    models = [str(tmp_path / "gated.py"), f"{SIMULATORS}:Double", f"{tmp_path / 'gated.py'}:missing"]
    gate = tmp_path / "gate"
    model_names: list[Any] = []
    with started_server(*models, "--processes", processes, environment={"TEST_GATE": str(gate)}) as process:
        url = f"http://{process.wait_until_live().url}"
        thread = threading.Thread(target=lambda: model_names.append(umbridge.supported_models(url)))
        thread.start()
        process.wait_for_status("/v2/models/Double/ready", 200)
        assert process.status("/v2/models/gated/ready") != 200
        assert process.request("POST", "/Evaluate", {"name": "Double", "input": [[1, 2, 3, 4]]})[0] == 200
        gate.touch()
        thread.join(60)
    assert model_names == [["Double", "gated"]]


MODEL = """
import umbridge

class Scaled(umbridge.Model):
    def __init__(self, name, factor=2.0):
        super().__init__("pre_" + name if name.startswith("_") else name)
        self.factor = factor

    def get_input_sizes(self, config):
        return [1]

    def get_output_sizes(self, config):
        return [1]

    def __call__(self, parameters, config):
        return [[self.factor * parameters[0][0]]]

    def supports_evaluate(self):
        return True
"""
GUARDED = """

class Fixed(Scaled):
    def __init__(self):
        super().__init__("fixed", 5.0)

if __name__ == "__main__":
    umbridge.serve_models([Fixed()], 4242)
"""


def model_files(folder: Path) -> list[str]:
    """Write files of simulators; return the paths to serve."""
    (folder / "scaled.py").write_text(MODEL)
    (folder / "server.py").write_text(MODEL + 'model = Scaled("posterior")\nprint("imported")\n')
    (folder / "several.py").write_text(
        "from scaled import Scaled\nimport umbridge\n"
        'a = Scaled("forward", 3.0)\nb = Scaled("_computed", 4.0)\nsame = a\n'
    )
    (folder / "guarded.py").write_text(MODEL + GUARDED)
    (folder / "chosen.py").write_text(MODEL + 'one = Scaled("first", 6.0)\ntwo = Scaled("second", 7.0)\n')
    (folder / "folder").mkdir()
    (folder / "folder" / "model.py").write_text(MODEL + 'm = Scaled("in_folder", 8.0)\n')
    (folder / "named").mkdir()
    (folder / "named" / "model.py").write_text(MODEL + 'm = Scaled("its_own", 9.0)\n')
    (folder / "named" / "dragoman.toml").write_text('[model]\nname = "operators"\n')
    (folder / "given.py").write_text(MODEL)
    paths = ["server.py", "several.py", "guarded.py:Fixed", "chosen.py:two", "folder", "named", "given.py:Scaled"]
    return [str(folder / path) for path in paths]


FACTORS = {
    "posterior": 2.0,
    "forward": 3.0,
    "pre__computed": 4.0,
    "fixed": 5.0,
    "second": 7.0,
    "in_folder": 8.0,
    "operators": 9.0,
    "Scaled": 2.0,  # its name is a constructor argument
}


def test_models_of_the_umbridge_package_keep_their_names(tmp_path: Path) -> None:
    with started_server(*model_files(tmp_path), "--placement", "thread", "--nonfinite", "error") as process:
        url = f"http://{process.wait_until_ready().url}"
        assert set(umbridge.supported_models(url)) == {*FACTORS}
        for name, factor in FACTORS.items():
            assert umbridge.HTTPModel(url, name)([[3.0]]) == [[3.0 * factor]], name
        # A client whose parser rejects every spelling of an infinity gets an error that it can read.
        with pytest.raises(Exception, match="error of type InvalidOutput: output 'output_0': element 0 is inf"):
            umbridge.HTTPModel(url, "posterior")([[1.5e308]])


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_a_file_with_one_class_is_served_under_the_instance_name(tmp_path: Path, placement: str) -> None:
    model_files(tmp_path)
    file = tmp_path / "lone.py"
    file.write_text("import umbridge\nimport scaled\n" + GUARDED.replace("(Scaled)", "(scaled.Scaled)"))
    with started_server(str(file), "--placement", placement) as process:
        url = f"http://{process.wait_until_ready().url}"
        assert umbridge.HTTPModel(url, "fixed")([[1.0]]) == [[5.0]]


def names(*paths: Any) -> list[str]:
    return [*DiskRepository([str(path) for path in paths], {}).scan()]


def test_names_follow_the_file_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(MODEL + 'model = Scaled("before")\n')
    assert names(file) == ["before"]
    file.write_text(MODEL + 'model = Scaled("afterwards")\n')
    assert names(file) == ["afterwards"]


@pytest.mark.parametrize(
    "text",
    [
        'a, b = Scaled("same"), Scaled("same")\n',  # several models of one name: the loader asks to name one
        "raise SystemExit(3)\n",
        "import umbridge\numbridge.serve_models([])\n",
        "import os; os._exit(1)\n",
        "class Other(Scaled): pass\n",
        'model = Scaled("m")\nmodel.name = 5\n',
    ],
)
def test_models_without_names_are_named_after_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.py").write_text(MODEL + text)
    assert names(tmp_path / "server.py") == ["server"]


@pytest.mark.parametrize(
    "imports",
    [
        "import dragoman\nvf = dragoman.vector_function",
        "from dragoman import vector_function as vf",
        "import functools, dragoman\nvf = functools.partial(dragoman.vector_function)",
    ],
)
def test_functions_marked_under_another_name_are_all_served(tmp_path: Path, imports: str) -> None:
    functions = "".join(f"\n@vf(inputs=[1], outputs=[1])\ndef {name}(x): return x\n" for name in ("one", "two"))
    (tmp_path / "file.py").write_text(imports + functions)
    assert names(tmp_path / "file.py") == ["one", "two"]


def test_two_files_with_the_same_model_name_are_rejected(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(MODEL + 'model = Scaled("posterior")\n')
    with pytest.raises(errors.InvalidInput, match=r"two models are called 'posterior': .*a.py and .*b.py; give one of"):
        names(tmp_path / "a.py", tmp_path / "b.py")


def test_names_that_are_invalid_in_a_url_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MODEL + 'model = Scaled("my model")\n')
    with pytest.raises(errors.InvalidInput, match="'my model' is not allowed"):
        names(tmp_path / "server.py")


def test_the_doctor_runs_no_code_to_find_names(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MODEL + f'model = Scaled("m")\nopen({str(tmp_path / "ran")!r}, "w")\n')
    assert [*load_errors(str(tmp_path / "server.py"), {})] == []
    assert not (tmp_path / "ran").exists()
    assert names(tmp_path / "server.py") == ["m"]
    assert (tmp_path / "ran").exists()
