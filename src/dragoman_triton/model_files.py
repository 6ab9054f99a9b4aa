"""The settings of Triton's model folders, and the remarks of `dragoman doctor` on them."""

from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.model_files import ModelFiles
from dragoman.core.remarks import Remark
from dragoman_triton.backends import CONFIG_FILE, is_model_folder


def _model_table(folder: Path) -> dict[str, Any] | None:
    if not (folder.is_dir() and is_model_folder(folder)):
        return None
    from dragoman_triton.config import model_table  # imports protobuf

    return model_table(folder)


def survey(path: Path) -> list[Remark]:
    """Return remarks on each `config.pbtxt` below a folder; none on an invalid one, which loading it reports."""
    files = sorted(path.rglob(CONFIG_FILE)) if path.is_dir() else []
    if not files:
        return []
    from dragoman_triton.config import read_model, remarks

    found: list[Remark] = []
    for file in files:
        try:
            found += remarks(read_model(file.parent), str(file.relative_to(path)))
        except InvalidInput:
            continue
    return found


MODEL_FILES = ModelFiles(file=CONFIG_FILE, model_table=_model_table)
