"""A prompt in the engine and the completions generated from it."""

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from dragoman.core.callers import ANYONE, Caller
from dragoman.core.errors import DragomanError
from dragoman.core.text import PromptInfo, Sampling, Text, Token
from dragoman_text.generation.completion_writer import CompletionWriter
from dragoman_text.generation.grammar import GrammarGuide
from dragoman_text.generation.speculation import DraftRate
from dragoman_text.generation.token_sampler import TokenChoice
from dragoman_text.generation.vision import NO_FEATURES, Features


class BatchRow(Struct, frozen=True):
    """Tokens of one sequence in a step.

    start: position of the first token in the sequence.
    wanted: number of last tokens whose logits are returned.
    adapter: name of the LoRA adapter, "" for none.
    prompt: number of tokens of the sequence's prompt.
    drafts: number of last tokens that are drafts; then each token is computed as if it were alone in its step.
    features: those of the prompt's images, as arguments of the model.
    """

    slot: int
    start: int
    tokens: abc.Sequence[int]
    wanted: int = 1
    adapter: str = ""
    prompt: int = 0
    drafts: int = 0
    features: Features = NO_FEATURES


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of a prompt and its completion.

    computed: number of tokens whose keys and values are in the cache's `slot`.
    cached: how many of these came from the prefix cache. A sequence with one pending token is decoding; with several,
        (the rest of) its prompt is computed.
    drafts: tokens that may follow, computed in the same step.
    written: maximum number of tokens in the slot with drafts, 0 without.
    salt: of the prefix cache.
    """

    tokens: list[int]
    prompt: int
    adapter: str = ""
    slot: int = -1
    computed: int = 0
    cached: int = 0
    drafts: list[int] = field(default_factory=list)
    written: int = 0
    rate: DraftRate = field(default_factory=DraftRate)
    features: Features = field(default_factory=dict)
    salt: str = ""

    def branch(self, tokens: list[int], slot: int) -> "Sequence":
        """Return a sequence of these tokens whose computed states are copied to another slot."""
        return Sequence(tokens, self.prompt, self.adapter, slot, self.computed, features=self.features, salt=self.salt)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.computed > 0


class ResultSink(Protocol):
    """Receiver of the results of one prompt; called in the engine's thread."""

    def info(self, index: int, info: PromptInfo) -> None: ...
    def text(self, text: Text) -> None: ...
    def error(self, error: DragomanError) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Validated request for one prompt of a call.

    index: position of the prompt in the call.
    text, tokens: the prompt.
    length: maximum number of new tokens.
    seed: None without sampling.
    guides: creates a grammar guide for each completion.
    bad: forbidden words as tokens.
    checked_s: seconds taken to validate and tokenize the call.
    encoded: the prompt is read by an encoder, so that the completion is a text of its own.
    adapter: the LoRA weights in memory to apply, "" for none.
    features: those of BatchRow.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    sampling: Sampling
    length: int
    stream: bool = False
    seed: int | None = None
    guides: Callable[[], GrammarGuide] | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    checked_s: float | None = None
    encoded: bool = False
    adapter: str = ""
    features: Features = field(default_factory=dict)

    @property
    def continued_tokens(self) -> tuple[int, ...]:
        """Tokens that the completion continues."""
        return () if self.encoded else self.tokens

    def info(self, cached: int, prefill: abc.Sequence[Token], waited_s: float | None) -> PromptInfo:
        """Return what is reported about the prompt; waited_s: None if the time in the queue is unknown."""
        sampling = self.sampling
        return PromptInfo(
            self.text,
            len(self.tokens),
            cached,
            tuple(prefill),
            waited_s,
            self.checked_s,
            self.length,
            self.tokens if sampling.prompt_token_ids else (),
            sampling.temperature if sampling.do_sample else 0.0,
            sampling.top_p,
        )

    @property
    def width(self) -> int:
        """Maximum number of sequences generated from the prompt."""
        sampling = self.sampling
        return sampling.num_beams if sampling.num_beams > 1 else max(sampling.n, sampling.best_of)


@dataclass(eq=False, slots=True)
class GenerationJob:
    """A prompt in the scheduler, with its sequences and their writers.

    writers: empty until the prompt is computed.
    search: the beam search, instead of writers.
    since_s: arrival on the monotonic clock.
    waited_s: seconds in the queue, negative until the first step.
    needs_prompt_logprobs: log-probabilities of the prompt are requested and not yet computed.
    is_ranked: more completions are generated than returned, so that the best are chosen at the end.
    caller: has sent the prompt.
    """

    request: PromptRequest
    sink: ResultSink
    sequences: list[Sequence] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    writers: dict[Sequence, CompletionWriter] = field(default_factory=dict)
    choices: dict[Sequence, int] = field(default_factory=dict)
    ended: list[CompletionWriter] = field(default_factory=list)
    prefill: list[Token] = field(default_factory=list)
    info_sent: bool = False
    search: Any = None
    since_s: float = field(default_factory=time.monotonic)
    waited_s: float = -1.0
    caller: Caller = ANYONE
    needs_prompt_logprobs: bool = field(init=False)
    is_ranked: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.needs_prompt_logprobs = sampling.prompt_logprobs is not None
        self.is_ranked = sampling.num_beams == 1 and self.request.width > sampling.n
        self._begin()

    def _begin(self) -> None:
        tokens = list(self.request.tokens)
        request = self.request
        first = Sequence(
            tokens, len(tokens), request.adapter, features=request.features, salt=request.sampling.cache_salt
        )
        self.sequences = [first]

    @property
    def width(self) -> int:
        return self.request.width if not self.writers else len(self.sequences)

    @property
    def generated(self) -> int:
        """Tokens of all completions so far, of a beam search those of its beams. Callable from any thread."""
        if self.search is not None:
            return sum(len(each.tokens) - each.prompt for each in [*self.sequences])
        return sum(writer.count for writer in [*self.writers.values()])

    @property
    def uses_prefix_cache(self) -> bool:
        return not self.needs_prompt_logprobs

    def restart(self) -> None:
        """Forget computed states. Completions continue from their tokens; a beam search restarts."""
        self.spare = []
        self.prefill = []
        if not self.writers:
            self.search = None
            self._begin()

    def send_info(self) -> None:
        """Report the prompt's information once."""
        if not self.info_sent:
            self.info_sent, self.needs_prompt_logprobs = True, False
            info = self.request.info(self.sequences[0].cached, self.prefill, max(0.0, self.waited_s))
            self.sink.info(self.request.index, info)

    def begin(self, sequence: Sequence, choice: TokenChoice) -> None:
        """Start the slow part of `take` in another thread."""
        self.writers[sequence].chooser.begin(choice.token)

    def take(self, sequence: Sequence, choice: TokenChoice) -> bool:
        """Append a token; return whether the completion is finished. Raises ValueError if the grammar forbids it."""
        writer = self.writers[sequence]
        writer.take(choice)
        if not writer.finish:
            sequence.tokens.append(choice.token)
        else:
            self.ended.append(writer)
        if (self.request.stream or writer.finish) and not self.is_ranked:
            self.sink.text(writer.chunk(self.request.index, self.choices[sequence]))
        return bool(writer.finish)

    def rank(self) -> None:
        """Report the best completions after all have finished."""
        best = sorted(self.ended, key=lambda writer: writer.mean, reverse=True)[: self.request.sampling.n]
        for choice, writer in enumerate(best):
            self.sink.text(writer.chunk(self.request.index, choice))
