"""TorchScript archives and exported programs return what the module returns when it is called directly."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman import open_engine
from dragoman.core.calls import ApplyHessian, ApplyJacobian, Gradient, Infer
from dragoman.core.datatypes import BF16, BOOL, BYTES, FP32, FP64, INT64
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.recognise import recognise
from dragoman.runtimes.torch import TorchModel

ROWS = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)


class Net(torch.nn.Module):
    """A linear layer whose forward returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(features)
        return {"logits": logits, "probabilities": logits.softmax(-1)}


class Sum(torch.nn.Module):
    """Two inputs, a tuple of outputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, (x * y).sum(1)


class Double(torch.nn.Module):
    """One tensor in and out, of any datatype, and an optional scale."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, power: int = 1) -> torch.Tensor:
        return 2 * x if scale is None else x * scale


def _script(module: torch.nn.Module, path: Path, how: Callable[..., Any] = torch.jit.script, *args: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        how(module.eval(), *args).save(str(path))
    return path


async def test_a_traceback_of_torchscript_stays_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _script(Net(), tmp_path / "net.pt")
    async with open_engine(tmp_path / "net.pt") as engine:
        with pytest.raises(ModelFailed) as caught:
            await engine.infer("net", {"features": ROWS.astype(np.float64)})
    message = caught.value.message
    assert message.startswith("model 'net' failed: RuntimeError: ")
    assert "must have the same dtype" in message
    assert not [word for word in ("Traceback", "File", "/", ".py", "HERE") if word in message]
    assert "Traceback of TorchScript" in caplog.text


def _export(module: torch.nn.Module, path: Path, *args: torch.Tensor, shapes: Any, **kwargs: torch.Tensor) -> Path:
    torch.export.save(torch.export.export(module.eval(), args, kwargs=kwargs, dynamic_shapes=shapes), path)
    return path


def _load(path: Path, **settings: Any) -> TorchModel:
    model = TorchModel(ModelSpec(name="m", uri=str(path), **settings))
    model.load()
    return model


def _infer(model: TorchModel, **arrays: Any) -> Any:
    tensors = {name: value if isinstance(value, Tensor) else Tensor.of(value) for name, value in arrays.items()}
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    return model.infer(Infer(tensors))


def test_script_with_a_dict(tmp_path: Path) -> None:
    net = Net().eval()
    model = _load(_script(net, tmp_path / "model.pt"))
    assert model.platform == "pytorch_torchscript"
    signature = model.signature()
    assert signature.inputs == (TensorSpec("features"),)
    assert signature.outputs == ()
    assert signature.open_outputs
    assert not signature.batched
    result = _infer(model, features=ROWS.copy())
    with torch.inference_mode():
        direct = net(torch.from_numpy(ROWS.copy()))
    np.testing.assert_array_equal(result["logits"], direct["logits"].numpy())
    np.testing.assert_array_equal(result["probabilities"], direct["probabilities"].numpy())


def test_script_by_position(tmp_path: Path) -> None:
    path = _script(Sum(), tmp_path / "model.pth", torch.jit.trace, (torch.zeros(2, 4), torch.zeros(2, 4)))
    model = _load(path, max_batch_size=8)
    assert [spec.name for spec in model.signature().inputs] == ["x", "y"]
    assert [spec.name for spec in model.signature().outputs] == ["output-0", "output-1"]
    assert model.signature().batched
    for names in ({"x": ROWS.copy(), "y": ROWS + 1}, {"first": ROWS.copy(), "second": ROWS + 1}):
        total, product = _infer(model, **names)
        np.testing.assert_array_equal(total, ROWS + (ROWS + 1))
        np.testing.assert_allclose(product, (ROWS * (ROWS + 1)).sum(1), rtol=1e-6)


def test_script_with_optional_arguments(tmp_path: Path) -> None:
    model = _load(_script(Double(), tmp_path / "model.ts"))
    x, scale, power = model.signature().inputs
    assert (x, scale) == (TensorSpec("x"), TensorSpec("scale", optional=True))
    assert (power.name, power.datatype, power.shape, power.optional) == ("power", INT64, (), True)
    for dtype in (np.float32, np.float64, np.int64, np.uint8, np.float16):
        rows = np.arange(4).astype(dtype)
        (result,) = _infer(model, x=rows)
        np.testing.assert_array_equal(result, 2 * rows)
        assert result.dtype == dtype
    (result,) = _infer(model, x=np.arange(4)[::-1], scale=np.array([3]))
    np.testing.assert_array_equal(result, [9, 6, 3, 0])
    with pytest.raises(InvalidInput, match="no strings"):
        _infer(model, x=Tensor.of(["a"], BYTES))


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    model = _load(_script(Double(), tmp_path / "model.pt"))
    (result,) = _infer(model, x=Tensor.of([1.0, 2.5, -3.0], BF16))
    assert result.dtype == BF16.dtype
    assert result.tolist() == [2.0, 5.0, -6.0]


def test_exported_program(tmp_path: Path) -> None:
    net = Net().eval()
    rows = torch.export.Dim("rows")
    path = _export(net, tmp_path / "model.pt2", torch.zeros(2, 4), shapes={"features": {0: rows}})
    model = _load(path, allow_pickle=True)
    assert model.platform == "pytorch_export"
    assert model.signature().inputs == (TensorSpec("features", FP32, (-1, 4)),)
    assert model.signature().outputs == (
        TensorSpec("logits", FP32, (-1, 3)),
        TensorSpec("probabilities", FP32, (-1, 3)),
    )
    assert model.signature().batched
    result = _infer(model, features=ROWS.copy())
    with torch.inference_mode():
        np.testing.assert_array_equal(result["logits"], net(torch.from_numpy(ROWS.copy()))["logits"].numpy())


def test_exported_program_with_keywords_and_fixed_shapes(tmp_path: Path) -> None:
    path = _export(Sum(), tmp_path / "model.pt2", torch.zeros(5, 4), y=torch.zeros(5, 4), shapes=None)
    model = _load(path, allow_pickle=True)
    assert model.signature().inputs == (TensorSpec("x", FP32, (5, 4)), TensorSpec("y", FP32, (5, 4)))
    assert model.signature().outputs == (TensorSpec("output-0", FP32, (5, 4)), TensorSpec("output-1", FP32, (5,)))
    assert not model.signature().batched
    total, _ = _infer(model, x=ROWS.copy(), y=ROWS.copy())
    np.testing.assert_array_equal(total, ROWS + ROWS)


def test_exported_programs_can_hold_pickles(tmp_path: Path) -> None:
    path = _export(Double(), tmp_path / "model.pt2", torch.zeros(2), shapes=None)
    with pytest.raises(ModelFailed, match="--allow-pickle"):
        _load(path)


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    with pytest.raises(ModelFailed, match="state_dict"):
        _load(tmp_path / "model.pt")
    (tmp_path / "model.pt2").write_text("hello")
    with pytest.raises(ModelFailed, match=r"torch\.export\.load"):
        _load(tmp_path / "model.pt2", allow_pickle=True)


class Scalars(torch.nn.Module):
    """Python numbers and a text among the arguments and results; `state` has no default."""

    def forward(
        self, x: torch.Tensor, rate: int, shift: float, negate: bool, unit: str, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, int, tuple[float, bool, str]]:
        y = x * rate + shift
        if negate:
            y = -y
        if state is not None:
            y = y + state
        return y, rate * 2, (shift / 2, not negate, unit + "s")


@pytest.mark.parametrize("name", ["model.jit", "model.torchscript", "model.pt"])
def test_numbers_and_texts_of_a_script_are_tensors_of_shape_nothing(tmp_path: Path, name: str) -> None:
    path = _script(Scalars(), tmp_path / name)
    assert recognise(path) == "torch"
    model = _load(path)
    inputs = {spec.name: (spec.datatype, spec.shape, spec.optional) for spec in model.signature().inputs}
    assert inputs == {
        "x": (None, None, False),
        "rate": (INT64, (), False),
        "shift": (FP64, (), False),
        "negate": (BOOL, (), False),
        "unit": (BYTES, (), False),
        "state": (None, None, True),
    }
    outputs = {spec.name: (spec.datatype, spec.shape) for spec in model.signature().outputs}
    assert outputs == {
        "output-0": (None, None),
        "output-1": (INT64, ()),
        "output-2-0": (FP64, ()),
        "output-2-1": (BOOL, ()),
        "output-2-2": (BYTES, ()),
    }
    arguments = {"rate": np.array(3, np.int16), "shift": np.array(0.5), "negate": np.array(True), "unit": "meter"}
    y, *rest = _infer(model, x=ROWS.copy(), **arguments)
    np.testing.assert_array_equal(y, -(ROWS * 3 + 0.5).astype(np.float32))
    assert [each.tolist() for each in rest] == [6, 0.25, False, "meters"]
    (y, *_) = _infer(model, x=ROWS.copy(), **arguments, state=ROWS.copy())
    np.testing.assert_array_equal(y, -(ROWS * 3 + 0.5) + ROWS)


class Times(torch.nn.Module):
    """A number, a pair of tensors and a keyword; nested results."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], n: int, *, flag: bool) -> Any:
        return {"product": pair[0] * n, "parts": (pair[0], [pair[1]])}


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_numbers_of_an_exported_program(tmp_path: Path, is_dynamic: bool) -> None:
    """A number is part of the program, unless it was exported as dynamic."""
    shapes = {"pair": (None, None), "n": torch.export.Dim.DYNAMIC if is_dynamic else None, "flag": None}
    args = ((torch.zeros(2), torch.ones(3)), 2)
    program = torch.export.export(Times(), args, kwargs={"flag": True}, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    model = _load(tmp_path / "model.pt2", allow_pickle=True)
    specs = {spec.name: (spec.datatype, spec.shape) for spec in model.signature().inputs}
    assert specs == {"pair_0": (FP32, (2,)), "pair_1": (FP32, (3,)), **({"n": (INT64, ())} if is_dynamic else {})}
    assert [spec.name for spec in model.signature().outputs] == ["product", "parts-0", "parts-1-0"]
    pair = {"pair_0": np.array([1, 2], np.float32), "pair_1": np.array([3, 4, 5], np.float32)}
    result = _infer(model, **pair, **({"n": np.array(5)} if is_dynamic else {}))
    assert {name: each.tolist() for name, each in result.items()} == {
        "product": [5, 10] if is_dynamic else [2, 4],
        "parts-0": [1, 2],
        "parts-1-0": [3, 4, 5],
    }


class Detector(torch.nn.Module):
    """Boxes of each picture, as of torchvision's detectors."""

    def forward(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        return {}, [{"boxes": row, "scores": row.sum()} for row in x]


def test_tensors_in_lists_and_dicts_have_names_of_their_own(tmp_path: Path) -> None:
    model = _load(_script(Detector(), tmp_path / "model.pt"))
    assert model.signature().open_outputs
    result = _infer(model, x=ROWS[:2].copy())
    assert list(result) == ["output-1-0-boxes", "output-1-0-scores", "output-1-1-boxes", "output-1-1-scores"]
    np.testing.assert_array_equal(result["output-1-1-boxes"], ROWS[1])
    model = _load(_script(Nested(), tmp_path / "nested.pt"))
    assert list(_infer(model, x=ROWS.copy())) == ["output-0-0", "output-1"]


class Nested(torch.nn.Module):
    """A list inside a tuple."""

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [x], x


class Missing(torch.nn.Module):
    """A result that is no tensor, and an argument that no tensor can be."""

    def forward(self, x: torch.Tensor, sizes: list[int] | None = None) -> tuple[torch.Tensor, torch.device]:
        return x, x.device


class Lists(torch.nn.Module):
    """An argument that no tensor can be."""

    def forward(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return x


def test_other_types_are_rejected(tmp_path: Path) -> None:
    model = _load(_script(Missing(), tmp_path / "model.pt"))
    assert [spec.name for spec in model.signature().inputs] == ["x"]
    with pytest.raises(InvalidOutput, match="output 'output-1': expected a tensor, got device"):
        _infer(model, x=ROWS.copy())
    with pytest.raises(ModelFailed, match=r"argument 'sizes' of forward is List\[int\]; expected a tensor, int, float"):
        _load(_script(Lists(), tmp_path / "lists.pt"))


# --- derivatives ---------------------------------------------------------------------------------------------


class Leaking(torch.nn.Module):
    """The derivative by the first element is lost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[0].detach() * x[1:] ** 2


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] * x[1:] ** 2


def _derivatives(path: Path, **parameters: Any) -> tuple[TorchModel, Callable[..., Any]]:
    x, y = (TensorSpec(name, FP64, (size,)) for name, size in (("x", 3), ("output-0", 2)))
    model = _load(path, inputs=(x,), outputs=(y,), parameters=parameters, allow_pickle=True)
    point = {"x": Tensor.of(np.array([0.7, 1.2, 2.0]))}

    def call(kind: str) -> Any:
        ends: Any = {"output": "output-0", "inputs": point}
        if kind == "gradient":
            return model.gradient(Gradient(**ends, input="x", sens=Tensor.of(np.ones(2))))
        vec = Tensor.of(np.array([1.0, 0.0, 0.0]))
        if kind == "apply_jacobian":
            return model.apply_jacobian(ApplyJacobian(**ends, input="x", vec=vec))
        return model.apply_hessian(ApplyHessian(**ends, input1="x", input2="x", sens=Tensor.of(np.ones(2)), vec=vec))

    return model, call


@pytest.mark.parametrize("name", ["m.pt", "m.pt2"])
def test_derivatives_of_files_are_verified(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for module in (Leaking(), Squares()):
        if name == "m.pt":
            _script(module, path)
        else:
            _export(module, path, torch.ones(3, dtype=torch.float64), shapes=None)
        model, call = _derivatives(path)
        assert set(model.details()["derivatives"].values()) == {"torch"}
        if isinstance(module, Leaking):
            for kind in ("gradient", "apply_jacobian"):
                with pytest.raises(ModelFailed, match="of 'm' by torch is not confirmed by central differences"):
                    call(kind)
            continue
        assert np.asarray(call("gradient")) == pytest.approx([5.44, 1.68, 2.8])
        assert np.asarray(call("apply_jacobian")) == pytest.approx([1.44, 4.0])
        assert np.asarray(call("apply_hessian")) == pytest.approx([0, 2.4, 4])


def test_verification_of_a_file_can_be_disabled(tmp_path: Path) -> None:
    _, call = _derivatives(_script(Leaking(), tmp_path / "m.pt"), verify="never")
    assert np.asarray(call("gradient")) == pytest.approx([0, 1.68, 2.8])
    with pytest.raises(ModelFailed, match="parameter 'verify': expected 'always', 'sampled', 'never', got 'no'"):
        _derivatives(tmp_path / "m.pt", verify="no")


def test_torchscript_without_declared_tensors_logs_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dragoman.model"):
        _load(_script(Squares(), tmp_path / "m.pt"))
    assert "not served over UM-Bridge, TorchScript declares no datatypes and shapes; declare `inputs`" in caplog.text
