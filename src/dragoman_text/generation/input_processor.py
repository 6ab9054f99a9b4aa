"""Input processing: validate the parameters of a call and tokenize its prompts."""

import asyncio
import math
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dragoman.core.calls import Generate
from dragoman.core.errors import AdapterNotFound, InvalidInput, TooLong
from dragoman.core.text import Chat, InfillPrompt, Prompt, Sampling
from dragoman_text.generation.generation_config import apply_defaults
from dragoman_text.generation.grammar import GrammarGuide, GrammarService
from dragoman_text.generation.grammar_compiler import GrammarLimits
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.vision import Features
from dragoman_text.generation.vocabulary import Vocabulary

# Maximum number of top tokens returned with each token.
MAX_TOP_LOGPROBS = 100

_NO_DEFAULTS: Mapping[str, Any] = {}
_LIMITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: v is None or v >= 1, "at least 1"),
    "min_new_tokens": (lambda v: v >= 0, "at least 0"),
    "temperature": (lambda v: v > 0, "more than 0"),
    "top_k": (lambda v: v >= 0, "at least 0"),
    "top_p": (lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "from 0 to 1"),
    "typical_p": (lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "repetition_penalty": (lambda v: v > 0, "more than 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
    "length_penalty": (lambda v: abs(v) <= 100, "from -100 to 100"),
    "n": (lambda v: v >= 1, "at least 1"),
    "best_of": (lambda v: v >= 0, "at least 0"),
    "num_beams": (lambda v: v >= 1, "at least 1"),
    "early_stopping": (lambda v: v in (True, False, "never"), "true, false or 'never'"),
    "top_logprobs": (lambda v: 0 <= v <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
    "prompt_logprobs": (lambda v: v is None or 0 <= v <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
    "truncate": (lambda v: v is None or v >= 0, "at least 0"),
    "truncation_side": (lambda v: v in ("left", "right"), "'left' or 'right'"),
    "seed": (lambda v: v is None or 0 <= v < 2**64, "from 0 to 2**64 - 1"),
    "stop": (lambda v: all(v), "non-empty strings"),
    "bad_words": (lambda v: all(v), "non-empty strings"),
}


def unknown_adapter(name: str, names: Iterable[str], skipped: Mapping[str, str]) -> AdapterNotFound:
    """Return the error for an adapter that is not there, with the reason if it was skipped."""
    if name in skipped:
        return AdapterNotFound(f"adapter: '{name[:128]}' is not loaded: {skipped[name]}")
    return AdapterNotFound(f"adapter: unknown adapter '{name[:128]}', expected one of {', '.join(names) or 'none'}")


def check(
    sampling: Sampling,
    vocabulary: int,
    max_batch: int,
    adapters: Collection[str],
    skipped: Mapping[str, str] = _NO_DEFAULTS,
) -> None:
    """Raise InvalidInput naming the parameter, the expected range and the value."""
    for name, (holds, expected) in _LIMITS.items():
        value = getattr(sampling, name)
        if (isinstance(value, float) and not math.isfinite(value)) or not holds(value):
            raise InvalidInput(f"{name}: expected {expected}, got {value!r}")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        invalid = [token for token in getattr(sampling, name) if not 0 <= token < vocabulary]
        if invalid:
            raise InvalidInput(f"{name}: expected token ids from 0 to {vocabulary - 1}, got {invalid[0]}")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidInput("logit_bias: expected finite numbers")
    for adapter in (sampling.adapter, *sampling.adapters):
        if adapter and adapter not in adapters:
            raise unknown_adapter(adapter, sorted(adapters), skipped)
    _check_combinations(sampling, max_batch)


def _check_combinations(sampling: Sampling, max_batch: int) -> None:
    """Check parameters that exclude each other."""
    if sampling.max_new_tokens is not None and sampling.min_new_tokens > sampling.max_new_tokens:
        raise InvalidInput(
            f"min_new_tokens: expected at most max_new_tokens, {sampling.max_new_tokens}, got {sampling.min_new_tokens}"
        )
    if sampling.num_beams > 1:
        if sampling.do_sample:
            raise InvalidInput("num_beams: beam search does not sample; expected do_sample false or num_beams 1")
        if max(sampling.n, sampling.best_of) > sampling.num_beams:
            raise InvalidInput(f"n: expected at most num_beams, {sampling.num_beams}, got {sampling.n}")
    elif sampling.best_of and sampling.best_of < sampling.n:
        raise InvalidInput(f"best_of: expected at least n, {sampling.n}, got {sampling.best_of}")
    width = max(sampling.n, sampling.best_of, sampling.num_beams)
    if width > max_batch:
        raise InvalidInput(f"n, best_of and num_beams: expected at most {max_batch}, got {width}")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Maximum number of sequences, of tokens of a prompt with its completion, and of prompt tokens per step."""

    max_batch: int = 32
    max_context: int = 2048
    prefill_chunk: int = 256


class InputProcessor:
    """Processes the calls of one model. `budget`: capacity of the key-value cache in tokens.

    follows_grammars: False if an external engine applies grammars, so that they are only validated here.
    encodes: the model has an encoder for prompts, so that a completion does not continue its prompt.
    defaults: the model's own values of sampling parameters. skipped: why adapters were not loaded, by name.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        budget: int,
        ends: frozenset[int],
        adapters: Collection[str],
        grammars: GrammarLimits | None = None,
        *,
        follows_grammars: bool = True,
        encodes: bool = False,
        defaults: Mapping[str, Any] = _NO_DEFAULTS,
        skipped: Mapping[str, str] = _NO_DEFAULTS,
    ) -> None:
        self.vocabulary, self._limits, self._budget, self._adapters = vocabulary, limits, budget, adapters
        vocabulary.context = limits.max_context
        self._skipped = skipped
        self._follows_grammars, self._encodes, self._defaults = follows_grammars, encodes, defaults
        self._grammars = GrammarService(
            vocabulary.tokenizer, vocabulary.size, sorted(ends), grammars, follows=follows_grammars
        )

    async def prepare(self, call: Generate) -> None:
        """Compile the grammar of a call in another thread. Raises InvalidInput or Overloaded."""
        if call.sampling.grammar is not None:
            await asyncio.shield(asyncio.wrap_future(self._grammars.compile(call.sampling.grammar)))

    def close(self) -> None:
        self._grammars.close()

    def split_call(self, call: Generate) -> list[PromptRequest]:
        """Return one request for each prompt. Raises InvalidInput naming the parameter."""
        began_s = time.monotonic()
        if not call.prompts:
            raise InvalidInput("prompts: expected at least one, got none")
        sampling = apply_defaults(call.sampling, self._defaults)
        check(sampling, self.vocabulary.size, self._limits.max_batch, self._adapters, self._skipped)
        if self._encodes and sampling.prompt_logprobs is not None:
            raise InvalidInput("prompt_logprobs: expected none: this model reads prompts with an encoder")
        if sampling.adapters and len(sampling.adapters) != len(call.prompts):
            count = len(call.prompts)
            raise InvalidInput(
                f"adapter: expected one adapter for each of {count} prompts, got {len(sampling.adapters)}"
            )
        bad = tuple(self._words(sampling))
        guides = self._guides(sampling)
        prompts = []
        for index, prompt in enumerate(call.prompts):
            text, tokens, features = self._tokens(prompt, sampling)
            length = self._length(len(tokens), sampling)
            seed = None
            if sampling.do_sample:
                seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
            own = replace(sampling, adapter=sampling.adapters[index]) if sampling.adapters else sampling
            request = PromptRequest(index, text, tuple(tokens), own, length, call.stream, seed, guides, bad)
            prompts.append(replace(request, encoded=self._encodes, features=features))
        checked_s = time.monotonic() - began_s
        return [replace(each, checked_s=checked_s) for each in prompts]

    def _tokens(self, prompt: Prompt, sampling: Sampling) -> tuple[str, list[int], Features]:
        text, tokens, features = self._encode(prompt, sampling)
        if not tokens:
            raise InvalidInput("prompt: expected at least one token, got an empty prompt")
        if sampling.truncate is not None:
            if features or isinstance(prompt, InfillPrompt):
                kind = "images" if features else "a suffix"
                raise InvalidInput(f"truncate: expected none for a prompt with {kind}")
            count = sampling.truncate or self._max_prompt_tokens(sampling)
            if len(tokens) > count:
                tokens = self._truncate(tokens, count, prompt, sampling.truncation_side)
        return text, tokens, features

    def _truncate(self, tokens: list[int], count: int, prompt: Prompt, side: str) -> list[int]:
        """Return `count` tokens of a prompt. As in transformers and TGI the special tokens around a text stay.

        A chat keeps the beginning-of-sequence token that its template writes.
        """
        before, after = self.vocabulary.special_tokens_around(prompt, tokens)
        rest = count - before - after
        if rest < 0:
            raise InvalidInput(
                f"truncate: expected at least {before + after}, the number of special tokens around the prompt, "
                f"got {count}"
            )
        end = len(tokens) - after
        inner = tokens[before : before + rest] if side == "right" else tokens[end - rest : end]
        return [*tokens[:before], *inner, *tokens[end:]]

    def _encode(self, prompt: Prompt, sampling: Sampling) -> tuple[str, list[int], Features]:
        """Return the text, the tokens and the features of a prompt.

        A conversation may lose its oldest turns, as few as possible so that it fits with the new tokens; at least the
        last turn stays.
        """
        bounded = sampling.truncate is None
        last = len(prompt.turns) - 1 if isinstance(prompt, Chat) and prompt.drops_turns else 0
        if not isinstance(prompt, Chat) or last < 1:
            return self.vocabulary.encode(prompt, bounded=bounded)
        chat, most = prompt, self._max_prompt_tokens(sampling)
        fitting: tuple[str, list[int], Features] | None = None  # of the fewest turns dropped so far

        def fits(dropped: int) -> bool:
            nonlocal fitting
            try:
                encoding = self.vocabulary.encode(chat.without_turns(dropped) if dropped else chat, bounded=True)
            except TooLong:
                return False
            if len(encoding[1]) > most:
                return False
            fitting = encoding
            return True

        if not fits(0):
            bisect_left(range(1, last), True, key=fits)
        return fitting or self.vocabulary.encode(chat.without_turns(last), bounded=bounded)

    def _max_prompt_tokens(self, sampling: Sampling) -> int:
        """Return the number of prompt tokens that fit into the context with the new tokens, at least 1."""
        new = 1 if sampling.max_new_tokens is None or self._encodes else sampling.max_new_tokens
        return max(1, self._limits.max_context - new)

    def _length(self, prompt: int, sampling: Sampling) -> int:
        """Return the maximum number of new tokens."""
        context = self._limits.max_context
        available = context - prompt
        if available < 1:
            raise TooLong(
                f"prompt: expected less than {context} tokens, the model's maximum context limit, got {prompt}"
            )
        if self._encodes:  # the decoder has a context of its own
            available = context
        count = available if sampling.max_new_tokens is None else sampling.max_new_tokens
        if sampling.shorten:
            count = min(count, available)
        if count > available:
            raise TooLong(
                f"max_new_tokens: prompt and new tokens must be at most {context}, the model's maximum context limit; "
                f"got {prompt} in the prompt and {count} new"
            )
        width = max(sampling.n, sampling.best_of, sampling.num_beams)
        if width * (prompt + count + 64) > self._budget and width > 1:
            raise InvalidInput(
                f"n, best_of and num_beams: {width} sequences of {prompt + count} tokens do not fit into "
                f"memory, which has room for {self._budget} tokens"
            )
        return count

    def _words(self, sampling: Sampling) -> list[tuple[int, ...]]:
        """Return forbidden words as tokens, at the start of a text and after a space."""
        words = []
        for word in sampling.bad_words:
            for text in dict.fromkeys((word, " " + word.lstrip())):
                tokens = tuple(self.vocabulary.tokenize(text))
                if tokens and tokens not in words:
                    words.append(tokens)
        return words

    def _guides(self, sampling: Sampling) -> Callable[[], GrammarGuide] | None:
        if sampling.grammar is None:
            return None
        compiled = self._grammars.compile(sampling.grammar).result()
        return compiled.guide if self._follows_grammars else None
