"""Text generation by an external engine that returns tokens; prompts, stop strings and text are handled here."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dragoman.core.calls import Generate
from dragoman.core.chunks import ChunkStream, Take, pushes
from dragoman.core.errors import ModelFailed, Overloaded
from dragoman.core.foreign_code import is_interruption
from dragoman.core.metrics import Family
from dragoman.core.text import Generation, Prompt, PromptInfo, Sampling, Text, Token, TokenSpan, merge_chunks
from dragoman_text.generation.completion_writer import CompletionWriter, EndConditions
from dragoman_text.generation.input_processor import InputProcessor
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.token_gaps import TokenGaps
from dragoman_text.generation.token_sampler import TokenChoice, TokenSampler

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ExternalRequest:
    """One completion: request of its prompt, end conditions and seed (None without sampling).

    Stop strings are found here and need not be supported by the engine.
    """

    prompt: PromptRequest
    ends: EndConditions
    seed: int | None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens since the last chunk.

    prefill: in the first chunk, if requested, log-probabilities of the prompt's tokens from the second on. cached:
    number of prompt tokens found in a cache.
    """

    choices: Sequence[TokenChoice]
    prefill: Sequence[TokenChoice] = ()
    cached: int = 0


class TokenEngine(Protocol):
    """External engine, implemented by an adapter."""

    @property
    def ended(self) -> str:
        """Why the engine has ended and can never answer again; "" while it runs."""

    def check(self, sampling: Sampling) -> None:
        """Raise InvalidInput for a parameter that this engine does not support, or with another meaning."""

    def tokens(self, request: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one completion including the last; closing the generator cancels it.

        Raises InvalidInput, ModelFailed or WorkerLost.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Update:
    """New tokens of a completion."""

    prompt: PromptRequest
    writer: CompletionWriter
    tokens: TokenChunk
    is_last: bool
    text: Text | None  # what is new, to be sent now


class ExternalEngine:
    """A `TextEngine` on top of a `TokenEngine`. `ends`: end tokens of the model.

    capacity: maximum number of open prompts; further ones are rejected with Overloaded. Several completions of one
    prompt are separate requests to the engine, each with its own seed.
    """

    def __init__(
        self,
        engine: TokenEngine,
        intake: InputProcessor,
        ends: frozenset[int],
        capacity: int,
        details: Mapping[str, Any],
    ) -> None:
        self.details = details
        self.engine, self._intake, self._ends, self._capacity = engine, intake, ends, capacity
        self._open = 0
        self._gaps = TokenGaps()

    @property
    def active(self) -> int:
        return self._open

    @property
    def ended(self) -> str:
        return self.engine.ended

    async def prepare(self, call: Generate) -> None:
        self.engine.check(call.sampling)
        await self._intake.prepare(call)

    def split_call(self, call: Generate) -> list[PromptRequest]:
        self.engine.check(call.sampling)
        return self._intake.split_call(call)

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        return self._intake.vocabulary.spans(prompt)

    def measurements(self) -> Iterable[Family]:
        return self._gaps.families()

    @pushes
    async def generate(self, prompts: Sequence[PromptRequest], take: Take[Generation]) -> None:
        if 0 < self._capacity < self._open + len(prompts):
            raise Overloaded(f"Exceeds maximum queue size of {self._capacity} prompts")
        self._open += len(prompts)
        try:
            await ChunkStream.of(self._chunks(prompts)).send_to(take)
        finally:
            self._open -= len(prompts)

    async def close(self) -> None:
        await self.engine.close()
        await asyncio.to_thread(self._intake.close)

    async def _chunks(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Generation, None]:
        infos: dict[int, PromptInfo] = {}
        ended: dict[int, list[CompletionWriter]] = {}
        received: list[Text] = []
        reported = False
        streams = [self._text(prompt, choice) for prompt in prompts for choice in range(prompt.width)]
        async with aclosing(merge_streams(streams)) as steps:
            async for step in steps:
                if step.prompt.index not in infos:
                    infos[step.prompt.index] = self._info(step)
                received += _texts(step, ended)
                if received and len(infos) == len(prompts):
                    about = () if reported else tuple(infos[index] for index in sorted(infos))
                    yield merge_chunks([Generation(tuple(received), about)])
                    received, reported = [], True

    async def _text(self, prompt: PromptRequest, index: int) -> AsyncGenerator[_Update, None]:
        sampling = prompt.sampling
        seed = None if prompt.seed is None else (prompt.seed + index) % 2**64
        # After a complete grammar there is no token to continue with.
        eos = frozenset() if sampling.ignore_eos and sampling.grammar is None else self._ends
        ends = EndConditions(eos, frozenset(sampling.stop_token_ids), prompt.length)
        writer = CompletionWriter(self._intake.vocabulary, sampling, ends, _ExternalSampler(), prompt.tokens, seed)
        async with aclosing(self.engine.tokens(ExternalRequest(prompt, ends, seed))) as chunks:
            async for tokens in chunks:
                self._gaps.count(writer, len(tokens.choices))
                for choice in tokens.choices:
                    writer.take(choice)
                    if writer.finish:
                        break
                # The text is taken here: the completion may go on before a slow reader takes this update.
                is_sent = prompt.width == sampling.n and (prompt.stream or writer.finish)
                text = writer.chunk(prompt.index, index) if is_sent else None
                yield _Update(prompt, writer, tokens, bool(writer.finish), text)
                if writer.finish:
                    return
        raise ModelFailed("generation failed: the engine ended a completion early")

    def _info(self, step: _Update) -> PromptInfo:
        prompt, vocabulary = step.prompt, self._intake.vocabulary
        prefill: list[Token] = []
        if prompt.sampling.prompt_logprobs is not None:
            prefill = [
                vocabulary.token(prompt.tokens[0], None),
                *(vocabulary.token(each.token, each.logprob, each.top) for each in step.tokens.prefill),
            ]
        return prompt.info(step.tokens.cached, prefill, None)


def _texts(step: _Update, ended: dict[int, list[CompletionWriter]]) -> list[Text]:
    """Return the new chunks of an update; with `best_of`, the best completions after all have finished."""
    prompt = step.prompt
    if prompt.width == prompt.sampling.n:
        return [] if step.text is None else [step.text]
    if not step.is_last:
        return []
    candidates = ended.setdefault(prompt.index, [])
    candidates.append(step.writer)
    if len(candidates) < prompt.width:
        return []
    best = sorted(candidates, key=lambda each: each.mean, reverse=True)[: prompt.sampling.n]
    return [each.chunk(prompt.index, choice) for choice, each in enumerate(best)]


class _ExternalSampler(TokenSampler):
    """Placeholder: the external engine samples."""

    def __init__(self) -> None:
        super().__init__(Sampling(), 0, (), frozenset(), ())

    def accept(self, token: int) -> None:
        pass


async def merge_streams(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they arrive; the first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    received: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(stream, received)) for stream in streams]
    try:
        remaining = len(tasks)
        while remaining:
            item_or_error = await received.get()
            if isinstance(item_or_error, BaseException):
                raise item_or_error
            if item_or_error is None:
                remaining -= 1
            else:
                yield item_or_error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(stream: AsyncGenerator[Item, None], into: "asyncio.Queue[Item | BaseException | None]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                into.put_nowait(item)
    except BaseException as error:
        if is_interruption(error):
            raise
        into.put_nowait(error)
    else:
        into.put_nowait(None)
