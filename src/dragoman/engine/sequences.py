"""Sequences of a stateful model: their parameters, their requests, and the slots of replicas that they have."""

import asyncio
from collections import deque
from typing import Any

import msgspec
from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.calls import Infer, Request
from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.sequences import SequenceStep, check_id_type, parse_flag, parse_id
from dragoman.system.request_context import Context, get_context
from dragoman.workers.pool import Pool

SequenceId = int | str
SequenceKey = tuple[str, SequenceId]  # owner and id
_PARAMETERS = "sequence_id", "sequence_start", "sequence_end"
_MAX_ID_BYTES = 128


def pop_step(call: Infer, model: str, ids: str = "any") -> tuple[Infer, SequenceStep]:
    """Return the call without Triton's parameters of sequences, and the step that they describe.

    ids: `any`, `integer` or `text`. Raises InvalidInput if they are invalid or there is no id.
    """
    parameters = {name: value for name, value in call.parameters.items() if name not in _PARAMETERS}
    id_ = call.parameters.get("sequence_id")
    if not id_:  # also 0 and "", which clients send for no sequence
        raise InvalidInput(error_texts.missing_sequence_id(model))
    parsed = parse_id(id_)
    check_id_type(parsed, model, ids)
    if isinstance(parsed, str) and len(parsed.encode()) > _MAX_ID_BYTES:
        raise InvalidInput(error_texts.LONG_SEQUENCE_ID)
    start, end = (parse_flag(call.parameters, name) for name in ("sequence_start", "sequence_end"))
    return structs.replace(call, parameters=parameters), SequenceStep(parsed, start, end)


class SequenceTurn(msgspec.Struct, eq=False):
    """A request that waits for its turn in its sequence. A stream's `response` is the pool that computes it."""

    request: Request[Any]
    call: Infer
    response: asyncio.Future[Any]
    stream_ended: asyncio.Event | None
    context: Context = msgspec.field(default_factory=get_context)


class LiveSequence:
    """A sequence. `worker` is None while it waits for a slot; `is_over` once no further request can join it."""

    def __init__(self, key: SequenceKey, number: int) -> None:
        self.key = key
        self.number = number
        self.worker: SequenceWorker | None = None
        self.slot = 0
        self.turns: deque[SequenceTurn] = deque()
        self.running: asyncio.Task[None] | None = None
        self.is_over = False
        self.last_s = 0.0

    @property
    def id(self) -> SequenceId:
        """The id that the client has given it."""
        return self.key[1]

    @property
    def is_idle(self) -> bool:
        return not self.turns and self.running is None and self.worker is not None


class SequenceWorker:
    """A pool of one replica, its free slots, and its sequences that have a request to compute."""

    def __init__(self, pool: Pool, slots: int) -> None:
        self.pool = pool
        self.free = list(range(slots, 0, -1))
        self.ready: deque[LiveSequence] = deque()
        self.tasks: set[asyncio.Task[None]] = set()


def earlier_request_cancelled(id_: SequenceId, model: str) -> InvalidInput:
    return InvalidInput(f"{error_texts.missing_start(id_, model)}; an earlier request of it was cancelled")


def unloading_error(model: str) -> NotReady:
    return NotReady(f"model '{model}' is unloading")
