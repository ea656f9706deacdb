"""What the compiler makes for Hopper of the sum over ranks."""

import pytest
import torch

from kernels.one_shot import Inbox, one_shot_sum
from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_shot_sum(ranks: int, dtype: torch.dtype) -> None:
    with compile_only() as compiled:
        for rank in range(ranks):
            own = torch.empty(64, dtype=torch.uint8)
            inbox = Inbox.of(own, [own.data_ptr()] * ranks, rank)
            for nbytes in (16, 4 << 10, 14 << 10, 250_000, 1 << 19, 1 << 20):
                part = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
                one_shot_sum(part, inbox, part, dependent=True)
    assert len({kernel.hash for kernel in compiled}) == 3, "one kernel for 1, 2 and 4 steps, the same on all ranks"
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        found = resources(kernel)
        found.check(registers=128)
        assert found.waits
        assert found.releases
        assert kernel.asm["ptx"].count("ld.relaxed.sys.global.v4.b32") % ranks == 0
        assert "LDG.E.128.STRONG.SYS" in machine_code(kernel)
        assert "STG.E.128.STRONG.SYS" in machine_code(kernel)
