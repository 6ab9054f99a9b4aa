"""The files beside a model that clients see are the model's own, also where they are links."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rest.rest_server import serving

MODEL = """import dragoman


class Reader(dragoman.Model):
    inputs = (dragoman.TensorSpec("file", dragoman.BYTES, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1, 2)),)

    def infer(self, call):
        return {"y": [[0.0, 0.0]] * call.inputs["file"].shape[0]}
"""
FILES = {
    "README.md": "Reads all files.",
    "labels.txt": "cat\ndog\n",
    "examples/one.bin": "of the folder",
    "examples.json": json.dumps(
        [{"id": "of a file", "inputs": [{"name": "file", "shape": [1], "datatype": "BYTES", "data": ["text"]}]}]
    ),
}
ALL = ("Reads all files.", {"y": ["cat", "dog"]}, {"of a file": "text"})
NONE: tuple[str, dict[str, Any], dict[str, str]] = ("", {}, {})


def write(folder: Path, names: Any = FILES) -> Path:
    """Write files of a model, and return their folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text({**FILES, "model.py": MODEL}[name])
    return folder


async def shown(path: Path, **settings: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the description, class names and examples that clients see, without the example of the trial."""
    async with serving(str(path), **settings) as server:
        (name,) = [each["name"] for each in (await server.request("GET", "/console/models")).json["models"]]
        model = (await server.request("GET", f"/console/models/{name}")).json
    examples = {each["name"]: each["inputs"][0]["data"][0] for each in model["examples"] if "data" in each["inputs"][0]}
    return model["description"], model["labels"], {n: text for n, text in examples.items() if n != "example"}


@pytest.mark.parametrize("name", FILES)
async def test_links_out_of_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    folder, secret = write(tmp_path / "m", ["model.py"]), write(tmp_path / "secret")
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret / name)
    assert await shown(folder) == NONE


async def test_a_folder_of_examples_that_is_elsewhere_is_not_read(tmp_path: Path) -> None:
    folder, secret = write(tmp_path / "m", ["model.py"]), write(tmp_path / "secret")
    (folder / "examples").symlink_to(secret / "examples")
    assert await shown(folder) == NONE
    (folder / "examples").unlink()
    (folder / "within").symlink_to(secret)
    (folder / "examples").symlink_to("within/examples")  # a link in the folder to a link out of it
    assert await shown(folder) == NONE


async def test_links_in_the_folder_are_read(tmp_path: Path) -> None:
    """A ConfigMap has a link for each file, to a link to the folder of its present content."""
    folder = tmp_path / "m"
    write(folder / "..2026_01_01", ["model.py", *FILES])
    (folder / "..data").symlink_to("..2026_01_01")
    for name in ("model.py", "README.md", "labels.txt", "examples.json", "examples"):
        (folder / name).symlink_to(f"..data/{name}")
    assert await shown(folder) == ALL
    (folder / "examples.json").unlink()
    assert await shown(folder) == (*ALL[:2], {"one": "of the folder"})


async def test_a_cache_of_hugging_face_is_read(tmp_path: Path) -> None:
    """Each file of a snapshot is a link to a blob of the same repository's cache."""
    snapshot, blobs = tmp_path / "models--a--m" / "snapshots" / "0f", tmp_path / "models--a--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(tmp_path / "all", ["model.py", *FILES])
    for i, name in enumerate(["model.py", *FILES]):
        (tmp_path / "all" / name).rename(blobs / str(i))
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(i), (snapshot / name).parent))
    assert await shown(snapshot) == ALL
    (snapshot / "README.md").unlink()
    (tmp_path / "other.md").write_text("Of another model.")
    (snapshot / "README.md").symlink_to("../../../other.md")
    assert await shown(snapshot) == ("", *ALL[1:])


@pytest.mark.parametrize("has_other_model", [False, True])
async def test_links_to_where_the_file_of_the_model_is(tmp_path: Path, has_other_model: bool) -> None:
    """In a farm of links each file is one: the folder that the model leads to is its own, if no other is there."""
    folder, store = tmp_path / "m", write(tmp_path / "store", ["model.py", *FILES])
    folder.mkdir()
    for name in ("model.py", "README.md", "labels.txt", "examples.json"):
        (folder / name).symlink_to(store / name)
    if has_other_model:
        (store / "other.onnx").write_bytes(b"")
    assert await shown(folder / "model.py") == (NONE if has_other_model else ALL)


async def test_a_model_folder_that_is_a_link(tmp_path: Path) -> None:
    write(tmp_path / "store" / "reader-3", ["model.py", *FILES])
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "reader").symlink_to(tmp_path / "store" / "reader-3")
    assert await shown(tmp_path / "models") == ALL


async def test_a_link_to_the_folder_of_the_versions(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", [*FILES])
    write(folder / "1", ["model.py"])
    (folder / "1" / "README.md").symlink_to("../README.md")
    assert await shown(tmp_path) == ALL


@pytest.mark.parametrize("name", ["README.md", "labels.txt", "examples.json", "examples/one.bin"])
async def test_pipes_and_loops_are_not_read(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "m", ["model.py"])
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)  # whose reading would wait for ever
    assert await shown(folder) == NONE
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    assert await shown(folder) == NONE


async def test_files_beside_a_model_that_is_a_link(tmp_path: Path) -> None:
    folder, store = tmp_path / "m", write(tmp_path / "store", ["model.py"])
    write(folder, FILES)
    (folder / "model.py").symlink_to(store / "model.py")
    assert await shown(folder) == ALL
