"""Caches of different kinds, and records of their pages with poison between."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.page_records import PagedRecords, launch_copy_pages

POISON = 0xA5


class Records:
    """Caches whose pages take `sizes` bytes, each behind a gap of 16 bytes in a record, and `count` chosen pages."""

    def __init__(self, sizes: list[int], pages: int, count: int, device: str = "cpu", seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        layers = [torch.randint(0, 256, (pages, size), dtype=torch.uint8, generator=random) for size in sizes]
        self.begins = [16 + sum(sizes[:n]) + 16 * n for n in range(len(sizes))]
        self.record_bytes = self.begins[-1] + sizes[-1] + 32
        self.page_N = torch.randperm(pages, generator=random)[:count].to(device)
        self.layers = [layer.to(device) for layer in layers]
        self.records = PagedRecords.of(self.layers, self.begins)

    def empty(self) -> Tensor:
        """Records that hold poison."""
        shape = (len(self.page_N), self.record_bytes)
        return torch.full(shape, POISON, dtype=torch.uint8, device=self.page_N.device)

    def run(self, record_NR: Tensor, out: bool) -> None:
        """The kernel, whatever the device."""
        launch_copy_pages(self.records, self.page_N, record_NR, out)

    def check(self) -> None:
        """Copy pages into records, and these into other caches: every byte of both by plain loops."""
        record_NR, before = self.empty(), [layer.cpu().clone() for layer in self.layers]
        self.run(record_NR, True)
        want = torch.full(record_NR.shape, POISON, dtype=torch.uint8)
        for n, page in enumerate(self.page_N.tolist()):
            for begin, layer in zip(self.begins, before, strict=True):
                want[n, begin : begin + layer.shape[1]] = layer[page]
        assert torch.equal(record_NR.cpu(), want)
        assert all(torch.equal(layer.cpu(), old) for layer, old in zip(self.layers, before, strict=True))
        record_NR.bitwise_xor_(0xFF)
        self.run(record_NR, False)
        chosen = set(self.page_N.tolist())
        for layer, old in zip(self.layers, before, strict=True):
            flipped = torch.stack([page ^ 0xFF if n in chosen else page for n, page in enumerate(old)])
            assert torch.equal(layer.cpu(), flipped)
