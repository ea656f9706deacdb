"""Prompts and what follows them: the same ids, pages and keys as of one list of all tokens, computed once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.page import PAGE_TOKENS
from workers.protocol import request as prompts
from workers.protocol.request import Prompt, pack_tokens, page_keys
from workers.scheduler.sequence import Tokens

lengths = st.integers(0, 3) | st.integers(62, 66) | st.integers(126, 200)


def tokens(prompt: list[int], generated: list[int]) -> Tokens:
    made = Tokens(Prompt.of(prompt))
    made.generated.extend(generated)
    made.length += len(generated)
    return made


@settings(deadline=None)
@given(before=lengths, after=lengths, seed=st.integers(0, 9), data=st.data())
def test_a_prompt_and_what_follows_it_are_one_sequence(before: int, after: int, seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(2**32) for _ in range(before + after)]
    made = tokens(ids[:before], ids[before:])
    assert [made[index] for index in range(made.length)] == ids
    end = data.draw(st.integers(0, len(ids)))
    begin = data.draw(st.integers(0, end))
    assert made.span(begin, end) == tuple(ids[begin:end])
    keys = page_keys(ids)
    assert made.keys() == keys
    for index, key in enumerate(keys):
        page = pack_tokens(ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
        assert made.page(index) == page
        assert made.key(index, page, keys[index - 1] if index else prompts.NO_ROOT) == key


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_a_prompt_is_the_sequence_of_its_ids(ids: list[int]) -> None:
    prompt = Prompt.of(ids)
    assert (list(prompt), len(prompt), prompt.length) == (ids, len(ids), len(ids))
    assert prompt[1:-1] == tuple(ids[1:-1])
    assert prompt.highest == max(ids, default=-1)
    assert bool(prompt) is bool(ids)
    assert Prompt.of(prompt) is prompt
    assert list(Prompt(prompt.packed)) == ids


def test_its_pages_are_hashed_once_for_all_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    strong = prompts.chain_key

    def counting(parent: bytes, page: bytes) -> bytes:
        hashed.append(page)
        return strong(parent, page)

    monkeypatch.setattr(prompts, "chain_key", counting)
    prompt = Prompt.of(range(1000))
    choices = [Tokens(prompt) for _ in range(128)]
    lists = [choice.keys() for choice in choices]
    assert len(hashed) == 1000 // PAGE_TOKENS
    assert all(keys is lists[0] for keys in lists)
    assert all(choice.prompt is prompt for choice in choices)


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_that_cannot_be_packed_raise(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        Prompt.of(ids)


def test_a_part_of_an_id_raises() -> None:
    with pytest.raises(ValueError, match="5 bytes are no whole number"):
        Prompt(bytes(5))
