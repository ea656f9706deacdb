"""Exchanges between GPUs that share out a latent cache: against fp64, in graphs, of any size, one behind the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing

from kernels.mla_decode.strands import merge_strands
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
]

REPLAYS = 20
SIZES = [(1, 64, 512), (3, 8, 512), (16, 64, 512), (300, 64, 512), (5, 3, 40), (700, 8, 256)]
"""Tokens, heads of a rank and latent features; the fourth needs several calls."""


def merged(part_DTHL: Tensor, lse_DTH: Tensor) -> Tensor:
    weight = lse_DTH.double().softmax(0).nan_to_num(0.0).unsqueeze(-1)
    return (weight * part_DTHL.double()).sum(0)


def drawn(seed: int, count: int, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, parts and log-sum-exps of all shards, the same on every rank. One feature of the last token is NaN in
    the first shard's parts, those without entries among them."""
    random, (tokens, heads, latent) = torch.Generator().manual_seed(seed), size
    q = torch.randn(count, tokens, heads * latent, generator=random).to(dtype)
    part = torch.randn(count, tokens, count, heads, latent, generator=random).to(dtype)
    lse = 4 * torch.randn(count, tokens, count, heads, generator=random)
    empty = torch.rand(lse.shape, generator=random) < 0.3
    part.masked_fill_(empty.unsqueeze(-1), 0.0)
    part[0, -1, :, :, 3] = torch.nan
    return q, part, lse.masked_fill_(empty, -torch.inf)


class Buffers:
    """Memory of the exchanges of one size."""

    def __init__(self, group: Group, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        tokens, heads, latent = size
        count = group.mesh.cache.size
        self.group, self.size, self.dtype = group, size, dtype
        self.q = torch.empty(tokens, heads * latent, dtype=dtype, device=device)
        self.every = torch.empty(tokens, count, heads * latent, dtype=dtype, device=device)
        self.part = torch.empty(tokens, count, heads, latent, dtype=dtype, device=device)
        self.lse = torch.empty(tokens, count, heads, device=device)
        self.out = torch.empty(tokens, heads, latent, dtype=dtype, device=device)
        self.out_lse = torch.empty(tokens, heads, device=device)

    def draw(self, seed: int) -> None:
        own = self.group.mesh.cache.rank
        q, part, lse = drawn(seed, self.group.mesh.cache.size, self.size, self.dtype)
        for into, drawn_ in ((self.q, q), (self.part, part), (self.lse, lse)):
            into.copy_(drawn_[own])

    def exchange(self) -> None:
        self.group.gather_shards(self.q, self.every)
        self.group.merge_shards(self.part, self.lse, self.out, self.out_lse)

    def check(self, seed: int) -> None:
        own = self.group.mesh.cache.rank
        q, part, lse = drawn(seed, self.group.mesh.cache.size, self.size, self.dtype)
        assert torch.equal(self.every.cpu(), q.transpose(0, 1))
        close = 2**-7 if self.dtype == torch.bfloat16 else 1e-5
        want = merged(part[:, :, own], lse[:, :, own])
        assert bool(want[-1, :, 3].isnan().all())
        torch.testing.assert_close(self.out.cpu().double(), want, atol=close, rtol=close, equal_nan=True)
        total = lse[:, :, own].double().logsumexp(0)
        torch.testing.assert_close(self.out_lse.cpu().double(), total, atol=1e-5, rtol=1e-5)


def check_tree(group: Group, device: torch.device) -> None:
    """Parts of invariant mode are merged with the bits of the kernel that merges the strands of a whole row."""
    own, count = group.mesh.cache.rank, group.mesh.cache.size
    for index, (tokens, heads, latent) in enumerate(SIZES):
        _, part, lse = drawn(index, count, (tokens, heads, latent), torch.float32)
        part, lse = part.nan_to_num(0.0).to(device), lse.to(device)
        out, out_lse = torch.empty(tokens, heads, latent, device=device), torch.empty(tokens, heads, device=device)
        group.merge_shards(part[own], lse[own], out, out_lse, tree=True)
        want, want_lse = torch.empty_like(out), torch.empty_like(out_lse)
        record = torch.tensor([0, 0, count, 0], dtype=torch.int32, device=device)
        parts = part[:, :, own].flatten(1, 2).contiguous(), lse[:, :, own].flatten(1, 2).contiguous()
        columns = latent & -latent
        merge_strands[(1, tokens * heads, latent // columns)](
            *(*parts, record, want, want_lse, tokens * heads, 0),
            LATENT=latent,
            COLUMNS=columns,
            STRANDS=count,
            LAST=True,
            FINEST=1,
            DEPENDENT=False,
            enable_fp_fusion=False,
        )
        assert torch.equal(out, want)
        assert torch.equal(out_lse, want_lse)


def rank_main(rank: int, ranks: int, count: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = Group.connect(Mesh.of(rank, ranks, cache=count), f"file://{folder}/rendezvous", device, timeout_s=60)
    check_tree(group, device)
    for dtype in (torch.bfloat16, torch.float32):
        every = [Buffers(group, size, dtype, device) for size in SIZES]
        for index, buffers in enumerate(every):
            buffers.draw(index)
            buffers.exchange()
            buffers.check(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for buffers in every:
                buffers.exchange()
        for replay in range(REPLAYS):
            for index, buffers in enumerate(every):
                buffers.draw(100 * replay + index)
            if replay % ranks == rank:
                torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
            graph.replay()
            for index, buffers in enumerate(every):
                buffers.check(100 * replay + index)
        graph.reset()
    group.close()


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 2), (4, 4), (8, 8)])
def test_exchanges_of_several_gpus(ranks: int, count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    multiprocessing.spawn(rank_main, args=(ranks, count, tmp_path), nprocs=ranks)
