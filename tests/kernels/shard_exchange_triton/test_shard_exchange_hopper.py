"""Compilation for Hopper of the exchanges between shards."""

from __future__ import annotations

import pytest
import torch

from kernels.shard_exchange import Inbox, gather_shards, merge_shards
from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_exchanges(shards: int, dtype: torch.dtype) -> None:
    """Two kernels each, of few threads and of many, the same on all ranks. What has arrived is taken once: who took it
    twice would wait for ever."""
    own = torch.empty(64, dtype=torch.uint8)
    with compile_only() as compiled:
        for index in range(shards):
            inbox = Inbox.of(own, [own.data_ptr()] * shards, index)
            for tokens in (1, 3, 16, 64, 100):
                q = torch.empty(tokens, 16 * 576, dtype=dtype)
                gather_shards(q, inbox, torch.empty(tokens, shards, 16 * 576, dtype=dtype), dependent=True)
                part, out = torch.empty(tokens, shards, 16, 512, dtype=dtype), torch.empty(tokens, 16, 512, dtype=dtype)
                lse = torch.empty(tokens, shards, 16)
                merge_shards(part, lse, inbox, out, torch.empty(tokens, 16), dependent=True)
                if dtype == torch.float32:
                    merge_shards(part, lse, inbox, out, torch.empty(tokens, 16), tree=True, dependent=True)
    found = {kernel.hash: kernel for kernel in compiled}
    assert len(found) == (6 if dtype == torch.float32 else 4)
    for kernel in found.values():
        needs = resources(kernel)
        needs.check(registers=128)
        assert needs.waits
        assert needs.releases
        ptx = kernel.asm["ptx"]
        takes = ptx.count("ld.relaxed.sys.global.v4.b32")
        assert takes == shards - 1
        assert "LDG.E.128.STRONG.SYS" in machine_code(kernel)
        assert "STG.E.128.STRONG.SYS" in machine_code(kernel)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_the_tree_adds_no_branch(shards: int) -> None:
    """Behind one of the merge's own, threads of a warp would come to the barrier apart, and all ranks might wait for
    ever. A planted fault that this finds: the library's logarithm."""
    own = torch.empty(64, dtype=torch.uint8)
    inbox = Inbox.of(own, [own.data_ptr()] * shards, 0)
    found: dict[bool, list[tuple[int, int, int]]] = {}
    for tree in (False, True):
        with compile_only() as compiled:
            for tokens in (1, 100):
                part, out = torch.empty(tokens, shards, 16, 512), torch.empty(tokens, 16, 512)
                lse = torch.empty(tokens, shards, 16)
                merge_shards(part, lse, inbox, out, torch.empty(tokens, 16), tree=tree, dependent=True)
        kernels = {kernel.hash: kernel for kernel in compiled}.values()
        assert len(kernels) == 2
        code = [(kernel.asm["ptx"], machine_code(kernel)) for kernel in kernels]
        found[tree] = [(ptx.count(" bra "), sass.count(" BRA "), sass.count(" BSSY")) for ptx, sass in code]
        assert all(min(counts) > 0 for counts in found[tree])
    assert found[True] == found[False]
