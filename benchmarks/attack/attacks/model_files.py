"""Hostile model files, loaded beside models that answer."""

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.server import LLAMA
from benchmarks.processes import ROOT

_LIMIT_S = 90.0  # by when a load and a call have their responses
_HONEST = f'[model]\nruntime = "python"\nuri = "{ROOT / "benchmarks" / "attack" / "models.py"}:doubled"\n'
_DEEP = 200_000
_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_ENTITIES = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(12))


def _prepare(folder: Path) -> Sequence[str]:
    """Return a folder with one model, in which the others appear later, and the flag with which clients load them."""
    served = folder / "files"
    shutil.rmtree(served, ignore_errors=True)
    (served / "honest").mkdir(parents=True)
    (served / "honest" / "dragoman.toml").write_text(_HONEST)
    return str(served), "--control-open"


def _llama(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that makes the folder of a text model and changes it."""

    def make(folder: Path) -> None:
        shutil.copytree(LLAMA, folder, ignore=shutil.ignore_patterns("adapters"))
        change(folder)

    return make


def _json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        change(values)
        (folder / name).write_text(json.dumps(values))

    return _llama(apply)


def _file(name: str, content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_bytes(content)

    return make


def _of_llama(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return _llama(write)


def _script(folder: Path) -> None:
    import torch

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_file("/etc/passwd", False, 8, dtype=torch.uint8) + x

    folder.mkdir()
    torch.jit.save(torch.jit.script(Reads()), str(folder / "model.pt"))


def _gguf(tensors: int, values: int, name_bytes: int) -> bytes:
    return (
        b"GGUF" + (3).to_bytes(4, "little") + b"".join(n.to_bytes(8, "little") for n in (tensors, values, name_bytes))
    )


def _safetensors(header: bytes, size: int = 0) -> bytes:
    return (size or len(header)).to_bytes(8, "little") + header


_FAR = b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[1099511627776,4],"data_offsets":[0,17592186044416]}}'
_WEIGHTS = "model.safetensors"
# What is refused when it is loaded.
_REFUSED: Mapping[str, Callable[[Path], None]] = {
    "token-ids": _json("tokenizer.json", lambda v: v["model"]["vocab"].update({"zzzz": 2**31 - 1})),
    "layers": _json("config.json", lambda v: v.update(num_hidden_layers=10**9)),
    "vocabulary": _json("config.json", lambda v: v.update(vocab_size=2**40)),
    "hidden": _json("config.json", lambda v: v.update(hidden_size=2**40, intermediate_size=2**40)),
    "header": _of_llama(_WEIGHTS, _safetensors(b"{}", 2**60)),
    "offsets": _of_llama(_WEIGHTS, _safetensors(_FAR)),
    "deep-config": _of_llama("config.json", b"[" * _DEEP),
    "deep-tokenizer": _of_llama("tokenizer.json", b'{"a":' * _DEEP),
    "deep-header": _of_llama(_WEIGHTS, _safetensors(b'{"a":' * _DEEP)),
    "deep-settings": _file("dragoman.toml", b"a = " + b"[" * _DEEP),
    "deep-mlserver": _file("model-settings.json", b'{"a":' * _DEEP),
    "deep-triton": _file("config.pbtxt", b"parameters { " * _DEEP),
    "deep-mlflow": _file("MLmodel", b"flavors: " + b"[" * _DEEP),
    "deep-graph": _file("graph.json", b'{"nodes":' * _DEEP),
    "deep-graph-yaml": _file("graph.yaml", b"nodes: " + b"{a: " * 20_000),
    "deep-graph-toml": _file("graph.toml", b"nodes = " + b"[" * _DEEP),
    "torchscript": _script,
    "pickle-as-onnx": _file("model.onnx", pickle.dumps(Counter("abc"))),
    "deep-onnx": _file("model.onnx", b"\x3a\xff\xff\xff\xff\x07" * 10_000),
    "deep-xgboost": _file("model.json", b'{"learner":' + b"[" * _DEEP),
    "deep-ubj": _file("model.ubj", (b"{L" + (1).to_bytes(8) + b"a") * _DEEP),
    "lists-ubj": _file("model.ubj", b"{L" + (1).to_bytes(8) + b"a" + b"[" * 1000),
    "lightgbm": _file(
        "model.txt", b"tree\nversion=v4\nnum_class=1000000000\nmax_feature_idx=2147483647\nTree=0\nnum_leaves=-5\n"
    ),
    "catboost": _file("model.cbm", b"CBM1" + b"\xff\xff\xff\x7f" + bytes(100)),
    "openvino": _file("model.xml", f'<!DOCTYPE a [<!ENTITY e0 "a">{_ENTITIES}]><net name="&e12;"/>'.encode()),
    "gguf": _file("model.gguf", _gguf(2**60, 2**60, 2**60)),
    "gguf-few": _file("model.gguf", _gguf(1, 1, 2**62) + bytes(100)),
}
# What is loaded, or refused, and must end in time: calls of it get an error.
_CALLED: Mapping[str, tuple[Callable[[Path], None], str, Any]] = {
    "template": (
        _of_llama("chat_template.jinja", _LOOPS.encode()),
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
    "pattern": (
        _json(
            "tokenizer.json",
            lambda v: v.update(
                pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
            ),
        ),
        "/v1/completions",
        {"prompt": "a" * 60 + "!", "max_tokens": 1},
    ),
}


def _load(target: Target, names: Sequence[str]) -> str:
    """Write the files, load them, and call those that are loaded."""
    served = Path(target.arguments[0])
    answers: Counter[int] = Counter()
    for name in names:
        make = _REFUSED[name] if name in _REFUSED else _CALLED[name][0]
        make(served / name)
        status, text = _post(target, f"/v2/repository/models/{name}/load", {})
        if name in _REFUSED and status == 200:
            raise AimMissedError(f"the files of '{name}' were loaded")
        if name in _CALLED and status == 200:
            _, path, body = _CALLED[name]
            status, text = _post(target, path, {"model": name, **body})
        if not 400 <= status < 600 or b'"error":' not in text:
            raise AimMissedError(f"files of '{name}': got {status} {text[:200]!r}")
        answers[status] += 1
        status, text = _post(target, "/v2/repository/models/honest/load", {})
        if status != 200:
            raise AimMissedError(f"beside the files of '{name}' another model is not loaded: {status} {text[:200]!r}")
    return f"{len(names)} models: {dict(answers)}"


def _post(target: Target, path: str, body: Any) -> tuple[int, bytes]:
    connection = HTTPConnection(target.host, target.http_port, timeout=_LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    except OSError as error:
        return 0, f"{type(error).__name__}: {error}".encode()
    finally:
        connection.close()


def _attack(name: str, about: str, names: Sequence[str]) -> Attack:
    return Attack(
        name=f"files-{name}",
        about=about,
        run=lambda target: _load(target, names),
        models=("doubled", "tiny-llama"),
        prepare=_prepare,
        body_bytes=64 << 20,
        logs_tracebacks=name == "pattern",
    )


ATTACKS = (
    _attack("refused", f"{len(_REFUSED)} model files with huge sizes, deep nesting or programs", [*_REFUSED]),
    *(_attack(name, f"a text model whose {name} never ends", [name]) for name in _CALLED),
)
