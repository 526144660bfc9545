"""At which address a worker listens: its machine's, in the network that was asked for."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from baton.fleet.address import NoAddress, own_address


@pytest.mark.parametrize("network", ["", "node"])
def test_without_a_network_it_is_the_nodes_address(network):
    assert own_address(network, "10.9.8.7") == "10.9.8.7"


def test_it_lies_in_the_network_and_belongs_to_this_machine():
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    for network in ("127.0.0.0/8", "127.1.2.3/8", "0.0.0.0/0"):
        chosen = own_address(network, "10.9.8.7")
        assert chosen in own
        assert ipaddress.ip_address(chosen) in ipaddress.ip_network(network, strict=False)


def test_the_nodes_own_address_comes_first():
    own = [it.address for addresses in psutil.net_if_addrs().values() for it in addresses if "." in it.address]
    for address in own:
        assert own_address("0.0.0.0/0", address) == address


def test_a_network_in_which_the_machine_has_no_address_is_named_with_those_that_it_has():
    with pytest.raises(NoAddress, match=r"router.worker_network is 203.0.113.0/24.*127\.0\.0\.1"):
        own_address("203.0.113.0/24", "10.9.8.7")
