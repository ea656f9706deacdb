"""Rows of some cached entries, scattered over pages of a cache that holds NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.gather_context import gather_context, launch_gather_context
from kernels.page import PAGE_TOKENS
from tests.support import fp8_entries

ARBITRARY_PAGE = 2147480000


@dataclass
class Gather:
    """Row b has `counts[b]` entries from `begin` on."""

    counts: list[int]
    begin: int = 0
    features: int = 576
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    seed: int = 0
    latent: int = 0
    """Latent features of FP8 entries; 0: plain entries."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        ends = [self.begin + count if count else 0 for count in self.counts]
        used = [-(-end // PAGE_TOKENS) for end in ends]
        pages = (torch.randperm(sum(used), generator=random) + 1).tolist()
        cache = torch.full((sum(used) + 1, PAGE_TOKENS, self.features), torch.nan)
        table = torch.full((len(ends), max(used, default=0) + 3), ARBITRARY_PAGE, dtype=torch.int32)
        rows = []
        for row, (end, count) in enumerate(zip(ends, self.counts, strict=True)):
            own = torch.tensor([pages.pop() for _ in range(used[row])], dtype=torch.int32)
            table[row, : used[row]] = own
            values = torch.randn(end, self.features, generator=random)
            at = torch.arange(end)
            cache[own[at // PAGE_TOKENS].long(), at % PAGE_TOKENS] = values
            rows.append(values[end - count :])
        self.want, cache = torch.cat(rows).to(self.dtype), cache.to(self.dtype)
        if self.latent:
            sizes = self.latent, self.features - self.latent, self.dtype
            self.want = fp8_entries.read(fp8_entries.encoded(self.want, self.latent), *sizes)
            bytes = fp8_entries.encoded(cache.flatten(0, 1), self.latent).view(*cache.shape[:2], -1)
            cache = bytes.masked_fill(cache.isnan().any(-1, keepdim=True), 255)
        cu = [sum(self.counts[:n]) for n in range(len(self.counts) + 1)]
        self.tensors = {
            "cache": cache.to(self.device),
            "table": table.to(self.device)[:, :-1],
            "cu": torch.tensor(cu, dtype=torch.int32, device=self.device),
            "out": torch.full_like(self.want, torch.nan, device=self.device),
        }

    def run(self) -> None:
        """The kernel, whatever the device."""
        launch_gather_context(*self.tensors.values(), self.begin, self.latent)

    def serve(self) -> None:
        """Call the function that attention calls."""
        gather_context(*self.tensors.values(), begin=self.begin, latent=self.latent)

    def check(self) -> None:
        assert torch.equal(self.tensors["out"].cpu(), self.want)
