"""Compilation for Hopper of the exchange between ranks."""

from typing import Any

import pytest
import torch

from kernels.one_shot import MOST_BYTES, Inbox, one_shot_add, one_shot_gather, one_shot_sum
from kernels.pending_norm import PendingNorm
from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate


def part_and_inbox(ranks: int, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Inbox]:
    own = torch.empty(64, dtype=torch.uint8)
    return torch.empty(shape, dtype=dtype), Inbox.of(own, [own.data_ptr()] * ranks, rank)


def check(compiled: list[Any], ranks: int, kernels: int) -> None:
    found = {kernel.hash: kernel for kernel in compiled}
    assert len(found) == kernels, "one kernel for 1, 2 and 4 steps each, the same on all ranks"
    for kernel in found.values():
        needs = resources(kernel)
        needs.check(registers=128)
        assert needs.waits
        assert needs.releases
        assert kernel.asm["ptx"].count("ld.relaxed.sys.global.v4.b32") % ranks == 0
        assert "LDG.E.128.STRONG.SYS" in machine_code(kernel)
        assert "STG.E.128.STRONG.SYS" in machine_code(kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums(ranks: int, dtype: torch.dtype) -> None:
    with compile_only() as compiled:
        for rank in range(ranks):
            for nbytes in (16, 4 << 10, 14 << 10, 250_000, 1 << 19, 1 << 20):
                part, inbox = part_and_inbox(ranks, rank, (1, nbytes // dtype.itemsize), dtype)
                one_shot_sum(part, inbox, part, dependent=True)
    check(compiled, ranks, kernels=3)


@pytest.mark.parametrize("hidden", [2048, 7168])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_of_few_tokens_that_enter_the_residual(ranks: int, hidden: int) -> None:
    with compile_only() as compiled:
        for rank in range(ranks):
            for tokens in (1, 2, 5, 16):
                part, inbox = part_and_inbox(ranks, rank, (tokens, hidden), torch.bfloat16)
                out = PendingNorm.empty(tokens, hidden, 1e-6, torch.bfloat16, torch.empty)
                norm_E = torch.empty(hidden, dtype=torch.bfloat16)
                one_shot_add(part, inbox, torch.empty(tokens, hidden), norm_E, out, dependent=True)
    check(compiled, ranks, kernels=1)


@pytest.mark.parametrize("vocabulary", [102_400, 129_280])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_logits_side_by_side(ranks: int, vocabulary: int) -> None:
    share = vocabulary // ranks
    with compile_only() as compiled:
        for rows in range(1, MOST_BYTES // (4 * share) + 1):
            part, inbox = part_and_inbox(ranks, 0, (rows, share), torch.float32)
            one_shot_gather(part, inbox, torch.empty(rows, ranks, share), dependent=True)
    check(compiled, ranks, kernels=len({kernel.hash for kernel in compiled}))
    assert len({kernel.hash for kernel in compiled}) <= 3
