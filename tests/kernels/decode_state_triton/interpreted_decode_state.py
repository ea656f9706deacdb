"""Decode bookkeeping, reference and Triton, against plain integers. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from collections.abc import Callable  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

import kernels.decode_state as family  # noqa: E402
from kernels.decode_state import SlotTensors  # noqa: E402
from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards  # noqa: E402

SLOTS, PAGES = 6, 5
REFERENCE = SimpleNamespace(
    feed=family.feed_reference, advance=family.advance_reference, feed_draft=family.feed_draft_reference
)
TRITON = SimpleNamespace(feed=family.launch_feed, advance=family.launch_advance, feed_draft=family.launch_feed_draft)


def random_state(width: int, seed: int) -> SlotTensors:
    torch.manual_seed(seed)
    state = SlotTensors.allocate(SLOTS, width - 1, PAGES, torch.device("cpu"), tokens=width != 2)
    state.token_SX.random_(1, 99)
    state.length_S[:SLOTS] = torch.randint(0, 3 * PAGE_TOKENS, (SLOTS,))
    state.length_S[0] = PAGE_TOKENS - 1
    state.last_S[:SLOTS] = torch.randint(1, 99, (SLOTS,))
    state.draft_SK[:SLOTS] = torch.randint(1, 99, state.draft_SK[:SLOTS].shape)
    state.page_SP[:SLOTS] = torch.randperm(SLOTS * PAGES).view(SLOTS, PAGES).to(torch.int32) + 1
    return state


def clone(state: SlotTensors) -> SlotTensors:
    return SlotTensors(*(tensor.clone() for tensor in vars(state).values()))


def entry(state: SlotTensors, slot: int, position: int, shards: Shards) -> int:
    page = NULL_PAGE if slot < 0 else int(state.page_SP[slot, position // PAGE_TOKENS])
    page = shards.local(page) if shards.owns(page) else NULL_PAGE
    return page * PAGE_TOKENS + position % PAGE_TOKENS


def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, -77, dtype=dtype)


@pytest.mark.parametrize("path", [REFERENCE, TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slots", [[0], [3, 0, 5], [2, -1, 4, -1], [-1]])
@pytest.mark.parametrize("shards", [Shards(), Shards(2, 0), Shards(2, 1), Shards(3, 1), Shards(4, 3)], ids=str)
def test_a_whole_step(path: SimpleNamespace, width: int, slots: list[int], shards: Shards) -> None:
    """Planted faults that this finds: a rank writes what another owns; the owner of page p - 1."""
    state = random_state(width, seed=width)
    before = clone(state)
    rows, slot_R = len(slots), torch.tensor(slots)
    token_RW, position_RW, cache_RW = garbage(rows, width), garbage(rows, width), garbage(rows, width)
    length_R, page_RP = garbage(rows, dtype=torch.int32), garbage(rows, PAGES, dtype=torch.int32)
    path.feed(state, slot_R, token_RW, position_RW, cache_RW, length_R, page_RP, shards)
    for row, slot in enumerate(slots):
        length = int(before.length_S[slot]) if slot >= 0 else 0
        for j in range(width):
            position = length + j if slot >= 0 else 0
            fed = int(before.last_S[slot] if j == 0 else before.draft_SK[slot, j - 1]) if slot >= 0 else 0
            assert int(token_RW[row, j]) == fed
            assert int(position_RW[row, j]) == position
            assert int(cache_RW[row, j]) == entry(before, slot, position, shards)
        assert int(length_R[row]) == (length + width if slot >= 0 else 0)
        assert page_RP[row].tolist() == (before.page_SP[slot].tolist() if slot >= 0 else [NULL_PAGE] * PAGES)

    target_RW = torch.randint(100, 200, (rows, width))
    accepted_R = torch.randint(0, width, (rows,))
    newest_R = garbage(rows)
    path.advance(state, slot_R, target_RW, accepted_R, position_RW, cache_RW, length_R, newest_R, shards)
    for row, slot in enumerate(slots):
        accepted = int(accepted_R[row])
        assert int(newest_R[row]) == row * width + accepted
        if slot < 0:
            assert position_RW[row].tolist() == [0] * width
            assert int(length_R[row]) == 0
            assert set(cache_RW[row].tolist()) <= set(range(PAGE_TOKENS))
            continue
        length = int(before.length_S[slot])
        assert int(state.length_S[slot]) == length + accepted + 1
        assert int(state.last_S[slot]) == int(target_RW[row, accepted])
        if state.token_SX.shape[1]:
            wanted = before.token_SX[slot].tolist()
            wanted[length + 1 : length + 1 + width] = target_RW[row].tolist()
            assert state.token_SX[slot].tolist() == wanted
        for j in range(width):
            assert int(position_RW[row, j]) == length + j + 1
            assert int(cache_RW[row, j]) == entry(before, slot, length + j + 1, shards)
        assert int(length_R[row]) == length + width + 1

    position_R, cache_R, length_R = garbage(rows), garbage(rows), garbage(rows, dtype=torch.int32)
    for index in range(width - 1):
        draft_R = torch.randint(200, 300, (rows,))
        path.feed_draft(state, slot_R, draft_R, index, position_R, cache_R, length_R, shards)
        for row, slot in enumerate(slots):
            position = int(state.length_S[slot]) + index + 1 if slot >= 0 else 0
            assert int(position_R[row]) == position
            assert int(cache_R[row]) == entry(state, slot, position, shards)
            assert int(length_R[row]) == (position + 1 if slot >= 0 else 0)
            if slot >= 0:
                assert int(state.draft_SK[slot, index]) == int(draft_R[row])

    # Only the rows' own slots changed, and never the row of nobody.
    others = [slot for slot in range(SLOTS + 1) if slot not in slots]
    for name, tensor in vars(state).items():
        assert torch.equal(tensor[others], getattr(before, name)[others]), name
    assert torch.equal(state.page_SP, before.page_SP)


def test_the_launchers_dispatch_cpu_tensors_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *args: called.append(name)

    for name in ("feed", "advance", "feed_draft"):
        monkeypatch.setattr(family, f"{name}_reference", note(name))
    state, one = random_state(2, 0), torch.zeros(1, dtype=torch.int64)
    family.feed(state, one, one, one, one, one, one)
    family.advance(state, one, one, one, one, one, one, one)
    family.feed_draft(state, one, one, 0, one, one, one)
    assert called == ["feed", "advance", "feed_draft"]
