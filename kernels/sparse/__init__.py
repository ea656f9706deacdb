"""Sparse attention as in DeepSeek-V3.2: an indexer scores all cached tokens for each query token, the best of them are
selected, and absorbed attention reads the latents of those alone.

The four steps, in the order in which a layer takes them: `write_index_keys`, `index_scores`, `select_positions` and
`sparse_decode`. They take tokens one by one, whatever rows these belong to, so decode rows of any width and chunks of
prompts go the same way: `row_T` says which row of the page table is a token's, and `bound_T` how many of the row's
entries it sees, itself included. Tokens of a row should stand side by side, because they then share what is read.

No grid depends on what tensors hold, and nothing allocates device memory or waits for the device where tensors are on a
GPU. So all of it may be captured in a graph, and replayed for other lengths, tables and rows.

`dependent` asks for programmatic dependent launch, see `launch`.

Positions, pages and rows that lie outside what they point into are never followed and never replaced by others: they
count as absent, and each adds 1 to `fault_1` (int64 [1]).

Shape legend: T query tokens, R rows of the page table, P pages (of a cache, or of a row's table), K = 64 entries per
page, N scores of a token (the longest context), S selected positions, H heads (of the indexer, or of attention), D
features of an index key, E what an entry of the index cache is wide, L latent features, C = L + rope features.
Source: DeepSeek-V3.2-Exp (2025), section 2.1.
"""

from __future__ import annotations

from torch import Tensor

from kernels.sparse import attention_launch, checks, launch, reference
from kernels.sparse.workspace import InvariantWorkspace, SelectWorkspace, SparseWorkspace, widens_selected

__all__ = [
    "InvariantWorkspace",
    "SelectWorkspace",
    "SparseWorkspace",
    "index_scores",
    "select_positions",
    "sparse_decode",
    "widens_selected",
    "write_index_keys",
]


def write_index_keys(key_TD: Tensor, slot_T: Tensor, index_PKE: Tensor, *, dependent: bool = False) -> None:
    """Write index keys to their entries of the index cache.

    - `key_TD`: normed and roped, in the model's dtype.
    - `slot_T`: int64 index into the flattened cache [pages * 64]. Padding points into the null page. A slot outside the
      cache, -1 included, is the caller's error and never written (on a CPU it raises IndexError).
    - `index_PKE`: the cache of one layer, in the dtype of the keys, or INT8 entries as bytes (`kernels.index_entry`).
    """
    checks.write_index_keys(key_TD, slot_T, index_PKE)
    if key_TD.is_cuda:
        launch.write_index_keys(key_TD, slot_T, index_PKE, dependent=dependent)
        return
    reference.write_index_keys(key_TD, slot_T, index_PKE)


def index_scores(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    *,
    width: int = 0,
    invariant: bool = False,
    dependent: bool = False,
) -> None:
    """score[t, s] = sum over heads h of weight[t, h] * relu(q[t, h] · key[s]), for the entries s that a token sees.

    - `q_THD`: roped queries of the indexer; in the dtype of the cache, or int8 codes for a cache of INT8 entries. The
      scale of a query's codes belongs into its weight, as relu(c * x) = c * relu(x) for a scale c.
    - `weight_TH`: fp32, with all factors in it; rows may be strided, but for keys in INT8.
    - `index_PKE`: see `write_index_keys`. Entry s of a row lies at [page_RP[row, s // 64], s % 64]. Plain keys that
      stand for several tokens each may be 32, 16, ... or 1 of a page in place of 64, but not in invariant mode.
    - `page_RP`, `row_T`, `bound_T`: int32. Token t sees the entries 0 <= s < bound_T[t]; 0 marks a padded token. A
      token whose row is outside the table, or whose bound is above N, is counted in `fault_1` and sees nothing. Entries
      on a page that is outside the cache have score -inf, and each such page is counted.
    - `score_TN`: fp32. What lies at or behind a token's bound means nothing, and may not be written at all.
    - `width`: tokens of a row, if all rows have as many and stand in turn, else 0. It changes the time alone.
    - `invariant`: a token's scores are bitwise the same in any call.

    Sums are in fp32, those over the features of codes exact. What the table and the cache hold at or behind a bound
    (NaN included) does not matter.
    """
    checks.index_scores(q_THD, weight_TH, index_PKE, page_RP, row_T, bound_T, score_TN, fault_1, invariant=invariant)
    tensors = (q_THD, weight_TH, index_PKE, page_RP, row_T, bound_T, score_TN, fault_1)
    if q_THD.is_cuda:
        launch.index_scores(*tensors, width=width, invariant=invariant, dependent=dependent)
        return
    reference.index_scores(*tensors, invariant=invariant)


