"""A text model without a language model, for the benchmark of token streams."""

from collections.abc import AsyncIterator

import dragoman
from benchmarks.token_ticks import TokenEngine
from dragoman.core.calls import Generate
from dragoman.core.text import FinishReason, Generation, PromptInfo, Text


class TokenStream(dragoman.Model):
    """A text model whose engine is a stub: its streams get a token at each step."""

    placement = "inline"

    def load(self) -> None:
        self._engine = TokenEngine()

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        limit, generated = call.sampling.max_new_tokens or 16, 0
        prompts: tuple[PromptInfo, ...] = (PromptInfo(str(call.prompts[0]), 1),)
        async for text, count in self._engine.tokens(limit):
            generated += count
            finish: FinishReason = "length" if generated == limit else ""
            yield Generation((Text(text=text, generated=generated, finish=finish),), prompts)
            prompts = ()
