"""TorchScript archives whose operators use files are not loaded, however their code spells them."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.core.calls import Infer
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.torch import TorchModel

SECRET = np.array([1.5, -2.5], np.float32)


class Plain(torch.nn.Module):
    """Returns its input; its code is replaced by a test."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Ordinary(torch.nn.Module):
    """Submodules with numbers as names, strings with escapes, lists, branches, and words that resemble operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.saved = 'é\n"it\'s" # save'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100_000:
            raise ValueError("too \x07 many")
        parts = [self.ops(x) * 1e-7, x[..., :2] ** 2]
        return torch.cat(parts, dim=-1)


def _save(module: torch.nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        torch.jit.save(torch.jit.script(module.eval()), str(path))
    return path


def _with_code(path: Path, *lines: str) -> Path:
    """Save a module whose forward has these lines before `return x`."""
    written = _save(Plain(), path.with_suffix(".plain"))
    with zipfile.ZipFile(written) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith(".py"):
                assert data.count(b"    return x\n") == 1
                data = data.replace(
                    b"    return x\n", "".join(f"    {line}\n" for line in (*lines, "return x")).encode()
                )
            after.writestr(name, data)
    return path


def _load(path: Path, **settings: Any) -> TorchModel:
    model = TorchModel(ModelSpec(name="m", uri=str(path), **settings))
    model.load()
    return model


def _infer(model: TorchModel, rows: Any = (0.0, 0.0)) -> Any:
    outputs: Any = model.infer(Infer({"x": Tensor.of(np.asarray(rows, np.float32))}))
    (found,) = outputs
    return np.asarray(found)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET.tobytes())
    return path


READS = {
    "function": ['x = torch.from_file("SECRET", False, 2, dtype=6)'],
    "name": ["read = torch.from_file", 'x = read("SECRET", False, 2, dtype=6)'],
    "getattr": ['x = getattr(torch, "from_file")("SECRET", False, 2, dtype=6)'],
    "joined": ['x = getattr(torch, "from_" "file")("SECRET", False, 2, dtype=6)'],
    "escaped": ["x = getattr(torch, 'from\\137file')(\"SECRET\", False, 2, dtype=6)"],
    "namespace": ['x = ops.aten.from_file("SECRET", False, 2, dtype=6)'],
    "alias": ["t = torch", 'x = getattr(t, "from_" "file")("SECRET", False, 2, dtype=6)'],
    "inner alias": ["t = ops", "a = t.aten", 'x = getattr(a, "from_" "file")("SECRET", False, 2, dtype=6)'],
    "continued": ["x = torch.\\", '      from_file("SECRET", False, 2, dtype=6)'],
}


@pytest.mark.parametrize("spelling", READS)
def test_a_file_is_not_read(tmp_path: Path, secret: Path, spelling: str) -> None:
    path = _with_code(tmp_path / "m.pt", *[line.replace("SECRET", str(secret)) for line in READS[spelling]])
    with pytest.raises(ModelFailed, match=r"'m\.pt' is not loaded: .*--allow-pickle|code .* cannot be read"):
        _load(path)
    np.testing.assert_array_equal(_infer(_load(path, allow_pickle=True)), SECRET)


@pytest.mark.parametrize(
    "call", ['torch.save(x, "FILE")', 'ops.aten.save(x, "FILE")', 'getattr(torch, "sa" "ve")(x, "FILE")']
)
def test_a_file_is_not_written(tmp_path: Path, call: str) -> None:
    target = tmp_path / "written"
    path = _with_code(tmp_path / "m.pt", call.replace("FILE", str(target)))
    with pytest.raises(ModelFailed, match=r"is not loaded: it uses save.*, by which a model can use files"):
        _load(path)
    _infer(_load(path, allow_pickle=True))
    assert target.is_file()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("y = ops.profiler._record_function_enter('a')", r"ops\.profiler"),
        ("y = getattr(ops, 'pro' 'filer')", r"ops\.profiler"),
        ("y = torch", "torch"),
        ("y = rpc_sync('other', x)", "rpc_sync"),
        ("y = ops.prim.rpc_sync('other', x)", "rpc_sync"),
    ],
)
def test_what_could_be_an_operator_is_named(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(ModelFailed, match=f"it uses {named}, by which"):
        _load(_with_code(tmp_path / "m.pt", line))


@pytest.mark.parametrize("line", ["y = 1 # torch.relu", 'y = """a', "y = \\\n    1", "y = 1x", "y = é"])
def test_code_that_pytorch_does_not_write_is_rejected(tmp_path: Path, line: str) -> None:
    with pytest.raises(ModelFailed, match=r"the code of 'm\.pt' cannot be read: unexpected"):
        _load(_with_code(tmp_path / "m.pt", line))


def test_code_that_runs_when_it_is_loaded_is_not_run(tmp_path: Path) -> None:
    class Stateful(torch.nn.Module):
        training: bool

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        @torch.jit.export
        def __getstate__(self) -> bool:
            return self.training

        @torch.jit.export
        def __setstate__(self, state: bool) -> None:
            self.training = state

    target, plain, path = tmp_path / "created", _save(Stateful(), tmp_path / "plain"), tmp_path / "m.pt"
    with zipfile.ZipFile(plain) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith(".py"):
                line = f'    self.training = torch.numel(torch.from_file("{target}", True, 4, dtype=0)) == 4\n'.encode()
                data = data.replace(b"    self.training = state\n", line)
                assert line in data
            after.writestr(name, data)
    with pytest.raises(ModelFailed, match="from_file"):
        _load(path)
    assert not target.exists()
    _load(path, allow_pickle=True)
    assert target.stat().st_size == 4


def test_ordinary_code_is_loaded(tmp_path: Path) -> None:
    path, rows = _save(Ordinary(), tmp_path / "m.pt"), np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(_infer(_load(path), rows)[:, 2:], rows)
