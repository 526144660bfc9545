"""Hosts that are cut off, processes that hang or are killed, a head that dies: no stream sees more than a pause.

Each fault strikes under 20 concurrent streams. Measured are the times from it until the router shows that it noticed,
of the longest pause in any stream, and until every worker is ready again; for a fault that lasts, also from its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import pytest
from asking import until
from hosts.launcher import HEAD, RayHosts, at_rest, workers
from hosts.streams import NUM_STREAMS, Stream, prompt_of, receive_all, wrong_tokens
from hosts.table import Table

from baton.client.errors import BatonError
from baton.proto import cluster_pb2 as cluster

pytestmark = pytest.mark.timeout(1800)

MOMENT_S = 120.0
NOTICED_S, WHOLE_S, REST_S = 60.0, 600.0, 60.0
FROZEN_S = 30.0
LOOK_EVERY_S = 0.05

Moment = Callable[[list[Stream]], bool]
Look = Callable[[cluster.ClusterStatus | None], bool]


@pytest.fixture(scope="module")
def undisturbed(hosts: RayHosts, model_dir) -> list[list[int]]:
    """The answers of a run in which nothing fails; the greedy ones are those of transformers."""

    async def run() -> list[list[int]]:
        async with hosts.client() as client:
            return await receive_all(client, [])

    tokens = asyncio.run(run())
    greedy = range(1, NUM_STREAMS, 2)
    assert not wrong_tokens(model_dir, list(map(prompt_of, greedy)), [tokens[index] for index in greedy])
    return tokens


class Watch:
    """Looks at the router's status all the time, in a thread of its own, and notes when it first looked in some way."""

    def __init__(self, hosts: RayHosts, noticed: Look) -> None:
        self._hosts = hosts
        self._noticed = noticed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self.noticed_at: float | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _look(self) -> None:
        with self._hosts.operator(timeout_s=2.0) as operator:
            while not self._stopping.wait(LOOK_EVERY_S) and self.noticed_at is None:
                try:
                    status = operator.status()
                except BatonError:
                    status = None
                if self._noticed(status):
                    self.noticed_at = time.monotonic()


class Disturbance:
    """One fault under load, from the first token to free blocks on every worker."""

    def __init__(self, hosts: RayHosts, undisturbed: list[list[int]], table: Table, event: str) -> None:
        self._hosts = hosts
        self._undisturbed = undisturbed
        self._table = table
        self._event = event

    async def run(
        self,
        moment: Moment,
        noticed: Look,
        strike: Callable[[], object],
        mend: Callable[[], object] | None = None,
        lasts_s: float | None = None,
    ) -> None:
        """`mend` ends the fault: `lasts_s` after it struck, or when all streams have ended."""
        await asyncio.to_thread(self._hosts.await_ready, WHOLE_S)
        streams: list[Stream] = []
        async with self._hosts.client() as client:
            running = asyncio.create_task(receive_all(client, streams))
            await until(
                lambda: running.done() or asyncio.to_thread(moment, streams),
                timeout_s=MOMENT_S,
                what="the moment to strike",
            )
            assert not running.done(), "the streams were over before the moment came"
            with Watch(self._hosts, noticed) as watch:
                struck_at = time.monotonic()
                await asyncio.to_thread(strike)
                if mend is not None and lasts_s is not None:
                    await asyncio.sleep(struck_at + lasts_s - time.monotonic())
                    await asyncio.to_thread(mend)
                mended_at = time.monotonic()
                try:
                    await until(lambda: watch.noticed_at, timeout_s=NOTICED_S, what="a router that noticed")
                    tokens = await running
                finally:
                    if mend is not None and lasts_s is None:
                        mended_at = time.monotonic()
                        await asyncio.to_thread(mend)
        assert tokens == self._undisturbed
        assert any(stream.moves for stream in streams), "the fault disturbed nobody"
        await asyncio.to_thread(self._hosts.await_ready, WHOLE_S)
        whole_at = time.monotonic()
        assert watch.noticed_at is not None
        self._note("noticed", watch.noticed_at - struck_at)
        self._note("longest pause of a stream", max(stream.pause_s(struck_at) for stream in streams))
        self._note("every worker ready", whole_at - struck_at)
        if mend is not None:
            self._note("every worker ready, from its end", whole_at - mended_at)
        await until(
            lambda: asyncio.to_thread(lambda: at_rest(self._hosts.status())),
            timeout_s=REST_S,
            what="free blocks on every worker",
        )

    def _note(self, what: str, seconds: float) -> None:
        self._table.note(self._event, what, seconds)


