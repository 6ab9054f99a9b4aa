"""Load requests with `config` and `file:` parameters, of Triton's clients over HTTP and gRPC."""

import asyncio
import base64
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

import dragoman
from features.triton.repository import ADD_SUB, write, write_add_sub

CLIENTS = (triton_http, triton_grpc)
ONNX = {"backend": "onnxruntime", "max_batch_size": 2}
PYTHON = b"""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + 1)]) for r in requests]
"""
PYTHON_CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": ["1"]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": ["1"]}],
}


@pytest.fixture
def sent_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sent files are written."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def served(tmp_path: Path, sent_folders: Path) -> Callable[..., Any]:
    root = tmp_path / "models"
    write_add_sub(root / "simple" / "1" / "model.onnx")
    write(root / "simple" / "config.pbtxt", f'backend: "onnxruntime"\nmax_batch_size: 8\n{ADD_SUB}')

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Callable[..., Any]]:
        async with dragoman.Server(str(root), http_port=0, grpc_port=0, control_open=True, **settings) as server:

            async def run(module: Any, method: str, *args: Any, **kwargs: Any) -> Any:
                """Call a method of a client of Triton."""

                def call() -> Any:
                    url = server.grpc_url if module is triton_grpc else server.http_url
                    with module.InferenceServerClient(url.removeprefix("http://")) as client:
                        return getattr(client, method)(*args, **kwargs)

                return await asyncio.to_thread(call)

            yield run
        assert list(sent_folders.iterdir()) == []

    return serve


def onnx(folder: Path, width: int) -> bytes:
    write_add_sub(folder / "sent.onnx", TensorProto.INT32, width)
    return (folder / "sent.onnx").read_bytes()


def add(module: Any, width: int) -> list[Any]:
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensor = module.InferInput(name, [1, width], "INT32")
        tensor.set_data_from_numpy(np.full((1, width), 3, np.int32))
        tensors.append(tensor)
    return tensors


@pytest.mark.parametrize("module", CLIENTS)
async def test_sent_files_replace_a_model_until_the_next_load(
    served: Callable[..., Any], sent_folders: Path, tmp_path: Path, module: Any
) -> None:
    def sent() -> list[Path]:
        return [folder for folder in sent_folders.iterdir() if folder not in others]

    async with served(allow_file_override="data") as run:
        others = [*sent_folders.iterdir()]
        files = {"file:7/model.onnx": onnx(tmp_path, 6)}
        await run(module, "load_model", "simple", config=json.dumps(ONNX), files=files)
        result = await run(module, "infer", "simple", add(module, 6))
        assert result.as_numpy("OUTPUT0").tolist() == [[6] * 6]
        config = (await run(triton_http, "get_model_config", "simple"))["max_batch_size"]
        assert (config, (await run(triton_http, "get_model_metadata", "simple"))["versions"]) == (2, ["7"])
        (folder,) = sent()
        assert folder.stat().st_mode & 0o077 == 0
        for bad in (b"no model", onnx(tmp_path, 6)[:-9]):  # the loaded one stays
            with pytest.raises(InferenceServerException, match="failed to load 'simple'"):
                await run(module, "load_model", "simple", config=json.dumps(ONNX), files={"file:1/model.onnx": bad})
            assert sent() == [folder]
            result = await run(module, "infer", "simple", add(module, 6))
            assert result.as_numpy("OUTPUT0").tolist() == [[6] * 6]
        await run(module, "load_model", "simple")
        result = await run(module, "infer", "simple", add(module, 4))
        assert result.as_numpy("OUTPUT0").tolist() == [[6] * 4]
        while sent():  # the old version has been closed
            await asyncio.sleep(0.01)
        await run(module, "load_model", "new", config=json.dumps(ONNX), files=files)
        result = await run(module, "infer", "new", add(module, 6))
        assert result.as_numpy("OUTPUT1").tolist() == [[0] * 6]
        assert len(sent()) == 1


async def test_files_of_code_need_their_own_permission(served: Callable[..., Any]) -> None:
    files, config = {"file:1/model.py": PYTHON}, json.dumps(PYTHON_CONFIG)
    text = {"file:1/model.txt": PYTHON}
    named = json.dumps({**PYTHON_CONFIG, "default_model_filename": "model.txt"})
    async with served(allow_file_override="data") as run:
        for given, sent, words in (
            (config, files, "got 'python'"),
            (named, text, "got 'python'"),
            ("{}", {"file:1/model.onnx": b""}, "got 'none'"),
            (json.dumps(ONNX), files, "expected .onnx, .data, .xml, .bin, .txt"),
        ):
            with pytest.raises(InferenceServerException, match=r"failed to load 'py', parameter .*" + words):
                await run(triton_http, "load_model", "py", config=given, files=sent)
    async with served(allow_file_override="code") as run:
        await run(triton_grpc, "load_model", "py", config=config, files=files)
        tensor = triton_grpc.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([4], np.int32))
        assert (await run(triton_grpc, "infer", "py", [tensor])).as_numpy("OUT").tolist() == [5]


