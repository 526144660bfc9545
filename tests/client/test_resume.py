"""However often and wherever streams break, what is received is what an unbroken stream would have brought."""

from __future__ import annotations

import pytest
from fake_router import token_at, whole_tokens
from hypothesis import given
from hypothesis import strategies as st

from baton.client.errors import (
    AlreadyExists,
    BatonError,
    ConnectionLost,
    ConnectionRefused,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from baton.client.resume import Attempt, Patience, Progress
from baton.proto import inference_pb2 as pb

LOST = ConnectionLost("lost")
REFUSED = ConnectionRefused("refused")
NO_WORKER = Unavailable("no worker")


def a_request(n: int = 1, max_tokens: int = 6, seed: int = 5) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(n=n, max_tokens=max_tokens, seed=seed, prompt_logprobs=1)
    return pb.GenerateRequest(request_id="r", text="hi", sampling=sampling)


def progress(request: pb.GenerateRequest | None = None, connected: bool = False) -> Progress:
    patience = Patience(give_up_s=10.0, first_delay_s=1.0, longest_delay_s=4.0)
    return Progress(request or a_request(), patience, connected, jitter=lambda: 1.0)


def messages(attempt: Attempt, sizes: list[int]) -> list[pb.GenerateResponse]:
    """What a router sends for an attempt, its outputs in turn, in messages of these sizes."""
    sampling = attempt.request.sampling
    found = []
    for index in range(sampling.n):
        position = len(attempt.request.resume_token_ids)
        while position < sampling.max_tokens:
            size = min(sizes[position % len(sizes)], sampling.max_tokens - position)
            message = pb.GenerateResponse(
                index=index,
                first_token_index=position,
                token_ids=[token_at(sampling.seed + index, position + i) for i in range(size)],
            )
            position += size
            if position == sampling.max_tokens:
                message.finish.reason = pb.FINISH_REASON_LENGTH
            found.append(message)
    return found


@given(
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    breaks=st.lists(st.integers(0, 12), max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_outputs_are_whole_whatever_breaks(
    n: int, max_tokens: int, seed: int, sizes: list[int], breaks: list[int], order: object
) -> None:
    state = progress(a_request(n, max_tokens, seed))
    received: list[list[int]] = [[] for _ in range(n)]
    while (attempt := state.next_attempt()) is not None:
        sent = messages(attempt, sizes)
        limit = breaks.pop() if breaks else len(sent)
        for message in sent[:limit]:
            output = state.accept(attempt, message)
            assert output.first_token_index == len(received[output.index])
            received[output.index] += output.token_ids
        error = state.ended(attempt)
        if error is not None:
            assert state.retry_delay_s(error, now=0.0) is not None
    assert [tuple(tokens) for tokens in received] == [whole_tokens(seed + index, max_tokens) for index in range(n)]


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    state = progress()
    attempt = state.next_attempt()
    assert attempt is not None
    state.accept(attempt, messages(attempt, [1])[0])
    again = state.next_attempt()
    assert again is not None
    assert not again.request.sampling.HasField("prompt_logprobs")
    assert attempt.request.sampling.HasField("prompt_logprobs")


def test_delays_grow_up_to_the_longest_and_begin_anew_with_each_token() -> None:
    state = progress()
    assert [state.retry_delay_s(LOST, now=0.0) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    attempt = state.next_attempt()
    assert attempt is not None
    state.accept(attempt, messages(attempt, [1])[0])
    assert state.retry_delay_s(LOST, now=100.0) == 1.0


def test_patience_ends_after_its_time() -> None:
    state = progress()
    assert state.retry_delay_s(LOST, now=0.0) is not None
    assert state.retry_delay_s(REFUSED, now=9.9) is not None
    assert state.retry_delay_s(REFUSED, now=10.0) is None


def test_breaks_are_counted_not_attempts() -> None:
    state = progress()
    for error in (LOST, REFUSED, REFUSED):
        state.retry_delay_s(error, now=0.0)
    assert state.num_resumes == 1


def test_an_overloaded_router_is_asked_again_when_it_says() -> None:
    state = progress()
    state.retry_delay_s(LOST, now=0.0)
    assert state.retry_delay_s(Overloaded("full", retry_after_s=3.5), now=1.0) == 3.5


@pytest.mark.parametrize("error", [NO_WORKER, Overloaded("full", 1.0), REFUSED, AlreadyExists("there")])
def test_the_answer_to_a_new_request_is_final(error: BatonError) -> None:
    assert progress().retry_delay_s(error, now=0.0) is None


@pytest.mark.parametrize("error", [NO_WORKER, Overloaded("full"), REFUSED, AlreadyExists("there")])
def test_the_same_answer_after_a_break_is_waited_out(error: BatonError) -> None:
    state = progress()
    state.retry_delay_s(LOST, now=0.0)
    assert state.retry_delay_s(error, now=1.0) is not None


def test_a_router_that_was_reached_before_is_waited_for() -> None:
    assert progress(connected=True).retry_delay_s(REFUSED, now=0.0) is not None


@pytest.mark.parametrize("error", [ServerError("bug"), InvalidRequest("wrong")])
def test_faults_are_never_tried_again(error: BatonError) -> None:
    state = progress()
    state.retry_delay_s(LOST, now=0.0)
    assert state.retry_delay_s(error, now=0.0) is None


@pytest.mark.parametrize("first_token_index", [0, 2])
def test_a_repeat_or_a_gap_is_an_error(first_token_index: int) -> None:
    state = progress()
    attempt = state.next_attempt()
    assert attempt is not None
    state.accept(attempt, pb.GenerateResponse(token_ids=[1]))
    with pytest.raises(ServerError, match="goes on at token"):
        state.accept(attempt, pb.GenerateResponse(token_ids=[1], first_token_index=first_token_index))


def test_words_after_the_end_are_an_error() -> None:
    state = progress()
    attempt = state.next_attempt()
    assert attempt is not None
    state.accept(attempt, pb.GenerateResponse(finish=pb.Finish(reason=pb.FINISH_REASON_STOP)))
    with pytest.raises(ServerError, match="after its end"):
        state.accept(attempt, pb.GenerateResponse(text="x"))


def test_an_end_without_a_reason_is_an_error() -> None:
    state = progress()
    attempt = state.next_attempt()
    assert attempt is not None
    with pytest.raises(ServerError, match="without a reason"):
        state.accept(attempt, pb.GenerateResponse(finish=pb.Finish()))
