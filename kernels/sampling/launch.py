"""Launches the sampling kernels into a workspace. Allocates nothing and waits for nothing, so it may be captured into a
CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from kernels.sampling import kernel, search
from kernels.sampling.tables import FILTERS, GENERATED, NEUTRAL_WHOLE, Feature, SlotTables
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
    bad_N: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """See `kernels.sampling.sample_rows`."""
    number, vocab = logits_NV.shape
    if not number:
        return
    nobody = tables.real_SF.shape[0] - 1
    parts = workspace.parts
    decode_tokens = rows.decode_rows * rows.width
    draft_stride = 0 if rows.draft is None else rows.draft.stride(0)
    windows = rows.slot_R if rows.window_N is None else rows.window_N
    drafts = rows.slot_R if rows.draft is None else rows.draft
    lists = (tables.stop_SK, tables.bias_id_SB, tables.bias_SB, tables.seen_SV)
    history = (windows, drafts, tables.real_SF, tables.whole_SI, *lists)
    numbers = (decode_tokens, rows.before, nobody, draft_stride)
    sizes: dict[str, Any] = {
        "VOCAB": vocab,
        "STRIDE": logits_NV.stride(0),
        "WIDTH": rows.width,
        "WINDOWS": rows.window_N is not None,
        "DRAFTED": rows.draft is not None,
        "BY_SLOT": rows.by_slot,
        "STOPS": tables.stop_SK.shape[1],
        "BIASES": tables.bias_SB.shape[1],
        "BIAS_LANES": triton.next_power_of_2(tables.bias_SB.shape[1]),
        "COUNTED": bool(features & Feature.PENALTIES),
        "DEPENDENT": dependent,
        **_UNFUSED,
        **_options(dependent),
    }
    peaks = triton.cdiv(vocab, PEAK_BLOCK)
    peak_lanes = triton.next_power_of_2(peaks)
    kernel.peak[(number, peaks)](
        logits_NV,
        rows.slot_R,
        *history,
        workspace.peak_NP,
        workspace.peak_id_NP,
        *numbers,
        BLOCK=PEAK_BLOCK,
        num_warps=4,
        **sizes,
    )
    if features & FILTERS & ~Feature.MIN_P and features & Feature.NOISE:
        search.search[(number,)](
            logits_NV,
            rows.slot_R,
            *history,
            workspace.peak_NP,
            workspace.floor_N,
            workspace.aside_NA,
            *numbers,
            PEAKS=peaks,
            PEAK_LANES=peak_lanes,
            ROWS=_SEARCH_ROWS,
            LANES=_SEARCH_LANES,
            ASIDE=ASIDE,
            num_warps=_SEARCH_WARPS,
            **sizes,
        )
    if features & Feature.NOISE:
        kernel.draw[(number, parts)](
            logits_NV,
            rows.slot_R,
            rows.position_N,
            *history,
            workspace.peak_NP,
            workspace.floor_N,
            workspace.score_NP,
            workspace.score_id_NP,
            *numbers,
            rows.ahead,
            PEAKS=peaks,
            PEAK_LANES=peak_lanes,
            BLOCK=DRAW_BLOCK,
            num_warps=4,
            **sizes,
        )
    kernel.finish[(number,)](
        rows.slot_R,
        tables.real_SF,
        workspace.peak_NP,
        workspace.peak_id_NP,
        workspace.score_NP,
        workspace.score_id_NP,
        token_N,
        fault_1 if bad_N is None else bad_N,
        decode_tokens,
        nobody,
        parts,
        WIDTH=rows.width,
        PEAKS=peaks,
        LANES=max(peak_lanes, triton.next_power_of_2(parts)),
        NOISE=bool(features & Feature.NOISE),
        NAMED=bad_N is not None,
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
    """See `kernels.sampling.count_tokens`."""
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
