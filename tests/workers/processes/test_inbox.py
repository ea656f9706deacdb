"""Messages that the scheduler's loop takes in in an iteration: little, in order, each request once, and none that was
cancelled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.processes import inbox
from workers.processes.inbox import Inbox
from workers.protocol.messages import Cancel, Request, Requests, Shutdown
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt

Taken = Request | Cancel | Shutdown


class Messages:
    """Stands for the socket."""

    def __init__(self, messages: Iterable[Any] = ()) -> None:
        self.left = deque(messages)

    def receive(self, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        return self.left.popleft() if self.left else None


def requests(name: str, tokens: int, choices: int = 1, key: str = "") -> Requests:
    prompt, sampling = Prompt(bytes(4 * tokens)), SamplingParams(1)
    return Requests.of([Request(f"{name}.{choice}", prompt, sampling, key=key) for choice in range(choices)])


def turns(box: Inbox, source: Messages) -> list[list[Taken]]:
    """All that is taken in until nothing is left."""
    found = []
    while source.left or box.waiting:
        found.append(box.take())
    return found


def names(take: Iterable[Taken]) -> list[str]:
    return [one.request_id for one in take if isinstance(one, Request)]


messages = st.lists(
    st.tuples(  # tokens, choices, key
        st.sampled_from([0, 1, 1000, 60_000, 99_000, 100_000, 250_000]), st.integers(1, 140), st.sampled_from("  ab")
    )
    | st.integers(0, 12),  # a cancel: of which message's requests, every second one
    max_size=12,
)


@settings(deadline=None)
@given(drawn=messages)
def test_every_request_is_taken_in_once_in_order_and_never_too_many_tokens_at_a_time(
    drawn: list[tuple[int, int, str] | int],
) -> None:
    said: list[Requests | Cancel] = []
    cancelled: set[str] = set()
    for index, one in enumerate(drawn):
        if isinstance(one, tuple):
            said.append(requests(str(index), *one))
        elif one < len(said) and isinstance(asked := said[one], Requests):
            gone = {name for name, _ in asked.choices[::2]} - cancelled
            said += [Cancel(name) for name in sorted(gone)]
            cancelled |= gone
    source = Messages(said)
    box = Inbox(source)  # type: ignore[arg-type]
    found = turns(box, source)
    taken = [name for take in found for name in names(take)]
    asked_of = {name: one.key for one in said if isinstance(one, Requests) for name, _ in one.choices}
    for key in {*asked_of.values()}:
        order = [name for name in asked_of if asked_of[name] == key]
        assert [name for name in taken if asked_of[name] == key] == [name for name in order if name in set(taken)]
    assert set(asked_of) - set(taken) <= cancelled
    assert len(set(taken)) == len(taken)
    # A cancel that passes on is of a request that was taken in before it, and of each it comes at most once.
    passed: set[str] = set()
    for take in found:
        known = set(names(take))
        assert not {one.request_id for one in take if isinstance(one, Cancel)} & known
        for cancel in (one for one in take if isinstance(one, Cancel)):
            assert cancel.request_id in passed
        passed |= known
    seen: set[int] = set()
    for take in found:
        prompts = {id(one.prompt): len(one.prompt) for one in take if isinstance(one, Request)}
        new = [length for prompt, length in prompts.items() if prompt not in seen]
        assert sum(new) - max(new, default=0) < inbox.ITERATION_TOKENS
        seen |= prompts.keys()
        assert len(names(take)) <= inbox.ITERATION_TOKENS // inbox.REQUEST_TOKENS + 1


def test_keys_take_turns() -> None:
    many = [requests(str(index), inbox.ITERATION_TOKENS, key="floods") for index in range(5)]
    source = Messages([*many, requests("b", 5, choices=2, key="other"), requests("c", 5)])
    found = [names(take) for take in turns(Inbox(source), source)]  # type: ignore[arg-type]
    assert found == [["0.0"], ["b.0", "c.0", "1.0"], ["b.1", "2.0"], ["3.0"], ["4.0"]]


def test_a_prompt_counts_once_for_all_who_share_it_and_all_of_them_have_one() -> None:
    source = Messages([requests("a", inbox.ITERATION_TOKENS - 50 * inbox.REQUEST_TOKENS, choices=50)])
    [taken] = turns(Inbox(source), source)  # type: ignore[arg-type]
    assert len(taken) == 50
    assert len({id(one.prompt) for one in taken if isinstance(one, Request)}) == 1


def test_what_ends_something_does_not_wait_behind_what_begins_something() -> None:
    long = inbox.ITERATION_TOKENS
    source = Messages([requests("a", long), requests("b", long, choices=2), requests("c", long)])
    box = Inbox(source)  # type: ignore[arg-type]
    assert names(box.take()) == ["a.0"]
    assert box.waiting == 3
    source.left += [Cancel("a.0"), Cancel("b.0"), Shutdown(), Cancel("c.0")]
    take = box.take()
    assert take[:2] == [Cancel("a.0"), Shutdown()]
    assert names(take) == ["b.1"]
    assert box.waiting == 0


def test_an_iteration_reads_little_and_the_rest_stays_on_the_socket() -> None:
    tokens = inbox.READ_BYTES // 8
    source = Messages([requests(str(index), tokens) for index in range(20)])
    box = Inbox(source)  # type: ignore[arg-type]
    box.take()
    assert len(source.left) >= 17


def test_an_id_that_waits_already_is_the_schedulers_to_refuse() -> None:
    source = Messages([requests("a", 5), requests("a", 6)])
    [take] = turns(Inbox(source), source)  # type: ignore[arg-type]
    assert sorted(len(one.prompt) for one in take if isinstance(one, Request)) == [5, 6]
