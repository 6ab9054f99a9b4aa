"""Tiny language models for tests, trained in a few seconds and saved as Hugging Face folders."""

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dragoman.plugins import import_file


@cache
def training() -> Any:
    """Return the example that trains models. It imports PyTorch and transformers."""
    return import_file(Path(__file__).parents[1] / "examples" / "text" / "train_models.py")


def make_model(folder: Path, kind: str = "llama") -> Path:
    """Save a tiny model ("llama" or "gpt2") in the folder, which is returned. A process trains each kind once."""
    return shutil.copytree(_trained(kind), folder, dirs_exist_ok=True)


@cache
def _trained(kind: str) -> Path:
    import torch

    folder = Path(tempfile.mkdtemp(prefix="dragoman-trained-"))
    atexit.register(shutil.rmtree, folder)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slow on a busy machine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside libraries
            training().train(folder, kind, training().TINY, 60)
    finally:
        torch.set_num_threads(before)
    return folder


@contextmanager
def tiny_models(*kinds: str) -> Iterator[Path]:
    """Create a temporary folder with a model of each kind in `tiny-<kind>`."""
    folder = Path(tempfile.mkdtemp(prefix="dragoman-text-"))
    try:
        for kind in kinds:
            make_model(folder / f"tiny-{kind}", kind)
        yield folder
    finally:
        shutil.rmtree(folder)
