"""From a call to what the engine is asked: prompts become tokens, and parameters are checked."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from dragoman.core.calls import Generate
from dragoman.core.errors import InvalidInput, TooLong
from dragoman.core.text import Prompt, Sampling
from dragoman.generation.checks import check
from dragoman.generation.grammar import Grammars, Guide
from dragoman.generation.grammar_compiler import GrammarLimits
from dragoman.generation.job import Asked
from dragoman.generation.limits import Limits
from dragoman.generation.vocabulary import Vocabulary


class Intake:
    """Takes calls for one model. `budget` is how many tokens the cache holds in all.

    `follows_grammars`: False where another engine follows them, and they are only checked here.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: Limits,
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
        self._grammars = Grammars(
            vocabulary.tokenizer, vocabulary.size, sorted(ends), grammars, follows=follows_grammars
        )

    async def prepare(self, call: Generate) -> None:
        """Compile the call's grammar, away from this thread and from the engine's. Raises what it is refused with."""
        if call.sampling.grammar is not None:
            await asyncio.shield(asyncio.wrap_future(self._grammars.compiled(call.sampling.grammar)))

    def close(self) -> None:
        self._grammars.close()

    def asked(self, call: Generate) -> list[Asked]:
        """One for each prompt. Raises InvalidInput naming the parameter; nothing has been computed then."""
        began_s = time.monotonic()
        if not call.prompts:
            raise InvalidInput("prompts: expected at least one, got none")
        given = call.sampling
        check(given, self.vocabulary.size, self._limits.max_batch, self._adapters)
        bad = tuple(self._words(given))
        guides = self._guides(given)
        found = []
        for index, prompt in enumerate(call.prompts):
            text, tokens = self._tokens(prompt, given)
            length = self._length(len(tokens), given)
            seed = None
            if given.do_sample:
                seed = given.seed if given.seed is not None else secrets.randbits(63)
            found.append(Asked(index, text, tuple(tokens), given, length, call.stream, seed, guides, bad))
        checked_s = time.monotonic() - began_s
        return [replace(each, checked_s=checked_s) for each in found]

    def _tokens(self, prompt: Prompt, given: Sampling) -> tuple[str, list[int]]:
        text, tokens = self.vocabulary.encode(prompt, bounded=given.truncate is None)
        if not tokens:
            raise InvalidInput("prompt: expected at least one token, got an empty prompt")
        if given.truncate is not None:
            tokens = tokens[-given.truncate :]
        return text, tokens

    def _length(self, prompt: int, given: Sampling) -> int:
        """How many tokens the text may have."""
        context = self._limits.max_context
        left = context - prompt
        if left < 1:
            raise TooLong(f"prompt: expected less than {context} tokens, the context of the model, got {prompt}")
        wanted = left if given.max_new_tokens is None else given.max_new_tokens
        if given.shorten:
            wanted = min(wanted, left)
        if wanted > left:
            raise TooLong(
                f"max_new_tokens: prompt and new tokens must be at most {context}, the context of the model; got "
                f"{prompt} in the prompt and {wanted} new"
            )
        width = max(given.n, given.best_of, given.num_beams)
        if width * (prompt + wanted + 64) > self._budget and width > 1:
            raise InvalidInput(
                f"n, best_of and num_beams: {width} texts of {prompt + wanted} tokens do not fit into memory, which "
                f"has room for {self._budget} tokens"
            )
        return wanted

    def _words(self, given: Sampling) -> list[tuple[int, ...]]:
        """Forbidden words as tokens, at the start of a text and after a space."""
        found = []
        for word in given.bad_words:
            for text in dict.fromkeys((word, " " + word.lstrip())):
                tokens = tuple(self.vocabulary.cut(text))
                if tokens and tokens not in found:
                    found.append(tokens)
        return found

    def _guides(self, given: Sampling) -> Callable[[], Guide] | None:
        if given.grammar is None:
            return None
        compiled = self._grammars.compiled(given.grammar).result()
        return compiled.guide if self._follows_grammars else None
