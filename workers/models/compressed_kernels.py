"""The operations of DeepSeek V4's attention as kernels: `CompressedOps` for GPUs.

They read rows, slots, positions and pages on the device and allocate nothing, so a pass that asks for them can be
captured. Memory comes from the pass's scratch, as much for any rows of a bucket: what it grows with are tokens, and
the pages that a row may have. On a CPU the kernels' references stand in for them.

Shape legend: see `workers.models.compressed_ops`; N scores of a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels import compressed
from kernels.compressed import AttendWorkspace, TokenRows
from kernels.linear import group_linear
from kernels.matrix import BlockScaled
from kernels.page import PAGE_TOKENS
from kernels.runtime.hopper import multiprocessors
from kernels.sparse import SelectWorkspace, index_scores, select_positions
from workers.memory.scratch import Scratch
from workers.models.compressed_ops import CompressedOps
from workers.models.general import dependent, plain
from workers.weights.weight import Weight

SCORES: Final = 1 << 26
"""Most scores of an indexer at once: tokens whose scores are more take turns."""


class KernelOps(CompressedOps):
    """See the head of this file."""

    @override
    def rope_queries(self, q_TJI: Tensor, rotation_TO: Tensor) -> None:
        compressed.rope_queries(q_TJI, rotation_TO)

    @override
    def rope_store(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        norm_D: Tensor,
        rotation_TO: Tensor,
        entry_TD: Tensor,
        ring_XLD: Tensor,
        rows: TokenRows,
        *,
        window: int,
        eps: float,
    ) -> None:
        compressed.rope_store(q_THD, kv_TD, norm_D, rotation_TO, entry_TD, ring_XLD, rows, window=window, eps=eps)

    @override
    def compress(
        self,
        made_TF: Tensor,
        bias_AC: Tensor,
        norm_D: Tensor,
        rotation_YO: Tensor,
        state_XLF: Tensor,
        entry_PKD: Tensor,
        rows: TokenRows,
        *,
        eps: float,
    ) -> None:
        compressed.compress(made_TF, bias_AC, norm_D, rotation_YO, state_XLF, entry_PKD, rows, eps=eps)

    @override
    def select(
        self,
        q_TJI: Tensor,
        weight_TJ: Tensor,
        key_PKI: Tensor,
        ratio: int,
        bound_T: Tensor,
        selected_TS: Tensor,
        rows: TokenRows,
        scratch: Scratch,
    ) -> None:
        """See `CompressedOps`. ValueError for keys that stand for more tokens than a page has."""
        if ratio > PAGE_TOKENS:
            raise ValueError(f"an index key for {ratio} tokens is not supported on GPUs, only one for {PAGE_TOKENS}")
        # Whole pages of 64 scores, whatever number of keys a page has.
        scores = -(-rows.page_RP.shape[1] * key_PKI.shape[1] // PAGE_TOKENS) * PAGE_TOKENS
        turn = max(1, SCORES // scores // max(rows.width, 1)) * max(rows.width, 1)
        for begin in range(0, len(q_TJI), turn):
            own = slice(begin, begin + turn)
            with scratch.scope():
                tokens, bound, row = len(q_TJI[own]), bound_T[own], rows.row_T[own]
                score_TN = scratch.empty(tokens, scores, dtype=torch.float32)
                asked = q_TJI[own], weight_TJ[own], key_PKI, rows.page_RP, row, bound
                index_scores(*asked, score_TN, rows.fault_1, width=rows.width)
                workspace = None
                if q_TJI.is_cuda:
                    most = selected_TS.shape[1]
                    workspace = SelectWorkspace.allocate(tokens, scores, scratch.empty, selected=most)
                select_positions(score_TN, bound, selected_TS[own], rows.fault_1, workspace)

    @override
    def attend(
        self,
        q_THD: Tensor,
        ring_XLD: Tensor,
        entry_TD: Tensor | None,
        entry_PKD: Tensor | None,
        selected_TS: Tensor | None,
        sink_H: Tensor,
        rotation_TO: Tensor,
        out_THD: Tensor,
        rows: TokenRows,
        scratch: Scratch,
        *,
        window: int,
        ratio: int,
        scale: float,
        first: int = 0,
        block: int = 0,
    ) -> None:
        tokens, heads, features = q_THD.shape
        entries = window
        if selected_TS is not None:
            entries += selected_TS.shape[1]
        elif ratio:
            entries += rows.page_RP.shape[1] * PAGE_TOKENS // ratio
        with scratch.scope():
            sizes, programs = (tokens, heads, features, entries), multiprocessors(q_THD.device)
            workspace = AttendWorkspace.allocate(*sizes, scratch.empty, programs=programs, dtype=q_THD.dtype)
            given = q_THD, ring_XLD, entry_TD, entry_PKD, selected_TS, sink_H, rotation_TO, out_THD, rows, workspace
            compressed.attend(*given, window=window, ratio=ratio, scale=scale, first=first, block=block)

    @override
    def keep_entries(self, entry_TD: Tensor, ring_XLD: Tensor, rows: TokenRows) -> None:
        compressed.keep_entries(entry_TD, ring_XLD, rows)

    @override
    def group_linear(self, x_TGF: Tensor, weight_NF: Weight, out_TGU: Tensor, scratch: Scratch) -> None:
        matrix, rows, early = weight_NF.matrix, out_TGU.shape[2], dependent(x_TGF)
        with scratch.scope():
            if not isinstance(matrix, BlockScaled) or rows % matrix.rows:
                # A matrix that is dequantized in the launch before must not be read early.
                early = early and isinstance(matrix, Tensor)
                matrix = plain(weight_NF, x_TGF.dtype, scratch)
            group_linear(x_TGF, matrix, out_TGU, dependent=early)
