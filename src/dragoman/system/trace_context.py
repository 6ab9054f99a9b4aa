"""W3C Trace Context: parse and format `traceparent` and `tracestate`, and decide which requests are traced."""

import math
import random
import re
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from dragoman.system.request_context import get_context, values

PARENT: Final = "traceparent"
STATE: Final = "tracestate"
_IS_SAMPLED: Final = 1
# The flags of version 00 and of level 2: sampled, and that the trace id is random. Others are not passed on.
_KNOWN_FLAGS: Final = 3
# A version, the ids of the trace and of the client's span, and flags. Later versions may have more behind them.
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(
    r"[a-z0-9][-a-z0-9_*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_MEMBERS: Final = 32
_MAX_STATE_CHARACTERS: Final = 4096
# Seeded by the system; a model that seeds the module `random` must not make trace ids repeat.
_random: Final = random.Random()  # noqa: S311 - ids, no secrets


class Trace(NamedTuple):
    """The trace of a request.

    `span_id`: of the span of this request; if it is not sampled, of the client's span.
    `flags`: two hexadecimal digits.
    `state`: the client's `tracestate`.
    `parent_id`: of the client's span, or "".
    """

    trace_id: str
    span_id: str
    flags: str
    state: str
    parent_id: str
    is_sampled: bool


class Sampler:
    """Decides which requests are traced.

    ratio: fraction of requests without a valid `traceparent`, 0 to 1. is_parent_based: the client decides if it sends
    one; else the ratio holds for all requests, by their trace ids. `is_on`: if not, the trace context of a client is
    passed on, and nothing is traced.
    """

    def __init__(self, ratio: float, is_parent_based: bool = True) -> None:
        self.is_parent_based = is_parent_based
        self.is_on = True
        self.set_ratio(ratio)

    def set_ratio(self, ratio: float) -> None:
        """Set the fraction of requests to trace."""
        # The lower half of a trace id decides, so that services with the same ratio decide alike.
        self._bound = round(ratio * (1 << 64))
        self.ratio = self._bound / (1 << 64)
        # Requests until the next one that is sampled. Subtracting 1 for each takes a fifth of the time of a random
        # number for each, and samples with the same probability.
        self.countdown = self._draw()

    def _draw(self) -> int:
        """Return a number of the geometric distribution."""
        if 0 < self.ratio < 1:
            return int(math.log(1 - _random.random()) / math.log1p(-self.ratio)) + 1
        return 1 if self.ratio else sys.maxsize

    def trace(self, headers: Mapping[str, str], is_health: bool = False) -> Trace | None:
        """Return the trace of a request; None if it is not traced and has no valid `traceparent`.

        The caller has subtracted 1 from `countdown`; at 0 a request without `traceparent` is traced. Health checks are
        traced only if their client says so.
        """
        is_drawn = self.countdown <= 0
        if is_drawn:
            self.countdown = self._draw()
        if PARENT in headers and (parent := parse_parent(headers[PARENT])) is not None:
            return self._continue(*parent, parse_state(headers.get(STATE, "")))
        if not is_drawn or is_health:
            return None
        trace_id = f"{_random.getrandbits(64) | 1:016x}{_random.randrange(self._bound):016x}"
        return Trace(trace_id, new_span_id(), "03", "", "", True)

    def _continue(self, trace_id: str, parent_id: str, flags: int, state: str) -> Trace:
        if not self.is_on:
            return Trace(trace_id, parent_id, f"{flags:02x}", state, parent_id, False)
        is_sampled = bool(flags & _IS_SAMPLED) if self.is_parent_based else int(trace_id[16:], 16) < self._bound
        span_id = new_span_id() if is_sampled else parent_id
        return Trace(trace_id, span_id, f"{flags & ~_IS_SAMPLED | is_sampled:02x}", state, parent_id, is_sampled)


def parse_parent(header: str) -> tuple[str, str, int] | None:
    """Return the trace id, the span id and the flags of a `traceparent`; None if it is invalid."""
    match = _PARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    is_invalid = version == "ff" or (version == "00" and rest) or not (trace_id.strip("0") and span_id.strip("0"))
    return None if is_invalid else (trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS)


def parse_state(header: str) -> str:
    """Return a `tracestate` without empty members; "" if it is invalid or too long."""
    if not header or len(header) > _MAX_STATE_CHARACTERS:
        return ""
    members = [member for part in header.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    is_valid = len(keys) == len(members) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""


def new_span_id() -> str:
    """Return the id of a new span."""
    return f"{_random.getrandbits(64) | 1:016x}"


def trace_headers() -> dict[str, str]:
    """Return `traceparent` and `tracestate` of the request that the running code works for, to send to other services.

    Empty outside of traced requests, and in a batch of several traced requests, which have no common parent.
    """
    _, trace_id, span_id, flags, state = (*values(get_context()), "", "", "", "", "")[:5]
    if not flags:
        return {}
    headers = {PARENT: f"00-{trace_id}-{span_id}-{flags}"}
    return {**headers, STATE: state} if state else headers
