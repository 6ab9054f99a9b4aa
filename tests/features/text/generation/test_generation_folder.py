"""Folders that cannot be served as text models: one line names the problem and a way to fix it."""

import gc
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Load, Request
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.system import process
from dragoman_text.generation.folder import explain_error
from dragoman_text.runtimes.llm.model import LanguageModel

INDEX = "model.safetensors.index.json"


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _only(name: str) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return rename


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def _add_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    tokenizer["model"]["vocab"]["far"] = 10**9
    path.write_text(json.dumps(tokenizer))


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (_without("model.safetensors"), "no weights found in 'broken'; copy model.safetensors beside config.json"),
    (_only("pytorch_model.bin"), "the weights in pytorch_model.bin are PyTorch's pickles, .* save it as safetensors"),
    (_only("broken-q4.gguf"), "broken-q4.gguf is not a valid GGUF file: expected the bytes 'GGUF' at its start"),
    (_only("model-00001-of-00002.safetensors"), f"has model-00001-of-00002.safetensors but no {INDEX}"),
    (_shards, f"lacks model-00002-of-00002.safetensors, one of 1 missing files of {INDEX}"),
    (_truncate, r"model.safetensors in 'broken' is truncated: expected \d+ bytes, got \d+; copy it again"),
    (
        _write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer.*`git lfs pull`",
    ),
    (_write("model.safetensors", "x" * 99), "model.safetensors in 'broken' is truncated: its header cannot be read"),
    (_without("tokenizer.json", "tokenizer_config.json"), "no tokenizer found in 'broken'; copy tokenizer.json"),
    (_write("tokenizer.json", "{"), "tokenizer.json in 'broken' cannot be read"),
    (_write("config.json", '{"architectures": ["Ll'), r"config.json in 'broken' cannot be read \(.*line 1.*\)"),
    (lambda f: _config(f, model_type=""), "config.json in 'broken' has no 'model_type'"),
    (lambda f: _config(f, model_type="nosuch"), "'broken' is of the model_type 'nosuch', which the installed transfor"),
    (
        lambda f: _config(f, model_type="vit"),
        "'broken' is of the model_type 'vit', for which transformers has no class that",
    ),
    (
        lambda f: _config(f, num_hidden_layers=10**7),
        r"config.json in 'broken' has num_hidden_layers 10000000, but the weights have \d+ tensors; copy",
    ),
    (
        lambda f: _config(f, text_config={"num_local_experts": 10**7}),
        r"config.json in 'broken' has num_local_experts 10000000, but the weights have \d+ tensors",
    ),
    (
        lambda f: _config(f, vocab_size=999),
        "has weights of other shapes than config.json says; .* sizes such as vocab_size and hidden_size",
    ),
    (
        _add_token,
        r"the tokenizer has the token id 1000000000, but the model has \d+ tokens \(vocab_size\); copy the tokenizer",
    ),
    (
        lambda f: _config(f, quantization_config={"quant_method": "hqq"}),
        "has weights quantized by 'hqq' .quantization_config in config.json., which cannot be run here: .*; serve the",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
async def test_missing_and_broken_files_are_reported(
    llama_folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(llama_folder, folder)
    damage(folder)
    async with dragoman.open_engine(str(tmp_path), control_token="t") as engine:
        (deployment,) = engine.deployments()
        assert deployment.state == "UNAVAILABLE"
        assert re.search(message, deployment.reason)
        assert "\n" not in deployment.reason
        with pytest.raises(InvalidInput) as caught:
            await engine.call(Request(Load("t"), "broken"))
        assert re.search(message, caught.value.message)


def test_frameworks_are_exempt_from_garbage_collection_and_the_model_is_not(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each full collection looks at 400,000 objects and stops the event loop for half a second."""
    engines: list[bool] = []

    def freeze() -> None:
        engines.append(any(thread.name == "text-exempt" for thread in threading.enumerate()))

    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(process, "_frozen_modules", 1)  # as in a server before a framework is imported
    LanguageModel(dragoman.ModelSpec(name="exempt", uri=str(llama_folder))).load()
    assert engines == [False]
    assert "transformers.modeling_utils" in sys.modules  # most modules come with this one


def test_an_adapter_alone_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    spec = dragoman.ModelSpec(name="a", runtime="llm", uri=str(tmp_path))
    with pytest.raises(ModelFailed, match="is a LoRA adapter, not a model; put it into the folder 'adapters'"):
        LanguageModel(spec).load()


def test_models_with_their_own_code_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    error = ValueError("contains custom code ... pass `trust_remote_code=True`\nand more")
    assert "needs code of its own (auto_map in config.json), and no code" in explain_error(error, tmp_path)
