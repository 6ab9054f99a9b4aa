"""Text generation with our own engine, for any Hugging Face decoder."""

import os
from pathlib import Path
from typing import Any

from dragoman.core.errors import NotSupported
from dragoman.core.runtime import Runtime
from dragoman.core.text_engine_calls import LoadAdapter, ResetPrefixCache, UnloadAdapter
from dragoman.runtimes.pretrained import takes_images
from dragoman.system.process import freeze_imports
from dragoman.system.threads import call_in_thread
from dragoman_text.generation import folder as folders
from dragoman_text.generation.gguf_file import GgufFile
from dragoman_text.runtimes.llm import RUNTIME
from dragoman_text.runtimes.text_model import TextModel

VISION = Runtime(load=RUNTIME.load, extra="images")


class LanguageModel(TextModel):
    """A folder with a model's configuration, safetensors and tokenizer, or a GGUF file. No pickles are read.

    Its parameters are those of `dragoman_text.generation.loading.Options`.
    """

    platform = "huggingface_generation"
    runtime = RUNTIME
    _file: GgufFile | None = None

    def load(self) -> None:
        # Both are read when PyTorch is first imported. Waiting threads spin only about as long as the time between two
        # matrix products of a step: longer spinning takes the cores from other processes.
        os.environ.setdefault("GOMP_SPINCOUNT", "8000")
        # Huge pages for weights and caches make a step, which reads all of them, 10 to 20 % faster.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        try:
            super().load()
        finally:
            self._file = None

    def check(self, folder: Path) -> None:
        self._file = folders.check(folder)  # kept for the load, which reads its header only once
        if self._file is not None:
            texts = (self._file.metadata.get(f"general.{key}") for key in ("description", "name"))
            self.description = next((text for text in texts if isinstance(text, str) and text), "")
        RUNTIME.require("torch")
        if folder.is_dir() and takes_images(folder):
            VISION.require("PIL")

    def start_engine(self, folder: Path) -> Any:
        if folder.is_dir():  # imported later too; its objects are to be among those that are exempt
            RUNTIME.require("transformers.modeling_utils")
        from dragoman_text.generation import loading

        freeze_imports()
        options = loading.parse_options(self.spec.parameters)
        return loading.load_engine(folder, options, self.spec.max_queue, f"text-{self.spec.name}")

    async def load_adapter(self, call: LoadAdapter) -> None:
        self._check_local()
        load = self.text_engine.adapters.load
        await call_in_thread(load, call.name, call.path, replaces=call.replaces, is_pinned=call.pinned)

    async def unload_adapter(self, call: UnloadAdapter) -> None:
        self._check_local()
        self.text_engine.adapters.unload(call.name)

    async def reset_prefix_cache(self, call: ResetPrefixCache) -> None:
        if self.spec.replicas > 1:
            raise NotSupported("the prefix cache can be reset only for a model with one replica: each has its own")
        await self.text_engine.reset_prefix_cache()

    def _check_local(self) -> None:
        """Raise NotSupported if other processes have copies of the model, or it would be lost with its process."""
        if self.spec.replicas > 1 or self.spec.placement == "process":
            raise NotSupported(
                "adapters can be loaded and unloaded only for a model with one replica in the server's process; with "
                "others, set the parameter 'adapters' or use the folder 'adapters' of the model"
            )
