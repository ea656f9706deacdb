"""Launches the kernels of `entries` and `begin`. Allocates nothing and waits for nothing, so it may be captured into a
CUDA graph. Grids follow from the shapes of tensors alone."""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.compressed import begin as beginning
from kernels.compressed import entries
from kernels.compressed.rows import TokenRows
from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamMemory

_ELEMENTS = 2048
"""Numbers of heads that a program norms and turns."""
_TILES = (4096, 8192)
"""Numbers of tokens that a program averages at a time, as many values and as many logits: of entries of few tokens, and
of those of at least `_MANY_TOKENS`, for which a program waits for memory most of its time."""
_MANY_TOKENS = 64
_BEGUN = 1024
"""Features of a token that a program of a pass's beginning looks up."""
_LAID_OUT = 128
"""Tokens of a program that says whose they are."""


def begin(
    token_T: Tensor,
    position_T: Tensor,
    embedding_YE: Tensor,
    rotations_YO: tuple[Tensor, Tensor],
    token_out_T: Tensor,
    rotations_TO: tuple[Tensor, Tensor],
    out_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    *,
    dependent: bool = False,
) -> None:
    (tokens, streams, features), rope = residual_TSE.shape, rotations_YO[0].shape[1]
    if not tokens:
        return
    beginning.begin_kernel[(tokens, triton.cdiv(features, _BEGUN))](
        token_T,
        position_T,
        embedding_YE,
        *rotations_YO,
        token_out_T,
        *rotations_TO,
        out_TE,
        residual_TSE,
        memory.open_TS,
        memory.mix_TSS,
        EMBEDDING=embedding_YE.stride(0),
        X_STRIDE=out_TE.stride(0),
        FEATURES=features,
        STREAMS=streams,
        STREAMS_BLOCK=triton.next_power_of_2(streams),
        ROPE=rope,
        ROPE_BLOCK=triton.next_power_of_2(rope),
        BLOCK=_BEGUN,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def lay_out_rows(
    position_T: Tensor,
    length_R: Tensor,
    wanted_R: Tensor | None,
    row_T: Tensor,
    bound_T: Tensor,
    ratio: int,
    *,
    dependent: bool = False,
) -> None:
    tokens = len(position_T)
    if not tokens:
        return
    beginning.lay_out_rows_kernel[(triton.cdiv(tokens, _LAID_OUT),)](
        position_T,
        length_R,
        length_R if wanted_R is None else wanted_R,
        row_T,
        bound_T,
        tokens,
        WIDTH=tokens // len(length_R),
        RATIO=ratio,
        WANTED=wanted_R is not None,
        BLOCK=_LAID_OUT,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def rope_store(
    q_THD: Tensor,
    kv_TD: Tensor,
    norm_D: Tensor,
    rotation_TO: Tensor,
    entry_TD: Tensor,
    ring_XLD: Tensor,
    rows: TokenRows,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    tokens, heads, features = q_THD.shape
    if not tokens:
        return
    block = triton.next_power_of_2(features)
    group = max(1, min(_ELEMENTS // block, triton.next_power_of_2(heads)))
    entries.rope_store_kernel[(tokens, 1 + triton.cdiv(heads, group))](
        q_THD,
        kv_TD,
        norm_D,
        rotation_TO,
        entry_TD,
        ring_XLD,
        rows.position_T,
        rows.row_T,
        rows.slot_R,
        rows.fault_1,
        len(rows.slot_R),
        len(ring_XLD),
        eps,
        Q_TOKEN=q_THD.stride(0),
        KV_TOKEN=kv_TD.stride(0),
        ROTATION=rotation_TO.stride(0),
        HEADS=heads,
        FEATURES=features,
        ROPE=rotation_TO.shape[1],
        LENGTH=ring_XLD.shape[1],
        ENTRY=True,
        KEEP=rows.width > 0,
        NORM=True,
        GROUP=group,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def rope_queries(q_THD: Tensor, rotation_TO: Tensor, *, dependent: bool = False) -> None:
    tokens, heads, features = q_THD.shape
    if not tokens:
        return
    block = triton.next_power_of_2(features)
    group = max(1, min(_ELEMENTS // block, triton.next_power_of_2(heads)))
    entries.rope_store_kernel[(tokens, triton.cdiv(heads, group))](
        *(q_THD, q_THD, q_THD, rotation_TO, q_THD, q_THD, q_THD, q_THD, q_THD, q_THD),
        0,
        0,
        0.0,
        Q_TOKEN=q_THD.stride(0),
        KV_TOKEN=0,
        ROTATION=rotation_TO.stride(0),
        HEADS=heads,
        FEATURES=features,
        ROPE=rotation_TO.shape[1],
        LENGTH=1,
        ENTRY=False,
        KEEP=False,
        NORM=False,
        GROUP=group,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )


def keep_entries(entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows) -> None:
    tokens, features = entry_TD.shape
    if not tokens:
        return
    entries.keep_entries_kernel[(tokens,)](
        entry_TD,
        ring_XLD,
        rows.position_T,
        rows.row_T,
        rows.slot_R,
        rows.fault_1,
        tokens,
        len(rows.slot_R),
        len(ring_XLD),
        FEATURES=features,
        LENGTH=ring_XLD.shape[1],
        BLOCK=triton.next_power_of_2(features),
        num_warps=1,
    )


def compress(
    made_TF: Tensor,
    bias_AC: Tensor,
    norm_D: Tensor,
    rotation_YO: Tensor,
    state_XLF: Tensor,
    entry_PKD: Tensor,
    rows: TokenRows,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    (ratio, made), features = bias_AC.shape, norm_D.shape[0]
    if not len(made_TF):
        return
    block, reach = triton.next_power_of_2(features), ratio * (made // features)
    tile = _TILES[reach >= _MANY_TOKENS]
    # A chunk's tokens may lie where the ring has those that its first entries are made of.
    launches = [(True, True)] if rows.width else [(True, False), (False, True)]
    for completing, keeping in launches:
        entries.compress_kernel[(len(made_TF),)](
            made_TF,
            bias_AC,
            norm_D,
            rotation_YO,
            state_XLF,
            entry_PKD,
            rows.position_T,
            rows.row_T,
            rows.slot_R,
            rows.page_RP,
            rows.fault_1,
            len(made_TF),
            len(rows.slot_R),
            len(state_XLF),
            len(rotation_YO),
            rows.page_RP.shape[1],
            len(entry_PKD),
            rows.page_RP.stride(0),
            eps,
            MADE_TOKEN=made_TF.stride(0),
            ROTATION=rotation_YO.stride(0),
            RATIO=ratio,
            FEATURES=features,
            HALVES=made // features,
            ROPE=rotation_YO.shape[1],
            LENGTH=state_XLF.shape[1],
            ENTRIES=max(1, PAGE_TOKENS // ratio),
            COMPLETE=completing,
            KEEP=keeping,
            TILE=max(1, min(tile // block, triton.next_power_of_2(reach))),
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=min(4 * triton.cdiv(block, 256), 8) * (2 if reach >= _MANY_TOKENS else 1),
            **options(dependent),
        )


def options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
