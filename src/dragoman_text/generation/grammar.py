"""Grammars: masks of the tokens that a grammar allows next, by llguidance."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.text import Grammar
from dragoman_text.generation import grammar_worker
from dragoman_text.generation.grammar_compiler import GrammarCompiler, GrammarLimits, GrammarVocabulary, deep_threads
from dragoman_text.generation.memory import release_memory

Mask = npt.NDArray[np.bool_]


class GrammarGuide(Protocol):
    """State of one completion in its grammar.

    `begin` starts the computation of the next mask in another thread, so that other sequences do not wait for it.
    """

    def next_mask(self) -> Mask:
        """Return the mask of tokens that may come next, [vocabulary]."""

    def begin(self, token: int) -> None:
        """Start to compute the mask after a token, which must be accepted next."""

    def wait(self, until_s: float) -> bool:
        """Wait until a time on the monotonic clock; return whether the mask is available.

        Raises InvalidInput if it takes too long.
        """

    def accept(self, token: int) -> None:
        """Append a token. Raises ValueError if it is not allowed, InvalidInput if the next mask takes too long or is
        empty."""

    def copy(self) -> "GrammarGuide":
        """Return an independent copy."""

    @property
    def is_ended(self) -> bool:
        """Whether the text is complete and no token may follow."""


class GrammarService:
    """Grammars of one vocabulary: a tokenizer of transformers, `size` logits and the end tokens `ends`.

    follows: False if an external engine applies the grammar, so that it is only validated here.
    """

    def __init__(
        self, tokenizer: Any, size: int, ends: list[int], limits: GrammarLimits | None = None, *, follows: bool = True
    ) -> None:
        self._tokenizer, self._size, self._ends, self._follows = tokenizer, size, ends, follows
        self._limits = limits or GrammarLimits()
        self._compiler: GrammarCompiler[CompiledGrammar] | None = None
        self._known: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Compile a grammar in other threads: up to a second for the first one, some milliseconds for later ones.

        The future and this function raise InvalidInput if the grammar is invalid or too large and Overloaded if too
        many are being compiled; this function also NotSupported.
        """
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._vocabulary, self._limits, self._start)
        return self._compiler.compile(grammar)

    def guide(self, grammar: Grammar) -> GrammarGuide:
        return self.compile(grammar).result().guide()

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _vocabulary(self) -> GrammarVocabulary:
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise NotSupported(f"grammar: needs the package 'llguidance' ({error})") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise NotSupported("grammar: needs a fast tokenizer, a tokenizer.json in the model's folder")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return GrammarVocabulary(backend.to_str(), self._size, self._ends)

    def _start(self, text: str) -> "CompiledGrammar":
        """Create the initial guide of a grammar; called in the compiler's threads."""
        if not self._follows:
            return CompiledGrammar(None)
        if self._known is None or self._threads is None:
            from llguidance import LLTokenizer

            vocabulary = self._vocabulary()
            self._known = LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.ends or None)
            self._threads = deep_threads(2, "grammar-step")
        try:
            matcher = grammar_worker.matcher(self._known, text)
            mask = _mask(matcher, self._size, self._ends)
        except ValueError as error:
            raise InvalidInput(f"grammar: {error}") from error
        return CompiledGrammar(_Guide(matcher, mask, self._threads, self._ends, self._limits.grammar_step_s))


class CompiledGrammar:
    """A compiled grammar with the guide of an empty completion."""

    def __init__(self, guide: "_Guide | None") -> None:
        self._guide = guide

    def guide(self) -> GrammarGuide:
        if self._guide is None:
            raise NotSupported("grammar: applied by the external engine")
        return self._guide.copy()


class _Guide:
    """A `GrammarGuide` on a matcher of llguidance; masks are computed in `threads`."""

    def __init__(self, matcher: Any, mask: Mask, threads: ThreadPoolExecutor, ends: list[int], limit_s: float) -> None:
        self._matcher, self._mask, self._threads, self._ends, self._limit_s = matcher, mask, threads, ends, limit_s
        self._pending: tuple[int, Future[None]] | None = None
        self._started_s: float | None = None
        self.is_ended = bool(matcher.is_stopped())

    def next_mask(self) -> Mask:
        return self._mask

    def begin(self, token: int) -> None:
        self._started_s = None
        self._pending = token, self._threads.submit(self._advance, token)

    def wait(self, until_s: float) -> bool:
        if self._pending is None:
            return True
        future = self._pending[1]
        try:
            future.exception(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            if self._started_s is not None and time.monotonic() - self._started_s > self._limit_s:
                raise InvalidInput(
                    "grammar: too complex to follow: expected the tokens that may come next within "
                    f"{self._limit_s:g} s (grammar_step_s)"
                ) from None
            return False
        return True

    def accept(self, token: int) -> None:
        if self._pending is None or self._pending[0] != token:
            self.begin(token)
        while not self.wait(time.monotonic() + self._limit_s):
            pass
        pending, self._pending = self._pending, None
        if pending is not None:
            pending[1].result()

    def copy(self) -> "_Guide":
        if self._pending is not None:
            self._pending[1].exception()  # the thread uses the matcher until then
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _advance(self, token: int) -> None:
        """Consume a token and compute the next mask, in one of the threads."""
        self._started_s = time.monotonic()
        if not self._mask[token]:
            raise ValueError(f"token {token} is not allowed by the grammar")
        try:
            if not self._matcher.consume_token(token):
                raise ValueError(grammar_worker.first_line(self._matcher.get_error()))
            mask = _mask(self._matcher, len(self._mask), self._ends)
        except ValueError as error:
            release_memory()
            why = "" if str(error) == grammar_worker.UNSATISFIABLE else "too complex to follow: "
            raise InvalidInput(f"grammar: {why}{error}") from error
        self._mask, self.is_ended = mask, bool(self._matcher.is_stopped())


def _mask(matcher: Any, size: int, ends: list[int]) -> Mask:
    """Return the mask of tokens that may come next: the end tokens if the text is complete."""
    if matcher.is_stopped() and not matcher.is_error():
        mask = np.zeros(size, np.bool_)
        mask[ends] = True
        return mask
    return grammar_worker.allowed_tokens(matcher, size)
