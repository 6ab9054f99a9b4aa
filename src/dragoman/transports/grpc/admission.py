"""Limits on gRPC calls: of the server, of one client address, and health checks of a connection."""

import math
from weakref import WeakValueDictionary

from dragoman.transports.grpc.handlers import GrpcError
from dragoman.transports.http2.stream import StreamConnection
from dragoman.transports.limits import Limits
from dragoman.transports.reserve import TOO_MANY_CONNECTIONS

# Health checks at a time of one connection; no other limit holds for them, so that no other client can stop them.
MAX_HEALTH_CALLS = 16


class AddressCalls:
    """How many calls of one address are under way."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls = 0


class ConnectionCalls:
    """How many health checks of one connection are under way, and the calls of its address."""

    __slots__ = ("address", "health_checks")

    def __init__(self, address: AddressCalls) -> None:
        self.address = address
        self.health_checks = 0


class Admission:
    """Counts the calls under way. A call counts until its work has ended, also if its client has left before."""

    __slots__ = ("_addresses", "_calls", "_max_calls", "_max_calls_per_address")

    def __init__(self, limits: Limits) -> None:
        self._max_calls = limits.max_grpc_calls
        self._max_calls_per_address = limits.max_grpc_calls_per_address or math.inf
        self._calls = 0
        # An address is forgotten with the last connection from there.
        self._addresses: WeakValueDictionary[str, AddressCalls] = WeakValueDictionary()

    def enter(self, connection: StreamConnection, health: bool) -> GrpcError | None:
        """Count a further call of this connection; return why it is error, and not counted, if it is."""
        of: ConnectionCalls | None = connection.calls
        if of is None:
            of = connection.calls = ConnectionCalls(self._addresses.setdefault(connection.address, AddressCalls()))
        if health:
            if of.health_checks >= MAX_HEALTH_CALLS:
                return _exhausted(f"this connection has {MAX_HEALTH_CALLS} health checks under way already")
            of.health_checks += 1
            return None
        if connection.reserved:
            return GrpcError("UNAVAILABLE", TOO_MANY_CONNECTIONS.message)
        if self._calls >= self._max_calls:
            return _exhausted(f"the server has {self._max_calls} calls under way already (max_grpc_calls)")
        address = of.address
        if address.calls >= self._max_calls_per_address:
            most = self._max_calls_per_address
            return _exhausted(f"this address has {most} calls under way already (max_grpc_calls_per_address)")
        self._calls += 1
        address.calls += 1
        return None

    def leave(self, connection: StreamConnection, health: bool) -> None:
        """A call that was counted has ended."""
        of: ConnectionCalls = connection.calls
        if health:
            of.health_checks -= 1
        else:
            self._calls -= 1
            of.address.calls -= 1


def _exhausted(message: str) -> GrpcError:
    return GrpcError("RESOURCE_EXHAUSTED", message)
