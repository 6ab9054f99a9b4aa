"""What a pool promises: to hold a model, to answer calls with it, and to tell the truth about its health."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dragoman.core.calls import Call, Request
from dragoman.core.metrics import Family
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement

A = TypeVar("A")

# How many pieces of a stream a model may be ahead of its reader.
WINDOW = 16
# How long a stream whose reader takes nothing may keep its model from other calls, in seconds.
STALL_S = 30.0
# How many calls one replica of an `async` model works on at a time.
CONCURRENT = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a model tells once it is loaded. `calls` are the types of call that it can answer.

    `streams`: it answers Infer with any number of pieces, not exactly one. `concurrent`: one replica works on
    many calls at a time (its methods are `async`), so no call waits for another.
    `merges`: to how many rows its calls are merged unless the operator says otherwise.
    `details`: what metadata tells besides. `handlers`: paths of its own.
    """

    signature: Signature
    platform: str
    calls: frozenset[type[Call[Any]]]
    streams: bool = False
    concurrent: bool = False
    merges: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[str, ...] = ()


class WrongPlacement(Exception):
    """A model that nobody has placed, asked before it is loaded, prefers to be in another place."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.placement = placement


class Pool(Protocol):
    """A model in one or more replicas. All methods run on the event loop.

    A pool is made with the spec of its model and a function that it calls whenever `ready` changes.
    """

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None: ...

    @property
    def ready(self) -> bool:
        """Whether at least one replica can take a call now."""

    @property
    def unavailable(self) -> str:
        """Why no replica can answer, as its model says; "" while one can."""

    @property
    def capacity(self) -> int:
        """How many calls are computed at the same time; further ones wait inside."""

    @property
    def replicated(self) -> bool:
        """Whether it holds as many replicas as the spec says; else one, which answers whatever comes."""

    async def start(self) -> Loaded:
        """Load every replica. Raises ModelFailed, what the model's own checks raise, NotReady where it may load
        later, or WrongPlacement."""

    def measurements(self) -> Sequence[Family]:
        """What the replicas in this process measure of themselves, each for itself; of others nothing is known."""

    async def call(self, request: Request[A]) -> A:
        """The one answer. Raises NotSupported where the model gives none or several.

        Cancelling drops the call if it waits, and tells the model's worker if it runs.
        """

    def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        """The answers as they come; closing the generator cancels the call."""

    async def close(self) -> None:
        """Stop at once: calls that still run or wait fail with NotReady."""
