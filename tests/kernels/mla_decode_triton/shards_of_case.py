"""Runs a decode case as D shards do that share out its pages, and merges what they find."""

from __future__ import annotations

from functools import partial

import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import DecodeTiling
from kernels.own_entries import OwnEntries, own_entries
from kernels.page import Shards


def cache_of(case: Case, shards: Shards) -> torch.Tensor:
    """The pages of one shard, in a cache that holds NaN, or bytes of it, in all others."""
    whole = case.tensors["cache"]
    pages = [page for page in range(1, len(whole)) if shards.owns(page)]
    own = torch.empty(len(pages) + 1, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
    own.view(torch.uint8).fill_(255)
    own[[shards.local(page) for page in pages]] = whole[pages]
    return own


def run_shards(case: Case, tiling: DecodeTiling, count: int, *, dependent: bool = False, early: bool = False) -> None:
    """Leave the merged output and log-sum-exp in the case's tensors. `tiling` may be of any number of heads."""
    t, parts = case.tensors, []
    rows, columns = t["table"].shape
    for index in range(count):
        shards = Shards(count, index)
        own = OwnEntries.allocate(rows, case.width, columns, partial(torch.empty, device=t["q"].device))
        own_entries(t["table"], t["length"], own, shards, first=case.first)
        workspace = case.workspace(tiling)
        out, lse = torch.full_like(t["out"], torch.nan), torch.full_like(t["lse"], torch.nan)
        launch.schedule(own.length_R, own.page_RP, workspace)
        tensors = t["q"], cache_of(case, shards), own.page_RP, own.length_R, out, lse
        launch.attend(*tensors, workspace, scale=case.scale, dependent=dependent, early=early, own=own)
        launch.merge(out, lse, workspace)
        parts.append((out.double(), lse.double()))
    out, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    assert not out.isnan().any()
    assert (out[lse == -torch.inf] == 0).all()
    total = lse.logsumexp(0)
    weight = (lse - total.masked_fill(total == -torch.inf, 0)).exp()
    t["out"].copy_((weight.unsqueeze(-1) * out).sum(0))
    t["lse"].copy_(total)
