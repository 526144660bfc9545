"""The lease table against a model of it, and its rules one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer.lease import LeaseTable, LeaseTaken, UnknownLease

LEASE_S = 10.0
BLOCK = 4


def table_with(sequence_id="s", **kwargs):
    table = LeaseTable(lease_s=LEASE_S, block_size=BLOCK, **kwargs)
    table.open(sequence_id, now=0.0)
    return table


def publish(table, num_tokens, final=False, now=0.0, sequence_id="s", next_token=7):
    blocks = tuple(100 + block for block in range(-(-num_tokens // BLOCK)))
    return table.publish(sequence_id, num_tokens, blocks, final, next_token, now)


def test_a_notice_names_only_what_is_new():
    table = table_with()
    assert table.subscribe("s", "d", now=0.0) is None
    _, first = publish(table, 8)
    _, second = publish(table, 14, final=True)
    assert (first.first_block, first.block_ids, first.num_tokens, first.final) == (0, (100, 101), 8, False)
    assert (second.first_block, second.block_ids, second.num_tokens) == (2, (102, 103), 14)
    assert (second.final, second.next_token) == (True, 7)


def test_a_partly_filled_block_is_told_with_the_final_notice_only():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    assert publish(table, 3) is None
    _, notice = publish(table, 7)
    assert (notice.num_tokens, notice.block_ids) == (4, (100,))


def test_a_final_publish_without_new_blocks_still_carries_the_token():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    publish(table, 8)
    _, notice = publish(table, 8, final=True)
    assert (notice.block_ids, notice.first_block, notice.final, notice.next_token) == ((), 2, True, 7)


def test_a_late_subscriber_gets_everything_published_so_far_in_one_notice():
    table = table_with()
    assert publish(table, 8) is None
    assert publish(table, 9, final=True) is None
    notice = table.subscribe("s", "d", now=0.0)
    assert (notice.first_block, notice.block_ids, notice.final) == (0, (100, 101, 102), True)


def test_a_subscriber_to_an_unknown_sequence_is_told_so():
    assert table_with().subscribe("other", "d", now=0.0) == UnknownLease("other")


def test_a_second_watcher_is_refused_and_the_first_stays():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    assert table.subscribe("s", "e", now=0.0) == LeaseTaken("s", "d")
    assert publish(table, 8)[0] == "d"


def test_a_revoked_range_is_void_and_published_anew_in_the_next_epoch():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    publish(table, 8)
    assert table.revoke("s") == ("d", 1)
    assert not table.valid("s", 1)
    _, notice = publish(table, 4)
    assert (notice.epoch, notice.first_block, notice.block_ids) == (2, 0, (100,))


def test_an_acknowledgement_of_a_revoked_epoch_releases_nothing():
    table = table_with()
    publish(table, 8, final=True)
    table.revoke("s")
    publish(table, 8, final=True)
    assert not table.acknowledge("s", 1)
    assert table.acknowledge("s", 2)


def test_early_late_and_repeated_acknowledgements_are_counted_and_ignored():
    table = table_with()
    publish(table, 8)
    early = table.acknowledge("s", 1)
    publish(table, 8, final=True)
    answers = [table.acknowledge("s", 1), table.acknowledge("s", 1), table.acknowledge("other", 1)]
    assert [early, *answers] == [False, True, False, False]
    assert table.counters.acknowledgements_ignored == 3


def test_a_lease_without_a_watcher_expires_after_the_final_publish():
    table = table_with()
    publish(table, 8, final=True, now=5.0)
    assert table.next_deadline() == 15.0
    assert table.expire(14.9) == []
    assert [name for name, _ in table.expire(15.0)] == ["s"]
    assert not table.valid("s", 1)


def test_a_heartbeat_keeps_a_lease():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    publish(table, 8, final=True, now=1.0)
    table.renew("d", now=9.0)
    table.renew("e", now=18.0)
    assert table.expire(18.9) == []
    assert [name for name, _ in table.expire(19.0)] == ["s"]


def test_a_sequence_that_is_still_computed_does_not_expire():
    table = table_with()
    publish(table, 8)
    assert table.expire(1e9) == []
    assert table.next_deadline() is None


def test_the_end_of_a_watchers_stream_ends_its_leases_and_no_other():
    table = table_with()
    table.open("t", now=0.0)
    table.open("u", now=0.0)
    table.subscribe("s", "d", now=0.0)
    table.subscribe("t", "e", now=0.0)
    assert table.drop_watcher("d") == ["s"]
    assert len(table) == 2


def test_a_publish_after_the_lease_has_gone_is_counted_and_ignored():
    table = table_with()
    table.close("s")
    assert publish(table, 8) is None
    assert table.counters.publishes_ignored == 1


def test_closing_names_the_watcher_to_tell():
    table = table_with()
    table.subscribe("s", "d", now=0.0)
    assert table.close("s") == ("d", 1)
    assert table.close("s") is None


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(4, (100,)), (12, (100, 101)), (12, (100, 999, 102)), (12, (100, 101, 102))],
    ids=["shrinks", "too few blocks", "other blocks", "after the final"],
)
def test_a_publish_that_contradicts_what_was_told_is_a_bug(num_tokens, blocks):
    table = table_with()
    publish(table, 8, final=len(blocks) == 3 and blocks[1] == 101)
    with pytest.raises(ValueError):
        table.publish("s", num_tokens, blocks, False, 0, 0.0)


def test_a_sequence_is_opened_once():
    with pytest.raises(ValueError):
        table_with().open("s", now=1.0)


def test_a_watcher_hears_of_the_beginning_before_there_is_any_kv():
    table = table_with()
    assert table.begin("s", now=0.0) is None
    notice = table.subscribe("s", "d", now=0.0)
    assert (notice.num_tokens, notice.block_ids, notice.final) == (0, (), False)
    assert table.begin("s", now=0.0)[0] == "d"
    assert publish(table, 8)[1].first_block == 0
    assert table.begin("of one that has gone", now=0.0) is None


class LeaseMachine(RuleBasedStateMachine):
    """Random steps, with each watcher putting together what its notices say."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable(lease_s=LEASE_S, block_size=BLOCK)
        self.now = 0.0
        self.live = {}
        self.heard = {}
        self.ended = 0

    def receive(self, notice):
        view = self.heard.setdefault((notice.sequence_id, notice.epoch), [])
        if notice.first_block == 0:
            view.clear()
        assert len(view) == notice.first_block
        view.extend(notice.block_ids)
        self.live[notice.sequence_id]["told"] = notice

    def end(self, sequence_id):
        del self.live[sequence_id]
        self.ended += 1

    @rule(number=st.integers(0, 5))
    def open(self, number):
        sequence_id = f"s{number}-{self.ended}"
        if sequence_id not in self.live:
            self.table.open(sequence_id, self.now)
            self.live[sequence_id] = {
                "epoch": 1, "watcher": None, "begun": False, "tokens": 0, "blocks": [], "final": False,
                "since": 0.0, "told": None,
            }  # fmt: skip

    @precondition(lambda self: self.live)
    @rule(data=st.data(), watcher=st.sampled_from("de"))
    def subscribe(self, data, watcher):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[sequence_id]
        answer = self.table.subscribe(sequence_id, watcher, self.now)
        if model["watcher"] not in (None, watcher):
            assert answer == LeaseTaken(sequence_id, model["watcher"])
            return
        model["watcher"] = watcher
        model["since"] = self.now
        if answer is not None:
            self.receive(answer)
        assert (answer is None) == (model["tokens"] // BLOCK == 0 and not model["final"] and not model["begun"])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def begin(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[sequence_id]
        answer = self.table.begin(sequence_id, self.now)
        model["begun"] = True
        assert (answer[0] if answer else None) == model["watcher"]
        if answer is not None:
            self.receive(answer[1])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(0, 9), final=st.booleans())
    def publish(self, data, more, final):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[sequence_id]
        if model["final"] or (final and model["tokens"] + more == 0):
            return
        model["tokens"] += more
        model["final"] = final
        while len(model["blocks"]) * BLOCK < model["tokens"]:
            model["blocks"].append(len(model["blocks"]) * 7 + model["epoch"])
        if final:
            model["since"] = self.now
        answer = self.table.publish(sequence_id, model["tokens"], model["blocks"], final, 3, self.now)
        if answer is not None:
            assert answer[0] == model["watcher"]
            self.receive(answer[1])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def revoke(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[sequence_id]
        answer = self.table.revoke(sequence_id)
        assert answer == ((model["watcher"], model["epoch"]) if model["watcher"] else None)
        model.update(epoch=model["epoch"] + 1, begun=False, tokens=0, blocks=[], final=False, told=None)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), behind=st.integers(0, 2))
    def acknowledge(self, data, behind):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[sequence_id]
        answer = self.table.acknowledge(sequence_id, model["epoch"] - behind)
        assert answer == (behind == 0 and model["final"])
        if answer:
            self.end(sequence_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.live)))
        self.table.close(sequence_id)
        self.end(sequence_id)
        assert self.table.subscribe(sequence_id, "d", self.now) == UnknownLease(sequence_id)

    @rule(watcher=st.sampled_from("de"))
    def drop_watcher(self, watcher):
        gone = self.table.drop_watcher(watcher)
        assert gone == [sequence_id for sequence_id, model in self.live.items() if model["watcher"] == watcher]
        for sequence_id in gone:
            self.end(sequence_id)

    @rule(watcher=st.sampled_from("de"))
    def renew(self, watcher):
        self.table.renew(watcher, self.now)
        for model in self.live.values():
            if model["watcher"] == watcher:
                model["since"] = self.now

    @rule(step=st.sampled_from([0.0, 3.0, LEASE_S]))
    def time_passes(self, step):
        self.now += step
        due = [s for s, model in self.live.items() if model["final"] and model["since"] + LEASE_S <= self.now]
        assert sorted(name for name, _ in self.table.expire(self.now)) == sorted(due)
        for sequence_id in due:
            self.end(sequence_id)
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now

    @invariant()
    def the_watchers_know_exactly_what_is_lent(self):
        self.table.check()
        for sequence_id, model in self.live.items():
            assert self.table.valid(sequence_id, model["epoch"])
            assert not self.table.valid(sequence_id, model["epoch"] - 1)
            if model["watcher"] is None:
                continue
            whole = len(model["blocks"]) if model["final"] else model["tokens"] // BLOCK
            assert self.heard.get((sequence_id, model["epoch"]), []) == model["blocks"][:whole]
            assert model["final"] == (model["told"] is not None and model["told"].final)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
