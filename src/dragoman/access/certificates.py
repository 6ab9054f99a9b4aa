"""Certificates of clients (mutual TLS): the names in them, and which of them are revoked."""

import base64
import binascii
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.system.der import read_der, read_time_s

# Kinds of names that entries of a key file have, as the ssl module calls them, by their names there.
_ALTERNATIVES: Final = {"URI": "URI", "DNS": "DNS", "email": "email", "IP": "IP Address"}
_NAME: Final = re.compile(r"(?:CN=|URI:|DNS:|email:|IP:)[^\x00-\x1f\x7f]{1,500}\Z")
_SPIFFE: Final = "spiffe://"
_CRL: Final = re.compile(rb"-----BEGIN X509 CRL-----(.+?)-----END X509 CRL-----", re.DOTALL)
# Tags of ASN.1.
_INTEGER, _SEQUENCE, _VERSION, _TIMES = 0x02, 0x30, 0xA0, (0x17, 0x18)

# The issuer of a certificate, in DER without its header, and its serial number: these are unique.
CertificateId = tuple[bytes, bytes]


class PeerCertificate(msgspec.Struct, frozen=True):
    """The verified certificate of a client: its names as key files have them, and until when it is valid."""

    names: tuple[str, ...]
    expires_s: float


def peer_certificate(transport: Any) -> PeerCertificate | None:
    """Return the certificate with which the client of a connection has identified itself; None without one."""
    found = transport.get_extra_info("peercert")
    if not found:
        return None
    kinds = {of_ssl: kind for kind, of_ssl in _ALTERNATIVES.items()}
    names = [f"{kinds[kind]}:{value}" for kind, value in found.get("subjectAltName", ()) if kind in kinds]
    subject = (field for fields in found.get("subject", ()) for field in fields)
    names += [f"CN={value}" for name, value in subject if name == "commonName"]
    return PeerCertificate(tuple(names), ssl.cert_time_to_seconds(found["notAfter"]))


def parse_certificate_name(text: str) -> str:
    """Return the name of an entry as `PeerCertificate` has it. Raises InvalidInput."""
    name = f"URI:{text}" if text.startswith(_SPIFFE) else text
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"'certificate': expected CN=..., DNS:..., URI:..., email:... or IP:..., got {text!r:.200}")
    return name


def certificate_id(der: bytes) -> CertificateId:
    """Return what identifies a certificate (RFC 5280, 4.1) among those of all authorities."""
    fields = read_der(read_der(read_der(der)[0][1])[0][1])
    at = 1 if fields[0][0] == _VERSION else 0
    return fields[at + 2][1], fields[at][1]


def read_revoked(file: str) -> frozenset[CertificateId]:
    """Return the revoked certificates in a file of revocation lists (PEM; RFC 5280, 5.1).

    Signatures are checked by OpenSSL, for each new connection. Raises InvalidInput for a file without a list, and for a
    list that has expired, with which every client would be rejected.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"'tls_client_crl' '{file}' cannot be read: {error.strerror or error}") from error
    lists = _CRL.findall(data)
    if not lists:
        raise InvalidInput(f"'tls_client_crl' '{file}': expected revocation lists in PEM (BEGIN X509 CRL), got none")
    revoked: set[CertificateId] = set()
    for each in lists:
        try:
            revoked.update(_revoked(base64.b64decode(each), file))
        except (binascii.Error, IndexError, ValueError) as error:
            raise InvalidInput(f"'tls_client_crl' '{file}': a revocation list is not valid") from error
    return frozenset(revoked)


def _revoked(der: bytes, file: str) -> Iterator[CertificateId]:
    fields = read_der(read_der(read_der(der)[0][1])[0][1])
    at = 1 if fields[0][0] == _INTEGER else 0  # the version, if it is there
    issuer, rest = fields[at + 1][1], fields[at + 3 :]
    if rest and rest[0][0] in _TIMES:
        end_s = read_time_s(*rest.pop(0))
        if end_s < time.time():
            day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(end_s))
            raise InvalidInput(f"'tls_client_crl' '{file}': expected a list that is valid now, got one until {day} UTC")
    if rest and rest[0][0] == _SEQUENCE:
        for _, entry in read_der(rest[0][1]):
            yield issuer, read_der(entry)[0][1]
