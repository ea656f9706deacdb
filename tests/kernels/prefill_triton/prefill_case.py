"""Ragged rows between poison, and their attention by the formula in float64.

fp32: sums of a few hundred products. bfloat16: one rounding of the probabilities (2^-9 of the largest value each, which
average out) and one of the result.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import ceil

import torch
from torch import Tensor

from kernels.mla_prefill import launch
from kernels.mla_prefill.launch import PrefillTiling

TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 4e-3)}
GAP = 3
REAL = {"nope": 128, "rope": 64, "value": 128}
"""Features of V2 and V3."""
SMALL = {"nope": 64, "rope": 64, "value": 128}
"""Of Mistral Small 4."""


class Case:
    """Rows of (queries, keys); tokens of no row, before, behind and in unused columns, hold NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 2,
        nope: int = 32,
        rope: int = 16,
        value: int = 32,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.nope, self.rope, self.value = rows, heads, nope, rope, value
        self.dtype, self.device, self.scale = dtype, device, (nope + rope) ** -0.5
        self.cu_q = list(accumulate((q for q, _ in rows), initial=GAP))
        self.cu_k = list(accumulate((k for _, k in rows), initial=GAP))
        queries, keys = self.cu_q[-1] + GAP, self.cu_k[-1] + GAP

        def poisoned(used: slice, *shape: int) -> Tensor:
            tensor = torch.full(shape, torch.nan)
            tensor[used] = torch.randn(tensor[used].shape, generator=generator)
            return tensor.to(dtype)

        q_used, k_used = slice(GAP, self.cu_q[-1]), slice(GAP, self.cu_k[-1])
        self.q = poisoned(q_used, queries, heads, nope + rope).to(device)
        self.kv = poisoned(k_used, keys, heads, nope + value).to(device)
        self.latent = poisoned(k_used, keys, 24 + rope)
        self.latent[:, :24] = torch.nan
        self.latent = self.latent.to(device)
        self.out = torch.full((queries, heads, value), 7.0, dtype=out_dtype or dtype, device=device)
        self.lse = torch.full((queries, heads), 7.0, device=device)
        self.parts: list[list[slice]] | None = None
        """Parts of every row's keys, where they are cut."""
        self.cu = [torch.tensor(cu, dtype=torch.int32, device=device) for cu in (self.cu_q, self.cu_k)]

    def cut(self, parts: int, keys: int) -> None:
        """Attend to so many parts of the keys apart, which are whole tiles of `keys`."""
        self.out = self.out.expand(parts, *self.out.shape).contiguous()
        self.lse = self.lse.expand(parts, *self.lse.shape).contiguous()
        self.parts = []
        for count in (k for _, k in self.rows):
            each = ceil(ceil(count / keys) / parts) * keys
            ends = [min(part * each, count) for part in range(parts + 1)]
            self.parts.append([slice(*pair) for pair in pairwise(ends)])

    def run(self, causal: bool, tiles: PrefillTiling | None = None, max_q: int | None = None) -> None:
        launch.mla_prefill(
            self.q,
            self.kv[..., : self.nope],
            self.latent[:, 24:],
            self.kv[..., self.nope :],
            *self.cu,
            self.out,
            self.lse,
            scale=self.scale,
            causal=causal,
            max_q=max_q or max(q for q, _ in self.rows),
            tiles=tiles,
        )

    def check(self, causal: bool) -> None:
        of_parts = [(self.out, self.lse)] if self.parts is None else list(zip(self.out, self.lse, strict=True))
        atol, rtol = TOLERANCE[self.dtype]
        for part, (out, lse) in enumerate(of_parts):
            for found in (out, lse):
                assert bool((found[:GAP] == 7).all() and (found[self.cu_q[-1] :] == 7).all())
            for row, (queries, keys) in enumerate(self.rows):
                own = slice(self.cu_q[row], self.cu_q[row] + queries)
                seen = slice(0, keys) if self.parts is None else self.parts[row][part]
                seen = slice(self.cu_k[row] + seen.start, self.cu_k[row] + seen.stop)
                want, want_lse = self._formula(own, seen, causal)
                torch.testing.assert_close(out[own].double(), want, atol=atol, rtol=rtol)
                torch.testing.assert_close(lse[own].double(), want_lse, atol=atol / 4, rtol=rtol / 10)

    def _formula(self, own: slice, seen: slice, causal: bool) -> tuple[Tensor, Tensor]:
        queries, keys = own.stop - own.start, seen.stop - seen.start
        k_rope = self.latent[seen, None, 24:].expand(-1, self.heads, -1)
        key = torch.cat([self.kv[seen, :, : self.nope], k_rope], -1).double()
        score = torch.einsum("qhd,shd->hqs", self.q[own].double(), key) * self.scale
        if causal:
            place = torch.arange(queries, device=score.device).unsqueeze(1) + keys - queries
            score.masked_fill_(torch.arange(keys, device=score.device) > place, -torch.inf)
        lse = torch.logsumexp(score, -1)
        weight = (score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return torch.einsum("hqs,shv->qhv", weight, self.kv[seen, :, self.nope :].double()), lse.T
