"""Shared by the runtimes of text generation: the model around an engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from dragoman.core.calls import Generate, Infer, Inference, Tokenize
from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Chat, Generation, Prompt, Tokenized, merge_chunks
from dragoman.generation import folder as folders
from dragoman.runtimes import text_infer
from dragoman.runtimes.files import model_path, transformers_lock

# Prompts of more characters are tokenized in a thread, not on the event loop.
_LONG = 20_000
# Converting one token to text takes as long as tokenizing so many characters.
_CHARACTERS_PER_TOKEN = 16


class TextModel(Model):
    """A folder with a tokenizer, and an engine that a subclass starts.

    `runtime` declares the packages that it needs. Nothing is downloaded, and no code of a model is run.
    """

    runtime: Runtime

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._loaded: Any = None

    def load(self) -> None:
        folder = Path(model_path(self.spec)).resolve()
        self.check(folder)
        with transformers_lock(self.runtime):
            try:
                self._loaded = self.start_engine(folder)
            except DragomanError:
                raise
            except Exception as error:  # the libraries document no class of error
                raise ModelFailed(folders.explain_error(error, folder)) from error

    def check(self, folder: Path) -> None:
        """Raise ModelFailed if a file of the folder or a package is missing."""

    def start_engine(self, folder: Path) -> Any:
        """Start the engine of the folder, a `dragoman.generation.text_engine.TextEngine`."""
        raise NotImplementedError

    def details(self) -> Mapping[str, Any]:
        details: Mapping[str, Any] = self._loaded.details
        return details

    def measurements(self) -> Iterable[Family]:
        families: Iterable[Family] = self._loaded.measurements()
        return families

    async def generate(self, call: Generate) -> AsyncGenerator[Generation, None]:
        if call.sampling.grammar is not None:
            await self._loaded.prepare(call)
        if sum(map(_size, call.prompts)) > _LONG:
            job = await asyncio.to_thread(self._loaded.split_call, call)
        else:
            job = self._loaded.split_call(call)
        async with aclosing(self._loaded.generate(job)) as chunks:
            if call.stream:
                async for chunk in chunks:
                    yield chunk
            else:
                yield merge_chunks([chunk async for chunk in chunks])

    def signature(self) -> Signature:
        return text_infer.SIGNATURE

    async def infer(self, call: Infer) -> Inference:
        return await text_infer.infer(self.generate, call)

    async def infer_stream(self, call: Infer) -> AsyncGenerator[Inference, None]:
        async with aclosing(text_infer.stream(self.generate, call)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def tokenize(self, call: Tokenize) -> Tokenized:
        spans = self._loaded.spans
        size = _size(call.prompt) * (_CHARACTERS_PER_TOKEN if isinstance(call.prompt, tuple) else 1)
        text_and_tokens = await asyncio.to_thread(spans, call.prompt) if size > _LONG else spans(call.prompt)
        return Tokenized(*text_and_tokens)

    async def close(self) -> None:
        if self._loaded is not None:
            await self._loaded.close()


def _size(prompt: Prompt) -> int:
    """Return the number of characters of a prompt, or an equivalent by processing time."""
    if isinstance(prompt, Chat):
        template = _LONG + 1 if prompt.template else 0  # the caller's template may take any time
        return sum((len(str(message)) for message in prompt.messages), template)
    return len(prompt)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the folder's config.json. Raises ModelFailed if it cannot be read."""
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFailed(f"'{folder.name}' has no config.json that can be read: {error}") from error
    return config
