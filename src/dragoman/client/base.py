"""Base class of both clients: the address of a server and the calls to it."""

from collections.abc import Coroutine, Mapping
from os import PathLike
from typing import Any

from dragoman.client.address import Address, Compression, address
from dragoman.client.calls import ClientCalls, ClientTransport, WireFormat


class ClientBase:
    """Client of one server; see `Client` for the arguments."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None = 60.0,
        retries: int = 3,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        compression: Compression = None,
        tls_ca: str | PathLike[str] | None = None,
        tls_verify: bool = True,
    ) -> None:
        self.url = url
        where = address(url, token, headers, compression, str(tls_ca or ""), tls_verify)
        self._calls = ClientCalls(_wire(where), self._transport(where), self._sleep, timeout_s, retries)

    def _transport(self, where: Address) -> ClientTransport:
        raise NotImplementedError

    def _sleep(self, delay: float) -> Coroutine[Any, Any, None]:
        raise NotImplementedError


def _wire(where: Address) -> WireFormat:
    """Return the wire format of a URL's scheme. grpcio is imported for gRPC only."""
    if where.is_grpc:
        from dragoman.client.rpc import Rpc

        return Rpc()
    from dragoman.client.rest import Rest

    return Rest(where)
