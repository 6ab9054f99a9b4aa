"""Tiny language models for tests, trained in a few seconds and saved as any Hugging Face folder is."""

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dragoman.plugins import import_file

train: Any = import_file(Path(__file__).parents[1] / "examples" / "text" / "train_models.py")


def make(folder: Path, kind: str = "llama", steps: int = 60) -> Path:
    """Save a tiny model of that kind ("llama" or "gpt2") in the folder, which is returned."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about their own future
            train.train(folder, kind, train.TINY, steps)
    finally:
        torch.set_num_threads(before)
    return folder


@contextmanager
def made(*kinds: str) -> Iterator[Path]:
    """A folder with a model of each kind in `tiny-<kind>`; it is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="dragoman-text-"))
    try:
        for kind in kinds:
            make(folder / f"tiny-{kind}", kind)
        yield folder
    finally:
        shutil.rmtree(folder)
