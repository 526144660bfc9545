"""n outputs of one request: one hand-off, then forks that share the prompt's blocks, and the right tokens always."""

from __future__ import annotations

import asyncio
import zlib
from random import Random

import grpc
import numpy as np
import pytest
from asking import Answer, answer, request, until
from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.engine.runner import Runner
from baton.proto import inference_pb2 as inference
from baton.proto.messages import Role
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import RouterSettings
from baton.router.fork import Fork

SEED = 40
BLOCK = 16


class SeededRunner(PaperRunner):
    """A paper model that samples: its next token depends on the seed too."""

    def _choose(self, sequence, context) -> int:
        return seeded_token(context, sequence.sampling.seed)


def seeded_token(context: list[int], seed: int) -> int:
    return zlib.crc32(np.asarray([seed, *context], dtype=np.int64).tobytes()) % 256


def seeded_output(prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(seeded_token(tokens, seed))
    return tokens[len(prompt) :]


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt * 31) % 256 for index in range(num_tokens)]


def outputs_of(prompt: list[int], num_tokens: int, n: int) -> list[list[int]]:
    """What n requests with the seeds that follow one another would give."""
    return [seeded_output(prompt, num_tokens, SEED + index) for index in range(n)]


def ask(prompt: list[int], max_tokens: int, n: int, **fields) -> inference.GenerateRequest:
    return request(prompt, max_tokens, sampling_n=n, sampling_seed=SEED, **fields)


async def answers(stub, message: inference.GenerateRequest, heard=None, timeout: float = 60.0) -> list[Answer]:
    """Each output's answer; asserts that its tokens have neither gap nor repeat. `heard` gets each part."""
    results = [Answer() for _ in range(message.sampling.n)]
    async for part in stub.Generate(message, timeout=timeout):
        result = results[part.index]
        assert result.finish is None, "a message came after the last one"
        assert part.first_token_index == len(result.tokens)
        result.tokens += part.token_ids
        result.text += part.text
        result.logprobs += part.logprobs
        result.prompt_logprobs += part.prompt_logprobs
        if part.HasField("finish"):
            result.finish = part.finish
        if heard is not None:
            heard(part)
    assert all(result.finish is not None for result in results), "an output has no end"
    return results


def tokens(results: list[Answer]) -> list[list[int]]:
    return [result.tokens for result in results]


async def prompt_work(small: SmallCluster, role: Role) -> tuple[int, int]:
    """Prompt tokens that the workers of a role have computed, and fetched."""
    counters = await small.counters()
    mine = [counters[seat.worker_id] for seat in small.members() if seat.role is role]
    return (
        sum(entry.prompt_tokens_computed for entry in mine),
        sum(entry.prompt_tokens_transferred for entry in mine),
    )


@pytest.mark.parametrize(("n", "length"), [(2, 1), (4, 15), (2, 16), (16, 17), (4, 31), (2, 32), (3, 33), (16, 200)])
async def test_n_outputs_are_those_of_n_requests_after_one_prefill_and_one_handoff(paper_dir, n, length):
    prompt = prompt_of(length)
    async with SmallCluster(paper_dir, SeededRunner, scheduler=SchedulerSettings(max_num_batched_tokens=64)) as small:
        results = await answers(small.inference, ask(prompt, 20, n))
        assert tokens(results) == outputs_of(prompt, 20, n)
        await small.at_rest()
        shared = (length - 1) // BLOCK * BLOCK
        assert await prompt_work(small, Role.PREFILL) == (length, 0)
        assert await prompt_work(small, Role.DECODE) == ((n - 1) * (length - shared), length)
        usage = [result.finish.usage for result in results]
        assert [entry.transferred_tokens for entry in usage] == [length] + [0] * (n - 1)
        assert [entry.cached_tokens for entry in usage] == [0] + [shared] * (n - 1)
        assert [(result.finish.usage.recomputed_tokens, result.finish.retries) for result in results] == [(0, 0)] * n
        assert {(result.finish.prefill_worker, result.finish.decode_worker) for result in results} == {
            ("prefill-0", "decode-0")
        }


