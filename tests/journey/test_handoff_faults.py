"""Workers, links and transfers that fail in the middle of requests: every stream ends with the right tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.decode_worker.peer import PeerLink
from baton.kvtransfer.connector import Pull
from baton.proto.messages import FailureKind, HandoffSource, Leg, Request, Role, Sampling
from baton.proto.settings import SchedulerSettings, TransferSettings
from baton.router.config import RouterSettings
from baton.scheduler.sequence import State

PROMPT = [index % 251 for index in range(640)]
CHUNK = 64


def cluster(paper_dir, **fields) -> SmallCluster:
    fields = {
        "scheduler": SchedulerSettings(max_num_batched_tokens=CHUNK),
        "make_runner": lambda: PaperRunner(num_blocks=256, seconds_per_token=0.0003, step_s=0.001),
        **fields,
    }
    return SmallCluster(paper_dir, **fields)


def sequences(seat) -> list:
    return list(seat.worker.core.scheduler._sequences.values())


def states(seat) -> list[State]:
    return [sequence.state for sequence in sequences(seat)]


def has(small: SmallCluster, state: State, role: Role) -> str | None:
    """The name of a worker of the role with a sequence in the state."""
    return next((name for name, seat in small.seats.items() if seat.role is role and state in states(seat)), None)


async def die(small: SmallCluster, worker_id: str) -> None:
    """The worker is gone, and nobody was told before."""
    seat = small.seats.pop(worker_id)
    await seat.worker.stop()
    await until(seat.link.lost.done, what="the loss of the link")
    await seat.link.close()


def start(small: SmallCluster, count: int, max_tokens: int) -> list[asyncio.Task]:
    return [
        asyncio.create_task(answer(small.inference, request(PROMPT[index:], max_tokens), timeout=30))
        for index in range(count)
    ]


async def all_right(small: SmallCluster, answers: list[asyncio.Task], max_tokens: int) -> list:
    results = await asyncio.gather(*answers)
    for index, result in enumerate(results):
        assert result.tokens == paper_output(PROMPT[index:], max_tokens)
    await small.at_rest()
    return results


@pytest.mark.parametrize("moment", ["mid-prompt", "first token", "mid-stream"])
@pytest.mark.parametrize("dying", ["prefill", "decode", "both"])
async def test_streams_survive_the_death_of_workers(paper_dir, dying, moment):
    async with cluster(paper_dir, prefill=2, decode=2) as small:
        answers = start(small, 4, 60)
        role, state = {
            "mid-prompt": (Role.PREFILL, State.RUNNING),
            "first token": (Role.PREFILL, State.EXPORTED),
            "mid-stream": (Role.DECODE, State.RUNNING),
        }[moment]
        await until(lambda: has(small, state, role), what=moment)
        victims = {"prefill": ["prefill-0"], "decode": ["decode-0"], "both": ["prefill-0", "decode-1"]}[dying]
        await asyncio.gather(*(die(small, victim) for victim in victims))
        await all_right(small, answers, 60)


async def test_streams_wait_for_the_only_prefill_worker_to_come_back_under_its_name(paper_dir):
    async with cluster(paper_dir) as small:
        answers = start(small, 3, 40)
        await until(lambda: has(small, State.RUNNING, Role.PREFILL))
        await die(small, "prefill-0")
        await small.add(Role.PREFILL, "prefill-0")
        await all_right(small, answers, 40)
        assert len(small.seats["decode-0"].worker.core.duty.side._links) == 1


async def test_a_leg_that_names_a_dead_incarnation_leaves_the_link_to_the_living_one_alone(paper_dir):
    async with cluster(paper_dir) as small:
        decode, prefill = small.seats["decode-0"], small.seats["prefill-0"]
        await answer(small.inference, request(PROMPT, 2))
        link = decode.worker.core.duty.side._links[prefill.description.incarnation]
        events = []
        source = HandoffSource("prefill-0", "of old", prefill.description.address, "x")
        stale = Request("stale", (1, 2, 3), 3, Sampling(max_tokens=4), Leg.DECODE, source=source)
        decode.link.submit(stale, events.append)
        await until(lambda: events, what="the failure of the leg")
        assert "of old" in events[0].message
        assert decode.worker.core.duty.side._links == {prefill.description.incarnation: link}
        await small.at_rest()


async def test_a_cut_link_between_two_living_workers_is_made_again(paper_dir):
    async with cluster(paper_dir) as small:
        receiver = small.seats["decode-0"].worker.core.duty.side
        answers = start(small, 3, 30)
        await until(lambda: any(handoff.incoming.announced for handoff in receiver._handoffs.values()))
        (link,) = receiver._links.values()
        link._task.cancel()
        results = await all_right(small, answers, 30)
        assert sum(result.finish.retries for result in results) > 0
        assert link not in receiver._links.values()


@pytest.mark.parametrize("moment", [State.RUNNING, State.EXPORTED])
async def test_the_end_of_the_watch_stream_at_the_source_ends_what_it_lends(paper_dir, moment):
    async with cluster(paper_dir) as small:
        lender = small.seats["prefill-0"].worker.core.duty.side
        answers = start(small, 3, 30)
        await until(lambda: has(small, moment, Role.PREFILL) and lender._watchers)
        for link in list(lender._watchers.values()):
            link.outbox.put_nowait(None)
        await all_right(small, answers, 30)


async def test_a_source_that_is_preempted_while_it_is_read_lends_again_in_a_new_epoch(paper_dir):
    scheduler = SchedulerSettings(max_num_batched_tokens=CHUNK, prefix_cache=False)
    transfer = TransferSettings(connector="local", checksums="off")
    async with cluster(paper_dir, scheduler=scheduler, transfer=transfer) as small:
        prefill, decode = small.seats["prefill-0"], small.seats["decode-0"]
        core = prefill.worker.core
        answers = start(small, 2, 30)
        for _ in range(3):
            await until(
                lambda: any(s.state is State.RUNNING and s.num_computed_tokens > 2 * CHUNK for s in sequences(prefill))
            )

            def preempt() -> None:
                for sequence in sequences(prefill):
                    if sequence.state is State.RUNNING:
                        # What is read from its blocks from now on is wrong.
                        prefill.runner.kv[sequence.block_ids] = -7
                        core.scheduler._preempt(sequence)
                        core.preempted(sequence)

            await small.on_loop(prefill, preempt)
        results = await all_right(small, answers, 30)
        assert sum(result.finish.retries for result in results) == 0
        assert (await small.counters())["prefill-0"].preemptions_recompute >= 3
        assert not decode.runner.errors


async def test_a_lease_outlives_its_time_while_the_decode_worker_waits_for_room(paper_dir):
    async with cluster(
        paper_dir,
        transfer=TransferSettings(connector="local", lease_s=1.0, heartbeat_s=0.1),
        make_runner=lambda: PaperRunner(num_blocks=64, seconds_per_token=0.0001, step_s=0.006),
    ) as small:
        prefill, decode = small.seats["prefill-0"], small.seats["decode-0"]
        long = asyncio.create_task(answer(small.inference, request(PROMPT[:600], 300)))
        await until(lambda: State.RUNNING in states(decode))
        small.promise_room()
        second = asyncio.create_task(answer(small.inference, request(PROMPT[40:], 20)))
        await until(lambda: State.EXPORTED in states(prefill))
        assert (await long).tokens == paper_output(PROMPT[:600], 300)
        result = await second
        assert result.tokens == paper_output(PROMPT[40:], 20)
        assert result.finish.retries == 0
        assert result.finish.timeline.handoff_wait > 1.0
        await small.at_rest()


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_a_side_that_stalled_gives_up_its_hand_offs_and_the_streams_go_on(paper_dir, side):
    async with cluster(paper_dir) as small:
        prefill, decode = small.seats["prefill-0"].worker, small.seats["decode-0"].worker
        fenced = prefill.core.duty.side if side == "prefill-0" else decode.core.duty.side
        hold_pulls(decode, 0.3)
        answers = start(small, 3, 30)
        await until(lambda: State.EXPORTED in states(small.seats["prefill-0"]))
        fenced._last_tick_s -= 3600
        results = await all_right(small, answers, 30)
        assert sum(result.finish.retries for result in results) > 0


class FaultyConnector:
    """Passes everything through; the first `num_bad` pulls name blocks that no pool has."""

    def __init__(self, real, num_bad: int, delay_s: float = 0.0) -> None:
        self._real = real
        self._num_bad = num_bad
        self._delay_s = delay_s

    def pull(self, pull: Pull) -> None:
        if self._num_bad:
            self._num_bad -= 1
            pull = replace(pull, source_blocks=tuple(10**6 for _ in pull.source_blocks))
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._real.pull, pull)
        else:
            self._real.pull(pull)

    def __getattr__(self, name: str):
        return getattr(self._real, name)


def hold_pulls(worker, delay_s: float) -> None:
    worker.core.duty.side._connector = FaultyConnector(worker.core.duty.side._connector, 0, delay_s)


async def test_reads_that_fail_cost_a_retry_each_and_no_token(paper_dir):
    async with cluster(paper_dir) as small:
        receiver = small.seats["decode-0"].worker.core.duty.side
        receiver._connector = FaultyConnector(receiver._connector, 2)
        results = await all_right(small, start(small, 2, 30), 30)
        assert sum(result.finish.retries for result in results) == 2
        assert (await small.counters())["decode-0"].pulls_failed == 2


@pytest.mark.parametrize("binding", ["early", "late"])
async def test_a_request_that_its_first_token_ends_is_never_tried_again(paper_dir, binding):
    async with cluster(paper_dir, router_settings=RouterSettings(port=0, binding=binding)) as small:
        for index in range(10):
            prompt = PROMPT[index : index + 70]
            first = paper_output(prompt, 1)
            result = await answer(small.inference, request(prompt, 20, sampling_stop_token_ids=first))
            assert result.tokens == first
            assert result.finish.retries == 0
            await small.at_rest()
        counters = await small.counters()
        assert counters["decode-0"].pulls_failed == 0


async def test_a_decode_leg_whose_source_ends_without_a_word_is_ended_by_the_router_alone(paper_dir):
    """The source's last word goes to the router: to tell the decode worker too would race it into a retry."""
    async with cluster(paper_dir) as small:
        decode = small.seats["decode-0"]
        failures = []
        fail = decode.worker.core.fail
        decode.worker.core.fail = lambda failure: (failures.append(failure), fail(failure))
        for index in range(5):
            prompt = PROMPT[index:]
            await answer(small.inference, request(prompt, 20, sampling_stop_token_ids=paper_output(prompt, 1)))
        await small.at_rest()
        assert failures == []


