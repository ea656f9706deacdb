"""Random requests, cancellations, plans and late results: each request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica import Replica
from simulated_worker import VOCAB
from workload import random_config, random_request

from kernels import page
from workers.protocol import request as prompts
from workers.scheduler import pages


class SchedulerMachine(RuleBasedStateMachine):
    colliding = False

    @initialize(seed=st.integers(0, 2**20), agree=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def start(self, seed: int, agree: float) -> None:
        self.rng = random.Random(seed)
        self.replica = Replica(random_config(self.rng), agree, seed)
        self.names = 0

    @rule(count=st.integers(1, 8))
    def add(self, count: int) -> None:
        for _ in range(count):
            prompt, sampling = random_request(self.rng, self.replica.config.max_context)
            self.submit(prompt, **sampling)

    @rule(count=st.integers(2, 8))
    def add_choices(self, count: int) -> None:
        """Several of one prompt at once, as choices that share it or as strangers, and others between them."""
        ids, sampling = random_request(self.rng, self.replica.config.max_context)
        prompt = prompts.Prompt.of(ids) if self.rng.random() < 0.5 else ids
        for seed in range(count):
            if self.rng.random() < 0.3:
                self.add(1)
            self.submit(prompt, **(sampling | {"seed": seed}))

    @precondition(lambda self: self.replica.finish)
    @rule(data=st.data(), more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
    def next_turn(self, data: st.DataObject, more: list[int]) -> None:
        replica = self.replica
        name = data.draw(st.sampled_from(sorted(replica.finish)))
        self.submit([*replica.requests[name].prompt, *replica.tokens[name], *more], max_tokens=40)

    def submit(self, prompt: Sequence[int], **sampling: object) -> None:
        self.names += 1
        refusal = self.replica.add(f"request {self.names}", prompt, **sampling)
        fits = 0 < len(prompt) < self.replica.config.max_context
        if refusal is None:
            assert fits
        else:
            assert not fits or refusal.overloaded or "pages of cache" in refusal.refused, f"without need: {refusal}"

    @precondition(lambda self: self.replica.scheduler._live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.replica.scheduler._live)))
        self.replica.cancel(name)
        assert self.replica.finish[name] == "cancelled"

    @rule()
    def cancel_unknown(self) -> None:
        assert self.replica.scheduler.cancel("nobody") == ()

    @rule()
    def plan(self) -> None:
        self.replica.plan()

    @precondition(lambda self: self.replica.launched)
    @rule()
    def apply(self) -> None:
        self.replica.apply()

    @rule()
    def move(self) -> None:
        """Ranks that have nothing else to do copy pages."""
        self.replica.move()

    @precondition(lambda self: self.replica.answers)
    @rule()
    def answer(self) -> None:
        self.replica.answer()

    @rule(steps=st.integers(1, 100))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.replica.step()
            self.replica.check_pages()

    @invariant()
    def pages_and_books(self) -> None:
        if hasattr(self, "replica"):
            self.replica.check_pages()
            self.replica.check_books()

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        self.replica.run()
        assert set(self.replica.finish) == set(self.replica.requests), "a request never ended"
        self.replica.check_tokens()
        self.replica.check_pages()
        self.replica.check_books()
        if not self.colliding:
            self.replica.check_rest()


class CollidingMachine(SchedulerMachine):
    """The same with page keys that collide all the time: only comparing tokens keeps prefixes apart."""

    colliding = True


class PiecesMachine(SchedulerMachine):
    """The same where the pieces of rows, of one page each, go round several ranks without exceptions."""

    @initialize(seed=st.integers(0, 2**20), agree=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def start(self, seed: int, agree: float) -> None:
        self.rng = random.Random(seed)
        drawn, shards = random_config(self.rng, tight=self.rng.random() < 0.5), self.rng.choice([2, 4])
        pages = drawn.pages + -(drawn.pages - 1) % shards
        self.replica = Replica(replace(drawn, pages=pages, cache_shards=shards, in_pieces=True), agree, seed)
        self.names = 0


SETTINGS = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS


@pytest.mark.soak
class TestSchedulerForLong(SchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(SETTINGS, max_examples=60)


class TestPieces(PiecesMachine.TestCase):  # type: ignore[name-defined,misc]
    """Planted faults that this finds: an owner without pages is passed over; what a row grows by is counted for all
    owners together."""

    settings = SETTINGS

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (page, pages):
            monkeypatch.setattr(module, "PIECE_PAGES", 1)


class TestCollidingKeys(CollidingMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = SETTINGS

    @pytest.fixture(autouse=True)
    def weak_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strong = prompts.chain_key
        monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(15) + bytes([strong(parent, page)[0] % 3]))


@pytest.mark.soak
class TestCollidingKeysForLong(TestCollidingKeys):
    settings = settings(SETTINGS, max_examples=60)
