"""TLS: certificates, client certificates and their revocation, versions, and their reload without a restart."""

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dragoman.access.certificates import CertificateId, read_revoked
from dragoman.core.audit import log_reload
from dragoman.core.errors import InvalidInput
from dragoman.system.der import read_der, read_time_s

log = logging.getLogger("dragoman.server")

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files of a TLS server. With `client_ca`, clients need a certificate that it has signed (mutual TLS), unless that
    `is_optional`, and with `client_crl` one that is not revoked.

    on_revoked: called with the revoked certificates when they have changed.
    """

    cert: str
    key: str = ""
    client_ca: str = ""
    client_crl: str = ""
    is_optional: bool = False
    min_version: str = "1.2"
    logs_reloads: bool = True  # in the audit log; one of several processes does it
    on_revoked: list[Callable[[frozenset[CertificateId]], None]] = field(default_factory=list, repr=False)
    _contexts: list[ssl.SSLContext] = field(default_factory=list, repr=False)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in (self.cert, self.key, self.client_ca, self.client_crl) if name)

    def context(self) -> ssl.SSLContext:
        """Return a new context, which `reload` will update. Raises InvalidInput for invalid files."""
        context = self._load()
        self._contexts.append(context)
        return context

    def check(self) -> None:
        """Raise InvalidInput for invalid files."""
        self._load()

    def reload(self) -> None:
        """Use changed files for new connections; a revoked certificate ends those that are open. Invalid files are
        logged and change nothing.

        Certificates of clients stay valid until a restart if their authority was removed from `client_ca`.
        """
        failure: InvalidInput | None = None
        try:
            self._load()  # a pair that does not match would break the contexts in use
            for context in self._contexts:
                self._load_into(context)
            revoked = read_revoked(self.client_crl) if self.client_crl else frozenset()
        except InvalidInput as error:
            log.error("the TLS certificate is not reloaded: %s", error.message)
            failure = error
        else:
            log.info("TLS certificate reloaded: file=%s", self.cert)
            for report in self.on_revoked:
                report(revoked)
        if self.logs_reloads:
            log_reload("certificates", "files", {"certificate": self.cert}, failure)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = _VERSIONS[self.min_version]
        self._load_into(context)
        if self.client_ca:
            context.verify_mode = ssl.CERT_OPTIONAL if self.is_optional else ssl.CERT_REQUIRED
            # A resumed session would show a certificate that has expired, or was revoked since. Those of TLS 1.2 cannot
            # be switched off, so that revocation needs TLS 1.3.
            context.num_tickets = 0
        if self.client_crl:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
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
        if self.client_crl:
            read_revoked(self.client_crl)
        for setting, file in (("tls_client_ca", self.client_ca), ("tls_client_crl", self.client_crl)):
            if file:
                try:
                    context.load_verify_locations(file)
                except OSError as error:
                    raise InvalidInput(f"cannot use '{setting}' '{file}': {error}") from error


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
    ((_, certificate),) = read_der(data)
    fields = list(read_der(read_der(certificate)[0][1]))
    validity = fields[4 if fields[0][0] == 0xA0 else 3][1]
    began, ended = (read_time_s(tag, content) for tag, content in read_der(validity))
    return began, ended
