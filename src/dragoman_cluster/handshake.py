"""Handshake of a worker that joins a server: each side proves that it knows the secret, before any frame is sent.

The worker sends a `Hello`, the server answers with a `Challenge` that proves its knowledge of the secret, the worker
with a `Proof` of its own, and the server with a `Welcome`. A proof is an HMAC-SHA256 of everything that was sent before
and of the server's TLS certificate, so it is of no use in another connection, nor to an intermediary with another
certificate. Messages are MessagePack with their length before them.
"""

import hashlib
import hmac
import platform
import re
import secrets
import socket
import ssl
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from dragoman._version import __version__
from dragoman.core.errors import InvalidInput, ServerError
from dragoman.core.secret_files import read_secret_file

PROTOCOL = 1
# Minor versions of Python differ in how they serialize values.
PYTHON = ".".join(platform.python_version_tuple()[:2])
SECRET_VARIABLE = "DRAGOMAN_WORKER_SECRET"  # noqa: S105 (the name of a variable)
_RELEASE = re.compile(r"([0-9]+\.[0-9]+)\.([0-9]+)")
_MIN_SECRET = 20
_MAX_BYTES = 4096
_TLS_RECORD = 0x16  # the first byte of a TLS connection; that of a length is 0
WRONG_SECRET = "the secrets of worker and server differ"  # noqa: S105 (a message)


class Hello(msgspec.Struct):
    """The first message of a worker. ticket: what the server gave to the command that started it, or "".

    model: the only model that it serves, "" for any. loaded: the model that it has kept from an earlier connection, or
    "". host, pid: for log lines.
    """

    nonce: bytes
    ticket: str = ""
    model: str = ""
    host: str = ""
    pid: int = 0
    protocol: int = PROTOCOL
    python: str = PYTHON
    dragoman: str = __version__
    loaded: str = ""


class Challenge(msgspec.Struct):
    """The server's answer to `Hello`: its proof, or an error."""

    nonce: bytes
    proof: bytes
    error: str = ""


class Proof(msgspec.Struct):
    """The worker's proof, or an error."""

    proof: bytes
    error: str = ""


class Welcome(msgspec.Struct):
    """The worker is accepted, unless there is an `error`.

    timeout_s: seconds without data after which either side gives the other one up. memory: paths of the memory files,
    for a worker on the same machine, which then returns the mark in the first. is_kept: whether the next server at this
    address will expect this worker.
    """

    timeout_s: float
    memory: tuple[str, ...] = ()
    error: str = ""
    is_kept: bool = False


class MemoryProof(msgspec.Struct):
    """The worker's answer to `Welcome`: the mark in the server's memory files, b"" if it cannot map them."""

    mark: bytes


class JoinError(ServerError):
    """A worker and a server could not be connected. The message is for the logs of both."""


class NoHandshake(JoinError):
    """The other side does not send what a handshake of Dragoman has, or closes the connection."""


M = TypeVar("M")


class Conversation:
    """Messages of a handshake through a socket that blocks until `deadline_s`; remembers them for the proofs."""

    def __init__(self, sock: socket.socket, deadline_s: float, certificate: bytes) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._digest = hashlib.sha256(certificate)

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self._digest.update(data)
        set_timeout(self._sock, self._deadline_s)
        self._sock.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self, message_type: type[M]) -> M:
        """Return the next message. Raises JoinError for anything else, OSError if the connection ends."""
        size = int.from_bytes(self._read(4), "big")
        if size > _MAX_BYTES:
            raise NoHandshake("expected a handshake of Dragoman, got other data")
        data = self._read(size)
        self._digest.update(data)
        try:
            message = msgspec.msgpack.decode(data, type=message_type)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise NoHandshake(f"expected a handshake of Dragoman, got other data: {error}") from error
        if reason := getattr(message, "error", ""):
            raise JoinError(str(reason)[:1000])
        return message

    @property
    def digest(self) -> bytes:
        """A hash of the certificate and of all messages so far."""
        return self._digest.digest()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            set_timeout(self._sock, self._deadline_s)
            more = self._sock.recv(count - len(data))
            if not more:
                raise NoHandshake("the connection was closed during the handshake")
            data += more
        return data


