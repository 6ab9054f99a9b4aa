"""Texts whose tokens another engine chooses: it is asked for tokens alone, and all that surrounds them is ours."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dragoman.core.calls import Generate
from dragoman.core.errors import ModelFailed, Overloaded
from dragoman.core.metrics import Family
from dragoman.core.text import Generation, Prompt, PromptInfo, Sampling, Text, Token, TokenSpan, joined
from dragoman.generation.completion_writer import CompletionWriter, EndConditions
from dragoman.generation.input_processor import InputProcessor
from dragoman.generation.job import PromptRequest
from dragoman.generation.token_choice import TokenChoice
from dragoman.generation.token_sampler import TokenSampler
from dragoman.generation.vocabulary import Vocabulary

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ExternalRequest:
    """One text: what is asked for its prompt, what ends it, and its own seed (None where nothing is drawn).

    Stop strings are looked for here, and no engine needs to know them.
    """

    asked: PromptRequest
    ends: EndConditions
    seed: int | None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What an engine has chosen since the piece before.

    The first piece has, where they are asked for, the log-probabilities of the prompt's tokens from the second on, and
    tells how many tokens of the prompt were found in a cache.
    """

    choices: Sequence[TokenChoice]
    prefill: Sequence[TokenChoice] = ()
    cached: int = 0


class TokenEngine(Protocol):
    """Another engine, behind its adapter."""

    def refuse(self, sampling: Sampling) -> None:
        """Raises InvalidInput naming a parameter that this engine does not have, or has in another sense."""

    def tokens(self, wanted: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one text until it ends, the one that ends it included; closing the generator cancels it.

        Raises InvalidInput, ModelFailed or WorkerLost.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A text has gone on."""

    asked: PromptRequest
    place: int
    writer: CompletionWriter
    tokens: TokenChunk


class ExternalEngine:
    """A `TextEngine` on a `TokenEngine`. `ends` are the model's own ends of a text.

    `capacity`: how many prompts may wait or be worked on; further ones are refused with Overloaded. Texts of one prompt
    are texts of their own for the engine, each with its own seed.
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
        self._engine, self._intake, self._ends, self._capacity = engine, intake, ends, capacity
        self._open = 0

    @property
    def active(self) -> int:
        return self._open

    async def prepare(self, call: Generate) -> None:
        self._engine.refuse(call.sampling)
        await self._intake.prepare(call)

    def split_call(self, call: Generate) -> list[PromptRequest]:
        self._engine.refuse(call.sampling)
        return self._intake.split_call(call)

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        return self._intake.vocabulary.spans(prompt)

    def measurements(self) -> Iterable[Family]:
        return ()

    async def generate(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Generation, None]:
        if 0 < self._capacity < self._open + len(prompts):
            raise Overloaded(f"Exceeds maximum queue size of {self._capacity} prompts")
        self._open += len(prompts)
        try:
            async with aclosing(self._pieces(prompts)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._open -= len(prompts)

    async def close(self) -> None:
        await self._engine.close()
        await asyncio.to_thread(self._intake.close)

    async def _pieces(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Generation, None]:
        infos: dict[int, PromptInfo] = {}
        ended: dict[int, list[CompletionWriter]] = {}
        come: list[Text] = []
        told = False
        streams = [self._text(asked, place) for asked in prompts for place in range(asked.width)]
        async with aclosing(merge_streams(streams)) as steps:
            async for step in steps:
                if step.asked.index not in infos:
                    infos[step.asked.index] = self._info(step)
                come += _texts(step, ended)
                if come and len(infos) == len(prompts):
                    about = () if told else tuple(infos[index] for index in sorted(infos))
                    yield joined([Generation(tuple(come), about)])
                    come, told = [], True

    async def _text(self, asked: PromptRequest, place: int) -> AsyncGenerator[_Step, None]:
        given = asked.sampling
        seed = None if asked.seed is None else (asked.seed + place) % 2**64
        # A text that a grammar completes has nothing to go on with.
        own = frozenset() if given.ignore_eos and given.grammar is None else self._ends
        ends = EndConditions(own, frozenset(given.stop_token_ids), asked.length)
        writer = CompletionWriter(self._intake.vocabulary, given, ends, _Elsewhere(), asked.tokens, seed)
        async with aclosing(self._engine.tokens(ExternalRequest(asked, ends, seed))) as pieces:
            async for tokens in pieces:
                for choice in tokens.choices:
                    writer.take(choice)
                    if writer.finish:
                        break
                yield _Step(asked, place, writer, tokens)
                if writer.finish:
                    return
        raise ModelFailed("generation failed: the engine ended a text that was not at its end")

    def _info(self, step: _Step) -> PromptInfo:
        asked, known = step.asked, self._intake.vocabulary
        prefill: list[Token] = []
        if asked.sampling.prompt_logprobs is not None:
            prefill = [_token(known, asked.tokens[0], None), *(_seen(known, choice) for choice in step.tokens.prefill)]
        told = (step.tokens.cached, tuple(prefill), None)  # how long a prompt waits inside an engine, only that knows
        return PromptInfo(asked.text, len(asked.tokens), *told, asked.checked_s, asked.length)


def _texts(step: _Step, ended: dict[int, list[CompletionWriter]]) -> list[Text]:
    """What there is to tell of a step: of texts that compete, the best, when all of them are over."""
    asked, writer = step.asked, step.writer
    if asked.width == asked.sampling.n:
        told = asked.stream or writer.finish
        return [writer.chunk(asked.index, step.place)] if told else []
    if not writer.finish:
        return []
    rivals = ended.setdefault(asked.index, [])
    rivals.append(writer)
    if len(rivals) < asked.width:
        return []
    best = sorted(rivals, key=lambda each: each.mean, reverse=True)[: asked.sampling.n]
    return [each.chunk(asked.index, place) for place, each in enumerate(best)]


def _token(known: Vocabulary, token: int, logprob: float | None) -> Token:
    return Token(token, known.text(token), logprob, token in known.special)


def _seen(known: Vocabulary, choice: TokenChoice) -> Token:
    top = tuple(_token(known, token, logprob) for token, logprob in choice.top)
    return Token(choice.token, known.text(choice.token), choice.logprob, choice.token in known.special, top)


class _Elsewhere(TokenSampler):
    """Stands for a choice that is made elsewhere."""

    def __init__(self) -> None:
        super().__init__(Sampling(), 0, (), frozenset(), ())

    def accept(self, token: int) -> None:
        pass


async def merge_streams(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """What comes of all streams, as it comes; the first error of any ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    come: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_drained(stream, come)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            news = await come.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                left -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drained(stream: AsyncGenerator[Item, None], into: "asyncio.Queue[Item | BaseException | None]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                into.put_nowait(item)
    except Exception as error:
        into.put_nowait(error)
    else:
        into.put_nowait(None)


def end_tokens(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that end a text, as the folder's generation_config or config says, or else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset(found) if isinstance(found, list) else frozenset({int(found)})
    own = vocabulary.tokenizer.eos_token_id
    return frozenset() if own is None else frozenset({int(own)})
