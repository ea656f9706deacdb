"""Launches the sampling kernels into a workspace. Allocates nothing and waits for nothing, so it may be captured into a
CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from kernels.sampling import kernel, search
from kernels.sampling.rows import Adjustment, PeakBlocks, RowLayout, SlotPointers
from kernels.sampling.tables import FILTERS, GENERATED, NEUTRAL_REAL, NEUTRAL_WHOLE, Feature, SlotTables, real_columns
from kernels.sampling.workspace import ASIDE, DRAW_BLOCK, PEAK_BLOCK, SampledRows, SampleWorkspace

_SEARCH_ROWS, _SEARCH_LANES, _SEARCH_WARPS = 2, 2048, 16
_UNFUSED = {"enable_fp_fusion": False}
"""Adjusted logits are rounded as the reference rounds them."""


def sample(
    logits_NV: Tensor,
    rows: SampledRows,
    tables: SlotTables,
    token_N: Tensor,
    fault_1: Tensor,
    features: Feature,
    workspace: SampleWorkspace,
    *,
    nonfinite_N: Tensor | None = None,
    dependent: bool = False,
) -> None:
    if unread := real_columns()[len(NEUTRAL_REAL) :]:
        raise NotImplementedError(
            f"no sampling kernel reads {', '.join(unread)}: name its column in kernels/sampling/tables.py, and read it "
            "in kernel.py, in `slot_floor`, or in search.py"
        )
    number, vocab = logits_NV.shape
    if not number:
        return
    nobody = tables.real_SF.shape[0] - 1
    parts = workspace.parts
    decode_tokens = rows.decode_rows * rows.width
    draft_stride = 0 if rows.draft is None else rows.draft.stride(0)
    windows = rows.slot_R if rows.window_N is None else rows.window_N
    drafts = rows.slot_R if rows.draft is None else rows.draft
    masks = rows.masks
    pointers = SlotPointers(
        real=tables.real_SF,
        whole=tables.whole_SI,
        stop=tables.stop_SK,
        bias_id=tables.bias_id_SB,
        bias=tables.bias_SB,
        seen=tables.seen_SV,
        mask_index=rows.slot_R if masks is None else masks.index_N,
        mask_bits=rows.slot_R if masks is None else masks.bits_MB,
    )
    history = (windows, drafts, pointers)
    numbers = (decode_tokens, rows.before, nobody, draft_stride)
    biases = tables.bias_SB.shape[1]
    common: dict[str, Any] = {
        "LAYOUT": RowLayout(
            stride=logits_NV.stride(0),
            width=rows.width,
            windows=rows.window_N is not None,
            drafted=rows.draft is not None,
            by_slot=rows.by_slot,
        ),
        "ADJUST": Adjustment(
            vocab=vocab,
            stops=tables.stop_SK.shape[1],
            biases=biases,
            bias_lanes=triton.next_power_of_2(biases),
            counted=bool(features & Feature.PENALTIES),
            masked=masks is not None,
            words=0 if masks is None else masks.bits_MB.shape[1],
        ),
        "DEPENDENT": dependent,
        **_UNFUSED,
        **_options(dependent),
    }
    blocks = triton.cdiv(vocab, PEAK_BLOCK)
    peaks = PeakBlocks(number=blocks, lanes=triton.next_power_of_2(blocks))
    kernel.peak[(number, blocks)](
        logits_NV,
        rows.slot_R,
        *history,
        workspace.peak_NP,
        workspace.peak_id_NP,
        *numbers,
        BLOCK=PEAK_BLOCK,
        num_warps=4,
        **common,
    )
    if features & FILTERS & ~Feature.FLOOR and features & Feature.NOISE:
        search.search[(number,)](
            logits_NV,
            rows.slot_R,
            *history,
            workspace.peak_NP,
            workspace.floor_N,
            workspace.last_N,
            workspace.aside_NA,
            *numbers,
            PEAKS=peaks,
            CUT=search.SearchCut(rows=_SEARCH_ROWS, lanes=_SEARCH_LANES, aside=ASIDE),
            num_warps=_SEARCH_WARPS,
            **common,
        )
    if features & Feature.NOISE:
        kernel.draw[(number, parts)](
            logits_NV,
            rows.slot_R,
            rows.position_N,
            *history,
            workspace.peak_NP,
            workspace.floor_N,
            workspace.last_N,
            workspace.score_NP,
            workspace.score_id_NP,
            *numbers,
            rows.ahead,
            PEAKS=peaks,
            BLOCK=DRAW_BLOCK,
            num_warps=4,
            **common,
        )
    kernel.finish[(number,)](
        rows.slot_R,
        tables.real_SF,
        workspace.peak_NP,
        workspace.peak_id_NP,
        workspace.score_NP,
        workspace.score_id_NP,
        token_N,
        fault_1 if nonfinite_N is None else nonfinite_N,
        decode_tokens,
        nobody,
        parts,
        WIDTH=rows.width,
        PEAKS=blocks,
        LANES=max(peaks.lanes, triton.next_power_of_2(parts)),
        NOISE=bool(features & Feature.NOISE),
        NAMED=nonfinite_N is not None,
        DEPENDENT=dependent,
        num_warps=1,
        **_options(dependent),
    )


def count_tokens(
    tables: SlotTables,
    slot_R: Tensor,
    token_RW: Tensor,
    count_R: Tensor,
    vocab: int,
    fault_1: Tensor,
    penalties: bool,
    more: int,
    *,
    dependent: bool = False,
) -> None:
    rows, width = token_RW.shape
    if not rows:
        return
    lanes = triton.next_power_of_2(width)
    block = 128 // min(lanes, 128)
    kernel.count[(triton.cdiv(rows, block),)](
        slot_R,
        token_RW,
        count_R,
        tables.whole_SI,
        tables.seen_SV,
        fault_1,
        rows,
        tables.real_SF.shape[0] - 1,
        more,
        token_RW.stride(0),
        vocab,
        WIDTH=width,
        LANES=lanes,
        ROWS=block,
        WHOLES=len(NEUTRAL_WHOLE),
        GENERATED=GENERATED,
        COUNTED=penalties,
        DEPENDENT=dependent,
        num_warps=4,
        **_options(dependent),
    )


def _options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
