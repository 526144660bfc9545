"""Certificates for tests, as `baton certs` makes them, and some that nobody should accept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from baton.client.certs import Authority, certificate_pem, key_pem, make_certificates, new_authority, signed
from baton.proto.credentials import CLUSTER_NAME, ClientTls
from baton.proto.settings import ClusterTlsSettings, SecuritySettings, TlsSettings

DAYS = 30


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert_file: str
    key_file: str


@dataclass(frozen=True)
class Certificates:
    """The files in a directory of `baton certs --client alice`."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        make_certificates(directory, ["router.example"], ["alice"], DAYS)
        return cls(directory)

    def file(self, name: str) -> str:
        return str(self.directory / name)

    @property
    def tls(self) -> TlsSettings:
        return TlsSettings(self.file("router.pem"), self.file("router-key.pem"))

    @property
    def mutual_tls(self) -> TlsSettings:
        """For clients that have a certificate."""
        return TlsSettings(self.file("router.pem"), self.file("router-key.pem"), self.file("ca.pem"))

    @property
    def cluster_tls(self) -> ClusterTlsSettings:
        return ClusterTlsSettings(*map(self.file, ("cluster/ca.pem", "cluster/node.pem", "cluster/node-key.pem")))

    @property
    def security(self) -> SecuritySettings:
        return SecuritySettings(tls=self.tls, cluster_tls=self.cluster_tls)

    @property
    def client(self) -> ClientTls:
        return ClientTls(ca_file=self.file("ca.pem"))

    @property
    def alice(self) -> ClientTls:
        return ClientTls(*map(self.file, ("ca.pem", "alice.pem", "alice-key.pem")))

    def front(self) -> Authority:
        """The authority of router and clients."""
        return _authority(self.directory / "ca.pem", self.directory / "ca-key.pem")

    def cluster(self) -> Authority:
        return _authority(self.directory / "cluster" / "ca.pem", self.directory / "cluster-ca-key.pem")


def written(stem: Path, made: Authority) -> Pair:
    certificate, key = stem.with_suffix(".pem"), stem.with_name(stem.name + "-key.pem")
    certificate.write_bytes(certificate_pem(made))
    key.touch(0o600)
    key.write_bytes(key_pem(made))
    return Pair(str(certificate), str(key))


def front_pair(stem: Path, authority: Authority, *, days: int = DAYS, name: str = "localhost") -> Pair:
    """A router's, or a client's: as expired as `days` below zero say."""
    names = [x509.DNSName(name)]
    return written(stem, signed(authority, name, names, days, server=True, client=True))


def member_pair(stem: Path, authority: Authority, *, days: int = DAYS, name: str = CLUSTER_NAME) -> Pair:
    return front_pair(stem, authority, days=days, name=name)


def stranger() -> Authority:
    """An authority that nobody trusts."""
    return new_authority("somebody else's", DAYS)


def _authority(certificate: Path, key: Path) -> Authority:
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), loaded)
