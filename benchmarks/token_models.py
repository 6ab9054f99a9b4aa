"""Text models without a language model, for the benchmark of token streams."""

from collections.abc import AsyncIterator

import dragoman
from benchmarks.token_ticks import TOKEN, TokenEngine
from dragoman.core.calls import Generate
from dragoman.core.chunks import NOTHING, Relay, StreamEnd, Take, pushes
from dragoman.core.text import FinishReason, Generation, PromptInfo, Text


class TokenStream(dragoman.Model):
    """A text model whose engine is a stub, which brings the tokens of a step to its streams as that of `llm` does."""

    placement = "inline"

    def load(self) -> None:
        self._engine = TokenEngine()

    @pushes
    async def generate(self, call: Generate, take: Take[Generation]) -> None:
        limit, generated = call.sampling.max_new_tokens or 16, 0
        engine = self._engine

        def next_chunk() -> Generation:
            nonlocal generated
            if generated == limit:
                raise StreamEnd
            count = min(limit - generated, engine.take(wake))
            if not count:
                nothing: Generation = NOTHING
                return nothing
            prompts = () if generated else (PromptInfo(str(call.prompts[0]), 1),)
            generated += count
            finish: FinishReason = "length" if generated == limit else ""
            return Generation((Text(text=TOKEN * count, generated=generated, finish=finish),), prompts)

        relay = Relay(take, next_chunk)
        wake = relay.wake
        engine.join(wake)
        try:
            await relay.run()
        finally:
            engine.leave(wake)


class TokenGenerator(TokenStream):
    """The same as an async generator."""

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:  # type: ignore[override]
        limit, generated = call.sampling.max_new_tokens or 16, 0
        prompts: tuple[PromptInfo, ...] = (PromptInfo(str(call.prompts[0]), 1),)
        async for text, count in self._engine.tokens(limit):
            generated += count
            finish: FinishReason = "length" if generated == limit else ""
            yield Generation((Text(text=text, generated=generated, finish=finish),), prompts)
            prompts = ()
