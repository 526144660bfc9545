"""The placement policies: what each prefers, and what none of them ever does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.messages import Role
from baton.router.placement import (
    POLICIES,
    Candidate,
    Placement,
    PlacementPolicy,
    PlacementQuery,
    WorkerView,
    able_to_serve,
    load_policy,
)

CREDIT = 200


def worker(worker_id: str, role: Role, uncached_tokens: int = 50, **changes: Any) -> Candidate:
    queued_tokens = changes.get("queued_tokens", 0)
    values: dict[str, Any] = {
        "incarnation": "first",
        "host": worker_id,
        "block_size": 16,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 8,
        "total_kv_tokens": 1024,
        "free_kv_tokens": 1024,
        "credit_tokens": max(0, CREDIT - queued_tokens),
        "credit_sequences": 8 - changes.get("running", 0),
    }
    return Candidate(WorkerView(worker_id=worker_id, role=role, **(values | changes)), uncached_tokens)


def prefill(worker_id: str, uncached_tokens: int = 50, **changes: Any) -> Candidate:
    return worker(worker_id, Role.PREFILL, uncached_tokens, **changes)


def decode(worker_id: str, **changes: Any) -> Candidate:
    return worker(worker_id, Role.DECODE, **changes)


def colocated(worker_id: str, uncached_tokens: int = 50, **changes: Any) -> Candidate:
    return worker(worker_id, Role.COLOCATED, uncached_tokens, **changes)


def policy(name: str, seed: int = 0) -> PlacementPolicy:
    return load_policy(name, Random(seed))


def pair(placement: Placement | None) -> tuple[str | None, str | None]:
    assert placement is not None
    assert placement.whole is None
    return placement.prefill, placement.decode


QUERY = PlacementQuery("r", num_tokens=50, max_new_tokens=16)
every_policy = pytest.mark.parametrize("name", POLICIES)


def test_the_policies_are_the_files_of_the_folder() -> None:
    assert POLICIES == ("power_of_two", "queue_depth", "random", "round_robin")
    with pytest.raises(ValueError, match="no placement policy 'best'"):
        load_policy("best", Random(0))


# --- what all of them obey ---


def candidates(role: Role) -> st.SearchStrategy[list[Candidate]]:
    def candidate(number: int, queued: int, uncached: int, running: int, used: int, draining: bool) -> Candidate:
        return worker(
            f"{role.value}{number}",
            role,
            uncached,
            queued_tokens=queued,
            running=running,
            free_kv_tokens=1024 - used,
            credit_sequences=max(0, 8 - running),
            draining=draining,
        )

    one = st.builds(
        candidate,
        st.integers(0, 9),
        st.one_of(st.just(0), st.integers(0, 300)),
        st.integers(1, 300),
        st.integers(0, 10),
        st.integers(0, 1024),
        st.booleans(),
    )
    return st.lists(one, max_size=4, unique_by=lambda each: each.worker_id)


def may_prefill(each: Candidate) -> bool:
    within = each.view.queued_tokens + each.uncached_tokens <= CREDIT
    return not each.view.draining and each.view.running < 8 and (within or each.view.queued_tokens == 0)


def may_decode(query: PlacementQuery, each: Candidate) -> bool:
    room = each.view.free_kv_tokens > query.num_tokens or each.view.running == 0
    return not each.view.draining and each.view.running < 8 and room


@settings(max_examples=1000, deadline=None)
@given(
    sources=candidates(Role.PREFILL),
    wholes=candidates(Role.COLOCATED),
    sinks=candidates(Role.DECODE),
    num_tokens=st.integers(1, 1200),
    seed=st.integers(0, 99),
)
def test_every_policy_places_exactly_if_credit_and_room_allow_it_and_never_beyond_them(
    sources: list[Candidate], wholes: list[Candidate], sinks: list[Candidate], num_tokens: int, seed: int
) -> None:
    query = PlacementQuery("r", num_tokens=num_tokens, max_new_tokens=16)
    good_sources = {each.worker_id for each in sources if may_prefill(each)}
    good_wholes = {each.worker_id for each in wholes if may_prefill(each) and may_decode(query, each)}
    good_sinks = {each.worker_id for each in sinks if may_decode(query, each)}
    for name in POLICIES:
        chosen = policy(name, seed).choose(query, sources + wholes, sinks)
        assert (chosen is not None) == bool(good_wholes or (good_sources and good_sinks)), name
        if chosen is not None and chosen.whole is not None:
            assert chosen.whole in good_wholes, name
            assert (chosen.prefill, chosen.decode) == (None, None), name
        elif chosen is not None:
            assert chosen.prefill in good_sources, name
            assert chosen.decode in good_sinks, name

        first_half = policy(name, seed).choose_prefill(query, sources + wholes)
        assert (first_half is not None) == bool(good_sources or good_wholes), name
        if first_half is not None:
            assert first_half.decode is None, name
            assert {first_half.prefill, first_half.whole} - {None} <= good_sources | good_wholes, name

        second_half = policy(name, seed).choose_decode(query, sinks)
        assert (second_half is not None) == bool(good_sinks), name
        if second_half is not None:
            assert second_half.decode in good_sinks, name


@every_policy
def test_the_same_seed_makes_the_same_choices(name: str) -> None:
    sources, sinks = [prefill(f"p{n}") for n in range(5)], [decode(f"d{n}") for n in range(5)]

    def choices() -> list[Placement | None]:
        chooser = policy(name, seed=7)
        return [chooser.choose(QUERY, sources, sinks) for _ in range(20)]

    assert choices() == choices()


@every_policy
def test_a_draining_worker_is_never_chosen(name: str) -> None:
    chooser = policy(name)
    sources = [prefill("p0", draining=True), prefill("p1", queued_tokens=140)]
    sinks = [decode("d0", draining=True), decode("d1", running=7)]
    assert {pair(chooser.choose(QUERY, sources, sinks)) for _ in range(20)} == {("p1", "d1")}
    assert chooser.choose(QUERY, sources[:1], sinks) is None
    assert chooser.choose(QUERY, sources, sinks[:1]) is None


@every_policy
def test_a_worker_to_avoid_is_chosen_only_if_there_is_no_other(name: str) -> None:
    chooser = policy(name)
    query = replace(QUERY, avoid=frozenset({"p0", "d1"}))
    sources, sinks = [prefill("p0"), prefill("p1")], [decode("d0"), decode("d1")]
    assert {pair(chooser.choose(query, sources, sinks)) for _ in range(20)} == {("p1", "d0")}
    assert pair(chooser.choose(query, sources[:1], sinks[1:])) == ("p0", "d1")


@every_policy
def test_a_worker_to_avoid_stays_avoided_while_the_other_has_no_credit(name: str) -> None:
    query = replace(QUERY, avoid=frozenset({"p0"}))
    assert policy(name).choose(query, [prefill("p0"), prefill("p1", queued_tokens=199)], [decode("d0")]) is None


@every_policy
def test_a_prompt_above_the_whole_credit_goes_only_where_nothing_is_queued(name: str) -> None:
    chooser = policy(name)
    large = replace(QUERY, num_tokens=500)
    sinks = [decode("d0")]
    assert chooser.choose(large, [prefill("p0", 500, queued_tokens=1)], sinks) is None
    assert pair(chooser.choose(large, [prefill("p0", 500, queued_tokens=1), prefill("p1", 500)], sinks)) == ("p1", "d0")


# --- what each prefers ---


def test_queue_depth_takes_the_shorter_queue() -> None:
    sources = [prefill("p0", queued_tokens=120), prefill("p1", queued_tokens=20), prefill("p2", queued_tokens=90)]
    for seed in range(10):
        assert pair(policy("queue_depth", seed).choose(QUERY, sources, [decode("d0")])) == ("p1", "d0")


def test_queue_depth_weighs_a_cached_prefix_against_the_queue() -> None:
    sources = [prefill("p0", uncached_tokens=5, queued_tokens=30), prefill("p1", uncached_tokens=50)]
    assert pair(policy("queue_depth").choose(QUERY, sources, [decode("d0")])) == ("p0", "d0")
    hot = [prefill("p0", uncached_tokens=5, queued_tokens=60), prefill("p1", uncached_tokens=50)]
    assert pair(policy("queue_depth").choose(QUERY, hot, [decode("d0")])) == ("p1", "d0")


def test_queue_depth_takes_the_decode_worker_with_more_room() -> None:
    full, free = decode("d0", free_kv_tokens=200, running=2), decode("d1", free_kv_tokens=900, running=2)
    assert pair(policy("queue_depth").choose(QUERY, [prefill("p0")], [full, free])) == ("p0", "d1")
    busy, idle = decode("d0", running=6), decode("d1", running=1)
    assert pair(policy("queue_depth").choose(QUERY, [prefill("p0")], [busy, idle])) == ("p0", "d1")


def test_queue_depth_avoids_a_prefill_worker_whose_memory_is_full() -> None:
    sources = [prefill("p0", free_kv_tokens=0), prefill("p1", queued_tokens=20)]
    assert pair(policy("queue_depth").choose(QUERY, sources, [decode("d0")])) == ("p1", "d0")


def test_queue_depth_prefers_a_pair_on_one_machine_when_all_else_is_equal() -> None:
    sources = [prefill("p0", host="a"), prefill("p1", host="b")]
    sinks = [decode("d0", host="b"), decode("d1", host="c")]
    for seed in range(8):
        assert pair(policy("queue_depth", seed).choose(QUERY, sources, sinks)) == ("p1", "d0")


def score(query: PlacementQuery, source: Candidate, sink: Candidate | None) -> float:
    """The formula of `queue_depth`, of one pair or one co-located worker."""
    full = sink or source
    kv_load = 1 - (full.view.free_kv_tokens - query.expected_tokens) / full.view.total_kv_tokens
    load = max(kv_load, (full.view.running + 1) / full.view.max_num_seqs)
    moved = 0.0 if sink is None else sink.uncached_tokens * (0.01 if sink.view.host == source.view.host else 0.1)
    waits = max(0, query.num_tokens - source.view.free_kv_tokens)
    return source.prefill_work + waits + load * full.view.max_num_batched_tokens + moved


@settings(max_examples=300, deadline=None)
@given(
    sources=candidates(Role.PREFILL),
    wholes=candidates(Role.COLOCATED),
    sinks=candidates(Role.DECODE),
    hosts=st.lists(st.sampled_from("abc"), min_size=12, max_size=12),
    seed=st.integers(0, 9),
)
def test_queue_depth_finds_the_least_work_of_all_pairs_and_co_located_workers(
    sources: list[Candidate], wholes: list[Candidate], sinks: list[Candidate], hosts: list[str], seed: int
) -> None:
    host = iter(hosts)
    sources, wholes, sinks = (
        [replace(each, view=replace(each.view, host=next(host))) for each in group]
        for group in (sources, wholes, sinks)
    )
    query = PlacementQuery("r", num_tokens=50, max_new_tokens=16)
    able = able_to_serve(query, sources + wholes, sinks)
    scores = {
        (source.worker_id, sink.worker_id if sink is not None else None): score(query, source, sink)
        for source in able.sources
        for sink in ([None] if source.view.role is Role.COLOCATED else able.sinks)
    }
    chosen = policy("queue_depth", seed).choose(query, sources + wholes, sinks)
    assert (chosen is not None) == bool(scores)
    if chosen is not None:
        assert scores[chosen.whole or chosen.prefill, chosen.decode] == pytest.approx(min(scores.values()))


def test_queue_depth_sends_a_request_whole_where_that_is_less_work() -> None:
    busy, sink = prefill("p0", queued_tokens=140), decode("d0")
    chosen = policy("queue_depth").choose(QUERY, [busy, colocated("c0")], [sink])
    assert chosen is not None
    assert chosen.whole == "c0"
    assert pair(policy("queue_depth").choose(QUERY, [prefill("p0"), colocated("c0", queued_tokens=140)], [sink])) == (
        "p0",
        "d0",
    )


def test_queue_depth_rotates_among_equals() -> None:
    chooser = policy("queue_depth")
    sources, sinks = [prefill(f"p{n}") for n in range(3)], [decode(f"d{n}") for n in range(2)]
    chosen = [pair(chooser.choose(QUERY, sources, sinks)) for _ in range(12)]
    assert Counter(source for source, _ in chosen) == {"p0": 4, "p1": 4, "p2": 4}
    assert Counter(sink for _, sink in chosen) == {"d0": 6, "d1": 6}


def test_power_of_two_never_takes_the_longest_of_three_queues() -> None:
    chooser = policy("power_of_two")
    sources = [prefill("p0", queued_tokens=10), prefill("p1", queued_tokens=20), prefill("p2", queued_tokens=140)]
    sinks = [decode("d0", running=1), decode("d1", running=2), decode("d2", running=7)]
    chosen = [pair(chooser.choose(QUERY, sources, sinks)) for _ in range(200)]
    assert {source for source, _ in chosen} == {"p0", "p1"}
    assert {sink for _, sink in chosen} == {"d0", "d1"}


def test_round_robin_gives_everyone_the_same_share() -> None:
    chooser = policy("round_robin")
    sources, sinks = [prefill(f"p{n}") for n in range(3)], [decode(f"d{n}") for n in range(2)]
    chosen = [pair(chooser.choose(QUERY, sources, sinks)) for _ in range(30)]
    assert Counter(source for source, _ in chosen) == {"p0": 10, "p1": 10, "p2": 10}
    assert Counter(sink for _, sink in chosen) == {"d0": 15, "d1": 15}


def test_round_robin_goes_on_with_the_next_when_a_worker_leaves() -> None:
    chooser = policy("round_robin")
    sources, sinks = [prefill(f"p{n}") for n in range(3)], [decode("d0")]
    assert pair(chooser.choose(QUERY, sources, sinks))[0] == "p0"
    assert pair(chooser.choose(QUERY, sources, sinks))[0] == "p1"
    assert pair(chooser.choose(QUERY, [sources[0], sources[2]], sinks))[0] == "p2"
    assert pair(chooser.choose(QUERY, sources, sinks))[0] == "p0"


def test_random_takes_everyone_sometimes() -> None:
    chooser = policy("random")
    sources, sinks = [prefill(f"p{n}") for n in range(3)], [decode(f"d{n}") for n in range(3)]
    chosen = Counter(pair(chooser.choose(QUERY, sources, sinks)) for _ in range(900))
    assert len(chosen) == 9
    assert min(chosen.values()) > 50
