"""Turns for work of different sizes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from deploy.api.http.body import Budget
from deploy.text.lane import LARGE_AT_ONCE, MIDDLE, MIDDLE_AT_ONCE, SMALL, Lanes


async def test_smaller_work_never_waits_for_larger() -> None:
    lanes, release = Lanes(), asyncio.Event()
    inside: list[int] = []

    async def hold(size: int) -> None:
        async with lanes.turn(size):
            inside.append(size)
            await release.wait()

    tasks = [asyncio.create_task(hold(MIDDLE + 1)) for _ in range(LARGE_AT_ONCE + 3)]
    tasks += [asyncio.create_task(hold(MIDDLE)) for _ in range(MIDDLE_AT_ONCE + 3)]
    tasks += [asyncio.create_task(hold(SMALL)) for _ in range(20)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(inside) == [SMALL] * 20 + [MIDDLE] * MIDDLE_AT_ONCE + [MIDDLE + 1] * LARGE_AT_ONCE
    release.set()
    await asyncio.gather(*tasks)
    assert len(inside) == len(tasks)


async def test_small_work_is_done_at_once_and_large_work_aside() -> None:
    lanes, here = Lanes(), threading.get_ident()
    for size, aside in ((SMALL, False), (SMALL + 1, True), (MIDDLE + 1, True)):
        async with lanes.turn(size) as work:
            assert (await work(threading.get_ident) != here) == aside
            with pytest.raises(ZeroDivisionError):
                await work(divmod, 1, 0)


async def test_work_whose_caller_left_keeps_its_turn_until_its_thread_ends() -> None:
    lanes, begun, go = Lanes(), threading.Event(), threading.Event()
    order: list[str] = []

    def wait() -> None:
        begun.set()
        go.wait(60)

    async def first() -> None:
        async with lanes.turn(MIDDLE + 1) as work:
            await work(wait)

    async def second() -> None:
        async with lanes.turn(MIDDLE + 1):
            order.append("second")

    leaving = asyncio.create_task(first())
    async with asyncio.timeout(60):
        while not begun.is_set():
            await asyncio.sleep(0.001)
    waiting = asyncio.create_task(second())
    leaving.cancel()
    await asyncio.sleep(0.02)
    assert order == []
    order.append("thread")
    go.set()
    with suppress(asyncio.CancelledError):
        await leaving
    await waiting
    assert leaving.cancelled()
    assert order == ["thread", "second"]


async def test_the_event_loop_goes_on_meanwhile() -> None:
    begun, enough = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return enough.wait(60)

    async def beat() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        enough.set()

    heart = asyncio.create_task(beat())
    async with Lanes().turn(MIDDLE + 1) as work:
        assert await work(wait)
    await heart


def test_a_budget_is_shared_and_given_back() -> None:
    budget = Budget(100)
    with budget.account() as first:
        assert first.grow(60)
        assert first.grow(70)
        with budget.account() as second:
            assert not second.grow(31)
            assert second.held == 0
            assert second.grow(30)
            assert not first.grow(71)
            assert (first.held, budget.held) == (70, 100)
        assert budget.held == 70
    assert budget.held == 0


async def test_keys_take_turns_and_who_leaves_takes_none() -> None:
    lanes, order = Lanes(), []
    go = asyncio.Event()

    async def work(name: str, key: str) -> None:
        async with lanes.turn(MIDDLE + 1, key):
            order.append(name)
            await go.wait()

    named = [("a0", "a"), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b0", "b"), ("gone", "b"), ("b1", "b"), ("c", "")]
    tasks = {name: asyncio.create_task(work(name, key)) for name, key in named}
    await asyncio.sleep(0)
    tasks.pop("gone").cancel()
    go.set()
    await asyncio.gather(*tasks.values())
    assert order == ["a0", "a1", "b0", "c", "a2", "b1", "a3"]
    go.clear()
    tasks = {name: asyncio.create_task(work(name, "a")) for name in ("first", "granted", "last")}
    await asyncio.sleep(0)
    tasks["first"].cancel()
    await asyncio.sleep(0)  # hands its turn on, and before that is taken its taker leaves
    tasks["granted"].cancel()
    go.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order[7:] in (["first", "last"], ["first", "granted", "last"])
    async with asyncio.timeout(60), lanes.turn(MIDDLE + 1):
        pass


def test_a_key_leaves_memory_to_others() -> None:
    budget = Budget(100)
    with budget.account("a") as one, budget.account("a") as two, budget.account("b") as other, budget.account() as none:
        assert one.grow(70), "a single body may be as large as it likes"
        assert not two.grow(10)
        assert other.grow(20)
        assert none.grow(10)
        assert not none.grow(11)
    with budget.account("a") as one, budget.account("a") as two, budget.account("b") as other:
        assert one.grow(30)
        assert two.grow(20)
        assert not two.grow(21)
        assert other.grow(50)
    assert (budget.held, budget.by_key) == (0, {})
