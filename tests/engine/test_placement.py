"""A model that nobody has placed: where it goes, and that it is loaded once."""

from pathlib import Path

import numpy as np
import pytest

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine.deployment import Deployment
from dragoman.engine.placement import first_placement
from dragoman.system.coroutines import complete

HEAD = """
import os
from pathlib import Path
import dragoman

HERE = Path(__file__).parent
with (HERE / "imports").open("a") as file:
    print(os.getpid(), file=file)

"""
LOAD = """
    def load(self):
        with (HERE / "loads").open("a") as file:
            print(os.getpid(), file=file)

    def infer(self, call):
        import numpy as np
        return {"pid": np.array([os.getpid()])}
"""
CLASS = HEAD + "class M(dragoman.Model):\n"
SEEN = {
    "class": (CLASS + '    placement = "thread"\n' + LOAD, "thread"),
    "annotated": (CLASS + '    placement: str = "inline"\n' + LOAD, "inline"),
    "function": (HEAD + '@dragoman.model(placement="inline")\ndef M(x: float) -> float:\n    return x\n', "inline"),
}
HIDDEN = {
    "by an expression": (CLASS + '    placement = "thread" + ""\n' + LOAD, "thread"),
    "by __init__": (
        CLASS + '    placement = "thread"\n    def __init__(self, spec):\n'
        '        super().__init__(spec)\n        self.placement = "process"\n' + LOAD,
        "process",
    ),
    "by a parent": (
        HEAD + 'class _Parent(dragoman.Model):\n    placement = "inline"\n\nclass M(_Parent):\n' + LOAD,
        "inline",
    ),
    "nowhere": (CLASS + LOAD, "process"),
}


def written(folder: Path, text: str) -> ModelSpec:
    (folder / "model.py").write_text(text)
    return ModelSpec(name="m", runtime="python", uri=str(folder))


@pytest.mark.parametrize("name", SEEN)
def test_what_a_file_says_is_seen_without_running_it(name: str, tmp_path: Path) -> None:
    text, place = SEEN[name]
    written(tmp_path, text)
    for uri in (f"{tmp_path}", f"{tmp_path}/model.py", f"{tmp_path}/model.py:M"):
        assert first_placement(ModelSpec(name="m", uri=uri)) == place
    assert not (tmp_path / "imports").exists()


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_not_plain_to_see_is_left_to_the_model(name: str, tmp_path: Path) -> None:
    assert first_placement(written(tmp_path, HIDDEN[name][0])) == "process"


@pytest.mark.parametrize("text", ["class (", "", "class M: placement = 'thread'", "\0"])
def test_strange_files_are_left_to_whoever_loads_them(text: str, tmp_path: Path) -> None:
    assert first_placement(written(tmp_path, text)) == "process"
    assert first_placement(ModelSpec(name="m", uri=str(tmp_path / "none.py"))) == "process"
    assert first_placement(ModelSpec(name="m", uri="module:M")) == "process"


@pytest.mark.parametrize(("name", "imports"), [("class", 1), *((name, 2) for name in HIDDEN)])
async def test_a_model_is_loaded_once_wherever_it_wants_to_be(name: str, imports: int, tmp_path: Path) -> None:
    text, place = (SEEN | HIDDEN)[name]
    deployment = Deployment(written(tmp_path, text), lambda: None)
    try:
        await deployment.start()
        assert deployment.place == place
        request: Request[Inference] = Request(Infer({"n": Tensor.of(np.array([1]))}), "m")
        pid = int((await complete(deployment.begin(request))).answer.outputs["pid"].data[0])
        assert (tmp_path / "loads").read_text().split() == [str(pid)]
        assert len((tmp_path / "imports").read_text().split()) == (1 if place == "process" else imports)
    finally:
        await deployment.close()
