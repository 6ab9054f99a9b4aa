"""Certificate authorities of the tests: certificates of servers and clients, and revocation lists."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

x509 = pytest.importorskip("cryptography.x509")


class Certificate(NamedTuple):
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.key, self.name, self.lists = self._new_key(), name, 0
        self.subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = self._sign(name, self.key, is_authority=True).cert

    def issue(self, name: str, names: Sequence[Any] = (), *, ended: bool = False) -> Certificate:
        """Return a certificate for 127.0.0.1 with further alternative names; `ended`: it is not valid any more."""
        return self._sign(name, self._new_key(), is_authority=False, names=names, ended=ended)

    def revoke(self, *certificates: Certificate, days: float = 1.0) -> Path:
        """Return the file of a list with these certificates, each list newer than the one before."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives import serialization as s

        self.lists += 1
        now = datetime.datetime.now(datetime.UTC)
        issued = now - datetime.timedelta(days=2) + datetime.timedelta(seconds=self.lists)
        builder = x509.CertificateRevocationListBuilder(
            self.subject, issued, now + datetime.timedelta(days=days)
        ).add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
        for each in certificates:
            serial = x509.load_pem_x509_certificate(each.cert.read_bytes()).serial_number
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(issued).build()
            builder = builder.add_revoked_certificate(revoked)
        file = self.folder / f"{self.name}.crl"
        file.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(s.Encoding.PEM))
        return file

    def _new_key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric import ec

        return ec.generate_private_key(ec.SECP256R1())

    def _sign(
        self, name: str, key: Any, *, is_authority: bool, names: Sequence[Any] = (), ended: bool = False
    ) -> Certificate:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives import serialization as s

        def named(text: str) -> Any:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *names])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        usage = {"key_cert_sign": is_authority, "crl_sign": is_authority, "digital_signature": not is_authority}
        others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        usage |= dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        certificate = (  # as Python 3.13 requires by default (RFC 5280)
            x509.CertificateBuilder(named(self.name), named(name), key.public_key(), x509.random_serial_number())
            .not_valid_before(now - 2 * day)
            .not_valid_after(now - day if ended else now + day)
            .add_extension(address, False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), True)
            .add_extension(x509.KeyUsage(**usage), True)
            .add_extension(issuer, False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(self.key, hashes.SHA256())
        )
        found = Certificate(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        found.cert.write_bytes(certificate.public_bytes(s.Encoding.PEM))
        found.key.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        return found