def select_positions(
    score_TN: Tensor,
    bound_T: Tensor,
    selected_TS: Tensor,
    fault_1: Tensor,
    workspace: SelectWorkspace | None = None,
    *,
    dependent: bool = False,
) -> None:
    """The positions of the S largest scores among the first `bound_T` ones of every token, in rising order.

    - `score_TN`: fp32. Of equal scores the lowest positions are taken; -0 equals 0, and NaN is above all numbers.
    - `bound_T`: int32, as for `index_scores`; one that is above N is counted in `fault_1` and taken for 0.
    - `selected_TS`: int32. A token that sees S positions or fewer gets them all. Behind the last one stands -1.
    - `workspace`: on a GPU, for as many tokens: `SelectWorkspace.allocate`.

    What is selected is a function of the scores alone, whatever the order in which programs run.
    """
    checks.select_positions(score_TN, bound_T, selected_TS, fault_1)
    if score_TN.is_cuda:
        if workspace is None:
            raise ValueError("selection on a GPU needs a workspace: SelectWorkspace.allocate")
        launch.select_positions(score_TN, bound_T, selected_TS, fault_1, workspace, dependent=dependent)
        return
    reference.select_positions(score_TN, bound_T, selected_TS, fault_1)


def sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    *,
    scale: float,
    workspace: SparseWorkspace | InvariantWorkspace | None = None,
    invariant: bool = False,
    dependent: bool = False,
) -> None:
    """out = softmax(scale * q · entries) · entries[..., :L], over the selected entries of the latent cache.

    - `q_THC`: query with W_UK absorbed into its first L features, the roped part after them.
    - `cache_PKC`: one layer's cache, in the dtype of the query, or FP8 entries as bytes (`kernels.latent_entry`), whose
      numbers Hopper's own kernel does not round to the query's dtype.
    - `page_RP`, `row_T`, `selected_TS`: int32. Entry s of a row lies at [page_RP[row, s // 64], s % 64]. Absent entries
      are -1 and may stand anywhere. A row, a position behind the table, or a page that is outside is counted in
      `fault_1`, and its entries are absent.
    - `out_THL`: dtype of the caller's choice; `lse_TH`: fp32, natural logarithm of the sum of exp(scale * q · k).
    - `workspace`: on a GPU, for as many tokens and heads: `SparseWorkspace.allocate`, in invariant mode
      `InvariantWorkspace.allocate`.
    - `invariant`: a token's result is bitwise the same in any call, and bitwise that of `kernels.mla_decode` in
      invariant mode where all entries that the token sees are selected.

    A token without entries gets output 0 and LSE -inf. Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """
    checks.sparse_decode(q_THC, cache_PKC, page_RP, row_T, selected_TS, out_THL, lse_TH, fault_1)
    tensors = (q_THC, cache_PKC, page_RP, row_T, selected_TS, out_THL, lse_TH, fault_1)
    if q_THC.is_cuda:
        if invariant and isinstance(workspace, InvariantWorkspace):
            attention_launch.invariant_sparse_decode(*tensors, workspace, scale=scale)
        elif not invariant and isinstance(workspace, SparseWorkspace):
            attention_launch.sparse_decode(*tensors, workspace, scale=scale, dependent=dependent)
        else:
            raise ValueError("sparse attention on a GPU needs a workspace: SparseWorkspace or InvariantWorkspace")
        return
    compute = reference.invariant_sparse_decode if invariant else reference.sparse_decode
    compute(*tensors, scale)
