"""Models in Python: subclasses, marked functions, typed `predict` methods and files that hold one."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman import plugins
from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP32, FP64
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.python.model import FunctionModel, ModelDeclaration, declaration_of, load, model

IMPORTS = "import dragoman.core.model, dragoman.runtimes.python.model as r\nModel = dragoman.core.model.Model\n"


def _spec(target: Any = None, uri: str = "") -> ModelSpec:
    return ModelSpec(name="m", target=target, uri=uri)


def _infer(loaded: Model, x: Any) -> Any:
    result: Any = loaded.infer(Infer({"x": Tensor.of(x)}))
    return result[0].data.tolist()


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return 2 * x


def test_a_plain_function() -> None:
    assert isinstance(plugins.runtime("python").load(_spec(double)), FunctionModel)
    loaded = load(_spec(double))
    loaded.load()
    assert loaded.signature().inputs == (TensorSpec("x", FP32),)
    assert loaded.signature().outputs == (TensorSpec("output-0", FP32),)
    assert (loaded.placement, loaded.platform, loaded.spec.name) == ("", "python_function", "m")
    assert _infer(loaded, np.ones(2, np.float32)) == [2, 2]


def test_a_decorated_function_is_returned_unchanged() -> None:
    inputs = [TensorSpec("x", FP64, (-1, 4))]

    @model(name="rows", inputs=inputs, outputs=[TensorSpec("y", FP64, (-1,))], batched=True, placement="thread")
    async def total(x):  # type: ignore[no-untyped-def]
        return x.sum(axis=1)

    @model
    def bare(x: float) -> float:
        return x

    assert bare(2.0) == 2.0
    assert declaration_of(bare) == ModelDeclaration(name="bare")
    assert declaration_of(double) is None
    assert declaration_of(total) == ModelDeclaration(
        "rows", tuple(inputs), (TensorSpec("y", FP64, (-1,)),), True, "thread"
    )
    loaded = load(_spec(total))
    assert loaded.placement == "thread"
    assert loaded.signature().inputs == tuple(inputs)
    assert [spec.name for spec in loaded.signature().outputs] == ["y"]
    assert loaded.signature().batched
    assert inspect.iscoroutinefunction(loaded.infer)


class Fitted(Model):
    """A class with a constructor and a typed `predict`."""

    batched = True

    def __init__(self, scale: float = 3.0) -> None:
        self.scale = scale

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.scale * x


class Plain(Model):
    """A subclass with `infer`."""

    inputs = (TensorSpec("x", FP64, (-1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data}

    def predict(self, anything: dict[str, Any]) -> None:
        """Never called: `infer` has priority."""


@pytest.mark.parametrize("target", [Fitted, Fitted(3.0)])
def test_a_typed_predict(target: Any) -> None:
    loaded = load(_spec(target))
    assert loaded.spec.name == "m"
    assert loaded.signature().inputs == (TensorSpec("x", FP64),)
    assert loaded.signature().batched
    assert _infer(loaded, [1.0]) == [3.0]


def test_a_subclass_with_infer() -> None:
    loaded = load(_spec(Plain))
    assert loaded.signature() == Plain(_spec()).signature()
    assert loaded.signature().open_outputs
    assert "infer" not in vars(loaded)


def test_batched_models_take_arrays() -> None:
    @model(batched=True)
    def single(x: float) -> float:
        return x

    with pytest.raises(ModelFailed, match="'x' is a single value"):
        load(_spec(single))


def test_a_file_with_one_model(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(IMPORTS + "class _Shared(Model):\n    pass\n\nclass Mine(_Shared):\n    platform = 'mine'\n")
    for uri in (str(path), str(tmp_path), f"{path}:Mine"):
        assert load(_spec(uri=uri)).platform == "mine"
    path = tmp_path / "other.py"
    path.write_text(IMPORTS + "@r.model(platform='f')\ndef f(x: float) -> float:\n    return x\n\ndef g():\n    pass\n")
    assert load(_spec(uri=str(path))).platform == "f"
    assert load(_spec(uri=f"{__name__}:Plain")).platform == "python_function"


def test_files_without_a_model_or_with_several(tmp_path: Path) -> None:
    for name, text, message in (
        ("none.py", IMPORTS, r"'none\.py' has no model: expected one subclass of dragoman\.Model"),
        (
            "celsius.py",
            "def other(): ...\ndef celsius(x): ...\ndef last(): ...\n",
            r"did you mean 'celsius\.py:celsius'\?",
        ),
        (
            "plain.py",
            "from os.path import join\ndef f(x): ...\ndef g(x): ...\ndef _h(x): ...\n",
            r"mean 'plain\.py:g'\?",
        ),
        (
            "two.py",
            IMPORTS + "class A(Model):\n    pass\n\nclass B(Model):\n    pass\n",
            r"several models, A, B: .*two\.py:A",
        ),
        ("wrong.py", "def (", r"cannot import 'wrong\.py': SyntaxError"),
        ("needs.py", "import nowhere_to_be_found", r"cannot import 'needs\.py': ModuleNotFoundError"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ModelFailed, match=message):
            load(_spec(uri=str(tmp_path / name)))
    for uri in ("model.bin", "nowhere_to_be_found:x", str(tmp_path / "missing.py")):
        with pytest.raises(ModelFailed):
            load(_spec(uri=uri))


def test_objects_that_are_not_models() -> None:
    for target in (dict, 3):
        with pytest.raises(ModelFailed, match=r"is not a model: expected a subclass"):
            load(_spec(target))
