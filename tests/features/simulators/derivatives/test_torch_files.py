"""Derivatives of PyTorch models loaded from files, in the precision of the module."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
import umbridge

import dragoman

ServeModel = Callable[[Any], str]


class Simulator(torch.nn.Module):
    """Two batched inputs and two outputs: tanh(layer(x)) y, and the sum of x³ plus twice the sum of y."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2, dtype=dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(x)) * y, (x**3).sum(dim=1) + 2 * y.sum(dim=1)


def save_simulator(folder: Path, form: str, dtype: torch.dtype) -> str:
    module = Simulator(dtype).eval()
    path = folder / f"simulator.{form}"
    example = (torch.ones(2, 3, dtype=dtype), torch.ones(2, 2, dtype=dtype))
    if form == "pt2":
        rows = torch.export.Dim("rows")
        torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: rows}, {0: rows})), path)
        return str(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        script: Any = torch.jit.script(module)
        script.save(str(path))
    kind = "FP64" if dtype is torch.float64 else "FP32"
    tensors = {"inputs": [("x", [-1, 3]), ("y", [-1, 2])], "outputs": [("output-0", [-1, 2]), ("output-1", [-1])]}
    lines = ["[model]", "max_batch_size = 4"]
    for side, specs in tensors.items():
        tensor_list = ", ".join(f'{{ name = "{n}", datatype = "{kind}", shape = {s} }}' for n, s in specs)
        lines.append(f"{side} = [{tensor_list}]")
    (folder / "dragoman.toml").write_text("\n".join(lines))
    return str(folder)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("form", ["pt2", "pt"])
def test_derivatives_of_a_file_are_those_of_its_module(
    serve_trusted_model: ServeModel, tmp_path: Path, form: str, dtype: torch.dtype, relative: float
) -> None:
    folder = tmp_path / "simulator"
    folder.mkdir()
    url = serve_trusted_model(save_simulator(folder, form, dtype))
    model = umbridge.HTTPModel(url, "simulator")
    assert model.supports_gradient()
    assert model.supports_apply_jacobian()
    assert model.supports_apply_hessian()
    module = Simulator(torch.float64)
    module.load_state_dict({k: v.double() for k, v in Simulator(dtype).state_dict().items()})
    rng = np.random.default_rng(1)
    at, sens, vec = ([rng.normal(size=n) for n in sizes] for sizes in ([3, 2], [2, 1], [3, 2]))
    point = [each.tolist() for each in at]

    def call_module(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.reshape(-1) for each in module(*(each[None] for each in x)))

    def assert_close(actual: Any, expected: torch.Tensor) -> None:
        assert np.abs(np.array(actual) - expected.detach().numpy()).max() <= relative * (
            1 + float(expected.abs().max())
        )

    tensors = tuple(torch.tensor(x) for x in at)
    functional: Any = torch.autograd.functional
    jacobians = functional.jacobian(call_module, tensors)
    for o in range(2):
        s = torch.tensor(sens[o])
        hessians = functional.hessian(lambda *x, o=o, s=s: call_module(*x)[o] @ s, tensors)
        for i in range(2):
            v = torch.tensor(vec[i])
            assert_close(model.gradient(o, i, point, sens[o].tolist()), jacobians[o][i].T @ s)
            assert_close(model.apply_jacobian(o, i, point, vec[i].tolist()), jacobians[o][i] @ v)
            for j in range(2):
                w = torch.tensor(vec[j])
                assert_close(model.apply_hessian(o, i, j, point, sens[o].tolist(), vec[j].tolist()), hessians[i][j] @ w)


def test_a_file_without_float_vectors_has_no_derivatives(serve_trusted_model: ServeModel, tmp_path: Path) -> None:
    class Image(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.sum()

    path = tmp_path / "image.pt2"
    torch.export.save(torch.export.export(Image(), (torch.ones(4, 4),)), path)
    url = serve_trusted_model(str(path))
    message = requests.post(f"{url}/ModelInfo", json={"name": "image"}, timeout=60).json()
    assert not any(message["support"].values())
    assert "details" not in requests.get(f"{url}/v2/models/image", timeout=60).json()


async def test_the_log_says_why_a_program_without_declared_tensors_is_no_simulator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script: Any = torch.jit.script(torch.nn.Tanh())
    script.save(str(tmp_path / "plain.pt"))
    caplog.set_level("INFO", "dragoman.model")
    async with dragoman.open_engine(str(tmp_path / "plain.pt"), allow_pickle=True):
        (record,) = [each for each in caplog.records if each.name == "dragoman.model"]
    assert "TorchScript declares no datatypes and shapes; declare `inputs` and `outputs`" in record.getMessage()
