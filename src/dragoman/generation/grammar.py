"""Grammars: which tokens may come next so that the text stays what it must be, by llguidance."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.text import Grammar

# White space between the parts of JSON: none, a space, or a line break and what indents the next line. More would be
# allowed by JSON, and a small model that has lost its way writes nothing else to the end.
_SPACE = r"(?: |\r?\n(?: {0,16}|\t{0,8}))?"
# Characters of a grammar: what reading it takes grows with their square.
_MOST: Mapping[str, int] = {"json_schema": 1 << 18, "regex": 1 << 16, "choice": 1 << 16, "lark": 1 << 15}
_KINDS = ("json_schema", "json_object", "regex", "lark", "choice")


class Guide(Protocol):
    """Follows one text through its grammar."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, one answer for each of the vocabulary. Raises InvalidInput where that cannot be
        told within bounds."""

    def took(self, token: int) -> None:
        """The token that came. Raises ValueError if it must not."""

    def copy(self) -> "Guide":
        """A guide that goes its own way from here."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""


class Grammars:
    """Makes guides for one vocabulary. `tokenizer` is transformers', `size` counts tokens as the logits do."""

    def __init__(self, tokenizer: Any, size: int, ends: list[int]) -> None:
        self._tokenizer, self._size, self._ends = tokenizer, size, ends
        self._known: Any = None

    def guide(self, grammar: Grammar) -> Guide:
        """Takes up to a second the first time, and some milliseconds then. Raises InvalidInput for a wrong grammar."""
        llguidance = self._library()
        if self._known is None:
            self._known = llguidance.hf.from_tokenizer(self._tokenizer, self._size, self._ends or None)
        try:
            compiled = _compiled(llguidance.LLMatcher, grammar)
        except ValueError as fault:
            raise InvalidInput(f"grammar: {fault}") from fault
        wrong = llguidance.LLMatcher.validate_grammar(compiled, self._known)
        if wrong and not wrong.startswith("WARNING"):
            raise InvalidInput(f"grammar: {wrong}")
        return _Follower(llguidance.LLMatcher(self._known, compiled, log_level=0), self._size, self._ends)

    def _library(self) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as fault:
            raise NotSupported(f"grammar: needs the package 'llguidance' ({fault})") from fault
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise NotSupported("grammar: needs a fast tokenizer, a tokenizer.json in the model's folder")
        return llguidance


def _compiled(matcher: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's own form; ValueError where it cannot be read."""
    made: Mapping[str, Any] = {
        "json_schema": lambda text: matcher.grammar_from_json_schema(_spaced(text)),
        "json_object": lambda _: matcher.grammar_from_json_schema(_spaced('{"type": "object"}')),
        "regex": matcher.grammar_from_regex,
        "lark": matcher.grammar_from_lark,
        "choice": lambda text: matcher.grammar_from_lark(_choice(text)),
    }
    if grammar.kind not in made:
        raise ValueError(f"expected one of {', '.join(_KINDS)}, got {grammar.kind!r}")
    most = _MOST.get(grammar.kind, 0)
    if len(grammar.text) > most > 0:
        raise ValueError(f"expected at most {most} characters, got {len(grammar.text)}")
    compiled: str = made[grammar.kind](grammar.text)
    return compiled


def _spaced(text: str) -> str:
    """The schema with bounds on white space, unless it says itself how JSON is to be written."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(schema, dict):
        return text
    return json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **schema})


def _choice(text: str) -> str:
    options = json.loads(text)
    if not isinstance(options, list) or not options or not all(isinstance(each, str) and each for each in options):
        raise ValueError("expected a list of texts that are not empty")
    return "start: " + " | ".join(map(_literal, options))


def _literal(text: str) -> str:
    """The text as Lark's: with JSON's escapes, and one for the control character that JSON writes as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Follower:
    def __init__(self, matcher: Any, size: int, ends: list[int]) -> None:
        self._matcher, self._size, self._ends = matcher, size, ends

    def allowed(self) -> npt.NDArray[np.bool_]:
        found = np.zeros(self._size, np.bool_)
        if self.ended and not self._matcher.is_error():
            found[self._ends] = True
            return found
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little")[: self._size]
        found[: len(bits)] = bits
        return found

    def _check(self) -> None:
        """llguidance gives up where to go on would take too long, or too much memory."""
        told = self._matcher.get_error() if self._matcher.is_error() else ""
        if "too" in told.lower() or "max is" in told:
            raise InvalidInput(f"grammar: too complex to follow: {told.partition(chr(10))[0][:200]}")

    def took(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise ValueError(f"token {token} is not what the grammar allows: {self._matcher.get_error()}")

    def copy(self) -> "Guide":
        return _Follower(self._matcher.deep_copy(), self._size, self._ends)

    @property
    def ended(self) -> bool:
        stopped: bool = self._matcher.is_stopped() and not self._matcher.is_error()
        return stopped