PATHS = (
    "model.onnx", "/1/model.onnx", "1//model.onnx", "1/../model.onnx", "1/./model.onnx", "../1/model.onnx",
    "a/model.onnx", "01/model.onnx", "1/a\\model.onnx", "1/a\x00model.onnx", "1/" + "a/" * 600 + "model.onnx",
)  # fmt: skip


async def test_paths_outside_of_a_version_are_rejected(served: Callable[..., Any]) -> None:
    async with served(allow_file_override="code") as run:
        for path in PATHS:
            with pytest.raises(
                InferenceServerException, match=r"expected file:VERSION/PATH, such as file:1/model\.onnx"
            ):
                await run(triton_http, "load_model", "m", config=json.dumps(ONNX), files={f"file:{path}": b""})


async def test_invalid_files_are_rejected(served: Callable[..., Any]) -> None:
    config = json.dumps(ONNX)
    async with served(allow_file_override="code") as run:
        for files, words in (
            ({"file:1/dragoman.toml": b""}, "files of settings cannot be sent"),
            ({"file:1/config.pbtxt": b""}, "files of settings cannot be sent"),
            ({"file:1/a": b"", "file:1/a/b": b""}, "'1/a' is both a file and a folder"),
            ({f"file:1/{number}": b"" for number in range(101)}, "expected at most 100 files, got 101"),
            ({"file:1/other.onnx": b""}, "failed to load 'm'"),
        ):
            with pytest.raises(InferenceServerException, match=words):
                await run(triton_grpc, "load_model", "m", config=config, files=files)
        for value in ("%", "é", 3):
            with pytest.raises(InferenceServerException, match=r"expected the content of a file in base64"):
                await run(Rest, "load", {"config": config, "file:1/model.onnx": value})
        with pytest.raises(InferenceServerException, match="files need the parameter 'config'"):
            await run(Rest, "load", {"file:1/model.onnx": base64.b64encode(b"x").decode()})
    async with served(allow_config_override=True) as run:
        with pytest.raises(InferenceServerException, match=r"not allowed: expected the setting allow_file_override"):
            await run(triton_grpc, "load_model", "m", config=config, files={"file:1/model.onnx": b""})


class Rest:
    """A load request as JSON."""

    class InferenceServerClient(triton_http.InferenceServerClient):  # type: ignore[misc]
        def load(self, parameters: Any) -> None:
            body = json.dumps({"parameters": parameters}).encode()
            response = self._post("v2/repository/models/m/load", body, {}, {})
            if response.status_code != 200:
                raise InferenceServerException(json.loads(response.read())["error"])


async def test_a_configuration_replaces_that_of_the_folder(served: Callable[..., Any], sent_folders: Path) -> None:
    async with served(allow_config_override=True) as run:
        others = {*sent_folders.iterdir()}
        config: dict[str, Any] = {"backend": "onnxruntime", "max_batch_size": "1", "version_policy": {"all": {}}}
        await run(triton_http, "load_model", "simple", config=json.dumps(config))
        assert (await run(triton_http, "get_model_config", "simple"))["max_batch_size"] == 1
        result = await run(triton_http, "infer", "simple", add(triton_http, 4))
        assert result.as_numpy("OUTPUT0").tolist() == [[6] * 4]
        for bad, words in (
            ({"name": "other"}, r"simple/config.pbtxt:1: field 'name': unexpected directory name 'simple'"),
            ({**config, "instance_group": [{"count": 65}]}, "expected from 1 to 64 instances in all, got .* 65"),
            ({"backend": "dali"}, r"field 'backend': DALI pipelines are not supported"),
            ({**config, "output": [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]}]}, "unexpected output 'X'"),
        ):
            with pytest.raises(InferenceServerException, match="^.*failed to load 'simple'.*" + words):
                await run(triton_http, "load_model", "simple", config=json.dumps(bad))
            assert (await run(triton_http, "get_model_config", "simple"))["max_batch_size"] == 1
        await run(triton_http, "unload_model", "simple")
        while {*sent_folders.iterdir()} > others:
            await asyncio.sleep(0.01)
        await run(triton_http, "load_model", "simple")
        assert (await run(triton_http, "get_model_config", "simple"))["max_batch_size"] == 8
