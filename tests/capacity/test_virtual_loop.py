"""The virtual clock: asyncio code runs on it unchanged, in the order of time, and no time passes."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.capacity.virtual_loop import Stalled, VirtualLoop


def run(loop: VirtualLoop, coroutine):
    task = loop.create_task(coroutine)
    task.add_done_callback(lambda _: loop.stop())
    loop.run()
    return task.result()


def test_a_day_of_sleep_passes_at_once() -> None:
    loop = VirtualLoop()

    async def sleeper() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run(loop, sleeper()) == 86_400
    assert time.monotonic() - began_s < 60


def test_a_timeout_ends_a_wait_at_its_virtual_time() -> None:
    loop = VirtualLoop()

    async def waiter() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await loop.create_future()
        return loop.time()

    assert run(loop, waiter()) == 7.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=400))
def test_events_come_by_time_then_in_the_order_in_which_they_were_asked_for(wanted) -> None:
    loop = VirtualLoop()
    seen: list[int] = []
    expected: list[tuple[int, int]] = []
    for number, (when, cancellable, cancelled) in enumerate(wanted):
        if cancellable:
            handle = loop.call_at(float(when), seen.append, number)
            if cancelled:
                handle.cancel()
                continue
        else:
            loop.at(float(when), lambda number=number: seen.append(number))
        expected.append((when, number))
    loop.at(6.0, loop.stop)
    loop.run()
    assert seen == [number for _, number in sorted(expected)]


def test_an_event_asked_for_in_the_past_comes_now_and_time_does_not_go_back() -> None:
    loop = VirtualLoop()
    times: list[float] = []
    loop.at(3.0, lambda: loop.at(1.0, lambda: times.append(loop.time())))
    loop.at(4.0, loop.stop)
    loop.run()
    assert times == [3.0]


def test_a_bug_in_a_callback_ends_the_run() -> None:
    loop = VirtualLoop()
    loop.call_later(1.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    loop = VirtualLoop()

    async def waiter() -> None:
        await loop.create_future()

    task = loop.create_task(waiter())
    with pytest.raises(Stalled, match="nothing is left to happen"):
        loop.run()
    assert not task.done()
    loop.close()
    assert task.cancelled()


async def test_it_runs_inside_another_loop_and_leaves_that_in_place() -> None:
    outer = asyncio.get_running_loop()
    assert run(VirtualLoop(), asyncio.sleep(5, "done")) == "done"
    assert asyncio.get_running_loop() is outer
