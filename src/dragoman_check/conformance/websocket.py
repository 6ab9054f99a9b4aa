"""A WebSocket client of conformance checks, on a blocking socket. Frames are those of wsproto."""

import base64
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from dragoman_check.conformance.clauses import ClauseFailed, NotOffered

_READ_BYTES = 1 << 16


class WebSocket:
    """One connection. Raises NotOffered if the server answers the handshake with another status than 101."""

    def __init__(
        self, url: str, path: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        address = urlsplit(url)
        host = address.hostname or ""
        port = address.port or (443 if tls is not None else 80)
        self._timeout_s = timeout_s
        self._due_s = time.monotonic() + timeout_s
        self._socket: socket.socket = socket.create_connection((host, port), timeout_s)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self._frames = Connection(ConnectionType.CLIENT)
        fields = {
            "host": address.netloc.rpartition("@")[2],
            "upgrade": "websocket",
            "connection": "Upgrade",
            "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
            "sec-websocket-version": "13",
            **headers,
        }
        lines = [f"GET {address.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._read("the response to the handshake")
        head, _, rest = received.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"101"]:
            self.close()
            raise NotOffered(f"the handshake of a WebSocket gets {head[:64].decode('latin-1').splitlines()[0]}")
        self._frames.receive_data(rest)

    def send(self, value: Any) -> None:
        self._due_s = time.monotonic() + self._timeout_s
        self._socket.sendall(self._frames.send(TextMessage(json.dumps(value))))

    def receive(self) -> str:
        """Return the next message. Raises ClauseFailed if the server closes, or sends nothing in time."""
        text = ""
        while True:
            for event in self._frames.events():
                if isinstance(event, CloseConnection):
                    raise ClauseFailed(f"expected a message, got a Close frame: {event.code} {event.reason or ''}")
                if isinstance(event, Ping):
                    self._socket.sendall(self._frames.send(event.response()))
                elif isinstance(event, TextMessage):
                    text += event.data
                    if event.message_finished:
                        return text
            self._frames.receive_data(self._read("a message"))

    def _read(self, what: str) -> bytes:
        left_s = self._due_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left_s)
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ClauseFailed(f"expected {what}, got none: {error}") from error
        if not data:
            raise ClauseFailed(f"expected {what}, got the end of the connection")
        return data

    def close(self) -> None:
        self._socket.close()
