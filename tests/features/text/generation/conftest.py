"""Tiny models shared by the tests of the text engine."""

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models
from dragoman_text.generation.grammar import GrammarService
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import Reference, grammar_service, load_model


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
    """A model with so short prefill chunks that most prompts take several steps."""
    model = load_model(llama_folder, prefill_chunk=24)
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def grammars(llama: LanguageModel) -> Iterator[GrammarService]:
    with grammar_service(llama) as service:
        yield service
