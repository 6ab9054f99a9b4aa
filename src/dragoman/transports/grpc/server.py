"""The gRPC server."""

import errno
import ssl
from collections.abc import Sequence

from dragoman.access.control import AccessControl
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.calls import GrpcCalls
from dragoman.transports.http2.limits import http2_limits
from dragoman.transports.http2.protocol import http2
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

# Time for cancelled work to end.
_CANCEL_S = 1.0


class GrpcServer:
    """Serves the gRPC services of protocols on one port."""

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[GrpcProtocol],
        *,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        executor: MessageExecutor | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self._engine = engine
        self._protocols = tuple(protocols)
        self._limits = limits
        self._executor = executor or MessageExecutor(BodyMemory(limits.max_bodies_bytes))
        self._tls = tls
        self._access = access
        self._calls: GrpcCalls | None = None
        self._listener: Listener | None = None

    def make_calls(self) -> GrpcCalls:
        return GrpcCalls(self._engine, self._protocols, self._limits, self._executor, access=self._access)

    async def start(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen and return the port, which the system chooses for port 0. Raises OSError if it cannot be bound."""
        calls = self.make_calls()
        wire = http2(calls, http2_limits(self._limits), self._executor)
        listener = Listener(wire, limits=self._limits, tls=self._tls, counters=self._executor.counters)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        try:
            (bound,) = await listener.start([(host, port)], shared=shared)
        except OSError as error:
            why = "" if error.errno == errno.EACCES else "; is the port in use, or the address not one of this host?"
            raise OSError(f"cannot listen for gRPC on {host}:{port}{why}") from error
        self._calls, self._listener = calls, listener
        return bound

    def begin_drain(self) -> None:
        """Send GOAWAY to the clients; new connections get one too."""
        if self._listener is not None:
            self._listener.begin_drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls and wait for those in flight, which are cancelled after `grace_s` seconds.

        Streams end after their current response; health becomes NOT_SERVING.
        """
        if self._listener is None or self._calls is None:
            return
        listener, self._listener = self._listener, None
        self._calls.begin_stop()
        await listener.stop(grace_s)
        await self._calls.ended(_CANCEL_S)
