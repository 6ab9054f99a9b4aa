"""Input processing: validate the parameters of a call and tokenize its prompts."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from dragoman.core.calls import Generate
from dragoman.core.errors import InvalidInput, TooLong
from dragoman.core.text import Prompt, Sampling
from dragoman.generation.checks import check
from dragoman.generation.engine_limits import EngineLimits
from dragoman.generation.grammar import GrammarGuide, GrammarService
from dragoman.generation.grammar_compiler import GrammarLimits
from dragoman.generation.job import PromptRequest
from dragoman.generation.vocabulary import Vocabulary


class InputProcessor:
    """Processes the calls of one model. `budget`: capacity of the key-value cache in tokens.

    follows_grammars: False if an external engine applies grammars, so that they are only validated here.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        budget: int,
        ends: frozenset[int],
        adapters: frozenset[str],
        grammars: GrammarLimits | None = None,
        *,
        follows_grammars: bool = True,
    ) -> None:
        self.vocabulary, self._limits, self._budget, self._adapters = vocabulary, limits, budget, adapters
        vocabulary.context = limits.max_context
        self._follows_grammars = follows_grammars
        self._grammars = GrammarService(
            vocabulary.tokenizer, vocabulary.size, sorted(ends), grammars, follows=follows_grammars
        )

    async def prepare(self, call: Generate) -> None:
        """Compile the grammar of a call in another thread. Raises InvalidInput or Overloaded."""
        if call.sampling.grammar is not None:
            await asyncio.shield(asyncio.wrap_future(self._grammars.compiled(call.sampling.grammar)))

    def close(self) -> None:
        self._grammars.close()

    def split_call(self, call: Generate) -> list[PromptRequest]:
        """Return one request for each prompt. Raises InvalidInput naming the parameter."""
        began_s = time.monotonic()
        if not call.prompts:
            raise InvalidInput("prompts: expected at least one, got none")
        sampling = call.sampling
        check(sampling, self.vocabulary.size, self._limits.max_batch, self._adapters)
        bad = tuple(self._words(sampling))
        guides = self._guides(sampling)
        found = []
        for index, prompt in enumerate(call.prompts):
            text, tokens = self._tokens(prompt, sampling)
            length = self._length(len(tokens), sampling)
            seed = None
            if sampling.do_sample:
                seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
            found.append(PromptRequest(index, text, tuple(tokens), sampling, length, call.stream, seed, guides, bad))
        checked_s = time.monotonic() - began_s
        return [replace(each, checked_s=checked_s) for each in found]

    def _tokens(self, prompt: Prompt, sampling: Sampling) -> tuple[str, list[int]]:
        text, tokens = self.vocabulary.encode(prompt, bounded=sampling.truncate is None)
        if not tokens:
            raise InvalidInput("prompt: expected at least one token, got an empty prompt")
        if sampling.truncate is not None:
            tokens = tokens[-sampling.truncate :]
        return text, tokens

    def _length(self, prompt: int, sampling: Sampling) -> int:
        """Return the maximum number of new tokens."""
        context = self._limits.max_context
        left = context - prompt
        if left < 1:
            raise TooLong(f"prompt: expected less than {context} tokens, the context of the model, got {prompt}")
        wanted = left if sampling.max_new_tokens is None else sampling.max_new_tokens
        if sampling.shorten:
            wanted = min(wanted, left)
        if wanted > left:
            raise TooLong(
                f"max_new_tokens: prompt and new tokens must be at most {context}, the context of the model; got "
                f"{prompt} in the prompt and {wanted} new"
            )
        width = max(sampling.n, sampling.best_of, sampling.num_beams)
        if width * (prompt + wanted + 64) > self._budget and width > 1:
            raise InvalidInput(
                f"n, best_of and num_beams: {width} sequences of {prompt + wanted} tokens do not fit into "
                f"memory, which has room for {self._budget} tokens"
            )
        return wanted

    def _words(self, sampling: Sampling) -> list[tuple[int, ...]]:
        """Return forbidden words as tokens, at the start of a text and after a space."""
        found = []
        for word in sampling.bad_words:
            for text in dict.fromkeys((word, " " + word.lstrip())):
                tokens = tuple(self.vocabulary.cut(text))
                if tokens and tokens not in found:
                    found.append(tokens)
        return found

    def _guides(self, sampling: Sampling) -> Callable[[], GrammarGuide] | None:
        if sampling.grammar is None:
            return None
        compiled = self._grammars.compiled(sampling.grammar).result()
        return compiled.guide if self._follows_grammars else None
