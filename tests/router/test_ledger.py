"""The stages of a timeline add up to its total, wherever the messages' ways fall."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.proto.messages import StageTimes
from baton.router.ledger import Ledger

seconds = st.floats(0.0, 10.0)
ways = st.floats(0.0, 0.1)


@given(seconds, seconds, seconds, seconds, seconds, seconds, ways, ways, ways)
def test_the_stages_of_a_hand_off_are_the_total(
    router_wait, queue, compute, wait, transfer, decode, to_prefill, first_back, last_back
):
    """The source's notice reaches decode while the first token is on its way to the router, as long as that takes."""
    sent_s = router_wait
    sampled_s = sent_s + to_prefill + queue + compute
    ended_s = max(sampled_s + first_back, sampled_s + wait + transfer + decode + last_back)
    ledger = Ledger(0.0)
    ledger.begin(0.0)
    ledger.sent_s, ledger.first_s, ledger.ended_s = sent_s, sampled_s + first_back, ended_s
    ledger.stages = StageTimes(prefill_compute=compute, handoff_wait=wait, handoff_transfer=transfer)
    timeline = asdict(ledger.timeline(ended_s))
    total = timeline.pop("total")
    assert total == pytest.approx(ended_s)
    assert sum(timeline.values()) == pytest.approx(total)
    assert min(timeline.values()) >= 0.0
