"""What is asked over a wire, how its answer is read, and until when: free of any input and output."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dragoman.core.errors import DeadlineExceeded
from dragoman.formats.message import InferenceResponse
from dragoman.formats.policy import Buffer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of all the time that a call may take, its retries included."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """None or 0 is no limit."""
        limit_s = timeout_s or math.inf
        return cls(limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float | None:
        """Seconds that are left, None for no limit; DeadlineExceeded where none are."""
        if math.isinf(self.at_s):
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise self.over()
        return left

    def allows(self, wait_s: float) -> bool:
        """Whether time is left after a wait."""
        return time.monotonic() + wait_s < self.at_s

    def over(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self.timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class HttpQuestion:
    """The buffers of the body are sent one after the other."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Names of headers are in lower case; the body is decompressed."""

    status: int
    headers: dict[str, str]
    body: Buffer


@dataclass(frozen=True, slots=True)
class GrpcQuestion:
    """One message, for a method of the protocol's service."""

    method: str
    message: bytes


@dataclass(frozen=True, slots=True)
class Exchange(Generic[T]):
    """One question, and how its answer is read: `read` raises what the answer tells."""

    question: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class StreamExchange:
    """One question, and how its answers are read: `reader` makes a function from the bytes that come next to the
    answers that are complete with them."""

    question: Any
    reader: Callable[[], Callable[[Buffer], Iterator[InferenceResponse]]]
