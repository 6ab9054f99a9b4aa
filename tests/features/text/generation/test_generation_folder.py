"""Folders that cannot be served as text models: one line names the problem and a way to fix it."""

import gc
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Load, Request
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.runtimes.saved_sizes import check_sizes, weight_files
from dragoman.system import process
from dragoman_text.generation.folder import check, explain_error
from dragoman_text.runtimes.llm.model import LanguageModel

from .test_generation_gguf_file import content, key, tensor

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
    *(
        (
            lambda f, name=name: _config(f, **{name: 2**40}),
            r"has weights of other shapes than config.json says: \d+ numbers instead of \d+; .* such as vocab_size and",
        )
        for name in ("vocab_size", "hidden_size", "intermediate_size")
    ),
    (
        lambda f: _config(f, num_labels=10**9),
        r"config.json in 'broken' has num_labels 1000000000, but the weights have \d+ tensors",
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


# --- the checks alone, without a framework: whole messages ---------------------------------------------------


def weights(tensors: dict[str, Any], data: int = 0, *, length: int | None = None) -> bytes:
    """A file of safetensors with these descriptions of tensors, and bytes of data."""
    header = json.dumps(tensors).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WHOLE = weights({"__metadata__": {"format": "pt"}, "a": A}, 8)
LAYER = {"model_type": "llama", "num_hidden_layers": 1}
PICKLES = "PyTorch's pickles, which can run code when they are loaded"
CONVERT = "save it as safetensors, by save_pretrained of transformers on a machine where you trust it"
SHARD = "model-00001-of-00002.safetensors"
Files = Mapping[str, Any]  # bytes, text, or an object that is JSON
FILES: Files = {"config.json": LAYER, "model.safetensors": WHOLE, "tokenizer.json": "{}"}
UNKNOWN = "has no 'model_type', so it is not known what the model is; take the file that save_pretrained wrote"
AGAIN = "but the weights have 1 tensors; copy the folder again"
TRUNCATED = "model.safetensors in 'f' is truncated"
UNREADABLE = f"{TRUNCATED}: its header cannot be read; copy it again"
INVALID: list[tuple[Files, str]] = [
    (
        {"config.json": "", "adapter_config.json": "{}"},
        "'f' is a LoRA adapter, not a model; put it into the folder 'adapters' of its base model and serve that",
    ),
    ({"config.json": "{}"}, f"config.json in 'f' {UNKNOWN}"),
    ({"model.safetensors": ""}, "no weights found in 'f'; copy model.safetensors beside config.json"),
    *(
        ({"model.safetensors": "", name: b"x"}, f"'f' has no model.safetensors; the weights in {name} are {text}")
        for name, text in (
            ("pytorch_model-1.bin", f"{PICKLES}; {CONVERT}"),
            ("consolidated.00.pth", f"{PICKLES}; {CONVERT}"),
            ("a.gguf", "GGUF; serve that file instead of the folder"),
            ("tf_model.h5", f"TensorFlow's; {CONVERT}"),
            ("flax_model.msgpack", f"Flax's; {CONVERT}"),
        )
    ),
    (
        {"model.safetensors": "", SHARD: WHOLE},
        f"'f' has {SHARD} but no {INDEX}; copy that file beside the weights",
    ),
    (
        {"model.safetensors": "", INDEX: {"weight_map": {"a": "x", "b": "y"}}},
        f"'f' lacks x, one of 2 missing files of {INDEX}; copy the folder again",
    ),
    ({"model.safetensors": "", INDEX: {}}, f"'f' names no files in {INDEX}; copy the folder again"),
    (
        {"model.safetensors": "", INDEX: {"weight_map": {"a": SHARD}}, SHARD: WHOLE[:-1]},
        f"{SHARD} in 'f' is truncated: expected {len(WHOLE)} bytes, got {len(WHOLE) - 1}; copy it again",
    ),
    (
        {"model.safetensors": b"version https://git-lfs.github.com"},
        "model.safetensors in 'f' is a Git LFS pointer instead of weights; run `git lfs pull` there",
    ),
    (
        {"model.safetensors": weights({"a": A}, 9)},
        f"{TRUNCATED}: expected {len(weights({'a': A}, 8))} bytes, got {len(weights({'a': A}, 9))}; copy it again",
    ),
    ({"model.safetensors": weights({"__metadata__": {}}, 1)}, f"{TRUNCATED}: expected 28 bytes, got 29; copy it again"),
    *(
        ({"model.safetensors": data}, UNREADABLE)
        for data in (
            b"x",
            b"\2\0\0\0\0\0\0",
            weights({"a": A}, 8, length=1),
            weights({"a": A}, 8, length=1 << 40),
            weights({"a": {}}),
            weights({"a": {"data_offsets": [0]}}),
            weights({"a": {"data_offsets": 5}}),
            weights({"a": {"data_offsets": [0, "x"]}}),
            weights({"a": 5}),
            b"\2\0\0\0\0\0\0\0[]",
        )
    ),
    *(
        ({"config.json": {"model_type": "m", name: 2}}, f"config.json in 'f' has {name} 2, {AGAIN}")
        for name in (
            *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers", "num_encoder_layers"),
            *("encoder_layers", "decoder_layers", "num_blocks", "n_blocks", "depth"),
        )
    ),
    *(
        ({"config.json": {"model_type": "m", "of": {name: 3}}}, f"config.json in 'f' has {name} 3, {AGAIN}")
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "moe_num_experts")
    ),
    (
        {"tokenizer.json": ""},
        "no tokenizer found in 'f'; copy tokenizer.json, or tokenizer.model, and tokenizer_config.json beside "
        "config.json",
    ),
]


