"""The checks of a running cluster, on examinations made up for them: what follows from what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.client.checks.cluster import MAX_CLOCK_S, check
from baton.client.checks.machine import Needs, room_to_start
from baton.proto import cluster_pb2 as cluster
from baton.proto import worker_pb2 as wire

GIB = 1 << 30


def machine(**changes: object) -> wire.Machine:
    sound = {"memory_bytes": 8 * GIB, "available_bytes": 4 * GIB, "shm_bytes": 4 * GIB, "shm_free_bytes": 4 * GIB}
    return wire.Machine(**{"host": "a", "boot_id": "b", **sound, **changes})


def worker(name: str, role: str, **lane: object) -> cluster.ExaminedWorker:
    its = wire.WorkerDescription(worker_id=name, incarnation=f"{name}-i", role=role, version="1")
    lanes = [wire.Lane(source="prefill-0", source_incarnation="prefill-0-i", **{"state": "open", **lane})]
    return cluster.ExaminedWorker(
        worker_id=name,
        role=role,
        state="ready",
        examination=wire.WorkerExamination(
            worker=its, device="cpu", machine=machine(), lanes=lanes if role == "decode" else []
        ),
    )


def sound(**lane: object) -> cluster.ClusterExamination:
    workers = [worker("prefill-0", "prefill"), worker("decode-0", "decode", **lane)]
    return cluster.ClusterExamination(version="1", machine=machine(), workers=workers)


def found(examination: cluster.ClusterExamination) -> list[tuple[str, str]]:
    return [(finding.check, finding.subject) for finding in check(examination) if finding.is_fault]


def test_a_sound_cluster_has_no_finding() -> None:
    assert list(check(sound())) == []


def test_lanes_from_a_worker_that_is_away_are_no_findings_of_their_own() -> None:
    examination = sound(state="lost", reason="gone")
    examination.workers[0].silence = "no answer"
    assert found(examination) == [("workers", "prefill-0")]


LANES = [
    ({"state": "lost", "reason": "silent for 3.0 s"}, "silent for 3.0 s"),
    ({"state": "refused", "reason": "dtype is 'a' on x and 'b' on y"}, "do not fit: dtype is 'a' on x"),
    ({"state": "meeting"}, "have not met"),
    ({"reason": "no route"}, "KV cannot be read by any way: no route"),
    ({"is_slow": True, "gb_per_s": 0.5, "expected_gb_per_s": 2.0, "transport": "t"}, "comes at 0.5 GB/s by t, 2 GB/s"),
    ({"round_trip_s": 0.2}, "a round trip takes 200.0 ms, at most 50.0 ms"),
]


@pytest.mark.parametrize(("lane", "said"), LANES)
def test_what_is_wrong_with_a_lane_is_said_of_the_pair(lane: dict[str, object], said: str) -> None:
    [finding] = check(sound(**lane))
    assert (finding.check, finding.subject) == ("lanes", "prefill-0 to decode-0")
    assert said in finding.problem


def test_a_pair_of_which_no_lane_is_known_has_not_met() -> None:
    examination = sound()
    del examination.workers[1].examination.lanes[:]
    [finding] = check(examination)
    assert "have not met" in finding.problem


def test_a_clock_is_not_blamed_for_what_the_round_trip_may_be() -> None:
    examination = sound()
    examination.workers[0].clock_ahead_s = MAX_CLOCK_S + 1
    examination.workers[0].round_trip_s = 2.1
    assert found(examination) == []
    examination.workers[0].round_trip_s = 1.9
    assert found(examination) == [("clock", "prefill-0")]


def test_a_clock_may_be_off_either_way() -> None:
    examination = sound()
    examination.workers[0].clock_ahead_s, examination.workers[1].clock_ahead_s = 90.0, -90.0
    assert [finding.problem.split(" that")[0] for finding in check(examination)] == [
        "its clock is 90.0 s ahead of",
        "its clock is 90.0 s behind",
    ]


def spoil_memory(examination: cluster.ClusterExamination) -> None:
    for each in examination.workers:
        each.examination.worker.num_blocks, each.examination.worker.block_size = 1 << 20, 16
        each.examination.worker.kv_bytes_per_token = 300  # 4.7 GiB each


def spoil_gpus(examination: cluster.ClusterExamination) -> None:
    examination.workers[1].examination.device = "cuda"


def spoil_available(examination: cluster.ClusterExamination) -> None:
    examination.machine.available_bytes = 1 << 20


def spoil_shm(examination: cluster.ClusterExamination) -> None:
    examination.machine.shm_free_bytes = 1 << 20


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(spoil_memory, "memory"), (spoil_gpus, "gpus"), (spoil_available, "memory"), (spoil_shm, "shm")],
)
def test_a_machine_is_judged_once_for_all_that_runs_on_it(
    spoil: Callable[[cluster.ClusterExamination], None], name: str
) -> None:
    examination = sound()
    spoil(examination)
    assert found(examination) == [(name, "a")]


def test_workers_on_machines_of_their_own_do_not_add_up() -> None:
    examination = sound()
    spoil_memory(examination)
    examination.workers[0].examination.machine.host = "c"
    assert found(examination) == []


def test_a_role_without_a_ready_worker_is_named() -> None:
    examination = sound()
    examination.workers[1].state = "draining"
    assert found(examination) == [("workers", "decode workers")]


def test_restarts_and_draining_are_worth_knowing_and_no_fault() -> None:
    examination = sound()
    examination.workers.append(worker("decode-1", "decode"))
    examination.workers[2].state, examination.workers[2].restarts = "draining", 3
    assert found(examination) == []
    assert [finding.subject for finding in check(examination)] == ["decode-1", "decode-1"]


def test_a_start_needs_room_for_pools_weights_shared_memory_and_gpus() -> None:
    needs = Needs(num_processes=2, kv_bytes=3 * GIB, weight_bytes=GIB, num_gpus=0)
    assert list(room_to_start(machine(), needs)) == []
    for change, name in ({"available_bytes": 4 * GIB - 1}, "memory"), ({"shm_free_bytes": 100 << 20}, "shm"):
        assert [finding.check for finding in room_to_start(machine(**change), needs)] == [name]
    more = Needs(num_processes=2, kv_bytes=0, weight_bytes=0, num_gpus=1.5)
    assert [finding.check for finding in room_to_start(machine(num_gpus=1), more)] == ["gpus"]
