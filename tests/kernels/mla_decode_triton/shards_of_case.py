"""Runs a decode case as D shards do that share out its pages, and merges what they find. In invariant mode a row's
pieces go round the shards, and the bits are those of one."""

from __future__ import annotations

from functools import partial

import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import DecodeTiling
from kernels.mla_decode.strands import merge_strands
from kernels.own_entries import OwnEntries, own_entries
from kernels.page import PIECE_PAGES, Shards, pages_for


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


def with_pieces_in_turns(case: Case, count: int) -> None:
    """Move every row's pages so that its pieces go round D shards, each row from another shard on."""
    whole, table = case.tensors["cache"], case.tensors["table"].clone()
    used = sum(map(pages_for, case.lengths)) + PIECE_PAGES
    moved = torch.empty(count * used + 1, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
    moved.view(torch.uint8).fill_(255)
    free = [list(range(1 + owner, 1 + count * used, count)) for owner in range(count)]
    for row, length in enumerate(case.lengths):
        for column in range(pages_for(length)):
            page = free[(row + column // PIECE_PAGES) % count].pop()
            moved[page] = whole[table[row, column]]
            table[row, column] = page
    case.tensors["cache"], case.tensors["table"] = moved, table


def run_invariant_shards(case: Case, tiling: DecodeTiling, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a case of invariant mode whose pieces go round: of the whole cache with one shard, else
    of the parts of all, merged as the exchange between shards merges them
    (`test_strands_are_merged_with_the_bits_of_one_rank`)."""
    t, outs, lses = case.tensors, [], []
    if count == 1:
        return tuple(x.clone() for x in case.run(tiling))  # type: ignore[return-value]
    rows, columns = t["table"].shape
    for index in range(count):
        shards = Shards(count, index)
        own = OwnEntries.allocate(rows, case.width, columns, partial(torch.empty, device=t["q"].device))
        own_entries(t["table"], t["length"], own, shards, first=case.first)
        workspace = case.workspace(tiling, count)
        out = torch.full_like(t["out"], torch.nan, dtype=torch.float32)
        lse = torch.full_like(t["lse"], torch.nan)
        launch.schedule(own.length_R, own.page_RP, workspace)
        tensors = t["q"], cache_of(case, shards), own.page_RP, own.length_R, out, lse
        launch.attend(*tensors, workspace, scale=case.scale, own=own)
        launch.merge(out, lse, workspace, shards=count)
        outs.append(out.flatten(0, 2))
        lses.append(lse.flatten())
    part_DXL, lse_DX = torch.stack(outs), torch.stack(lses)
    assert not part_DXL.isnan().any()
    assert not lse_DX.isnan().any()
    vectors, latent = part_DXL.shape[1:]
    record = torch.tensor([0, 0, count, 0], dtype=torch.int32, device=part_DXL.device)
    merge_strands[(1, vectors, latent // tiling.merge_columns)](
        *(part_DXL, lse_DX, record, t["out"], t["lse"], vectors, 0),
        LATENT=latent,
        COLUMNS=tiling.merge_columns,
        STRANDS=count,
        LAST=True,
        FINEST=1,
        DEPENDENT=False,
        enable_fp_fusion=False,
    )
    return t["out"].clone(), t["lse"].clone()
