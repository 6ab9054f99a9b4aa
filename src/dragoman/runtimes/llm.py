"""Language models that continue texts, on the engine of our own: any Hugging Face decoder folder."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from dragoman.core.calls import Generate, Infer, Inference, Tokenize
from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.text import Chat, Generation, Prompt, Tokenized, joined
from dragoman.generation import folder as folders
from dragoman.runtimes import llm_infer
from dragoman.runtimes.files import model_path, package, transformers_alone

# Prompts of more characters are cut into tokens aside, so that others are answered meanwhile.
_LONG = 20_000


class LanguageModel(Model):
    """A folder with a decoder's configuration, safetensors and tokenizer.

    Of the spec's parameters: those of `dragoman.generation.loading.Options`. Nothing is downloaded, no code of a model
    is run, and no pickles are read.
    """

    platform = "huggingface_generation"
    placement: Placement = "thread"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._loaded: Any = None

    def load(self) -> None:
        # Threads that wait for each other spin no longer than this: where others need the cores, as this server's own
        # event loop does, spinning takes ten times what it saves. It is read when PyTorch is first imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        folder = Path(model_path(self.spec)).resolve()
        folders.check(folder)
        package("torch", "text")
        with transformers_alone("text"):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        from dragoman.generation import loading

        chosen = loading.options(self.spec.parameters)
        try:
            self._loaded = loading.loaded(folder, chosen, self.spec.max_queue, f"text-{self.spec.name}")
        except DragomanError:
            raise
        except Exception as fault:  # transformers promises no class of error
            raise ModelFailed(folders.explained(fault, folder)) from fault

    def details(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._loaded.details
        return found

    async def generate(self, call: Generate) -> AsyncGenerator[Generation, None]:
        intake, service = self._loaded.intake, self._loaded.service
        if call.sampling.grammar is not None or sum(map(_size, call.prompts)) > _LONG:
            asked = await asyncio.to_thread(intake.asked, call)
        else:
            asked = intake.asked(call)
        async with aclosing(service.generate(asked)) as pieces:
            if call.stream:
                async for piece in pieces:
                    yield piece
            else:
                yield joined([piece async for piece in pieces])

    def signature(self) -> Signature:
        return llm_infer.SIGNATURE

    async def infer(self, call: Infer) -> Inference:
        return await llm_infer.whole(self.generate, call)

    async def infer_stream(self, call: Infer) -> AsyncGenerator[Inference, None]:
        async with aclosing(llm_infer.pieces(self.generate, call)) as pieces:
            async for piece in pieces:
                yield piece

    async def tokenize(self, call: Tokenize) -> Tokenized:
        spans = self._loaded.intake.vocabulary.spans
        cut = await asyncio.to_thread(spans, call.prompt) if _size(call.prompt) > _LONG else spans(call.prompt)
        return Tokenized(*cut)

    async def close(self) -> None:
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.service.close)


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, Chat):
        return sum(len(str(message)) for message in prompt.messages)
    return len(prompt)
