"""The queue of waiting requests against a plain list of them, under anything that may happen to it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt
from workers.scheduler.queue import WaitingQueue
from workers.scheduler.sequence import Phase, Sequence, Tokens


def sequence(priority: int, arrival: int) -> Sequence:
    prompt = Prompt.of(range(1 + arrival % 7))
    return Sequence(
        request=Request(str(arrival), prompt, SamplingParams(1)),
        rank=(priority, 0.0, arrival),
        limit=100,
        tokens=Tokens(prompt),
        stop_ids=frozenset(),
        min_total=0,
        logprobs=-1,
    )


class QueueMachine(RuleBasedStateMachine):
    """Machine that keeps the requests which wait, those among them that let others go first, and those that left and
    may come back."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Sequence] = []
        self.aside: list[Sequence] = []
        self.out: list[Sequence] = []
        self.arrivals = 0

    @rule(priority=st.integers(-2, 2), count=st.integers(1, 20))
    def push(self, priority: int, count: int) -> None:
        for _ in range(count):
            self.arrivals += 1
            self.waiting.append(sequence(priority, self.arrivals))
            self.queue.push(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(one)
        assert one.phase is Phase.ENDED

    @rule()
    def cancel_all(self) -> None:
        while self.waiting:
            self.queue.remove(self.waiting.pop())

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        self.out.append(self.queue.pop())
        assert self.out[-1] is min(self.waiting, key=lambda one: one.rank)
        self.waiting.remove(self.out[-1])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.waiting.append(self.out.pop(data.draw(st.integers(0, len(self.out) - 1))))
        self.queue.push(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule()
    def set_aside(self) -> None:
        self.aside.append(self.queue.set_aside())
        assert self.aside[-1] is min(self.waiting, key=lambda one: one.rank)
        self.waiting.remove(self.aside[-1])

    @rule()
    def put_back(self) -> None:
        for one in self.aside:
            self.queue.put_back(one)
        self.waiting += self.aside
        self.aside.clear()

    @invariant()
    def who_waits_is_all_there_is(self) -> None:
        assert list(self.queue) == sorted(self.waiting, key=lambda one: one.rank)
        assert self.queue.head() is min(self.waiting, key=lambda one: one.rank, default=None)
        assert len(self.queue) == len(self.waiting) + len(self.aside)
        assert self.queue.tokens == sum(one.tokens.length for one in (*self.waiting, *self.aside))
        assert all(one.phase is Phase.WAITING for one in (*self.waiting, *self.aside))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
