"""Grammars: masks of the tokens that a grammar allows next, by llguidance."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.text import Grammar
from dragoman.generation import grammar_worker
from dragoman.generation.grammar_compiler import (
    GrammarCompiler,
    GrammarLimits,
    GrammarVocabulary,
    deep_threads,
    release_memory,
)

Mask = npt.NDArray[np.bool_]


class GrammarGuide(Protocol):
    """Follows one text through its grammar.

    What takes time is begun with `begin` and done in another thread, so that nobody else's text waits for it. `took`
    waits for it.
    """

    def allowed(self) -> Mask:
        """Which tokens may come next, one answer for each of the vocabulary."""

    def begin(self, token: int) -> None:
        """Begin to find what may follow the token, which will be taken next."""

    def wait(self, until_s: float) -> bool:
        """Wait for what was begun, at most until then on the monotonic clock. Gives whether it is done.

        Raises InvalidInput where it takes too long.
        """

    def accept(self, token: int) -> None:
        """The token that came. Raises ValueError if it must not, InvalidInput if what follows takes too much to find,
        or nothing can."""

    def copy(self) -> "GrammarGuide":
        """A guide that goes its own way from here."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""


class GrammarService:
    """Makes guides for one vocabulary. `tokenizer` is transformers', `size` counts tokens as the logits do.

    `follows`: False where another engine follows the grammar, and it is only checked here.
    """

    def __init__(
        self, tokenizer: Any, size: int, ends: list[int], limits: GrammarLimits | None = None, *, follows: bool = True
    ) -> None:
        self._tokenizer, self._size, self._ends, self._follows = tokenizer, size, ends, follows
        self._limits = limits or GrammarLimits()
        self._compiler: GrammarCompiler[_Start] | None = None
        self._known: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def compiled(self, grammar: Grammar) -> "Future[_Start]":
        """Compile the grammar in other threads; its result's `guide` gives a guide.

        Its errors: InvalidInput if the grammar is wrong or too large, Overloaded if too many are being compiled. Raises
        them too, and NotSupported. The first one takes up to a second, and later ones some milliseconds.
        """
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._vocabulary, self._limits, self._start)
        return self._compiler.compiled(grammar)

    def guide(self, grammar: Grammar) -> GrammarGuide:
        """As `compiled`, and waits for it."""
        return self.compiled(grammar).result().guide()

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

    def _start(self, text: str) -> "_Start":
        """In the compiler's threads."""
        if not self._follows:
            return _Start(None)
        if self._known is None or self._threads is None:
            from llguidance import LLTokenizer

            known = self._vocabulary()
            self._known = LLTokenizer(known.tokenizer, n_vocab=known.size, eos_token=known.ends or None)
            self._threads = deep_threads(2, "grammar-step")
        try:
            matcher = grammar_worker.matcher(self._known, text)
            mask = _mask(matcher, self._size, self._ends)
        except ValueError as error:
            raise InvalidInput(f"grammar: {error}") from error
        return _Start(_Follower(matcher, mask, self._threads, self._ends, self._limits.grammar_step_s))


class _Start:
    """A compiled grammar, where a text begins."""

    def __init__(self, follower: "_Follower | None") -> None:
        self._follower = follower

    def guide(self) -> GrammarGuide:
        if self._follower is None:
            raise NotSupported("grammar: it is followed by another engine")
        return self._follower.copy()


class _Follower:
    """A `GrammarGuide`. `mask` are the tokens that may come next, found in one of the `threads` after each token."""

    def __init__(self, matcher: Any, mask: Mask, threads: ThreadPoolExecutor, ends: list[int], limit_s: float) -> None:
        self._matcher, self._mask, self._threads, self._ends, self._limit_s = matcher, mask, threads, ends, limit_s
        self._begun: tuple[int, Future[None]] | None = None
        self._since_s: float | None = None
        self.ended = bool(matcher.is_stopped())

    def allowed(self) -> Mask:
        return self._mask

    def begin(self, token: int) -> None:
        self._since_s = None
        self._begun = token, self._threads.submit(self._advance, token)

    def wait(self, until_s: float) -> bool:
        if self._begun is None:
            return True
        future = self._begun[1]
        try:
            future.exception(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            if self._since_s is not None and time.monotonic() - self._since_s > self._limit_s:
                raise InvalidInput(
                    "grammar: too complex to follow: expected the tokens that may come next within "
                    f"{self._limit_s:g} s (grammar_step_s)"
                ) from None
            return False
        return True

    def accept(self, token: int) -> None:
        if self._begun is None or self._begun[0] != token:
            self.begin(token)
        while not self.wait(time.monotonic() + self._limit_s):
            pass
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].result()

    def copy(self) -> "_Follower":
        if self._begun is not None:
            self._begun[1].exception()  # nothing else may touch the matcher meanwhile
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _advance(self, token: int) -> None:
        """In one of the threads, and by nothing else meanwhile."""
        self._since_s = time.monotonic()
        if not self._mask[token]:
            raise ValueError(f"token {token} is not what the grammar allows")
        try:
            if not self._matcher.consume_token(token):
                raise ValueError(grammar_worker.first_line(self._matcher.get_error()))
            mask = _mask(self._matcher, len(self._mask), self._ends)
        except ValueError as error:
            release_memory()
            why = "" if str(error) == grammar_worker.NO_TEXT else "too complex to follow: "
            raise InvalidInput(f"grammar: {why}{error}") from error
        self._mask, self.ended = mask, bool(self._matcher.is_stopped())


def _mask(matcher: Any, size: int, ends: list[int]) -> Mask:
    """The tokens that may come next: those that end a text where it is complete."""
    if matcher.is_stopped() and not matcher.is_error():
        found = np.zeros(size, np.bool_)
        found[ends] = True
        return found
    return grammar_worker.allowed_tokens(matcher, size)
