"""Whether certificate files will do, looked at before anything is started by them.

Owns: their dates, names and signatures. Refuses to know: what connections make of them (`proto.credentials`).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from baton.proto.credentials import CLUSTER_NAME, ClusterWire, CredentialsError, FrontDoor
from baton.proto.settings import SecuritySettings

SOON = timedelta(days=14)


def check_certificates(security: SecuritySettings, now: datetime) -> list[str]:
    """What will be wrong soon. Raises CredentialsError for what is wrong now."""
    tls, cluster = security.tls, security.cluster_tls
    FrontDoor(tls)
    ClusterWire(cluster)
    warnings = []
    for file in filter(None, (tls.cert_file, tls.client_ca_file, cluster.ca_file, cluster.cert_file)):
        warnings += [_dates(file, certificate, now) for certificate in _certificates(file)]
    for file in filter(None, (tls.key_file, cluster.key_file)):
        if Path(file).expanduser().stat().st_mode & 0o077:
            warnings.append(f"{file} is a key that other users of this machine may read: chmod 600 it")
    if cluster.cert_file:
        _check_member(cluster.cert_file, cluster.ca_file)
    return [warning for warning in warnings if warning]


def _dates(file: str, certificate: x509.Certificate, now: datetime) -> str:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now:
        raise CredentialsError(f"the certificate in {file} expired on {ends:%Y-%m-%d at %H:%M} UTC")
    if begins > now:
        raise CredentialsError(f"the certificate in {file} is not valid before {begins:%Y-%m-%d at %H:%M} UTC")
    return f"the certificate in {file} expires on {ends:%Y-%m-%d at %H:%M} UTC" if ends - now < SOON else ""


def _check_member(file: str, ca_file: str) -> None:
    """What a cluster's certificate has to be, or no process would connect to another."""
    certificate = _certificates(file)[0]
    names: list[str] = []
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            names += extension.value.get_values_for_type(x509.DNSName)
    if CLUSTER_NAME not in names:
        raise CredentialsError(f"the certificate in {file} is for {names or 'no name'}, must be for {CLUSTER_NAME}")
    issuers = [authority for authority in _certificates(ca_file) if authority.subject == certificate.issuer]
    if len(_certificates(file)) == 1 and not any(_issued(certificate, issuer) for issuer in issuers):
        raise CredentialsError(f"the certificate in {file} is not signed by the authority in {ca_file}")


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _certificates(file: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(Path(file).expanduser().read_bytes())
    except (ValueError, OSError) as error:
        raise CredentialsError(f"{file} holds no certificate in PEM form") from error
