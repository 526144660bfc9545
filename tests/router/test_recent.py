"""The ring of the requests that ended last, and the counts of what went wrong."""

from __future__ import annotations

import pytest

from baton.router.journey import Trouble
from baton.router.ledger import Timeline
from baton.router.observe import Call, Face, OutputRecord, RequestRecord
from baton.router.recent import MAX_TEXT_CHARS, RecentRequests

CALL = Call(Face.GRPC)


def output(total: float = 1.0, finish: str = "length", **fields) -> OutputRecord:
    values = {
        "index": 0,
        "finish": finish,
        "message": "",
        "completion_tokens": 5,
        "cached_tokens": 16,
        "transferred_tokens": 32,
        "recomputed_tokens": 1,
        "retries": 0,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "connector": "nixl",
        "timeline": Timeline(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, total, 0.0, total),
    }
    return OutputRecord(**(values | fields))


def record(name: str, *outputs: OutputRecord, trouble: str = "", ttft_s: float | None = 0.1) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        call=CALL,
        traceparent="",
        arrived_unix_s=0.0,
        duration_s=1.0,
        ttft_s=ttft_s,
        prompt_tokens=40,
        max_tokens=5,
        temperature=0.0,
        top_p=1.0,
        outputs=outputs or (output(),),
        trouble=trouble,
    )


def test_the_ring_keeps_the_last_ones_the_newest_first() -> None:
    recent = RecentRequests(size=3)
    for number in range(10):
        recent.ended(record(str(number)))
    assert [message.request_id for message in recent.messages()] == ["9", "8", "7"]
    assert [message.number for message in recent.messages()] == [10, 9, 8]


def test_the_age_is_the_time_since_the_end() -> None:
    now = 100.0
    recent = RecentRequests(clock=lambda: now)
    recent.ended(record("old"))
    now = 103.5
    recent.ended(record("new"))
    assert [message.age_s for message in recent.messages()] == [0.0, 3.5]


def test_several_outputs_are_summed_up_and_the_last_one_to_end_is_drawn() -> None:
    recent = RecentRequests()
    first, last = output(1.0, decode_worker="d0"), output(2.0, decode_worker="d1", finish="stop", retries=2)
    recent.ended(record("two", last, first))
    (message,) = recent.messages()
    assert (message.num_outputs, message.completion_tokens, message.retries) == (2, 10, 2)
    assert (message.timeline.total, message.decode_worker, message.outcome) == (2.0, "d1", "stop")
    assert (message.prompt_tokens, message.cached_tokens, message.transferred_tokens) == (40, 16, 64)


def test_what_went_wrong_is_the_outcome_and_explained() -> None:
    recent = RecentRequests()
    failed = output(1.0, finish="internal", message="x" * 1000)
    recent.ended(record("bad", output(2.0, finish="aborted"), failed, trouble="internal", ttft_s=None))
    (message,) = recent.messages()
    assert message.outcome == "internal"
    assert message.message == "x" * MAX_TEXT_CHARS
    assert not message.HasField("ttft_s")


@pytest.mark.parametrize("trouble", Trouble)
def test_a_full_queue_refuses_and_every_other_trouble_fails(trouble: Trouble) -> None:
    recent = RecentRequests()
    recent.ended(record("bad", trouble=trouble.value))
    recent.ended(record("good"))
    recent.refused(trouble.value, CALL, [])
    is_refused = trouble is Trouble.OVERLOADED
    assert (recent.num_refused, recent.num_failed) == (1 + is_refused, 1 - is_refused)