@pytest.mark.parametrize("binding", ["early", "late"])
@pytest.mark.parametrize("connector", ["local", "nixl"])
async def test_several_requests_at_once_are_handed_on_once_each(paper_dir, binding, connector):
    async with SmallCluster(
        paper_dir,
        SeededRunner,
        prefill=2,
        decode=2,
        transfer=TransferSettings(connector=connector, checksums="always"),
        scheduler=SchedulerSettings(max_num_batched_tokens=48),
        router_settings=RouterSettings(port=0, binding=binding),
    ) as small:
        prompts = [prompt_of(20 + 23 * index, salt=index) for index in range(8)]
        results = await asyncio.gather(*(answers(small.inference, ask(prompt, 12, 4)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert tokens(result) == outputs_of(prompt, 12, 4)
        await small.at_rest()
        assert await prompt_work(small, Role.PREFILL) == (sum(map(len, prompts)), 0)
        assert (await prompt_work(small, Role.DECODE))[1] == sum(map(len, prompts))


async def test_forks_share_the_prompts_full_blocks(paper_dir):
    prompt, n = prompt_of(20 * BLOCK + 5), 8
    async with SmallCluster(paper_dir, lambda: SeededRunner(step_s=0.005)) as small:
        scheduler = small.seats["decode-0"].worker.core.scheduler
        asked = asyncio.create_task(answers(small.inference, ask(prompt, 40, n)))
        await until(lambda: scheduler.load().running == n, what="all outputs on the decode worker")
        # The prompt's last, partial block and what follows it are each output's own.
        assert scheduler.load().held_blocks <= 20 + 4 * n
        assert tokens(await asked) == outputs_of(prompt, 40, n)
        await small.at_rest()


async def test_co_located_outputs_compute_their_prompt_once(paper_dir):
    prompt, n = prompt_of(100), 4
    async with SmallCluster(paper_dir, SeededRunner, prefill=0, decode=0, colocated=2) as small:
        for max_tokens in (1, 20):
            results = await answers(small.inference, ask(prompt, max_tokens, n, cache_salt=str(max_tokens)))
            assert tokens(results) == outputs_of(prompt, max_tokens, n)
            assert len({result.finish.decode_worker for result in results}) == 1
        await small.at_rest()
        assert await prompt_work(small, Role.COLOCATED) == (2 * (100 + (n - 1) * 4), 0)


@pytest.mark.parametrize("role", ["pair", "colocated"])
async def test_preemption_in_a_small_pool_changes_no_token(paper_dir, role):
    async with SmallCluster(
        paper_dir,
        lambda: SeededRunner(num_blocks=60),
        prefill=int(role == "pair"),
        decode=int(role == "pair"),
        colocated=int(role == "colocated"),
        scheduler=SchedulerSettings(max_num_batched_tokens=48),
    ) as small:
        prompts = [prompt_of(70, salt=index) for index in range(3)]
        results = await asyncio.gather(*(answers(small.inference, ask(prompt, 400, 4)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert tokens(result) == outputs_of(prompt, 400, 4)
        await small.at_rest()
        assert sum(entry.preemptions_recompute for entry in (await small.counters()).values()) > 0


async def test_more_outputs_than_seats_wait_their_turn(paper_dir):
    prompt = prompt_of(50)
    async with SmallCluster(paper_dir, SeededRunner, scheduler=SchedulerSettings(max_num_seqs=3)) as small:
        load = small.seats["decode-0"].worker.core.scheduler.load
        waiting = []
        results = await answers(small.inference, ask(prompt, 10, 16), lambda part: waiting.append(load().waiting))
        assert tokens(results) == outputs_of(prompt, 10, 16)
        assert max(waiting) <= 3
        await small.at_rest()
        assert await prompt_work(small, Role.PREFILL) == (50, 0)


async def test_a_single_token_is_sampled_n_times_from_one_prefill(paper_dir):
    prompt = prompt_of(100)
    async with SmallCluster(paper_dir, SeededRunner) as small:
        results = await answers(small.inference, ask(prompt, 1, 5))
        assert tokens(results) == outputs_of(prompt, 1, 5)
        await small.at_rest()
        # Nothing was handed on, so the others went to the prefill worker, which has the full blocks cached.
        assert await prompt_work(small, Role.PREFILL) == (100 + 4 * 4, 0)


@pytest.mark.parametrize("by", ["token", "string"])
async def test_an_output_that_ends_before_its_handoff_leaves_the_others_whole(paper_dir, by):
    async with SmallCluster(paper_dir, lambda: SeededRunner(seconds_per_token=0.001)) as small:
        # A prompt after which the first output begins with a letter, and the others do not begin with that.
        prompt, whole, text = next(
            (prompt, whole, text)
            for prompt in (prompt_of(100, salt) for salt in range(256))
            if (whole := outputs_of(prompt, 20, 4))
            and (text := small.router.tokenizer.decode(whole[0][:1])).isascii()
            and all(output[0] != whole[0][0] for output in whole[1:])
        )
        last = whole[0][0]
        stop = {"sampling_stop_token_ids": [last]} if by == "token" else {"sampling_stop": [text]}
        results = await answers(small.inference, ask(prompt, 20, 4, **stop))
        assert results[0].tokens == [last]
        for result, output in zip(results, whole, strict=True):
            assert result.tokens == output[: output.index(last) + 1 if last in output else 20]
        await small.at_rest()


async def test_a_stop_string_in_one_output_ends_that_one_only(paper_dir):
    prompt, n = prompt_of(100), 4
    whole = outputs_of(prompt, 60, n)
    async with SmallCluster(paper_dir, SeededRunner) as small:
        decode = small.router.tokenizer.decode
        stop = next(
            text
            for token in whole[1][5:]
            if (text := decode([token])).isascii() and all(text not in decode(whole[index]) for index in (0, 2, 3))
        )
        results = await answers(small.inference, ask(prompt, 60, n, sampling_stop=[stop]))
        assert results[1].finish.stop == stop
        assert len(results[1].tokens) < 60
        assert [tokens(results)[index] for index in (0, 2, 3)] == [whole[index] for index in (0, 2, 3)]
        await small.at_rest()


async def test_outputs_on_a_lost_decode_worker_go_on_elsewhere(paper_dir):
    prompt, n = prompt_of(100), 4
    async with SmallCluster(paper_dir, lambda: SeededRunner(step_s=0.005), prefill=2, decode=2) as small:
        heard: dict[int, int] = dict.fromkeys(range(n), 0)

        def hear(part) -> None:
            heard[part.index] += len(part.token_ids)

        asked = asyncio.create_task(answers(small.inference, ask(prompt, 60, n), hear))
        await until(lambda: min(heard.values()) >= 3, what="tokens of all outputs")
        name = next(seat.worker_id for seat in small.members() if seat.role is Role.DECODE and seat.link.num_legs == n)
        await small.remove(name)
        results = await asked
        assert tokens(results) == outputs_of(prompt, 60, n)
        assert {result.finish.retries for result in results} == {1}
        assert name not in {result.finish.decode_worker for result in results}
        await small.at_rest()


async def test_forks_wait_for_a_first_output_that_has_to_start_again(paper_dir):
    prompt, n = prompt_of(300), 4
    async with SmallCluster(
        paper_dir,
        lambda: SeededRunner(seconds_per_token=0.001),
        prefill=2,
        scheduler=SchedulerSettings(max_num_batched_tokens=32),
    ) as small:
        asked = asyncio.create_task(answers(small.inference, ask(prompt, 20, n)))

        def busy():
            return [seat for seat in small.members() if seat.role is Role.PREFILL and seat.link.num_legs]

        await until(busy, what="a prefill leg")
        await small.remove(busy()[0].worker_id)
        results = await asked
        assert tokens(results) == outputs_of(prompt, 20, n)
        assert [result.finish.retries for result in results] == [1, 0, 0, 0]
        assert [result.finish.usage.transferred_tokens for result in results[1:]] == [0, 0, 0]
        await small.at_rest()


def before_forks(small: SmallCluster, act) -> None:
    """Has something happen when the prompt has landed, before the others go there."""
    place_fork = small.router.dispatcher.place_fork
    acted = asyncio.Lock()
    done = []

    async def place_late(query, deadline=None):
        async with acted:
            if not done:
                await act(query.at)
                done.append(query.at)
        return await place_fork(query, deadline)

    small.router.dispatcher.place_fork = place_late


@pytest.mark.parametrize("what", ["the router knows", "the worker says", "it is gone"])
async def test_forks_of_a_worker_that_takes_nothing_more_go_the_ordinary_way(paper_dir, what):
    prompt, n = prompt_of(100), 4
    async with SmallCluster(paper_dir, lambda: SeededRunner(step_s=0.002), decode=2) as small:
        took: list[str] = []

        async def leave(worker_id: str) -> None:
            took.append(worker_id)
            if what == "the router knows":
                small.router.book.set_draining(worker_id, True)
            elif what == "the worker says":
                small.seats[worker_id].worker.core.desk.draining = True
            else:
                await small.remove(worker_id)

        before_forks(small, leave)
        results = await answers(small.inference, ask(prompt, 20, n))
        assert tokens(results) == outputs_of(prompt, 20, n)
        assert took[0] not in {result.finish.decode_worker for result in results[1:]}
        await small.at_rest()


async def test_a_fork_whose_blocks_are_evicted_is_refused_and_goes_the_ordinary_way(paper_dir):
    prompt, n = prompt_of(160), 3
    async with SmallCluster(paper_dir, lambda: SeededRunner(num_blocks=32)) as small:
        scheduler = small.seats["decode-0"].worker.core.scheduler

        async def evict(worker_id: str) -> None:
            await until(lambda: not scheduler.load().running, what="the end of the first output")
            other = prompt_of(470, salt=9)
            await answer(small.inference, request(other, 4, sampling_seed=1))

        before_forks(small, evict)
        results = await answers(small.inference, ask(prompt, 2, n))
        assert tokens(results) == outputs_of(prompt, 2, n)
        assert [result.finish.retries for result in results] == [0, 1, 1]
        await small.at_rest()


async def test_without_a_prefix_cache_every_output_goes_its_own_way(paper_dir):
    prompt, n = prompt_of(100), 3
    async with SmallCluster(paper_dir, SeededRunner, scheduler=SchedulerSettings(prefix_cache=False)) as small:
        results = await answers(small.inference, ask(prompt, 20, n))
        assert tokens(results) == outputs_of(prompt, 20, n)
        assert [result.finish.usage.transferred_tokens for result in results] == [100, 100, 100]
        assert [result.finish.retries for result in results] == [0, 0, 0]
        # A worker refuses by itself what it would have to compute.
        small.router.fork = lambda n: Fork()
        results = await answers(small.inference, ask(prompt, 20, n))
        assert tokens(results) == outputs_of(prompt, 20, n)
        assert [result.finish.retries for result in results] == [0, 1, 1]
        await small.at_rest()
        assert (await prompt_work(small, Role.DECODE))[0] == 0


@pytest.mark.parametrize("shape", ["pair", "colocated"])
async def test_the_stages_of_each_output_add_up_to_its_total(paper_dir, shape):
    async with SmallCluster(
        paper_dir,
        lambda: SeededRunner(step_s=0.005, seconds_per_token=0.0002),
        prefill=int(shape == "pair"),
        decode=int(shape == "pair"),
        colocated=int(shape == "colocated"),
    ) as small:
        for result in await answers(small.inference, ask(prompt_of(400), 30, 4)):
            timeline = result.finish.timeline
            stages = sum(value for field, value in timeline.ListFields() if field.name != "total")
            assert stages == pytest.approx(timeline.total, rel=0.05)
            # The prompt was computed for all of them, and none of that time is a wait in the router.
            assert timeline.prefill_compute > 0.08
            assert timeline.router_wait < 0.5 * timeline.total


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
async def test_whatever_ends_a_request_frees_all_its_outputs(paper_dir, when, how):
    async with SmallCluster(
        paper_dir,
        lambda: SeededRunner(seconds_per_token=0.001, step_s=0.002),
        scheduler=SchedulerSettings(max_num_batched_tokens=32),
    ) as small:
        message = ask(prompt_of(300), 1000, 8, request_id="victim")
        role = Role.PREFILL if when == "prefill" else Role.DECODE
        scheduler = next(seat for seat in small.members() if seat.role is role).worker.core.scheduler
        timeout = 60.0 if how != "deadline" else 0.2 if when == "prefill" else 1.5
        asked = asyncio.create_task(answers(small.inference, message, timeout=timeout))
        if how == "deadline":
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            await until(lambda: scheduler.load().running >= (1 if when == "prefill" else 8), what="running outputs")
            if how == "abort":
                await small.inference.Abort(inference.AbortRequest(request_id="victim"))
                assert {result.finish.reason for result in await asked} == {inference.FINISH_REASON_ABORTED}
            else:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: small.router.num_running == 0, what="the end of the request")
        await small.at_rest()


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_storm_of_requests_cancels_and_lost_workers_leaves_right_tokens_and_nothing_held(paper_dir, seed):
    random = Random(seed)
    async with SmallCluster(
        paper_dir,
        lambda: SeededRunner(num_blocks=60, step_s=0.001),
        prefill=2,
        decode=2,
        scheduler=SchedulerSettings(max_num_batched_tokens=64, max_num_seqs=12),
        router_settings=RouterSettings(port=0, binding=random.choice(["early", "late"])),
    ) as small:

        async def one(number: int) -> None:
            await asyncio.sleep(random.random())
            prompt = prompt_of(random.choice([1, 16, 40, 130]), salt=number % 5)
            n, max_tokens = random.randint(1, 6), random.choice([1, 2, 30, 120])
            asked = asyncio.create_task(answers(small.inference, ask(prompt, max_tokens, n)))
            if random.random() < 0.25:
                await asyncio.sleep(random.random() / 4)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            else:
                assert tokens(await asked) == outputs_of(prompt, max_tokens, n)

        async def harm() -> None:
            for worker_id in ("decode-0", "prefill-1", "decode-1"):
                await asyncio.sleep(0.3)
                role = small.seats[worker_id].role
                await small.remove(worker_id)
                await small.add(role, worker_id)

        async with asyncio.TaskGroup() as group:
            group.create_task(harm())
            for number in range(40):
                group.create_task(one(number))
        await until(lambda: small.router.num_running == 0, what="the end of all requests")
        await small.at_rest()


def near(mine, others) -> bool:
    """Whether two lists of log-probabilities are of the same tokens, and equal but for roundings."""
    return [(entry.token_id, pytest.approx(entry.logprob, abs=1e-3)) for entry in mine] == [
        (entry.token_id, entry.logprob) for entry in others
    ]


@pytest.mark.parametrize("shape", ["pair", "colocated"])
async def test_the_real_models_outputs_and_logprobs_are_those_of_n_requests(tiny_model_dir, shape):
    model_dir = tiny_model_dir()

    def make_runner() -> Runner:
        return Runner(EngineSettings(model=str(model_dir), dtype="float32", num_blocks=128, threads=1))

    async with SmallCluster(
        model_dir,
        make_runner,
        prefill=int(shape == "pair"),
        decode=int(shape == "pair"),
        colocated=int(shape == "colocated"),
        scheduler=SchedulerSettings(max_num_batched_tokens=32),
    ) as small:
        for length in (5, 16, 48, 75):
            for temperature in (0.0, 0.9):
                fields = {"sampling_temperature": temperature, "sampling_logprobs": 2, "sampling_prompt_logprobs": 1}
                prompt = prompt_of(length, salt=length)
                results = await answers(small.inference, ask(prompt, 12, 4, **fields))
                for index, result in enumerate(results):
                    alone = await answer(
                        small.inference, request(prompt, 12, sampling_seed=SEED + index, cache_salt="alone", **fields)
                    )
                    assert (result.tokens, result.finish.retries) == (alone.tokens, 0)
                    assert len(result.prompt_logprobs) == length - 1
                    assert near(result.prompt_logprobs, alone.prompt_logprobs)
                    assert near(result.logprobs, alone.logprobs)
        await small.at_rest()
