"""The certificates of a cluster that has no authority of its own: made once, by `baton certs`.

Owns: which files there are, what is in them, who may have which. Refuses to know: who uses them (`proto.credentials`).

    DIR/ca.pem                              for clients, to trust the router by
    DIR/router.pem, router-key.pem          for the router's machine: metadata.baton.security.tls
    DIR/NAME.pem, NAME-key.pem              for a client called NAME, where tls.client_ca_file asks for one
    DIR/cluster/ca.pem, node.pem, node-key.pem    for every machine of the cluster: metadata.baton.security.cluster_tls
    DIR/ca-key.pem, cluster-ca-key.pem      for nobody but who makes further certificates: keep them elsewhere

Two authorities, as a client's certificate must not make it a member of the cluster.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.proto.credentials import CLUSTER_NAME

MAX_DAYS = 36_500
# A machine whose clock is a little behind takes a new certificate too.
CLOCK_SLACK = timedelta(hours=1)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class CertsError(ValueError):
    """Certificates that cannot be made as asked; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate that signs others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(directory: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> str:
    """Makes all files; returns what a person should know about them. Raises CertsError, and then has made none."""
    if days > MAX_DAYS:
        raise CertsError(f"--days is {days}, must be at most {MAX_DAYS}")
    for name in clients:
        if not _NAME.fullmatch(name) or name in ("ca", "router", "cluster-ca"):
            bound = "1 to 63 letters, digits and ._- that is no name of another file here"
            raise CertsError(f"--client is {name!r}, must be {bound}")
    names = [_host(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1"))]
    front, cluster = new_authority("Baton clients' authority", days), new_authority("Baton cluster's authority", days)
    inside = directory / "cluster"
    files = _Files()
    files.authority(directory / "ca.pem", directory / "ca-key.pem", front)
    files.authority(inside / "ca.pem", directory / "cluster-ca-key.pem", cluster)
    files.pair(directory / "router", signed(front, "baton router", names, days, server=True))
    both = signed(cluster, CLUSTER_NAME, [x509.DNSName(CLUSTER_NAME)], days, server=True, client=True)
    files.pair(inside / "node", both)
    for name in clients:
        files.pair(directory / name, signed(front, name, [x509.DNSName(name)], days, client=True))
    files.write()
    shown = directory.absolute()
    return (
        f"made in {shown}, good for {days} days:\n"
        "  cluster/  to the same path on every machine of the cluster, readable by Baton alone\n"
        "  router.pem, router-key.pem  to the router's machine\n"
        "  ca.pem  to every client: baton generate --tls-ca ca.pem ...\n"
        "  ca-key.pem, cluster-ca-key.pem  to a place apart: whoever has them can make members of the cluster\n"
        "\n"
        "in the cluster file, under metadata.baton:\n"
        "    security:\n"
        f"      tls: {{cert_file: {shown}/router.pem, key_file: {shown}/router-key.pem}}\n"
        "      cluster_tls:\n"
        f"        ca_file: {shown}/cluster/ca.pem\n"
        f"        cert_file: {shown}/cluster/node.pem\n"
        f"        key_file: {shown}/cluster/node-key.pem\n"
    )


def new_authority(name: str, days: int) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, key, days).issuer_name(_subject(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def signed(
    authority: Authority,
    name: str,
    hosts: Sequence[x509.GeneralName],
    days: int,
    *,
    server: bool = False,
    client: bool = False,
) -> Authority:
    """A certificate and its key, for one end of a connection or both. A number of days below 0 has it expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH] * server + [ExtendedKeyUsageOID.CLIENT_AUTH] * client
    issuer = authority.certificate
    builder = _builder(name, key, days).issuer_name(issuer.subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
    )
    return Authority(builder.sign(authority.key, hashes.SHA256()), key)


def certificate_pem(made: Authority) -> bytes:
    return made.certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(made: Authority) -> bytes:
    return made.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class _Files:
    """What is to be written, all or nothing."""

    def __init__(self) -> None:
        self._contents: dict[Path, bytes] = {}

    def authority(self, certificate: Path, key: Path, made: Authority) -> None:
        self._contents[certificate], self._contents[key] = certificate_pem(made), key_pem(made)

    def pair(self, stem: Path, made: Authority) -> None:
        self.authority(stem.with_name(stem.name + ".pem"), stem.with_name(stem.name + "-key.pem"), made)

    def write(self) -> None:
        there = [path for path in self._contents if path.exists()]
        if there:
            raise CertsError(f"{there[0]} is there already: make the certificates in another directory")
        try:
            for path, content in self._contents.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                # Readable by its owner alone from its first moment on.
                mode = 0o600 if path.stem.endswith("-key") else 0o644
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                    file.write(content)
        except OSError as error:
            raise CertsError(f"{error.filename} cannot be written: {error.strerror}") from error


def _builder(name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    begins = min(now, ends) - CLOCK_SLACK
    builder = x509.CertificateBuilder(subject_name=_subject(name), public_key=key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise CertsError(f"--host is {host!r}, must be a host's name or an address, without a port")
    return x509.DNSName(host)
