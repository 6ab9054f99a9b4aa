"""Whether a request of an HTTP/1.1 connection is served, decided by its headers."""

from functools import partial
from typing import Any

from dragoman.access.certificates import peer_certificate
from dragoman.core.errors import DragomanError
from dragoman.protocols.wire import HttpError
from dragoman.transports.application import Application
from dragoman.transports.clients import client_host
from dragoman.transports.http1.headers import NO_HEADERS, Http1Headers
from dragoman.transports.loop_delay import LOOP_LATE


class RequestAdmission:
    """Checks the requests of one connection. `application`: as the client of the last checked request may use it.

    Unless `is_needed`, plain requests need no check.
    """

    __slots__ = ("_authorization", "_authorized_headers", "_delay", "_shared", "application", "is_needed", "transport")

    def __init__(self, application: Application) -> None:
        self.application = self._shared = application
        self.transport: Any = None
        self._delay = application.executor.loop_delay
        self._authorization = application.unrestricted  # of requests with these headers
        self._authorized_headers = NO_HEADERS
        self.is_needed = application.is_guarded or self._delay.is_limited

    def check(self, head: Http1Headers) -> DragomanError | HttpError | None:
        """Return why a request with these headers is rejected, None if it is served."""
        match: Any = head.match
        if self._delay.is_limited and match.is_sheddable and self._delay.rejects():
            return LOOP_LATE
        if head is self._authorized_headers and self._authorization.is_valid():
            return None
        try:
            of_client = partial(client_host, self.transport), partial(peer_certificate, self.transport)
            # Browsers send the handshake of a WebSocket for any page, without asking: it is no safe method.
            method = "WEBSOCKET" if head.upgrades else head.method
            access = self._shared.authorize(match, method, head.headers, *of_client)
        except DragomanError as error:
            self._authorized_headers = NO_HEADERS
            return error
        self._authorization, self._authorized_headers, self.application = access, head, access.application
        return None
