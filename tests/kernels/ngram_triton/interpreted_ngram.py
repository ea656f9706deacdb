"""Prompt look-up, reference and Triton, against lists. Run with TRITON_INTERPRET=1, see test_ngram.py."""

from tests.support import interpreter

interpreter.repair()

import random  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

import kernels.ngram as family  # noqa: E402
from kernels.ngram import BLOCK, LEAST, MOST, propose_reference  # noqa: E402

PATHS: dict[str, Callable[..., None]] = {
    "reference": lambda *arguments: propose_reference(*arguments[:-1]),
    "triton": family.launch_propose,
}


def expected(row: list[int], drafts: int) -> tuple[int, list[int]]:
    """Return how many of the newest tokens stood before, and the drafts."""
    for count in range(MOST, LEAST - 1, -1):
        for end in range(len(row) - 1, count - 1, -1):
            if row[end - count : end] == row[-count:]:
                longer = list(row)
                for index in range(drafts):
                    longer.append(longer[end + index])
                return count, longer[len(row) :]
    return 0, [0] * drafts


def check(path: str, rows: list[list[int] | None], room: int, drafts: int, tokens: int) -> Counter[int]:
    """`rows`: None is padding. Returns how often how many tokens were found."""
    slots = len(rows) + 2
    # What is behind a row's newest token would be found everywhere.
    token_SX = torch.full((slots + 1, tokens), 1, dtype=torch.int32)
    newest_S = torch.full((slots + 1,), tokens - 1)
    draft_SK = torch.full((slots + 1, room), -77)
    slot_R = torch.randperm(slots)[: len(rows)]
    seen: Counter[int] = Counter()
    wanted_SK = draft_SK.clone()
    for index, row in enumerate(rows):
        if row is None:
            slot_R[index] = -1
            continue
        slot = int(slot_R[index])
        token_SX[slot, : len(row)] = torch.tensor(row, dtype=torch.int32)
        newest_S[slot] = len(row) - 1
        count, found = expected(row, drafts)
        seen[count] += 1
        wanted_SK[slot, :drafts] = torch.tensor(found)
    found_RC = torch.full((len(rows), family.blocks(tokens)), -77)
    before = token_SX.clone()
    PATHS[path](token_SX, newest_S, slot_R, draft_SK, drafts, found_RC)
    assert torch.equal(draft_SK, wanted_SK)
    assert torch.equal(token_SX, before)
    return seen


@pytest.mark.parametrize("path", PATHS)
def test_drafts_are_what_followed_the_newest_tokens(path: str) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    seen: Counter[int] = Counter()
    for round_ in range(30):
        room = rng.randint(1, 7)
        rows = [
            None
            if rng.random() < 0.2
            else [rng.randrange(1, rng.choice((2, 4, 30))) for _ in range(rng.randint(1, 60))]
            for _ in range(rng.randint(1, 5))
        ]
        seen += check(path, rows, room, rng.randint(1, room), 64 + round_ % 3)
    assert set(seen) == {0, 2, 3, 4}


@pytest.mark.parametrize("path", PATHS)
def test_a_place_may_be_in_any_block(path: str) -> None:
    """The needle and what follows it lie on either side of a block's end; the longest wins, wherever it is."""
    needle, rng = [900, 901, 902, 903], random.Random(2)
    for end in (4, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 3, 2 * BLOCK + 5):
        row = [rng.randrange(1, 800) for _ in range(2 * BLOCK + 50)] + needle
        row[end - 4 : end] = needle
        row[2 * BLOCK + 20 : 2 * BLOCK + 22] = needle[2:]  # later, but shorter
        assert check(path, [row], 3, 3, len(row) + 7) == {4: 1}


def test_the_launcher_dispatches_cpu_tensors_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(family, "propose_reference", lambda *arguments: called.append(len(arguments)))
    one = torch.zeros(1, 1, dtype=torch.int64)
    family.propose(one, one[0], one[0], one, 1, one)
    assert called == [5]
