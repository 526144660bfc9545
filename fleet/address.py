"""At which address of its machine a worker listens, and is reached by other machines.

Owns: that choice. Refuses to know: ports, and what is said there.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

NODE = "node"


class NoAddress(ValueError):
    """The machine has no address in the network that was asked for."""


def own_address(network: str, node_address: str) -> str:
    """This machine's address in a network like 10.1.0.0/16 or fd00::/8; `node`, or an empty one, takes the node's.

    Raises NoAddress.
    """
    if network in ("", NODE):
        return node_address
    wanted = ipaddress.ip_network(network, strict=False)
    families = (socket.AF_INET, socket.AF_INET6)
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    ]
    for candidate in sorted(own, key=lambda address: address != node_address):
        # What is only valid on one link carries the link's name, and no other machine could use it.
        if "%" not in candidate and ipaddress.ip_address(candidate) in wanted:
            return candidate
    raise NoAddress(f"router.worker_network is {network}, but this machine has only {', '.join(sorted(own))}")
