"""How many gRPC calls there may be at a time: of all clients, of one address, and health checks of a connection."""

from collections import Counter
from typing import TypeVar

from dragoman.transports.grpc_calls import Refusal
from dragoman.transports.http2.stream import Outlet
from dragoman.transports.limits import Limits
from dragoman.transports.reserve import TOO_MANY_CONNECTIONS

K = TypeVar("K", str, Outlet)

# Health checks at a time of one connection; no other limit holds for them, so that no other client can stop them.
MAX_HEALTH_CALLS = 16


class Admission:
    """Counts the calls under way. A call counts until its work has ended, also if its client has left before."""

    __slots__ = ("_by_address", "_calls", "_health", "_limits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls = 0
        self._by_address: Counter[str] = Counter()
        self._health: Counter[Outlet] = Counter()

    def refusal(self, connection: Outlet, health: bool) -> Refusal | None:
        """Return why a further call of this connection is refused; None if it is not."""
        limits = self._limits
        if health:
            if self._health[connection] < MAX_HEALTH_CALLS:
                return None
            return _exhausted(f"this connection has {MAX_HEALTH_CALLS} health checks under way already")
        if connection.reserved:
            return Refusal("UNAVAILABLE", TOO_MANY_CONNECTIONS.message)
        if self._calls >= limits.max_grpc_calls:
            return _exhausted(f"the server has {limits.max_grpc_calls} calls under way already (max_grpc_calls)")
        most = limits.max_grpc_calls_per_address
        if 0 < most <= self._by_address[connection.address]:
            return _exhausted(f"this address has {most} calls under way already (max_grpc_calls_per_address)")
        return None

    def enter(self, connection: Outlet, health: bool) -> None:
        """A call begins."""
        if health:
            self._health[connection] += 1
        else:
            self._calls += 1
            self._by_address[connection.address] += 1

    def leave(self, connection: Outlet, health: bool) -> None:
        """A call has ended."""
        if health:
            _less(self._health, connection)
        else:
            self._calls -= 1
            _less(self._by_address, connection.address)


def _less(counter: Counter[K], key: K) -> None:
    if counter[key] > 1:
        counter[key] -= 1
    else:
        del counter[key]


def _exhausted(message: str) -> Refusal:
    return Refusal("RESOURCE_EXHAUSTED", message)
