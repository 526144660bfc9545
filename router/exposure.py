"""What a cluster leaves open to whoever can reach its ports, in words for a person.

Owns: which settings close which port. Refuses to know: how they do it, and whether their files can be used
(`certificates`).
"""

from __future__ import annotations

from baton.proto.credentials import is_loopback
from baton.router.config import ClusterConfig


def openings(config: ClusterConfig) -> list[str]:
    """Each with the setting that closes it; empty if nothing is open. On loopback only `require_auth` asks for keys."""
    router, security = config.router, config.security
    remote, found = not is_loopback(router.host), []
    faces = f"gRPC on port {router.port} and HTTP on port {router.http_port}"
    if not (router.api_keys_file or security.tls.client_ca_file) and (remote or security.require_auth):
        found.append(
            f"{faces} take requests and operators' commands from anybody: set router.api_keys_file or "
            "security.tls.client_ca_file"
        )
    if remote and not security.tls.cert_file:
        found.append(f"what passes {faces}, keys included, can be read on the way: set security.tls")
    if remote and not security.cluster_tls.cert_file:
        found.append(
            "workers and the router's replicas take work and give out prompts and tokens, each on a port of its own, "
            "to anybody: set security.cluster_tls"
        )
    return found
