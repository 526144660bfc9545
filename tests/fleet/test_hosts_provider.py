"""Ray's launcher over fixed hosts: no host is two nodes at once, none is forgotten, mistakes in the file are named."""

from __future__ import annotations

import copy
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

from baton.fleet.hosts_provider import Book, HostsProvider, address_of

CLUSTER_YAML = Path(__file__).resolve().parents[2] / "cluster.yaml"
HEAD, PREFILL, DECODE = "192.0.2.10", ["192.0.2.11", "192.0.2.12"], ["192.0.2.21", "192.0.2.22", "192.0.2.23"]
OF_HEAD, OF_WORKERS = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD}, {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}


def worker(node_type: str) -> dict[str, str]:
    return {**OF_WORKERS, TAG_RAY_USER_NODE_TYPE: node_type}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def cluster(**provider: Any) -> dict[str, Any]:
    """cluster.yaml as Ray prepares it, with these hosts."""
    raw = yaml.safe_load(CLUSTER_YAML.read_text(encoding="utf-8"))
    raw["provider"] |= {"head_ip": HEAD, "hosts": {"prefill": PREFILL, "decode": DECODE}} | provider
    return HostsProvider.bootstrap_config(prepare_config(raw))


def open_provider(**provider: Any) -> HostsProvider:
    return HostsProvider(cluster(**provider)["provider"], "some")


