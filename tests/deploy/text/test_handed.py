"""Prompts that routers hand over belong to one request and one text."""

from __future__ import annotations

import asyncio

import pytest

from deploy.text.handed import EncodedPrompt, HandedPrompts, text_digest


def prompt(text: str, *ids: int) -> EncodedPrompt:
    return EncodedPrompt.of(text, False, [*ids])


def ids(handed: HandedPrompts, text: str) -> tuple[int, ...] | None:
    found = handed.ids(text, False)
    return None if found is None else tuple(found)


def test_ids_are_those_of_the_text_that_came_with_the_request() -> None:
    handed = HandedPrompts()
    handed.give("r/1", prompt("one", 1, 2**32 - 1))
    handed.give("r/2", prompt("two", 2))
    handed.arrive("r/2")
    assert ids(handed, "two") == (2,)
    assert ids(handed, "two") == (2,)  # of a request that looks twice
    assert ids(handed, "one") is None
    assert handed.ids("two", True) is None
    handed.arrive("r/1")
    assert ids(handed, "one") == (1, 2**32 - 1)


@pytest.mark.parametrize("ticket", [None, "r/3", "r/1/2", ""])
def test_others_get_nothing(ticket: str | None) -> None:
    handed = HandedPrompts()
    handed.give("r/1", prompt("one", 1))
    handed.arrive(ticket)
    assert ids(handed, "one") is None
    handed.arrive("r/1")
    assert ids(handed, "one") == (1,)


def test_a_prompt_is_its_first_request_s_alone() -> None:
    taken: list[None] = []
    handed = HandedPrompts(lambda: taken.append(None))
    handed.give("r/1", prompt("one", 1))
    handed.arrive("r/1")
    assert ids(handed, "another") is None
    assert not taken
    assert ids(handed, "one") == (1,)
    assert len(taken) == 1
    handed.give("r/1", prompt("one", 1))
    handed.arrive("r/1")
    handed.arrive("r/1")
    assert ids(handed, "one") is None


async def test_requests_that_run_together_do_not_mix() -> None:
    handed = HandedPrompts()

    async def request(number: int) -> tuple[int, ...] | None:
        handed.arrive(f"r/{number}")
        await asyncio.sleep(0)
        return ids(handed, "the same text")

    for number in range(20):
        handed.give(f"r/{number}", prompt("the same text", number))
    assert await asyncio.gather(*map(request, range(20))) == [(number,) for number in range(20)]


def test_prompts_whose_requests_never_come_make_room() -> None:
    handed = HandedPrompts(most_bytes=40)
    for number in range(50):
        handed.give(f"r/{number}", prompt("one", 1, 2, 3))
        handed.give(f"r/{number}", prompt("one", 4, 5, number))
    assert len(handed._waiting) == 3
    assert handed._held == 36
    for number in range(50):
        handed.arrive(f"r/{number}")
        assert ids(handed, "one") == ((4, 5, number) if number >= 47 else None)
    assert handed._held == 0


def test_one_that_is_too_large_is_not_kept() -> None:
    handed = HandedPrompts(most_bytes=10)
    handed.give("r/1", prompt("one", 1, 2, 3))
    assert handed._held == 0
    assert not handed._waiting


def test_every_text_has_a_digest() -> None:
    texts = ["", "a", "é", "\ud800", "\x00a", "a\x00"]
    assert len({text_digest(text, special) for text in texts for special in (False, True)}) == 12
