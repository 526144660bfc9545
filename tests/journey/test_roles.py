"""A worker changes its role while requests run: streams have the right tokens, and nothing of the old role is left."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import grpc
import pytest
from asking import Answer, answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import Seat, SmallCluster

from baton.decode_worker.peer import PeerLink
from baton.engine import roles
from baton.proto import cluster_pb2 as cluster
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.messages import HandoffSource, Role
from baton.proto.settings import SchedulerSettings, TransferSettings
from baton.router.config import RouterSettings
from baton.scheduler.sequence import State

PROMPT = [index % 251 for index in range(640)]
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.COLOCATED, Role.COLOCATED: Role.PREFILL}


def cluster_of(paper_dir, **fields) -> SmallCluster:
    fields = {
        "scheduler": SchedulerSettings(max_num_batched_tokens=128),
        "make_runner": lambda: PaperRunner(num_blocks=192, seconds_per_token=0.00005, step_s=0.0005),
        **fields,
    }
    return SmallCluster(paper_dir, **fields)


async def set_role(small: SmallCluster, worker_id: str, role: Role, **fields) -> cluster.SetRoleResponse:
    message = cluster.SetRoleRequest(worker_id=worker_id, role=role.value, **fields)
    return await small.cluster.SetRole(message, timeout=30)


async def refused(call: Awaitable) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def one(small: SmallCluster, index: int, num_tokens: int) -> Answer:
    """The right answer to prompt number `index`."""
    prompt = PROMPT[index % 600 :]
    result = await answer(small.inference, request(prompt, num_tokens), timeout=30)
    assert result.tokens == paper_output(prompt, num_tokens)
    return result


def states(seat: Seat) -> list[State]:
    return [sequence.state for sequence in list(seat.worker.core.scheduler._sequences.values())]


# --- under load -----------------------------------------------------------------------------------------------------


class Load:
    """Clients that ask one thing after the other until told to stop. Every answer is checked."""

    def __init__(self, small: SmallCluster, random: Random, num_clients: int) -> None:
        self.stopping = False
        self.answers: list[Answer] = []
        self._small = small
        self._clients = [asyncio.create_task(self._client(random.randrange(2**32))) for _ in range(num_clients)]

    async def _client(self, seed: int) -> None:
        random = Random(seed)
        while not self.stopping:
            self.answers.append(await one(self._small, random.randrange(600), random.choice((1, 2, 20, 80))))

    async def more(self, count: int) -> None:
        """Waits for answers, or for the first client that has got none."""
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal or any(client.done() for client in self._clients), timeout_s=30)

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.gather(*self._clients)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("binding", ["early", "late"])
async def test_workers_that_go_from_role_to_role_lose_no_request_and_alter_none(paper_dir, binding, seed):
    """Two workers go round in a ring of roles, at random times and with random patience; two others stay."""
    random = Random(seed)
    settings = RouterSettings(port=0, binding=binding)
    scheduler = SchedulerSettings(max_num_batched_tokens=128, async_scheduling=random.choice(("on", "off")))
    async with cluster_of(paper_dir, prefill=2, decode=2, router_settings=settings, scheduler=scheduler) as small:
        seats = {name: small.seats[name] for name in ("prefill-0", "decode-0")}
        pools = {name: seat.runner.kv.data_ptr() for name, seat in seats.items()}
        incarnations = [seat.description.incarnation for seat in small.members()]
        load = Load(small, random, 6)

        async def go_round(name: str) -> None:
            for _ in range(6):
                await load.more(random.randrange(1, 6))
                role = OTHER_ROLE[small.seats[name].role]
                done = await set_role(small, name, role, timeout_s=random.choice((0.0, 0.02, 10.0)))
                assert 0 <= done.drain_s <= done.total_s
                assert small.seats[name].role is role
                incarnations.append(small.seats[name].description.incarnation)

        await asyncio.gather(*map(go_round, seats))
        await load.more(6)
        await load.stop()
        await small.at_rest()
        assert len(set(incarnations)) == len(incarnations) == 4 + 12
        # The same processes, with the same pools: nothing was loaded or allocated again.
        assert {name: small.seats[name] for name in seats} == seats
        assert {name: seat.runner.kv.data_ptr() for name, seat in seats.items()} == pools


async def test_a_worker_has_run_legs_of_each_role_that_it_had(paper_dir):
    async with cluster_of(paper_dir, prefill=2, decode=2) as small:
        ran: dict[Role, set[str]] = {}
        for role in (Role.DECODE, Role.COLOCATED, Role.PREFILL):
            await set_role(small, "prefill-0", role)
            results = await asyncio.gather(*(one(small, index, 5) for index in range(0, 120, 10)))
            ran[role] = {
                leg
                for result in results
                for leg, worker in (("prefill", result.finish.prefill_worker), ("decode", result.finish.decode_worker))
                if worker == "prefill-0"
            }
        assert ran == {Role.DECODE: {"decode"}, Role.COLOCATED: {"prefill", "decode"}, Role.PREFILL: {"prefill"}}
        await small.at_rest()


async def test_a_pair_becomes_two_colocated_workers_and_a_pair_again_while_requests_come(paper_dir):
    """Whoever changes is the last of its role, so new requests wait meanwhile. None is turned away."""
    async with cluster_of(paper_dir) as small:
        load = Load(small, Random(5), 4)
        for name, role in (
            ("decode-0", Role.COLOCATED),
            ("prefill-0", Role.COLOCATED),
            ("decode-0", Role.PREFILL),
            ("prefill-0", Role.DECODE),
        ):
            await load.more(3)
            await set_role(small, name, role)
        await load.more(3)
        await load.stop()
        await small.at_rest()
        assert [seat.role for seat in small.members()] == [Role.DECODE, Role.PREFILL]


async def test_legs_that_end_in_time_are_not_moved(paper_dir):
    async with cluster_of(paper_dir, decode=2) as small:
        asked = [asyncio.create_task(one(small, index, 60)) for index in range(4)]
        await until(lambda: State.RUNNING in states(small.seats["decode-0"]))
        done = await set_role(small, "decode-0", Role.COLOCATED, timeout_s=20)
        assert done.moved == 0
        assert done.drain_s > 0
        assert [result.finish.retries for result in await asyncio.gather(*asked)] == [0] * 4
        await small.at_rest()


async def test_legs_that_do_not_end_in_time_go_on_elsewhere(paper_dir):
    async with cluster_of(paper_dir, decode=2) as small:
        asked = [asyncio.create_task(one(small, index, 400)) for index in range(4)]
        await until(lambda: states(small.seats["decode-0"]).count(State.RUNNING) == 2)
        done = await set_role(small, "decode-0", Role.COLOCATED, timeout_s=0.0)
        assert done.moved >= 2
        results = await asyncio.gather(*asked)
        assert sum(result.finish.retries for result in results) >= 2
        await small.at_rest()


async def test_a_prompt_that_is_lent_when_its_worker_leaves_is_computed_again(paper_dir):
    """The reader is stopped in the middle of the hand-off; its blocks come out of quarantine all the same."""
    async with cluster_of(paper_dir, prefill=2) as small:
        asked = [asyncio.create_task(one(small, index, 30)) for index in range(6)]
        await until(lambda: State.EXPORTED in states(small.seats["prefill-0"]))
        await set_role(small, "prefill-0", Role.DECODE, timeout_s=0.0)
        await asyncio.gather(*asked)
        await small.at_rest()


async def test_a_worker_that_dies_on_the_way_takes_no_request_with_it(paper_dir):
    async with cluster_of(paper_dir, prefill=2, decode=2) as small:
        asked = [asyncio.create_task(one(small, index, 300)) for index in range(6)]
        await until(lambda: State.RUNNING in states(small.seats["decode-0"]))
        change = asyncio.create_task(set_role(small, "decode-0", Role.PREFILL, timeout_s=20))
        await until(lambda: small.seats["decode-0"].worker.core.desk.leaving)
        await small.remove("decode-0")
        await small.add(Role.PREFILL, "decode-0")
        await asyncio.gather(*asked)
        change.cancel()
        await asyncio.gather(*(one(small, index, 5) for index in range(6)))
        await small.at_rest()


# --- what is left of the former role --------------------------------------------------------------------------------


async def test_what_was_cached_before_is_found_in_the_new_role(paper_dir):
    """KV that was pulled as a decode worker, then computed as a co-located one."""
    async with cluster_of(paper_dir) as small:
        assert (await one(small, 0, 3)).finish.usage.cached_tokens == 0
        await set_role(small, "decode-0", Role.COLOCATED)
        assert (await one(small, 0, 3)).finish.usage.cached_tokens == len(PROMPT) - small.block_size
        await one(small, 5, 3)
        await set_role(small, "prefill-0", Role.DECODE)
        await set_role(small, "decode-0", Role.PREFILL)
        assert (await one(small, 5, 3)).finish.usage.cached_tokens >= len(PROMPT) - 5 - 2 * small.block_size
        await small.at_rest()


async def test_the_former_incarnation_is_refused_by_name_and_the_new_role_by_what_it_is(paper_dir):
    """A decode worker that was told of the lender before the change cannot read from what it has become."""
    async with cluster_of(paper_dir, prefill=2) as small:
        seat = small.seats["prefill-0"]
        former = seat.description
        await set_role(small, "prefill-0", Role.DECODE)
        assert "prefill-0 is a decode worker" in await lost(seat, former)
        await set_role(small, "prefill-0", Role.PREFILL)
        assert f"incarnation {seat.description.incarnation} answers" in await lost(seat, former)
        assert seat.description.address == former.address


async def lost(seat: Seat, description) -> str:
    """Why a link to a worker, as it was described, is lost."""
    reasons: asyncio.Queue[str] = asyncio.Queue()

    class Listener:
        def opened(self, link) -> None:
            reasons.put_nowait("")

        def lost(self, link, reason: str) -> None:
            reasons.put_nowait(reason)

    geometry = seat.runner.geometry
    link = PeerLink(
        HandoffSource(description.worker_id, description.incarnation, description.address, "x"),
        wire.WatcherHello(worker_id="watcher", incarnation="w", geometry=geometry.to_wire(), connector="local"),
        geometry,
        TransferSettings(),
        Listener(),
        pytest.fail,
    )
    reason = await asyncio.wait_for(reasons.get(), 5)
    await link.close()
    return reason


async def test_other_workers_forget_a_lender_that_lends_no_more(paper_dir):
    async with cluster_of(paper_dir, prefill=2) as small:
        reader = small.seats["decode-0"].worker.core.duty.side
        await asyncio.gather(*(one(small, index, 5) for index in range(8)))
        assert len(reader._links) == 2
        await set_role(small, "prefill-0", Role.COLOCATED)
        await until(lambda: [link.worker_id for link in reader._links.values()] == ["prefill-1"])
        await small.at_rest()


async def test_a_leg_that_comes_too_late_for_the_former_role_is_refused_or_dropped(paper_dir):
    """A second router, which knows nothing of the change, goes on sending prefill legs on the stream that it has."""
    async with cluster_of(paper_dir, prefill=2, decode=2) as small:
        seat = small.seats["prefill-0"]
        async with grpc.aio.insecure_channel(seat.description.address) as channel:

            async def sent():
                yield wire.RouterMessage(hello=wire.RouterHello(router_incarnation="other"))
                for number in itertools.count(1):
                    submit = wire.Submit(
                        number=number, sequence_id=f"other-{number}", token_ids=[1], num_prompt_tokens=1
                    )
                    submit.leg = wire.LEG_PREFILL
                    submit.sampling.max_tokens = 2
                    yield wire.RouterMessage(submit=submit)
                    await asyncio.sleep(0)

            messages = aiter(worker_pb2_grpc.WorkerStub(channel).Connect(sent()))
            assert (await anext(messages)).hello.worker.role == "prefill"
            change = asyncio.create_task(set_role(small, "prefill-0", Role.DECODE, timeout_s=0.05))
            heard = []
            with suppress(grpc.aio.AioRpcError):  # how gRPC tells one who sends that the stream was ended
                while (message := await anext(messages, None)) is not None:
                    heard.append(message)
            await change
            failures = [failure.kind for message in heard for failure in message.failures]
            assert set(failures) == {wire.LEG_FAILURE_KIND_DRAINING}
            reports = [message.load for message in heard if message.HasField("load")]
            assert {(report.role, report.incarnation) for report in reports} == {("prefill", reports[0].incarnation)}
        await small.at_rest()


async def test_status_shows_the_new_role_in_the_old_pool(paper_dir):
    async with cluster_of(paper_dir, prefill=2) as small:
        await set_role(small, "prefill-1", Role.COLOCATED)
        status = await small.status()
        shown = {pool.name: (pool.role, [worker.role for worker in pool.workers]) for pool in status.pools}
        assert shown == {"prefill": ("prefill", ["prefill", "colocated"]), "decode": ("decode", ["decode"])}
        worker = status.pools[0].workers[1]
        assert (worker.state, worker.restarts) == ("ready", 0)
        assert worker.incarnation == small.seats["prefill-1"].description.incarnation


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker_id", "role", "lacking"), [("prefill-0", Role.DECODE, "prefill"), ("decode-0", Role.PREFILL, "decode")]
)
async def test_the_last_worker_of_a_role_stays_if_nothing_could_be_served_without_it(
    paper_dir, worker_id, role, lacking
):
    async with cluster_of(paper_dir) as small:
        error = await refused(set_role(small, worker_id, role))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"no {lacking} worker" in error.details()
        await one(small, 0, 5)
        await small.at_rest()


async def test_who_insists_may_pass_through_a_cluster_that_serves_nothing(paper_dir):
    async with cluster_of(paper_dir) as small:
        await set_role(small, "prefill-0", Role.DECODE, force=True)
        waiting = asyncio.create_task(one(small, 0, 5))
        await until(lambda: small.router.dispatcher.num_requests)
        await set_role(small, "decode-0", Role.PREFILL)
        assert (await waiting).finish.prefill_worker == "decode-0"
        await small.at_rest()


async def test_of_two_changes_that_together_leave_nothing_one_is_refused(paper_dir):
    async with cluster_of(paper_dir, prefill=2, decode=1) as small:
        changes = [set_role(small, name, Role.DECODE) for name in ("prefill-0", "prefill-1")]
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        assert sorted(isinstance(outcome, grpc.aio.AioRpcError) for outcome in outcomes) == [False, True]
        await one(small, 0, 5)
        await small.at_rest()


async def test_changes_of_one_worker_come_one_after_the_other(paper_dir):
    async with cluster_of(paper_dir, prefill=2, decode=2) as small:
        load = Load(small, Random(1), 4)
        await load.more(2)
        wanted = [Role.DECODE, Role.COLOCATED, Role.PREFILL, Role.DECODE, Role.COLOCATED]
        before = small.seats["prefill-0"].description.incarnation
        await asyncio.gather(*(set_role(small, "prefill-0", role) for role in wanted))
        assert small.seats["prefill-0"].role is Role.COLOCATED
        assert small.seats["prefill-0"].description.incarnation != before
        await load.stop()
        await small.at_rest()


async def test_a_role_that_it_has_already_costs_a_worker_nothing(paper_dir):
    async with cluster_of(paper_dir) as small:
        before = small.seats["prefill-0"].description
        done = await set_role(small, "prefill-0", Role.PREFILL)
        assert (done.drain_s, done.moved) == (0, 0)
        assert small.seats["prefill-0"].description == before
        await one(small, 0, 5)


async def test_a_worker_that_does_not_come_to_rest_keeps_its_role_and_serves_on(paper_dir, monkeypatch):
    """A read that never settles keeps its blocks in quarantine: nobody knows when they may be used again."""
    monkeypatch.setattr(roles, "SETTLE_S", 0.2)
    async with cluster_of(paper_dir, decode=2) as small:
        seat = small.seats["decode-0"]
        receiver = seat.worker.core.duty.side
        stuck = await on(seat, lambda: seat.worker.core.scheduler.pool.allocate(1))
        await on(seat, lambda: seat.worker.core.scheduler.pool.quarantine(stuck))
        error = await refused(set_role(small, "decode-0", Role.COLOCATED, timeout_s=0.0))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "1 blocks may still be written to" in error.details()
        assert seat.worker.core.duty.side is receiver
        results = await asyncio.gather(*(one(small, index, 5) for index in range(6)))
        assert "decode-0" in {result.finish.decode_worker for result in results}
        await on(seat, lambda: seat.worker.core.scheduler.pool.settle(stuck))
        await small.at_rest()


async def on(seat: Seat, function: Callable[[], object]) -> object:
    return await seat.worker._ask(function)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"role": "cook"}, "'cook'"), ({"role": ""}, "''"), ({"role": "decode", "timeout_s": -1.0}, "timeout_s")],
)
async def test_what_is_no_role_or_no_time_is_named(paper_dir, fields, named):
    async with cluster_of(paper_dir) as small:
        message = cluster.SetRoleRequest(worker_id="prefill-0", **fields)
        error = await refused(small.cluster.SetRole(message))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in error.details() or named in str(error.trailing_metadata())


async def test_a_worker_that_is_not_there_has_no_role_to_change(paper_dir):
    async with cluster_of(paper_dir) as small:
        error = await refused(set_role(small, "prefill-9", Role.DECODE))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "prefill-9" in error.details()
