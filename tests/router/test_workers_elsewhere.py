"""What the configuration says of workers on other machines, and which of them may leave."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from baton.proto.messages import Role
from baton.router.config import ConfigError, RouterSettings, defaults, from_mapping
from baton.router.placement import can_serve
from baton.router.roles import departure_refusal

PAIR = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}


def read(**router: object) -> RouterSettings:
    return from_mapping({"metadata": {"baton": {"pools": PAIR, "router": router}}}).router


def test_ports_of_workers_are_a_range_with_both_ends():
    assert list(read(worker_ports="20000-20002").worker_port_range) == [20000, 20001, 20002]
    assert list(read(worker_ports="7-7").worker_port_range) == [7]
    assert not read().worker_port_range


@pytest.mark.parametrize("ports", ["20000", "20000-", "2-1", "0-5", "60000-65536", "a-b", "1-2-3", "-1-2"])
def test_ports_that_are_no_range_are_refused_by_name_value_and_bound(ports):
    with pytest.raises(ConfigError, match=f"router.worker_ports is '{ports}', must be .* from 1 to 65535"):
        read(worker_ports=ports)


@pytest.mark.parametrize("network", ["eth0", "10.0.0.0/33", "10.0.0", "fd00::/129"])
def test_a_network_that_is_none_is_refused(network):
    with pytest.raises(ConfigError, match=r"router.worker_network is .*, must be node or a network"):
        read(worker_network=network)


@pytest.mark.parametrize("network", ["node", "10.0.0.0/8", "10.1.2.3/8", "fd00::/8", "::1/128"])
def test_networks_of_both_kinds_are_taken(network):
    assert read(worker_network=network).worker_network == network


def test_on_other_machines_what_was_left_open_is_decided_and_what_was_said_stays():
    router = defaults().on_machines().router
    assert (router.ready_with, router.worker_network) == ("some", "node")
    said = from_mapping(
        {"metadata": {"baton": {"pools": PAIR, "router": {"ready_with": "all", "worker_network": "fd00::/8"}}}}
    )
    assert said.on_machines() == said


def test_workers_may_leave_exactly_if_the_others_can_serve():
    for size in range(4):
        for others in combinations_with_replacement(Role, size):
            assert bool(departure_refusal(["decode-0"], others)) != can_serve(others)
    assert "without decode-0, decode-1 nothing could be served: only prefill" in departure_refusal(
        ["decode-0", "decode-1"], [Role.PREFILL]
    )
