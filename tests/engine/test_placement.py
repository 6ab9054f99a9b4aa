"""Model files without a configured placement: the placement that the model declares, and one load."""

import os
from pathlib import Path

import numpy as np
import pytest

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine.deployment import Deployment
from dragoman.engine.placements import PreferredPlacements
from dragoman.system.coroutines import complete

IMPORTS = """
import os
from pathlib import Path
import dragoman

HERE = Path(__file__).parent
with (HERE / "imports").open("a") as file:
    print(os.getpid(), file=file)

"""
METHODS = """
    def load(self):
        with (HERE / "loads").open("a") as file:
            print(os.getpid(), file=file)

    def infer(self, call):
        import numpy as np
        return {"pid": np.array([os.getpid()])}
"""
CLASS_LINE = IMPORTS + "class M(dragoman.Model):\n"
MODELS = {
    "class": (CLASS_LINE + '    placement = "thread"\n' + METHODS, "thread"),
    "annotated": (CLASS_LINE + '    placement: str = "inline"\n' + METHODS, "inline"),
    "expression": (CLASS_LINE + '    placement = "thread" + ""\n' + METHODS, "thread"),
    "set by __init__": (
        CLASS_LINE + '    placement = "thread"\n    def __init__(self, spec):\n'
        '        super().__init__(spec)\n        self.placement = "process"\n' + METHODS,
        "process",
    ),
    "set afterwards": (CLASS_LINE + METHODS + '\nM.placement = "inline"\n', "inline"),
    "inherited": (
        IMPORTS + 'class _Parent(dragoman.Model):\n    placement = "inline"\n\nclass M(_Parent):\n' + METHODS,
        "inline",
    ),
    "default": (CLASS_LINE + METHODS, "process"),
}


@pytest.mark.parametrize("name", MODELS)
async def test_a_model_is_loaded_once_at_its_declared_placement(name: str, tmp_path: Path) -> None:
    text, placement = MODELS[name]
    (tmp_path / "model.py").write_text(text)
    deployment = Deployment(ModelSpec(name="m", runtime="python", uri=str(tmp_path)), lambda: None)
    try:
        await deployment.start()
        assert deployment.placement == placement
        request: Request[Inference] = Request(Infer({"n": Tensor.of(np.array([1]))}), "m")
        pid = int((await complete(deployment.begin(request))).answer.outputs["pid"].data[0])
        assert (tmp_path / "loads").read_text().split() == [str(pid)]
        assert len((tmp_path / "imports").read_text().split()) == (1 if placement == "process" else 2)
    finally:
        await deployment.close()


async def test_a_decorated_function_declares_its_placement(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(IMPORTS + '@dragoman.model(placement="inline")\ndef M() -> int:\n    return 1\n')
    deployment = Deployment(ModelSpec(name="m", uri=f"{tmp_path}/model.py:M"), lambda: None)
    try:
        await deployment.start()
        assert deployment.placement == "inline"
    finally:
        await deployment.close()


@pytest.mark.parametrize("uri", ["model.py:M", ""])
async def test_models_start_no_process_to_find_out_a_known_placement(uri: str, tmp_path: Path) -> None:
    file, placements = tmp_path / "model.py", PreferredPlacements()

    async def placement_and_imports() -> tuple[str, int]:
        (tmp_path / "imports").write_text("")
        spec = ModelSpec(name="m", runtime="python", uri=str(tmp_path / uri))
        deployment = Deployment(spec, lambda: None, placements=placements)
        try:
            await deployment.start()
        finally:
            await deployment.close()
        pids = (tmp_path / "imports").read_text().split()
        return deployment.placement, len(set(pids) - {str(os.getpid())})

    file.write_text(CLASS_LINE + '    placement = "inline"\n' + METHODS)
    assert await placement_and_imports() == ("inline", 1)
    assert await placement_and_imports() == ("inline", 0)
    file.write_text(CLASS_LINE + METHODS)  # a changed file may prefer another placement
    assert await placement_and_imports() == ("process", 1)
    file.write_text(CLASS_LINE + '    def __init__(self, spec):\n        self.placement = "inline"\n' + METHODS)
    assert await placement_and_imports() == ("inline", 1)
