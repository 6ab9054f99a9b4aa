"""Temporary folders of processes that were killed are removed, and no others."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from dragoman.system.files import TemporaryFolder, remove_abandoned_folders

SRC = Path(__file__).parents[2] / "src"


def test_only_old_folders_without_a_lock_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("dragoman-tmp-left-1", "dragoman-model-2", "dragoman-tmp-young-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("a")
    (tmp_path / "dragoman-tmp-link").symlink_to(tmp_path / "dragoman-model-2")
    with TemporaryFolder("metrics") as own, TemporaryFolder("sent") as other:
        for folder in tmp_path.iterdir():
            if "young" not in folder.name:
                os.utime(folder, (1, 1))
        remove_abandoned_folders()
        kept = {"dragoman-model-2", "dragoman-tmp-young-3", "dragoman-tmp-link", Path(own).name, Path(other).name}
        assert {path.name for path in tmp_path.iterdir()} == kept
        assert (tmp_path / "dragoman-model-2" / "file").exists()
    assert not {own, other} & {str(path) for path in tmp_path.iterdir()}


def test_there_is_one_kind_of_temporary_folders() -> None:
    """Another one would be left behind by a process that is killed."""
    makes = re.compile(r"\b(mkdtemp|TemporaryDirectory)\b")
    found = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if makes.search(path.read_text())}
    # The latter runs while the package is built.
    assert found == {"dragoman/system/files.py", "dragoman_kernels/build.py"}
