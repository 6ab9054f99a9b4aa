"""TLS: certificates, client certificates, versions, and their reload without a restart."""

import calendar
import logging
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from dragoman.core.errors import InvalidInput

log = logging.getLogger("dragoman.server")

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files of a TLS server. With `client_ca`, clients need a certificate that it has signed (mutual TLS)."""

    cert: str
    key: str = ""
    client_ca: str = ""
    min_version: str = "1.2"
    _contexts: list[ssl.SSLContext] = field(default_factory=list, repr=False)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in (self.cert, self.key, self.client_ca) if name)

    def context(self) -> ssl.SSLContext:
        """Return a new context, which `reload` will update. Raises InvalidInput for invalid files."""
        context = self._load()
        self._contexts.append(context)
        return context

    def check(self) -> None:
        """Raise InvalidInput for invalid files."""
        self._load()

    def reload(self) -> None:
        """Use changed files for new connections. Invalid files are logged and change nothing.

        Certificates of clients stay valid until a restart if their authority was removed from `client_ca`.
        """
        try:
            self._load()  # a pair that does not match would break the contexts in use
            for context in self._contexts:
                self._load_into(context)
        except InvalidInput as error:
            log.error("the TLS certificate is not reloaded: %s", error.message)
        else:
            log.info("TLS certificate reloaded: file=%s", self.cert)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = _VERSIONS[self.min_version]
        self._load_into(context)
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.cert, self.key or None, password=_no_password)
        except OSError as error:
            key = self.key or self.cert
            missing = next((file for file in (self.cert, key) if not os.path.exists(file)), "")
            reason = f"'{missing}' does not exist" if missing else str(error)
            if isinstance(error, ssl.SSLError):  # which says neither which file nor what is wrong with it
                reason = f"expected a certificate and its private key, both PEM, without a password: {error}"
            raise InvalidInput(f"cannot use certificate '{self.cert}' with key '{key}': {reason}") from error
        if self.client_ca:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise InvalidInput(f"cannot use 'tls_client_ca' '{self.client_ca}': {error}") from error


def _no_password() -> str:
    """Fail instead of asking the terminal for the password of an encrypted key."""
    return ""


def expiry_s(file: str) -> tuple[float, float]:
    """Return from when and until when the first certificate (PEM) of a file is valid, in seconds since 1970.

    The times are the field `validity` of RFC 5280, 4.1: the fifth of the certificate, or the fourth without a version.
    """
    pem = Path(file).read_text(encoding="ascii", errors="replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    data = ssl.PEM_cert_to_DER_cert(begin + pem.partition(begin)[2].partition(end)[0] + end)
    ((_, certificate),) = _der(data)
    fields = list(_der(_der(certificate)[0][1]))
    validity = fields[4 if fields[0][0] == 0xA0 else 3][1]
    began, ended = (_time_s(tag, text.decode("ascii")) for tag, text in _der(validity))
    return began, ended


def _der(data: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and the content of each value in DER (X.690)."""
    found, at = [], 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _time_s(tag: int, text: str) -> float:
    """Return an UTCTime (tag 23), whose years are 1950 to 2049, or a GeneralizedTime in seconds since 1970."""
    if tag == 23:
        text = ("19" if text >= "5" else "20") + text
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))