@pytest.fixture
def disturb(hosts: RayHosts, undisturbed, table: Table) -> Callable[..., None]:
    """`disturb(event, moment, noticed, strike, mend)`: see `Disturbance.run`."""

    def run(event: str, *arguments: object, **options: object) -> None:
        asyncio.run(Disturbance(hosts, undisturbed, table, event).run(*arguments, **options))

    return run


def some_have(num_tokens: int) -> Moment:
    return lambda streams: sum(len(stream.tokens) >= num_tokens for stream in streams) >= 3


class Victim:
    """A worker, chosen before the streams begin, as they may be short; whether the router takes it for what it was."""

    def __init__(self, hosts: RayHosts, role: str) -> None:
        self._hosts = hosts
        chosen = next(w for w in workers(hosts.await_ready(WHOLE_S)) if w.role == role)
        self._incarnation = chosen.incarnation
        self.host = hosts.bed.name_of(chosen.address)
        self.pid = hosts.bed.outer_pid(self.host, chosen.pid)

    def busy(self, streams: list[Stream]) -> bool:
        """Whether it is in the middle of work; streams may be faster than the status, so some have to be open."""
        running = {w.incarnation for w in workers(self._hosts.status()) if w.load.running}
        return self._incarnation in running and any(stream.tokens for stream in streams)

    def lost(self, status: cluster.ClusterStatus | None) -> bool:
        return status is not None and not any(
            worker.incarnation == self._incarnation and worker.state == "ready" for worker in workers(status)
        )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_host_is_cut_off(hosts: RayHosts, disturb, role: str) -> None:
    chosen = Victim(hosts, role)
    disturb(
        f"a {role} host is cut off",
        chosen.busy,
        chosen.lost,
        lambda: hosts.bed.cut(chosen.host),
        lambda: hosts.bed.heal(chosen.host),
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_hangs_and_comes_back_after_30_s(hosts: RayHosts, disturb, role: str) -> None:
    chosen = Victim(hosts, role)

    def thaw() -> None:
        # Ray may have put another in its place already.
        with suppress(ProcessLookupError):
            os.kill(chosen.pid, signal.SIGCONT)

    disturb(
        f"a {role} worker hangs",
        chosen.busy,
        chosen.lost,
        lambda: os.kill(chosen.pid, signal.SIGSTOP),
        thaw,
        lasts_s=FROZEN_S,
    )


def test_a_raylet_is_killed(hosts: RayHosts, disturb) -> None:
    chosen = Victim(hosts, "decode")
    raylet = hosts.raylet(chosen.host)
    assert raylet is not None
    disturb("a raylet is killed", chosen.busy, chosen.lost, lambda: os.kill(raylet, signal.SIGKILL))


class Router:
    """The router's process, and whether another one answers in its place, or none."""

    def __init__(self, hosts: RayHosts) -> None:
        was = hosts.await_ready(WHOLE_S).router
        self._incarnation = was.incarnation
        self.pid = hosts.bed.outer_pid(HEAD, was.pid)

    def gone(self, status: cluster.ClusterStatus | None) -> bool:
        return status is None or status.router.incarnation != self._incarnation


def test_the_router_is_killed(hosts: RayHosts, disturb) -> None:
    router = Router(hosts)
    disturb("the router is killed", some_have(5), router.gone, lambda: os.kill(router.pid, signal.SIGKILL))


def test_the_heads_machine_dies_and_is_started_again(hosts: RayHosts, disturb) -> None:
    router = Router(hosts)

    def restart() -> None:
        hosts.bed.crash(HEAD)
        hosts.bed.boot(HEAD)
        hosts.restart_head()

    disturb("the head is restarted", some_have(5), router.gone, restart)
