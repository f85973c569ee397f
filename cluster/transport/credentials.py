"""Certificates for mutual TLS between the cluster's own processes; nothing is to be configured.

The process that is called makes an authority that lives as long as itself. A caller makes a key of
its own and sends the public half through Ray; the authority signs it. So no secret leaves a
process, and a reader of the network, Ray's traffic included, learns nothing that lets it in. Each
side accepts only what this authority has signed for the other side's role.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_NAME = "lockstep-pool"
"""The name in the certificate of the process that is called, and in no other."""
_CALLER_NAME = "lockstep-caller"
_CLOCKS_DIFFER = timedelta(days=1)
_VALID = timedelta(days=3650)
"""A process does not live that long, and its authority ends with it."""


class Key:
    """A private key of this process."""

    def __init__(self) -> None:
        self.private = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public_pem(self) -> bytes:
        """The half that an authority signs."""
        return self.private.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )

    def channel_credentials(self, authority: bytes, certificate: bytes) -> grpc.ChannelCredentials:
        """For a caller; `certificate` is what the authority made of `public_pem`."""
        return grpc.ssl_channel_credentials(authority, self.pem, certificate)


class Authority:
    """Signs certificates for one server and its callers."""

    def __init__(self) -> None:
        self._key = Key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lockstep-authority")])
        signed = self._builder(self._name, self._key.private.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = self._sign(signed)
        """In PEM; public."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """For the process that is called; a caller without a certificate is refused."""
        key = Key()
        own = self._issue(key.private.public_key(), SERVER_NAME, ExtendedKeyUsageOID.SERVER_AUTH)
        return grpc.ssl_server_credentials(
            [(key.pem, own)], root_certificates=self.certificate, require_client_auth=True
        )

    def certify_caller(self, public_pem: bytes) -> bytes:
        """A caller's certificate in PEM. Raises ValueError for what is no key on P-256."""
        key = load_pem_public_key(public_pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("the key is not on an elliptic curve")
        return self._issue(key, _CALLER_NAME, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(
        self, key: ec.EllipticCurvePublicKey, name: str, usage: x509.ObjectIdentifier
    ) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return self._sign(
            self._builder(subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(now + _VALID)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key.private, hashes.SHA256()).public_bytes(Encoding.PEM)
