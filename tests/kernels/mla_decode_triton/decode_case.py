"""Random decode cases over a poisoned paged cache, and their answer by torch's own attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import DecodeShape, DecodeTiling, Workspace
from kernels.page import PAGE_TOKENS, pages_for
from tests.support import fp8_entries

POISONED_PAGE = 2147480000


@dataclass
class Case:
    """One launch: lengths and sizes. The cache holds NaN wherever no row has an entry, the table's tail huge ids."""

    lengths: list[int]
    width: int = 1
    heads: int = 4
    latent: int = 64
    rope: int = 16
    dtype: torch.dtype = torch.float32
    first: int = 0
    invariant: bool = False
    fp8: bool = False
    """Whether the cache has FP8 entries."""
    spare_columns: int = 2
    least_columns: int = 0
    """Table columns at least."""
    seed: int = 0
    device: str = "cpu"
    scale: float = 0.11
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        rows, features = len(self.lengths), self.latent + self.rope
        used = sum(pages_for(length) for length in self.lengths)
        columns = max(max(map(pages_for, self.lengths)) + self.spare_columns, self.least_columns)
        cache = torch.full((used + 2, PAGE_TOKENS, features), torch.nan)
        table = torch.full((rows, columns), POISONED_PAGE, dtype=torch.int32)
        free = (torch.randperm(used, generator=random) + 1).tolist()
        for row, length in enumerate(self.lengths):
            for column in range(pages_for(length)):
                page = free.pop()
                table[row, column] = page
                count = min(PAGE_TOKENS, length - column * PAGE_TOKENS)
                cache[page, :count] = torch.randn(count, features, generator=random)
            if length:
                cache[table[row, 0], : self.first] = torch.nan
        q = torch.randn(rows, self.width, self.heads, features, generator=random)
        self.tensors = {
            "q": q.to(self.device, self.dtype),
            "cache": self._entries(cache.to(self.dtype)).to(self.device),
            "table": table.to(self.device),
            "length": torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            "out": torch.full((rows, self.width, self.heads, self.latent), torch.nan).to(self.device, self.dtype),
            "lse": torch.full((rows, self.width, self.heads), torch.nan, device=self.device),
        }

    def _entries(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the entries as they lie in memory; what holds NaN has no bit that is 0 in FP8."""
        if not self.fp8:
            return cache
        # Groups of other magnitudes, and some of zeros.
        groups = -(-self.latent // 128)
        factor = torch.tensor([1.0, 0.25, 0.0, 3.0, 1e-3])[torch.arange(len(cache) * PAGE_TOKENS * groups) * 7 % 5]
        factor = factor.view(*cache.shape[:2], groups).repeat_interleave(128, -1)[..., : self.latent]
        plain = torch.cat([cache[..., : self.latent] * factor.to(self.dtype), cache[..., self.latent :]], -1)
        bytes = fp8_entries.encoded(plain.flatten(0, 1), self.latent).view(*cache.shape[:2], -1)
        return bytes.masked_fill_(cache.isnan().any(-1, keepdim=True), 255)

    @property
    def shape(self) -> DecodeShape:
        return self.shape_of(1)

    def shape_of(self, shards: int) -> DecodeShape:
        """The launch's, of one of so many shards in invariant mode."""
        return DecodeShape(
            rows=len(self.lengths),
            width=self.width,
            heads=self.heads,
            latent=self.latent,
            rope=self.rope,
            pages=self.tensors["table"].shape[1],
            invariant=self.invariant,
            shards=shards,
        )

    def workspace(self, tiling: DecodeTiling, shards: int = 1) -> Workspace:
        """A workspace full of NaN and huge numbers."""
        shape = self.shape_of(shards)
        buffer = torch.full((Workspace.bytes(shape, tiling, self.dtype),), 255, dtype=torch.uint8, device=self.device)
        return Workspace.over(buffer, shape, tiling, self.dtype)

    def run(self, tiling: DecodeTiling, workspace: Workspace | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the kernels."""
        workspace = workspace or self.workspace(tiling)
        t = self.tensors
        launch.schedule(t["length"], t["table"], workspace, first=self.first)
        launch.attend(
            t["q"],
            t["cache"],
            t["table"],
            t["length"],
            t["out"],
            t["lse"],
            workspace,
            scale=self.scale,
            first=self.first,
        )
        launch.merge(t["out"], t["lse"], workspace)
        return t["out"], t["lse"]

    def _numbers(self, entries: torch.Tensor, rounded: bool) -> torch.Tensor:
        """FP8 entries in float64."""
        sizes = self.latent, self.rope, self.dtype
        return (fp8_entries.read(entries, *sizes) if rounded else fp8_entries.numbers(entries, *sizes)).double()

    def expected(self, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in float64 on the CPU, token by token. `rounded`: of FP8 entries that are read as numbers of the
        query's dtype, as the portable kernel reads them, and not exactly."""
        t = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        out = torch.zeros(t["out"].shape, dtype=torch.float64)
        lse = torch.full(t["lse"].shape, -torch.inf, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            pages = t["table"][row, : pages_for(length)].long()
            entries = t["cache"][pages].flatten(0, 1)[self.first : length]
            entries = self._numbers(entries, rounded) if self.fp8 else entries.double()
            for token in range(self.width):
                seen = entries[: max(0, length - (self.width - 1 - token) - self.first)]
                if not len(seen):
                    continue
                q = t["q"][row, token].double()
                out[row, token] = torch.nn.functional.scaled_dot_product_attention(
                    q[:, None], seen[None], seen[None, :, : self.latent], scale=self.scale
                )[:, 0]
                lse[row, token] = torch.logsumexp(self.scale * (q @ seen.T), -1)
        return out, lse

    def check(self, tiling: DecodeTiling) -> None:
        """Run, then compare. Kernels run before the oracle does, so that nothing the oracle leaves can help them."""
        self.run(tiling)
        self.compare_with(tiling)

    def compare_with(self, tiling: DecodeTiling) -> None:
        """`compare` with what kernels of this tiling are to compute."""
        self.compare(rounded=tiling.path in ("triton", "wide"), short_sums=tiling.path == "fp8")

    def compare(self, rounded: bool = False, short_sums: bool = False) -> None:
        """Compare what a run left in "out" and "lse" with the oracle.

        bfloat16: weights, pieces and outputs are rounded to 8 bits of significand, each once, so the output is off by a
        few units of 2**-9 of its largest values; LSE comes from fp32 sums of products of exact bfloat16. float32:
        rounding of sums over a few thousand terms.

        `short_sums`: where scores are sums of 8-bit products on a GPU, of which Hopper's tensor cores keep 14 bits.
        They are off by at most 2**-13 of what the lengths of a query vector and of an entry allow.
        """
        out, lse = (self.tensors[name].cpu().double() for name in ("out", "lse"))
        want_out, want_lse = self.expected(rounded)
        tolerance = 1e-5 if self.dtype == torch.float32 else 2**-7
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        largest = 0.0
        if short_sums and self.tensors["q"].is_cuda:
            numbers = self._numbers(self.tensors["cache"].cpu().flatten(0, 1), rounded)
            longest = torch.linalg.vector_norm(numbers, dim=-1).nan_to_num(0).max()
            largest = float(self.scale * longest * torch.linalg.vector_norm(self.tensors["q"].double(), dim=-1).max())
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=2e-5 + 2**-13 * largest)
        assert torch.all(out[want_lse == -torch.inf] == 0)
        error = torch.linalg.vector_norm(out - want_out, dim=-1)
        norm = torch.linalg.vector_norm(want_out, dim=-1)
        assert torch.all(error <= tolerance * norm), (error / norm).nan_to_num().max()