def folder_with(path: Path, files: Files) -> Path:
    """Return the folder `f` with files; without those that are ""."""
    folder = path / "f"
    folder.mkdir()
    for name, given in files.items():
        data = json.dumps(given) if isinstance(given, dict) else given
        if data:
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


@pytest.mark.parametrize(("files", "message"), INVALID)
def test_messages_about_folders(tmp_path: Path, files: Files, message: str) -> None:
    with pytest.raises(ModelFailed) as caught:
        check(folder_with(tmp_path, {**FILES, **files}))
    assert caught.value.message == message


@pytest.mark.parametrize(
    "files",
    [
        {},
        *(
            {"tokenizer.json": "", name: "{}"}
            for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
        ),
        {"tokenizer.json": "", "tekken.json": "{}"},
        {"adapter_config.json": "{}"},
        {"model.safetensors": "", INDEX: {"weight_map": {"a": SHARD, "b": SHARD}}, SHARD: WHOLE},
        {"config.json": {"model_type": "m", "of": {"num_experts": 2}}},  # parts of one tensor
        {"config.json": {"model_type": "m", "num_heads": 99, "num_layers": "99"}},
        {"model.safetensors": weights({"a": {**A, "data_offsets": [0, 4]}, "b": {**A, "data_offsets": [4, 8]}}, 8)},
    ],
)
def test_folders_that_are_whole(tmp_path: Path, files: Files) -> None:
    folder = folder_with(tmp_path, {**FILES, **files})
    check(folder)
    check_sizes(folder)
    assert [path.name for path in weight_files(folder)] == [SHARD if INDEX in files else "model.safetensors"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_of_tokenizers_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFailed, match=rf"^{name} in 'f' cannot be read \(Expecting .*\); copy it from the model"):
        check(folder_with(tmp_path, {**FILES, name: "{"}))


def gguf(*keys: bytes, tensors: int = 1) -> bytes:
    return content(keys, [tensor(f"t{at}", [1], 0, 32 * at) for at in range(tensors)], bytes(32 * tensors))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.gguf", gguf(), ""),
        ("a.gguf", gguf(key("split.count", 4, 1), key("l.block_count", 4, 1), key("l.expert_count", 4, 4096)), ""),
        ("a.gguf", gguf(key("l.block_count", 8, "2"), key("block_count", 4, 2)), ""),
        (
            "a.gguf",
            b"version https://git-lfs",
            "a.gguf is a Git LFS pointer instead of weights; run `git lfs pull` there",
        ),
        (
            "a.gguf",
            b"GGML",
            "a.gguf is not a valid GGUF file: expected the bytes 'GGUF' at its start, got b'GGML'; copy it again",
        ),
        (
            "a-00001-of-00002.gguf",
            gguf(),
            "a-00001-of-00002.gguf is one of several files; join them with `llama-gguf-split --merge`",
        ),
        (
            "a.gguf",
            gguf(key("split.count", 4, 2)),
            "a.gguf is one of several files; join them with `llama-gguf-split --merge`",
        ),
        ("a.gguf", gguf(key("l.block_count", 4, 2)), "a.gguf has l.block_count 2, but 1 tensors; copy it again"),
        (
            "a.gguf",
            gguf(key("l.expert_count", 4, 4097)),
            "a.gguf has l.expert_count 4097, but 1 tensors; copy it again",
        ),
    ],
)
def test_messages_about_gguf_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    if not message:
        check(tmp_path / name)
        return
    with pytest.raises(ModelFailed) as caught:
        check(tmp_path / name)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, "a\nb", "'f' cannot be loaded as a text model: a"),
        ({}, " ", "'f' cannot be loaded as a text model: ValueError"),
        (
            {"quantization_config": {"quant_method": "q"}},
            "a",
            "'f' has weights quantized by 'q' (quantization_config in config.json), which cannot be run here: a; serve "
            "the folder that it was made from",
        ),
        (
            {"quantization_config": {}},
            "a",
            "'f' has weights quantized by 'unknown' (quantization_config in config.json), which cannot be run here: a; "
            "serve the folder that it was made from",
        ),
        (
            {"auto_map": {}},
            "trust_remote_code",
            "'f' needs code of its own (auto_map in config.json), and no code of a model is run; serve a model that "
            "transformers knows by itself",
        ),
        ({"auto_map": {}}, "a", "'f' cannot be loaded as a text model: a"),
        ({}, "trust_remote_code", "'f' cannot be loaded as a text model: trust_remote_code"),
        (
            {"model_type": "m"},
            "Unrecognized configuration class",
            "'f' is of the model_type 'm', for which transformers has no class that generates text",
        ),
        (
            {"model_type": "m"},
            "does not recognize this architecture",
            "'f' is of the model_type 'm', which the installed transformers does not know; install a newer one, or "
            "correct config.json",
        ),
        (
            {},
            "ignore_mismatched_sizes",
            "'f' has weights of other shapes than config.json says; take both from the same place, and correct sizes "
            "such as vocab_size and hidden_size",
        ),
    ],
)
def test_messages_about_errors(tmp_path: Path, config: dict[str, Any], error: str, message: str) -> None:
    folder = folder_with(tmp_path, {"config.json": config, "a.gguf": b"x"})
    assert explain_error(ValueError(error), folder) == message
    first = error.split("\n")[0].strip() or "ValueError"
    assert explain_error(ValueError(error), folder / "a.gguf") == f"'a.gguf' cannot be loaded as a text model: {first}"
