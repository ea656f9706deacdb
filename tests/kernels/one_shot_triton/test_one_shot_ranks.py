"""Ranks that are processes run the kernel's PTX at the same time, in memory that all of them write."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import Tensor

from kernels import one_shot
from kernels.one_shot import Inbox, one_shot_gather, one_shot_sum
from kernels.one_shot.words import EMPTY
from tests.support.ptx import emulated, machine, step
from tests.support.ptx.values import LANES

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 240)]

CALLS, WARPS = 4, 4
PIECES = (128, 128, 200, 131)
"""Pieces of the parts of each call: all warps have some, in the last calls some warps several."""
PATIENCE_S = 240.0
"""Seconds between two signs of life of a rank: it may compile a kernel on a busy machine."""


def one_half(ptx: str) -> str:
    """A fault: every call uses the same half of the inboxes."""
    found = re.findall(r"and\.b32\s+%r\d+, %r\d+, \d{7,};", ptx)
    assert len(found) == 1, found
    return ptx.replace(found[0], re.sub(r"\d+;$", "0;", found[0]))


def not_emptied(ptx: str) -> str:
    """A fault: what was read stays where it is."""
    left, count = re.subn(r"st\.relaxed\.sys\.global\.v4\.b32 \[%rd\d+ \+ \d+\], \{(%r\d+), \1, \1, \1\};", "", ptx)
    assert count
    return left


def right(ptx: str) -> str:
    """No fault."""
    return ptx


EDITS = {edit.__name__: edit for edit in (right, one_half, not_emptied)}


class Polls:
    """Records which warps look for what arrives. Rank 0 is late: its last warp to look has sent its part, and waits
    until rank 1, which can end the call, has sent the part of the next one."""

    def __init__(self, rank: int, shared: Tensor) -> None:
        self.rank, self.shared = rank, shared
        self.call, self.warps = 0, set[int]()
        plain, modifiers = step._known["ld.relaxed.sys.global"]

        def execute(one: step.Step) -> None:
            if one.warp.number not in self.warps:
                self.warps.add(one.warp.number)
                self.begun()
            plain(one)

        step._known["ld.relaxed.sys.global"] = execute, modifiers

    def next_call(self, call: int) -> None:
        """Begin a call."""
        self.call = call
        self.warps.clear()

    def begun(self) -> None:
        """A warp begins to look."""
        all_of = WARPS * (self.call + 1)
        self.shared[self.rank] = all_of - WARPS + len(self.warps)
        # A warp sends its second piece once it has taken the first: nobody could end a call in which one waits so.
        if self.rank == 0 and len(self.warps) == WARPS and PIECES[self.call] == LANES * WARPS:
            while int(self.shared[1]) < all_of + WARPS:  # for ever, where it hangs: then the test ends this rank
                time.sleep(0.01)


def rank_main(rank: int, ranks: int, memory: Tensor, ended: Tensor, polling: Tensor, edit: str) -> None:
    """Make the calls; `ended` says how many were right, or -1 where one was not."""
    torch.set_num_threads(1)
    # The emulator runs one block after the other, and a warp until its turn ends, also where it polls.
    one_shot.LANES, machine._TURNS = 1, (10, 200)
    owns = list(memory.view(torch.uint8).split(Inbox.nbytes(ranks)))
    address_R = torch.tensor([own.data_ptr() for own in owns])
    inbox = Inbox(owns[rank], address_R, torch.zeros(1, dtype=torch.int32), rank)
    polls = Polls(rank, polling)
    for call in range(CALLS):
        polls.next_call(call)
        parts = list(torch.randn(ranks, PIECES[call], 4, generator=torch.Generator().manual_seed(call)))
        want, out = parts[0].clone(), torch.zeros_like(parts[0])
        with emulated(seed=call, edit=EDITS[edit]):
            if call % 3 == 2:
                want = torch.stack(parts, dim=1)
                out = torch.zeros_like(want)
                one_shot_gather(parts[rank], inbox, out, dependent=True)
            else:
                for part in parts[1:]:
                    want += part
                one_shot_sum(parts[rank], inbox, out, dependent=True)
        if not torch.equal(out, want):
            ended[rank] = -1
            return  # and the others wait
        ended[rank] = call + 1


def calls_that_were_right(ranks: int, edit: str) -> tuple[list[int], Tensor]:
    """Return the number of right calls of every rank, and the inboxes afterwards. Ranks that wait for ever are
    ended."""
    memory = torch.full((ranks * Inbox.nbytes(ranks) // 4,), EMPTY, dtype=torch.int32).share_memory_()
    ended, polling = (torch.zeros(ranks, dtype=torch.int64).share_memory_() for _ in range(2))
    context = torch.multiprocessing.start_processes(
        rank_main, (ranks, memory, ended, polling, edit), ranks, join=False, start_method="forkserver"
    )
    until, seen = time.monotonic() + 2 * PATIENCE_S, ended.clone()
    try:
        while not context.join(timeout=0.2):
            alive = sum(process.is_alive() for process in context.processes)
            if not torch.equal(ended, seen):
                until, seen = time.monotonic() + PATIENCE_S, ended.clone()
            if alive < ranks and max(ended.tolist()) < CALLS:  # one was wrong, or has crashed
                time.sleep(1.0)
                break
            if time.monotonic() > until:
                break
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return ended.tolist(), memory


def test_all_calls_are_right_where_a_rank_is_late() -> None:
    ended, memory = calls_that_were_right(3, "right")
    assert ended == [CALLS] * 3
    assert bool((memory == EMPTY).all())


@pytest.mark.parametrize("fault", ["one_half", "not_emptied"])
def test_faults_are_found(fault: str) -> None:
    ended, _ = calls_that_were_right(2, fault)
    assert min(ended) == -1
