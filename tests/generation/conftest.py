"""Tiny models shared by the tests of the text engine."""

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models
from dragoman.runtimes.llm.model import LanguageModel
from generation.helpers import Reference, load_model


@pytest.fixture(scope="session")
def folders() -> Iterator[Path]:
    with text_models.tiny_models("llama", "gpt2") as folder:
        yield folder


@pytest.fixture(scope="session")
def llama_folder(folders: Path) -> Path:
    return folders / "tiny-llama"


@pytest.fixture(scope="session")
def reference(llama_folder: Path) -> Reference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Reference(llama_folder)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Iterator[LanguageModel]:
    """In chunks so short that most prompts take several steps."""
    model = load_model(llama_folder, prefill_chunk=24)
    yield model
    asyncio.run(model.close())
