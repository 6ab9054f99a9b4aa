"""Requests, responses and deadlines of the client, independent of transports."""

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
    """End of the time limit of a call, including retries."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> "Deadline":
        """Return the deadline after a timeout in seconds; None or 0 is no limit."""
        limit_s = timeout_s or math.inf
        return cls(limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float | None:
        """Return the seconds left, None without a limit. Raises DeadlineExceeded if none are left."""
        if math.isinf(self.at_s):
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise self.expired()
        return left

    def allows(self, wait_s: float) -> bool:
        """Return whether time is left after a wait."""
        return time.monotonic() + wait_s < self.at_s

    def expired(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no response within {self.timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class RestRequest:
    """HTTP request; the buffers of the body are sent one after the other."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class RestResponse:
    """HTTP response with header names in lower case and the body decompressed."""

    status: int
    headers: dict[str, str]
    body: Buffer


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """gRPC request: a method of the inference service and one message."""

    method: str
    message: bytes


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[T]):
    """A request and the parser of its response; `read` raises the error that a response reports."""

    request: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class RemoteStream:
    """A request and the parser of its streamed responses.

    `reader` returns a function that takes the next bytes and yields the responses completed by them.
    """

    request: Any
    reader: Callable[[], Callable[[Buffer], Iterator[InferenceResponse]]]