def set_timeout(sock: socket.socket, deadline_s: float) -> None:
    """Let the next operation of a socket end at the deadline. Raises TimeoutError if it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the handshake took too long")
    sock.settimeout(left_s)


def _proof(secret: bytes, role: str, digest: bytes, nonce: bytes = b"") -> bytes:
    """Return the proof that `role`, `server` or `worker`, knows the secret, for all messages so far."""
    return hmac.digest(secret, role.encode() + digest + nonce, "sha256")


def check_secret(secret: str, origin: str) -> bytes:
    """Return a secret as bytes. Raises InvalidInput if it is too short."""
    if len(secret) < _MIN_SECRET:
        raise InvalidInput(f"{origin}: expected a secret of {_MIN_SECRET} characters or more, got {len(secret)}")
    return secret.encode()


def read_secret(file: str, value: str) -> bytes:
    """Return the secret in a file, or the value of the environment variable. Raises InvalidInput."""
    if not file:
        if not value:
            raise InvalidInput(f"the secret of workers is missing: expected a file, or the variable {SECRET_VARIABLE}")
        return check_secret(value, SECRET_VARIABLE)
    return check_secret(read_secret_file("secret of workers", Path(file)).strip(), f"'{file}'")


# --- the server's side ---------------------------------------------------------------------------------------


def is_tls(sock: socket.socket, deadline_s: float) -> bool:
    """Return whether a client begins with TLS."""
    set_timeout(sock, deadline_s)
    return sock.recv(1, socket.MSG_PEEK) == bytes([_TLS_RECORD])


def version_error(hello: Hello) -> str:
    """Return why a worker cannot work for this server; "" if it can.

    Dragoman may differ by one patch release, as it does while a server and its workers are upgraded one by one: what
    they send each other changes with minor releases only.
    """
    if (hello.protocol, hello.python) == (PROTOCOL, PYTHON) and are_compatible(hello.dragoman, __version__):
        return ""
    return (
        f"versions differ: the server runs Dragoman {__version__} on Python {PYTHON}, the worker runs Dragoman "
        f"{hello.dragoman[:32]} on Python {hello.python[:32]}; expected the same version of Python, and the same "
        "version of Dragoman or the patch release before or after it"
    )


def are_compatible(one: str, other: str) -> bool:
    """Return whether two versions of Dragoman are equal, or neighbouring patch releases of one minor release."""
    if one == other:
        return True
    numbers = [_RELEASE.fullmatch(version[:32]) for version in (one, other)]
    if None in numbers:
        return False
    (first, patch), (second, other_patch) = (each.groups() for each in numbers if each is not None)
    return first == second and abs(int(patch) - int(other_patch)) <= 1


def authenticate_worker(conversation: Conversation, secret: bytes) -> Hello:
    """Prove the secret to a worker and check that it knows it. Raises JoinError, of which the worker is informed."""
    hello = conversation.receive(Hello)
    if error := version_error(hello):
        conversation.send(Challenge(b"", b"", error))
        raise JoinError(error)
    nonce = secrets.token_bytes(32)
    conversation.send(Challenge(nonce, _proof(secret, "server", conversation.digest, nonce)))
    expected = _proof(secret, "worker", conversation.digest)
    if not hmac.compare_digest(conversation.receive(Proof).proof, expected):
        conversation.send(Welcome(0.0, error=WRONG_SECRET))
        raise JoinError(WRONG_SECRET)
    return hello


# --- the worker's side ---------------------------------------------------------------------------------------


def authenticate_server(conversation: Conversation, secret: bytes, hello: Hello) -> Welcome:
    """Check that a server knows the secret, then prove it to the server. Raises JoinError."""
    conversation.send(hello)
    digest = conversation.digest
    challenge = conversation.receive(Challenge)
    if not hmac.compare_digest(challenge.proof, _proof(secret, "server", digest, challenge.nonce)):
        conversation.send(Proof(b"", WRONG_SECRET))
        raise JoinError(WRONG_SECRET)
    conversation.send(Proof(_proof(secret, "worker", conversation.digest)))
    return conversation.receive(Welcome)


def certificate_of(sock: socket.socket) -> bytes:
    """Return the certificate of the server at the other end of a TLS connection; b"" without TLS."""
    return (sock.getpeercert(binary_form=True) or b"") if isinstance(sock, ssl.SSLSocket) else b""