async def test_a_lease_that_nobody_watches_ends_by_itself(paper_dir):
    transfer = TransferSettings(connector="local", lease_s=0.5, heartbeat_s=0.05)
    async with cluster(paper_dir, transfer=transfer) as small:
        prefill = small.seats["prefill-0"]
        events = []
        prefill.link.submit(
            Request("alone", tuple(PROMPT), len(PROMPT), Sampling(max_tokens=9), Leg.PREFILL), events.append
        )
        await until(lambda: len(events) == 2, what="the failure after the token")
        assert events[1].kind is FailureKind.LEASE_LOST
        await small.at_rest()


async def test_who_subscribes_to_what_never_comes_is_told_after_a_leases_time(paper_dir):
    transfer = TransferSettings(connector="local", lease_s=0.2, heartbeat_s=0.02)
    async with cluster(paper_dir, transfer=transfer) as small:
        prefill, decode = small.seats["prefill-0"], small.seats["decode-0"]
        events = []
        description = prefill.description
        source = HandoffSource("prefill-0", description.incarnation, description.address, "never")
        leg = Request("waiting", (1, 2, 3), 3, Sampling(max_tokens=4), Leg.DECODE, source=source)
        decode.link.submit(leg, events.append)
        await until(lambda: events, what="the failure of the leg")
        assert "no such sequence" in events[0].message
        assert not prefill.worker.core.duty.side._early
        await small.at_rest()


