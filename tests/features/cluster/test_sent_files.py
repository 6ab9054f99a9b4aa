"""`placement.files = "send"`: the server sends a model's files once per host, and workers load verified copies only."""

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import FileContent, LaunchOptions, ModelSpec
from dragoman.engine.model_files import model_settings
from dragoman.workers.channel import Channel, socket_pair
from dragoman.workers.file_contents import check_contents, file_contents, send_files
from dragoman.workers.frames import Frame, FrameKind
from dragoman.workers.process import ProcessPool
from dragoman_cluster.file_cache import FileCache
from dragoman_cluster.worker_port import WorkerPort
from features.cluster.test_join import JOIN, open_port
from workers.workers_harness import call, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="flock and modes of files")

MODEL = """
import os, pathlib
import dragoman
import numpy as np

class Sum(dragoman.Model):
    def load(self) -> None:
        self.file = pathlib.Path(__file__)
        self.weights = np.frombuffer((self.file.parent / "data" / "weights.bin").read_bytes(), np.uint8)

    def predict(self, n: np.ndarray) -> dict[str, np.ndarray]:
        text = f"{self.file}|{self.weights.sum(dtype=np.int64)}|{os.getpid()}"
        return {"about": np.array([text.encode()], object)}
"""
SIZE = 3_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "server" / "story"
    (folder / "data").mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "data" / "weights.bin").write_bytes(bytes(range(256)) * (SIZE // 256))
    (folder / "data" / "empty").touch()
    return folder


def pool_of(model: Path, port: WorkerPort, cache: Path, replicas: int = 1) -> ProcessPool:
    launch = LaunchOptions(
        launcher="command", command=f"{JOIN} --cache-dir {cache}", replicas=replicas, min_ready=replicas, files="send"
    )
    spec = ModelSpec(name="m", runtime="python", uri=f"{model}/model.py:Sum" if model.suffix else str(model))
    spec = ModelSpec(**{**vars(spec), "launch": launch, "replicas": replicas, "worker_port": port})
    return ProcessPool(spec, lambda: None)


async def answers(pool: ProcessPool, count: int) -> set[tuple[str, str]]:
    """Return the model file and the sum of weights that `count` workers have."""
    found: dict[str, tuple[str, str]] = {}
    while len(found) < count:
        for response in await asyncio.gather(*(call(pool) for _ in range(8))):
            path, weights, pid = response.outputs["about"].data[0].decode().split("|")
            found[pid] = (path, weights)
    return set(found.values())


def inodes(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in cache.rglob("*/story/**/*") if path.is_file()}


async def test_workers_load_copies_that_are_sent_once(model: Path, tmp_path: Path) -> None:
    cache, expected = tmp_path / "cache", str(sum(range(256)) * (SIZE // 256))
    async with open_port() as port:
        pool = pool_of(model, port, cache, replicas=2)
        await pool.start()
        ((path, weights),) = await answers(pool, 2)
        await pool.close()
        assert Path(path).is_relative_to(cache)
        assert weights == expected
        assert (cache.stat().st_mode & 0o777, Path(path).stat().st_mode & 0o777) == (0o700, 0o400)
        first = inodes(cache)
        assert {*first} == {"model.py", "weights.bin", "empty"}

        copy = next(cache.rglob("weights.bin"))  # a file that is damaged is sent again, others are not
        copy.chmod(0o600)
        copy.write_bytes(b"\1" * copy.stat().st_size)
        (model / "model.py").write_text(MODEL + "# changed\n")
        pool = pool_of(model, port, cache)
        await pool.start()
        ((new_path, weights),) = await answers(pool, 1)
        await pool.close()
        assert (weights, new_path == path) == (expected, False)
        folder = Path(new_path).parent
        assert (folder / "data" / "empty").stat().st_ino == first["empty"]
        assert (folder / "data" / "weights.bin").stat().st_ino != first["weights.bin"]


async def test_errors_name_the_host_and_the_reason(model: Path, tmp_path: Path) -> None:
    async with open_port() as port:
        (tmp_path / "open").mkdir(mode=0o777)
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(ModelFailed, match=r"on worker host '.*': the cache '.*' can be written by other users"):
            await pool_of(model, port, tmp_path / "open").start()
        launch = LaunchOptions(launcher="command", command=JOIN, files="send")
        spec = ModelSpec(name="m", runtime="python", uri="json:JSONDecoder", launch=launch, worker_port=port)
        with pytest.raises(ModelFailed, match=r"placement\.files 'send': expected a model in files"):
            await ProcessPool(spec, lambda: None).start()


def test_local_workers_get_no_files(tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text('[model.placement]\nfiles = "send"\n')
    with pytest.raises(InvalidInput, match=r"'placement\.files': expected shared with launcher 'local'"):
        model_settings(tmp_path)


# --- the cache -------------------------------------------------------------------------------------------------


def spec_of(*files: tuple[str, bytes], folder: str = "/server/m") -> ModelSpec:
    contents = tuple(FileContent(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in files)
    return ModelSpec(name="m", uri=folder, contents=contents)


def sender(*files: tuple[str, bytes]) -> "Sender":
    return Sender(files)


class Sender:
    """Sends files in two blocks each, and records which."""

    def __init__(self, files: Sequence[tuple[str, bytes]]) -> None:
        self.files = files
        self.sent: list[str] = []

    def __call__(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        for number in numbers:
            path, content = self.files[number]
            self.sent.append(path)
            yield number, content[:2]
            yield number, content[2:]


@pytest.mark.parametrize("path", ["/server/m/../../x", "/etc/passwd", "m/x", "/server"])
def test_paths_do_not_leave_the_cache(path: str, tmp_path: Path) -> None:
    file = (path, b"content")
    with pytest.raises(ModelFailed, match="is outside of its folder"):
        FileCache(tmp_path / "cache", 100).localize(spec_of(file), sender(file))
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_while_it_is_sent_is_not_used(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", 100)
    spec = spec_of(("/server/m/a", b"right"))
    with pytest.raises(ModelFailed, match="its file 'a' has changed while it was sent"):
        cache.localize(spec, sender(("/server/m/a", b"wrong")))
    local = FileCache(tmp_path / "cache", 100).localize(spec, sender(("/server/m/a", b"right")))
    assert (Path(local.uri) / "a").read_bytes() == b"right"


def test_only_damaged_copies_are_replaced(tmp_path: Path) -> None:
    """Workers that use the model keep the others."""
    files = [("/server/m/a", b"right"), ("/server/m/b", b"other")]
    users, kept = [], set()
    for sent in (["/server/m/a", "/server/m/b"], ["/server/m/a"], ["/server/m/a"]):
        users.append(FileCache(tmp_path / "cache", 10))
        server = sender(*files)
        folder = Path(users[-1].localize(spec_of(*files), server).uri)
        assert server.sent == sent
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"right", "b": b"other"}
        kept.add((folder / "b").stat().st_ino)
        (folder / "a").chmod(0o600)
        (folder / "a").write_bytes(b"wrong")
    assert len(kept) == 1


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    files = [("/server/m/a", b"content"), (f"/server/m/{'n' * 300}", b"content")]
    with pytest.raises(ModelFailed, match="File name too long"):
        FileCache(tmp_path / "cache", 100).localize(spec_of(*files), sender(*files))


def test_other_models_are_searched_once_for_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ([(f"/server/m/{number}", f"{name}{number}".encode()) for number in range(9)] for name in ("old", "new"))
    FileCache(tmp_path / "cache", 100).localize(spec_of(*old), sender(*old))
    read, read_bytes = [], Path.read_bytes

    def recorded(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    FileCache(tmp_path / "cache", 100).localize(spec_of(*new), sender(*new))
    assert 0 < len(read) <= 4


# --- the files of a model on the server -------------------------------------------------------------------------


def files_on_server(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"content of {path}")


def cached(spec: ModelSpec, cache: Path) -> ModelSpec:
    """Return the spec of a worker that has got the model's files."""
    launch = LaunchOptions(launcher="join", files="send")
    spec = replace(spec, contents=file_contents(replace(spec, launch=launch)))
    files = [(file.path, Path(file.path).read_bytes()) for file in spec.contents]
    return FileCache(cache, 10_000).localize(spec, sender(*files))


@pytest.mark.parametrize(
    ("uri", "runtime"),
    [("x/weights", "x/rt.py:Model"), ("x", "x/rt.py:Model"), ("x", "y/rt.py:Model"), ("x/a/weights", "x/rt.py:Model")],
)
def test_the_model_and_the_file_of_its_runtime_are_sent(uri: str, runtime: str, tmp_path: Path) -> None:
    files_on_server(tmp_path, "x/weights", "x/rt.py", "y/rt.py", "x/a/weights")
    local = cached(ModelSpec(name="m", uri=f"{tmp_path}/{uri}", runtime=f"{tmp_path}/{runtime}"), tmp_path / "cache")
    file, colon, name = local.runtime.rpartition(":")
    assert (colon, name) == (":", "Model")
    assert Path(file).read_text() == f"content of {runtime.removesuffix(':Model')}"
    weights = Path(local.uri, "weights") if uri == "x" else Path(local.uri)
    assert weights.read_text() == f"content of {uri if uri != 'x' else 'x/weights'}"
    for path in (file, local.uri):
        assert Path(path).is_relative_to(tmp_path / "cache")


def test_a_folder_with_the_name_of_the_runtime_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_on_server(tmp_path, "model/weights", "onnx/notes")
    monkeypatch.chdir(tmp_path)
    contents = file_contents(ModelSpec(name="m", uri=f"{tmp_path}/model", runtime="onnx"))
    assert [file.path for file in contents] == [f"{tmp_path}/model/weights"]


@pytest.mark.parametrize("position", [0, 31 << 20, (66 << 20) - 1])
def test_a_large_file_is_compared_by_blocks_from_its_beginning_to_its_end(position: int, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with weights.open("wb") as file:
        file.truncate(66 << 20)  # without blocks on disk
    spec = ModelSpec(name="m", uri=str(weights), runtime="onnx")
    on_server = replace(spec, contents=file_contents(spec))
    check_contents(on_server)
    with weights.open("r+b") as file:
        file.seek(position)
        file.write(b"x")
    with pytest.raises(ModelFailed, match="its file 'weights' has other content on worker host"):
        check_contents(on_server)


def test_executable_files_stay_executable(tmp_path: Path) -> None:
    for name in ("program", "data"):
        (tmp_path / name).write_text("the same content")
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "data").chmod(0o644)
    modes = {"program": 0o500, "data": 0o400}
    for number in range(2):  # the second model takes the files of the first one
        (tmp_path / str(number)).mkdir()
        for name in modes:
            os.link(tmp_path / name, tmp_path / str(number) / name)
        local = cached(ModelSpec(name="m", uri=f"{tmp_path}/{number}"), tmp_path / "cache")
        assert {path.name: path.stat().st_mode & 0o777 for path in Path(local.uri).iterdir()} == modes


def test_incomplete_models_are_not_sent(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    files_on_server(folder, "weights")
    (folder / "other").symlink_to("other")  # cannot be read, also by root
    spec = ModelSpec(name="m", uri=str(folder))
    assert [file.path for file in file_contents(spec)] == [f"{folder}/weights"]
    with pytest.raises(ModelFailed, match=r"^failed to load 'm', placement\.files 'send': 'other' cannot be read \("):
        cached(spec, tmp_path / "cache")
    (folder / "other").unlink()
    for number in range(10_000):
        (folder / str(number)).touch()
    with pytest.raises(ModelFailed, match=r"'send': expected at most 10000 files, got 10001$"):
        cached(spec, tmp_path / "cache")


# --- what workers request --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [[1], [-1], [0.5], "0", None, [10**30], [[0]]])
async def test_workers_get_no_other_files(wanted: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    ours, theirs = socket_pair()
    frames: list[Frame] = []
    receiver, channel = Channel(theirs, frames.append, lambda: None), Channel(ours, frames.append, lambda: None)
    contents = [FileContent(str(tmp_path / "a"), 7, "")]
    await send_files(channel, contents, wanted)
    await send_files(channel, contents, [0])
    await wait_until(lambda: frames)
    assert [(frame.kind, frame.job, frame.value()) for frame in frames] == [(FrameKind.FILE, 0, b"content")]
    for each in (receiver, channel):
        each.close()


def test_models_that_were_used_least_recently_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    files = [(f"/server/m/{name}", name.encode() * 40) for name in "abc"]
    specs, senders = [spec_of(file) for file in files], [sender(file) for file in files]

    def use(number: int) -> FileCache:
        cache = FileCache(folder, 100)
        local = cache.localize(specs[number], senders[number])
        os.utime(Path(local.uri).parents[1], (number, number))
        return cache

    def names() -> list[str]:
        return sorted(path.name for path in folder.rglob("?") if path.is_file())

    for number in (0, 1):
        use(number).close()
    FileCache(folder, 100).localize(specs[0], senders[0])  # used again, and in use from now on
    holder = use(2)
    assert names() == ["a", "c"]
    assert [len(each.sent) for each in senders] == [1, 1, 1]
    large = ("/server/m/large", b"1" * 61)
    with pytest.raises(ModelFailed, match=r"it has 61 bytes: expected at most 100 in the cache .* in use have 80"):
        FileCache(folder, 100).localize(spec_of(large), sender(large))
    assert names() == ["a", "c"]
    holder.close()
    use(1).close()
    assert names() == ["a", "b"]


def test_models_that_are_downloaded_count(tmp_path: Path) -> None:
    first, second = ("/server/m/first", b"1" * 60), ("/server/m/second", b"2" * 60)
    send_first, send_second = sender(first), sender(second)

    def download(numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        with pytest.raises(ModelFailed, match=r"at most 100 in the cache .* in use have 60"):
            FileCache(tmp_path, 100).localize(spec_of(second), send_second)
        yield from send_first(numbers)

    tmp_path.chmod(0o700)
    cache = FileCache(tmp_path, 100)
    cache.localize(spec_of(first), download)
    cache.close()
    FileCache(tmp_path, 100).localize(spec_of(second), send_second)
    assert send_second.sent == ["/server/m/second"]


def test_a_model_larger_than_the_cache_removes_no_other_model(tmp_path: Path) -> None:
    small, large = ("/server/m/small", b"1"), ("/server/m/large", b"2" * 101)
    cache = FileCache(tmp_path / "cache", 100)
    local = cache.localize(spec_of(small), sender(small))
    cache.close()
    with pytest.raises(ModelFailed, match=r"it has 101 bytes: expected at most 100 in the cache \(--cache-gib\)$"):
        cache.localize(spec_of(large), sender(large))
    assert (Path(local.uri) / "small").read_bytes() == b"1"
