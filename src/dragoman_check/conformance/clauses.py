"""Clauses of a protocol's document, and results of checking them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NoReturn, TypeVar

Level = Literal["must", "should"]
F = TypeVar("F", bound=Callable[..., None])


class Outcome(StrEnum):
    """Outcome of one clause."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_OFFERED = "not offered"
    NOT_TRIED = "not tried"


class ClauseFailed(Exception):
    """The server violates the clause; the message names what was expected and what was received."""


class NotOffered(Exception):
    """The server does not offer the optional feature or the protocol."""


class NotTried(Exception):
    """The clause cannot be checked with this server, model or command."""


@dataclass(frozen=True, slots=True)
class Clause:
    """A requirement of a document and the function that checks it with a protocol's context."""

    id: str
    section: str
    requirement: str
    level: Level
    changes_server: bool
    check: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol: its document, its clauses, and `prepare`, which returns the context of their checks.

    `prepare` raises NotOffered or NotTried for the protocol as a whole.
    """

    name: str
    title: str
    document: str
    prepare: Callable[[Any], Any]
    clauses: "ClauseList"


@dataclass(slots=True)
class ClauseList:
    """Clauses in the order in which they are checked. Ids begin with the prefix."""

    prefix: str
    _clauses: list[Clause] = field(default_factory=list)

    def add(self, name: str, section: str, level: Level = "must", changes_server: bool = False) -> Callable[[F], F]:
        """Return a decorator that adds a check; the first line of its docstring is the requirement."""

        def decorate(check: F) -> F:
            requirement = (check.__doc__ or "").partition("\n")[0].rstrip(".")
            self._clauses.append(Clause(f"{self.prefix}-{name}", section, requirement, level, changes_server, check))
            return check

        return decorate

    def __iter__(self) -> Iterator[Clause]:
        return iter(self._clauses)

    def __len__(self) -> int:
        return len(self._clauses)


@dataclass(frozen=True, slots=True)
class RecordedExchange:
    """One request and its response, as shown in reports."""

    sent: str
    received: str


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """Result of one clause: outcome, reason and the exchanges with the server."""

    protocol: Protocol
    clause: Clause
    outcome: Outcome
    reason: str
    exchanges: tuple[RecordedExchange, ...]

    @property
    def violates(self) -> bool:
        """Return whether a requirement (not a recommendation) is violated."""
        return self.outcome is Outcome.FAIL and self.clause.level == "must"


def fail(expected: str, got: object) -> NoReturn:
    """Raise ClauseFailed with a shortened representation of `got`."""
    text = got if isinstance(got, str) else repr(got)
    raise ClauseFailed(f"expected {expected}, got {text if len(text) <= 200 else text[:197] + '...'}")


def expect(condition: object, expected: str, got: object) -> None:
    """Raise ClauseFailed unless the condition holds."""
    if not condition:
        fail(expected, got)


def field_of(value: object, name: str, kind: type | tuple[type, ...], what: str = "the response") -> Any:
    """Return a field of a JSON object. Raises ClauseFailed if it is missing or of another type."""
    if not isinstance(value, dict):
        fail(f"{what} to be an object", value)
    expect(name in value, f"'{name}' in {what}", value)
    field_value = value[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_bool = isinstance(field_value, bool) and bool not in kinds  # which Python counts as an integer
    names = " or ".join(k.__name__ for k in kinds)
    expect(isinstance(field_value, kind) and not is_bool, f"'{name}' in {what} to be {names}", field_value)
    return field_value
