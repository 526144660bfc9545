"""Tokens without text: blocks have equal names exactly where their requests share all tokens up to there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.capacity.prompts import OUTPUT_TOKEN, Prompts, block_names, extend_names
from baton.capacity.workload import Arrival

BLOCK = 4

arrivals = st.lists(
    st.builds(
        lambda session, prompt, prefix, shared: Arrival(0.0, prompt, 1, session, min(prefix, prompt), shared),
        st.integers(0, 3),
        st.integers(1, 40),
        st.one_of(st.just(0), st.integers(0, 40)),
        st.sampled_from([0, 6, 9]),
    ),
    max_size=12,
)


def told_apart(arrivals: list[Arrival]) -> list[list[object]]:
    """The same prompts with every token written out: who had it first, and where."""
    latest: dict[int, list[object]] = {}
    prompts = []
    for number, arrival in enumerate(arrivals):
        most = arrival.prompt_tokens - 1  # the last token is always its own
        before = latest.get(arrival.session, [])[: min(arrival.prefix_tokens, most)]
        shared = [("all", position) for position in range(min(arrival.shared_tokens, most))]
        begin = before if len(before) > len(shared) else shared
        own = [(number, position) for position in range(len(begin), arrival.prompt_tokens)]
        prompts.append(begin + own)
        latest[arrival.session] = prompts[-1]
    return prompts


@settings(max_examples=300, deadline=None)
@given(arrivals)
def test_blocks_have_one_name_exactly_if_all_tokens_up_to_there_are_the_same(arrivals: list[Arrival]) -> None:
    prompts = Prompts(BLOCK)
    token_ids = [prompts.token_ids(arrival) for arrival in arrivals]
    assert [len(tokens) for tokens in token_ids] == [arrival.prompt_tokens for arrival in arrivals]
    names = [block_names(tokens, BLOCK) for tokens in token_ids]
    prefix_of: dict[object, tuple[object, ...]] = {}
    name_of: dict[tuple[object, ...], object] = {}
    for named, prompt in zip(names, told_apart(arrivals), strict=True):
        assert len(named) == len(prompt) // BLOCK
        for index, name in enumerate(named):
            prefix = tuple(prompt[: (index + 1) * BLOCK])
            assert prefix_of.setdefault(name, prefix) == prefix
            assert name_of.setdefault(prefix, name) == name


@given(arrivals.filter(bool), st.integers(1, 30), st.integers(0, 12))
def test_names_that_are_extended_are_those_of_the_whole_and_outputs_share_none(
    arrivals: list[Arrival], num_output: int, cut: int
) -> None:
    prompts = Prompts(BLOCK)
    seen: dict[object, int] = {}
    for number, arrival in enumerate(arrivals):
        tokens = list(prompts.token_ids(arrival))
        num_prompt_blocks = len(tokens) // BLOCK
        tokens.extend([OUTPUT_TOKEN] * num_output)
        names: list[object] = []
        extend_names(names, tokens[:cut], BLOCK, "", "")
        extend_names(names, tokens, BLOCK, "", "")
        assert tuple(names) == block_names(tuple(tokens), BLOCK)
        for name in names[num_prompt_blocks:]:
            assert seen.setdefault(name, number) == number
