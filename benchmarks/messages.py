"""Questions and answers over HTTP as whole messages, for the load generators in Python."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httptools


def question(plan: Mapping[str, Any], body: bytes) -> bytes:
    """The bytes of a POST: `plan` has its path and further headers."""
    head = [f"POST {plan['path']} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in plan["headers"].items()]
    return "\r\n".join([*head, "", ""]).encode() + body


class Answers(asyncio.Protocol):
    """A connection that hands the body of each answer to `answered`."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.answered(body)

    def answered(self, body: bytes) -> None:
        raise NotImplementedError