async def test_who_subscribes_before_the_sequence_comes_gets_it(paper_dir):
    async with cluster(paper_dir) as small:
        prefill, decode = small.seats["prefill-0"], small.seats["decode-0"]
        description = prefill.description
        events, tokens = [], []
        source = HandoffSource("prefill-0", description.incarnation, description.address, "late")
        prompt, sampling = tuple(PROMPT), Sampling(temperature=0.0, max_tokens=6)
        decode.link.submit(Request("d", prompt, len(prompt), sampling, Leg.DECODE, source=source), tokens.append)
        await until(lambda: prefill.worker.core.duty.side._early)
        prefill.link.submit(Request("late", prompt, len(prompt), sampling, Leg.PREFILL), events.append)
        await until(lambda: len(tokens) == 5, what="the tokens")
        assert [*events[0].token_ids, *(batch.token_ids[0] for batch in tokens)] == paper_output(PROMPT, 6)
        await small.at_rest()
        prefill.link.forget("late")


async def test_a_link_that_its_own_bug_ends_fails_the_worker_and_its_hand_offs(paper_dir, monkeypatch):
    async with cluster(paper_dir) as small:
        decode = small.seats["decode-0"]

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(PeerLink, "_refusal", broken)
        waiting = asyncio.create_task(answer(small.inference, request(PROMPT, 4)))
        await until(lambda: small.failures, what="the failure")
        assert [str(error) for error in small.failures] == ["a bug"] * len(small.failures)
        await until(lambda: not decode.worker.core.duty.side._links or waiting.done())
        monkeypatch.undo()
        await asyncio.gather(waiting, return_exceptions=True)
        small.failures.clear()
        await small.at_rest()


async def test_a_client_that_lost_only_the_last_message_gets_the_text_that_was_held_back(paper_dir):
    async with cluster(paper_dir) as small:
        prompt = PROMPT[:40]
        plain = await answer(small.inference, request(prompt, 12))
        # The last character could begin this stop string, so it waits for the end of the output.
        message = request(prompt, 12, sampling_stop=[plain.text[-1] + "never"])
        parts = [part async for part in small.inference.Generate(message, timeout=30)]
        assert parts[-1].HasField("finish")
        assert parts[-1].text.endswith(plain.text[-1])
        message.resume_token_ids[:] = plain.tokens
        rest = await answer(small.inference, message)
        assert rest.text == plain.text[-1]
        assert rest.finish.usage.completion_tokens == 12
        assert rest.finish.reason == parts[-1].finish.reason
