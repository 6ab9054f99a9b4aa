"""Text generation with our own engine, for any Hugging Face decoder."""

import os
from pathlib import Path
from typing import Any

from dragoman.generation import folder as folders
from dragoman.runtimes.llm import RUNTIME
from dragoman.runtimes.text_model import TextModel


class LanguageModel(TextModel):
    """A folder with a decoder's configuration, safetensors and tokenizer. No pickles are read.

    Its parameters are those of `dragoman.generation.loading.Options`.
    """

    platform = "huggingface_generation"
    runtime = RUNTIME

    def load(self) -> None:
        # Threads that wait for each other spin about as long as lies between two products of a step, and no longer:
        # where others need the cores, spinning costs more than it saves. It is read when PyTorch is first imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "8000")
        # Weights and caches in large pages: a step, which reads them all, takes a tenth to a fifth less. Read likewise.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        super().load()

    def check(self, folder: Path) -> None:
        folders.check(folder)
        RUNTIME.require("torch")

    def start_engine(self, folder: Path) -> Any:
        from dragoman.generation import loading

        chosen = loading.parse_options(self.spec.parameters)
        return loading.load_engine(folder, chosen, self.spec.max_queue, f"text-{self.spec.name}")
