"""How processes know each other by certificates: gRPC channels and ports with TLS, plain where none is set.

Owns: reading certificates and keys, what makes them unusable, and everything that is made of them. Refuses to know:
bearer tokens (`router.keys`), and who connects to whom.

    client --ClientTls--> router with TlsSettings: its certificate names the router's hosts; a client may need one too
    Baton's own processes with ClusterTlsSettings: mutual, all under one name, for their addresses come and go

Files are read again when they have changed: who renews a certificate restarts nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from baton.proto.settings import ClusterTlsSettings, TlsSettings

log = logging.getLogger(__name__)

CLUSTER_NAME = "baton.internal"
"""The name in the certificates of Baton's own processes. Workers are known by addresses, which no certificate made
beforehand can name, so that each connection asks for this name instead."""

Options = Sequence[tuple[str, Any]]
Made = TypeVar("Made")


class CredentialsError(ValueError):
    """A file that cannot be used; the message names it, and never holds a key."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client checks a router, and what it shows. `ca_file`: empty for the public authorities that gRPC knows.
    `name`: what the router's certificate calls it, where that is not the host in its address."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    name: str = ""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises CredentialsError."""
        pem = _Pem.read(self.ca_file, self.cert_file, self.key_file)
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)

    @property
    def options(self) -> Options:
        return (("grpc.ssl_target_name_override", self.name),) if self.name else ()

    def context(self) -> ssl.SSLContext:
        """The same for HTTP, where public authorities are the machine's. Raises CredentialsError."""
        _Pem.read(self.ca_file, self.cert_file, self.key_file)
        context = ssl.create_default_context(cafile=_path(self.ca_file) if self.ca_file else None)
        if self.cert_file:
            context.load_cert_chain(_path(self.cert_file), _path(self.key_file))
        return context


class ClusterWire:
    """Connections between Baton's own processes. Raises CredentialsError for files that cannot be used."""

    def __init__(self, settings: ClusterTlsSettings) -> None:
        self._pem: _Fresh[_Pem] | None = None
        if settings.cert_file:
            files = (settings.ca_file, settings.cert_file, settings.key_file)
            self._pem = _Fresh(files, lambda: _Pem.read(*files))

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        if self._pem is None:
            return grpc.aio.insecure_channel(address, options=options)
        pem = self._pem.get()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        named = (*options, ("grpc.ssl_target_name_override", CLUSTER_NAME))
        return grpc.aio.secure_channel(address, credentials, options=named)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Has a server listen; returns the port. Raises RuntimeError if it cannot be bound."""
        if self._pem is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _server_credentials(self._pem, mutual=True))


PLAIN = ClusterWire(ClusterTlsSettings())


class FrontDoor:
    """What the router's two ports show clients. Raises CredentialsError for files that cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._pem: _Fresh[_Pem] | None = None
        if settings.cert_file:
            files = (settings.client_ca_file, settings.cert_file, settings.key_file)
            self._pem = _Fresh(files, lambda: _Pem.read(*files))

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Has a server listen; returns the port. Raises RuntimeError if it cannot be bound."""
        if self._pem is None:
            return server.add_insecure_port(address)
        mutual = bool(self._settings.client_ca_file)
        return server.add_secure_port(address, _server_credentials(self._pem, mutual))

    def context(self) -> ssl.SSLContext | None:
        """The same for HTTP; None for plain text."""
        if self._pem is None:
            return None
        settings = self._settings
        files = (settings.client_ca_file, settings.cert_file, settings.key_file)
        present = _Fresh(files, lambda: _server_context(settings))

        def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = present.get()

        first = present.get()
        # It is called in every handshake, whether or not the client has named a host.
        first.sni_callback = renew
        return first


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _Pem:
    """The contents of the files, None for one that is not given."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None = field(repr=False)

    @classmethod
    def read(cls, ca_file: str, cert_file: str, key_file: str) -> _Pem:
        """Raises CredentialsError: what gRPC would say of bad files is that a handshake failed."""
        pem = cls(*(_bytes(file) if file else None for file in (ca_file, cert_file, key_file)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if ca_file:
            try:
                context.load_verify_locations(_path(ca_file))
            except ssl.SSLError as error:
                raise CredentialsError(f"{ca_file} holds no certificate of an authority in PEM form") from error
        if cert_file:
            try:
                # An encrypted key would be asked about at the terminal.
                context.load_cert_chain(_path(cert_file), _path(key_file), password="")
            except ssl.SSLError as error:
                problem = f"{cert_file} and {key_file} are no certificate and its own unencrypted key in PEM form"
                raise CredentialsError(f"{problem} ({error.reason or 'not PEM'})") from error
        return pem


class _Fresh(Generic[Made]):
    """What is made of some files, made again when they have changed and can be used."""

    def __init__(self, files: Sequence[str], make: Callable[[], Made]) -> None:
        self._paths = [_path(file) for file in files if file]
        self._make = make
        self._seen = self._times()
        self._made = make()

    def get(self) -> Made:
        times = self._times()
        if times != self._seen:
            self._seen = times
            try:
                self._made = self._make()
            except CredentialsError as error:
                log.error("the former certificate stays in use: %s", error)
            else:
                log.info("certificates were read again: %s", ", ".join(map(str, self._paths)))
        return self._made

    def _times(self) -> list[int]:
        return [_changed_ns(path) for path in self._paths]


def _server_credentials(fresh: _Fresh[_Pem], mutual: bool) -> grpc.ServerCredentials:
    shown = fresh.get()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Asked in every handshake, on a thread of gRPC's; None where nothing has changed."""
        nonlocal shown
        pem = fresh.get()
        if pem is shown:
            return None
        shown = pem
        return _configuration(pem)

    fetcher: Any = renewed  # None is allowed, as gRPC documents it
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetcher, require_client_authentication=mutual)


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.certificate is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.ca)


def _server_context(settings: TlsSettings) -> ssl.SSLContext:
    _Pem.read(settings.client_ca_file, settings.cert_file, settings.key_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(_path(settings.cert_file), _path(settings.key_file))
    if settings.client_ca_file:
        context.load_verify_locations(_path(settings.client_ca_file))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _changed_ns(path: Path) -> int:
    """Zero for a file that is not there: it may be in the middle of being replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _path(file: str) -> Path:
    return Path(file).expanduser()


def _bytes(file: str) -> bytes:
    try:
        return _path(file).read_bytes()
    except OSError as error:
        raise CredentialsError(f"{file} cannot be read: {error.strerror}") from error