class Silent:
    """Stands for ssh: no host answers. Notes where it was to run what."""

    def __init__(self, address: str, ran: list[tuple[str, str]]) -> None:
        self._address = address
        self._ran = ran

    def run(self, command: str, **_: object) -> None:
        self._ran.append((self._address, command))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Commands by ssh, with the host that each is for."""
    commands: list[tuple[str, str]] = []
    monkeypatch.setattr(
        NodeProvider, "get_command_runner", lambda _, prefix, node_id, *rest: Silent(address_of(node_id), commands)
    )
    return commands


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_host_is_one_node_at_a_time_and_each_launch_has_an_id_of_its_own(steps: list[tuple[bool, int]]) -> None:
    book, ever = Book(), set()
    for takes, number in steps:
        if takes:
            free = len(DECODE) - len(book.nodes)
            taken = book.take(DECODE, number, {"tag": "of its own"})
            assert len(taken) == min(number, free)
            assert ever.isdisjoint(taken)
            ever |= set(taken)
        elif book.nodes:
            del book.nodes[sorted(book.nodes)[number % len(book.nodes)]]
        addresses = list(map(address_of, book.nodes))
        assert len(set(addresses)) == len(addresses)
        assert set(addresses) <= set(DECODE)


def test_a_host_that_failed_comes_last() -> None:
    book = Book()
    for host in DECODE:
        (taken,) = book.take(DECODE, 1, {})
        assert address_of(taken) == host
        del book.nodes[taken]
    assert address_of(next(iter(book.take(DECODE, 1, {})))) == DECODE[0]


@pytest.mark.parametrize("address", ["10.0.0.1", "2001:db8::1", "gpu-7.example.org"])
def test_an_id_leads_back_to_its_host(address: str) -> None:
    (taken,) = Book().take([address], 1, {})
    assert address_of(taken) == address
    assert address_of(address) == address


def test_nodes_are_of_their_types_hosts_until_there_is_none_left(home: Path) -> None:
    provider = open_provider()
    made = provider.create_node({}, worker("decode"), 5)
    assert set(map(address_of, made)) == set(DECODE)
    assert sorted(provider.non_terminated_nodes(worker("decode"))) == sorted(made)
    assert provider.non_terminated_nodes(worker("prefill")) == []
    with pytest.raises(NodeLaunchException, match="all 3 hosts of decode are in use"):
        provider.create_node({}, worker("decode"), 1)
    provider.set_node_tags(next(iter(made)), {"more": "tags"})
    assert provider.node_tags(next(iter(made))) == worker("decode") | {"more": "tags"}


def test_what_one_provider_does_another_of_the_same_machine_sees(home: Path) -> None:
    """Ray has the launcher's commands in processes of their own, and several threads in the autoscaler's."""
    providers = [open_provider() for _ in range(3)]

    def take(provider: HostsProvider) -> None:
        made.extend(map(address_of, provider.create_node({}, worker("decode"), 1)))

    made: list[str] = []
    threads = [threading.Thread(target=take, args=(provider,)) for provider in providers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == DECODE
    assert all(len(provider.non_terminated_nodes(OF_WORKERS)) == 3 for provider in providers)


def test_ray_is_stopped_on_a_host_that_is_given_up_and_then_it_is_free(home: Path, ran) -> None:
    provider = open_provider(stop_commands=["ray stop", "echo done"])
    (node_id,) = provider.create_node({}, worker("prefill"), 1)
    provider.terminate_nodes([node_id])
    assert ran == [(PREFILL[0], "ray stop"), (PREFILL[0], "echo done")]
    assert provider.is_terminated(node_id)
    assert len(provider.create_node({}, worker("prefill"), 2)) == 2


def test_a_launch_that_has_ended_is_given_up_again_without_harm_to_the_one_that_has_its_host_now(
    home: Path, ran
) -> None:
    """As an autoscaler does that starts anew, and reads of all nodes that ever were."""
    provider = open_provider(head_ip="127.0.0.1")
    (ended,) = provider.create_node({}, worker("prefill"), 1)
    provider.terminate_node(ended)
    now = provider.create_node({}, worker("prefill"), len(PREFILL))
    ran.clear()
    provider.terminate_nodes([ended, "127.0.0.1"])
    assert ran == []
    assert set(provider.non_terminated_nodes(OF_WORKERS)) == set(now)
    assert provider.non_terminated_nodes(OF_HEAD) == ["127.0.0.1"]


def test_ray_down_reaches_every_host_whatever_the_book_says(home: Path, ran) -> None:
    provider = open_provider()
    provider.create_node({}, OF_HEAD, 1)
    while left := provider.nodes_for_teardown(OF_HEAD) + provider.nodes_for_teardown(OF_WORKERS):
        provider.terminate_nodes(left)
    assert sorted({host for host, _ in ran}) == sorted([HEAD, *PREFILL, *DECODE])
    assert all((host, "ray stop") in ran for host in (HEAD, *PREFILL, *DECODE))
    assert provider.non_terminated_nodes(OF_HEAD) == []


def test_the_cluster_is_drained_before_ray_down_stops_the_head_and_by_nothing_else(home: Path, ran) -> None:
    provider = open_provider(drain_command="baton stop", stop_commands=["ray stop"])
    for command in ("ray start --head", "ray stop"):
        provider.get_command_runner("", HEAD).run(command, exit_on_fail=True)
    provider.get_command_runner("", PREFILL[0]).run("ray stop")
    provider.terminate_node(HEAD)
    commands = [command for host, command in ran if host == HEAD]
    assert commands[:4] == ["ray start --head", "baton stop", "ray stop", "ray stop"]
    assert (PREFILL[0], "baton stop") not in ran


def test_on_the_head_itself_the_head_is_there(home: Path) -> None:
    assert open_provider().non_terminated_nodes(OF_HEAD) == []
    shutil.rmtree(home / ".baton")
    assert open_provider(head_ip="127.0.0.1").non_terminated_nodes(OF_HEAD) == ["127.0.0.1"]


def test_hosts_that_left_the_file_leave_the_book(home: Path) -> None:
    open_provider().create_node({}, worker("decode"), 3)
    smaller = open_provider(hosts={"prefill": PREFILL, "decode": DECODE[:1]})
    assert list(map(address_of, smaller.non_terminated_nodes(OF_WORKERS))) == DECODE[:1]


@pytest.mark.parametrize(
    ("provider", "complaint"),
    [
        ({"hosts": ["192.0.2.11"]}, "provider.hosts is .*, must be a list of addresses for each node type"),
        ({"hosts": {"prefill": "192.0.2.11"}}, "provider.hosts is .*, must be a list of addresses for each node type"),
        ({"hosts": {"prefil": PREFILL}}, "provider.hosts.prefil is no node type that workers have: decode, prefill"),
        ({"hosts": {"prefill": PREFILL, "decode": PREFILL}}, "decode has 192.0.2.11, which is in hosts.prefill too"),
        ({"hosts": {"prefill": [HEAD]}}, "prefill has 192.0.2.10, which is in head_ip too"),
    ],
)
def test_hosts_that_do_not_fit_are_named(provider: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        cluster(**provider)


def test_the_head_finds_the_key_where_ray_puts_it() -> None:
    config = cluster()
    config["provider"]["auth"]["ssh_private_key"] = "/home/me/.ssh/key"
    sent = HostsProvider({**config["provider"]}, "x").prepare_for_head_node(copy.deepcopy(config))
    assert sent["provider"]["auth"]["ssh_private_key"] == "~/ray_bootstrap_key.pem"
