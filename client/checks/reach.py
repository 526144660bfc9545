"""Whether a port can be reached, and what answers there.

Owns: sockets of its own, and what each way to fail means. Refuses to know: what is asked of a router that answers.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator

import psutil

from baton.client.checks.finding import Finding

_CONNECT_S = 3.0


def split_address(target: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPV6]:PORT; raises ValueError."""
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r} is not HOST:PORT with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def reach(target: str) -> str:
    """Why no connection can be made; empty if one can."""
    host, port = split_address(target)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except socket.gaierror as error:
        return f"the name {host!r} has no address ({error.strerror})"
    except ConnectionRefusedError:
        return f"port {port} of {host} is closed: nothing listens there"
    except TimeoutError:
        return (
            f"port {port} of {host} does not answer within {_CONNECT_S:.0f} s: a firewall drops it, or the host is down"
        )
    except OSError as error:
        return f"port {port} of {host} cannot be reached: {error.strerror or error}"
    return ""


def is_local(target: str) -> bool:
    """Whether the address is one of this machine."""
    host, port = split_address(target)
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    own = {address.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(addresses & (own | {"0.0.0.0", "::"}))


def speaks_tls(target: str) -> bool:
    """Whether what listens there begins a TLS session."""
    host, port = split_address(target)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return secured.version() is not None
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error) or "HANDSHAKE_FAILURE" in str(error)
    except OSError:
        return False


def bindable(host: str, port: int, key: str) -> Iterator[Finding]:
    """What keeps a router from listening there. `key`: the setting that names the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem = f"is taken{_holder(port)}"
                remedy = f"end that process, or set metadata.baton.{key} to another port"
            elif error.errno == errno.EADDRNOTAVAIL:
                problem = "cannot be listened at: this machine has no such address"
                remedy = "set metadata.baton.router.host to an address of this machine, or 0.0.0.0"
            else:
                problem = f"cannot be listened at: {error.strerror}"
                remedy = f"set metadata.baton.{key} to a port from 1024 to 65535"
            yield Finding("ports", f"{host}:{port}", problem, remedy)


def _holder(port: int) -> str:
    """Who listens at a port of this machine, where the system tells."""
    try:
        for connection in psutil.net_connections("tcp"):
            at = connection.laddr
            if connection.status == psutil.CONN_LISTEN and at and at[1] == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return " by another process"
