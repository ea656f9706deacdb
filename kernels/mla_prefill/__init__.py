"""Attention of ragged query rows over expanded keys and values: the chunk itself (causal), or cached context (not).

Shape legend: T query tokens, S keys, H heads, N non-rope and O rope features of a key, D = N + O, V value features,
B rows, Z parts of the keys.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.mla_prefill import launch
from kernels.runtime.hopper import multiprocessors

SCORE_ELEMENTS: Final = 1 << 24
"""Scores held at once: queries of a row are taken in blocks so that heads * block * keys stays near this."""
MOST_KEY_PARTS: Final = 8
FEWEST_TILES: Final = 4
"""Tiles of keys in a part, but for the last one's: fewer do not pay for the part's results."""
_QUERIES, _KEYS = 128, 128
"""Queries and keys of a program, as `key_parts` counts them: of `hopper` always, of the portable kernel where rows are
long."""
_EDGE_TILES = 4
"""Tiles in whose time a program begins and ends."""
_MERGED = 64
"""Programs whose results are merged with what else there is in the time of a tile."""
_MOST_WAVES = 2
"""Times as many programs as the device runs at once, where keys are cut into parts."""


def mla_prefill(
    q_THD: Tensor,
    k_SHN: Tensor,
    k_SO: Tensor,
    v_SHV: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    *,
    scale: float,
    causal: bool,
    max_q: int,
    max_k: int,
) -> None:
    """out = softmax(scale * (q[..., :N] · k_SHN + q[..., N:] · k_SO)) · v, row by row.

    - The roped part of a key, `k_SO`, is shared by all heads and never expanded.
    - `cu_q_B1`, `cu_k_B1`: int32 [rows + 1] on the device, where each row's queries and keys begin; row b owns
      queries cu_q[b] <= t < cu_q[b + 1] and keys cu_k[b] <= s < cu_k[b + 1]. `max_q`, `max_k`: the longest of each.
    - `causal`: bottom-right aligned, query i of a row of n queries and m keys sees keys s <= i + m - n.
    - `out_THV`: dtype of the caller's choice; `lse_TH`: fp32, natural logarithm.
    - Where they are `out_ZTHV` and `lse_ZTH`, the keys of every row are cut into Z parts, the longest first, and each
      part has results of its own, to be merged by `kernels.merge_attention`. Not causally. `key_parts` says how many
      pay.

    A query that sees no key gets output 0 and LSE -inf. `k_SHN` and `v_SHV` may be strided views of one tensor; the
    last dimension of every tensor is contiguous. On a GPU (up to fp32) nothing is allocated and nothing waited for;
    `max_q` may be too large there, and tokens that no row owns are neither read nor written.
    Source: DeepSeek-V2 (2024), section 2.1.
    """
    if q_THD.is_cuda:
        launch.mla_prefill(
            q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, cu_k_B1, out_THV, lse_TH, scale=scale, causal=causal, max_q=max_q
        )
        return
    mla_prefill_reference(q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, cu_k_B1, out_THV, lse_TH, scale, causal)


def key_parts(max_q: int, max_k: int, rows: int, heads: int, device: torch.device) -> int:
    """Into how many parts the keys of context are best cut: few queries alone would leave most of the device idle. From
    the times that bench/prefill_attention.py prints."""
    programs, at_once = -(-max_q // _QUERIES) * rows * heads, multiprocessors(device)
    tiles = -(-max_k // _KEYS)
    most = min(MOST_KEY_PARTS, tiles // FEWEST_TILES, _MOST_WAVES * at_once // max(programs, 1))

    def tiles_in_turn(parts: int) -> float:
        waves = -(-programs * parts // at_once)
        return waves * (-(-tiles // parts) + _EDGE_TILES) + programs * parts / _MERGED

    return min(range(1, max(most, 1) + 1), key=tiles_in_turn)


def most_partial(tokens: int, heads: int, device: torch.device) -> int:
    """Tokens of all parts together, of up to so many query tokens in any rows: `key_parts` asks for no more."""
    cut = _MOST_WAVES * multiprocessors(device) * _QUERIES // heads
    return max(tokens, min(MOST_KEY_PARTS * tokens, cut))


def mla_prefill_reference(
    q_THD: Tensor,
    k_SHN: Tensor,
    k_SO: Tensor,
    v_SHV: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    scale: float,
    causal: bool,
) -> None:
    """`mla_prefill` in plain torch: row by row, a bounded block of queries at a time."""
    if out_THV.ndim == 4:
        assert not causal
        for part in range(out_THV.shape[0]):
            begin_B, end_B = _part(cu_k_B1, part, out_THV.shape[0])
            _attend(q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, begin_B, end_B, out_THV[part], lse_TH[part], scale, causal)
        return
    _attend(q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, cu_k_B1[:-1], cu_k_B1[1:], out_THV, lse_TH, scale, causal)


def _part(cu_k_B1: Tensor, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return the beginning and the end of a part of every row's keys."""
    each_B = (cu_k_B1.diff() + parts - 1) // parts
    begin_B = torch.minimum(cu_k_B1[:-1] + part * each_B, cu_k_B1[1:])
    return begin_B, torch.minimum(begin_B + each_B, cu_k_B1[1:])


def _attend(
    q_THD: Tensor,
    k_SHN: Tensor,
    k_SO: Tensor,
    v_SHV: Tensor,
    cu_q_B1: Tensor,
    begin_k_B: Tensor,
    end_k_B: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    scale: float,
    causal: bool,
) -> None:
    compute = torch.promote_types(q_THD.dtype, torch.float32)
    starts_q, starts_k, ends_k = cu_q_B1.tolist(), begin_k_B.tolist(), end_k_B.tolist()
    for row in range(len(starts_q) - 1):
        begin, end = starts_q[row], starts_q[row + 1]
        keys = slice(starts_k[row], ends_k[row])
        count = keys.stop - keys.start
        if count == 0:
            out_THV[begin:end].zero_()
            lse_TH[begin:end].fill_(-torch.inf)
            continue
        k_HNS = k_SHN[keys].to(compute).permute(1, 2, 0)
        k_OS = k_SO[keys].to(compute).t()
        v_HSV = v_SHV[keys].to(compute).transpose(0, 1)
        offset = count - (end - begin)  # query i of the row sees keys up to i + offset
        step = max(1, SCORE_ELEMENTS // (k_HNS.shape[0] * count))
        for at in range(begin, end, step):
            block = slice(at, min(at + step, end))
            q_HQD = q_THD[block].to(compute).transpose(0, 1)
            score_HQS = torch.matmul(q_HQD[..., : k_HNS.shape[1]], k_HNS)
            score_HQS += torch.matmul(q_HQD[..., k_HNS.shape[1] :], k_OS)
            score_HQS *= scale
            if causal:
                last_Q = torch.arange(block.start - begin, block.stop - begin, device=q_THD.device) + offset
                unseen_QS = torch.arange(count, device=q_THD.device) > last_Q.unsqueeze(-1)
                score_HQS.masked_fill_(unseen_QS, -torch.inf)
            lse_HQ = torch.logsumexp(score_HQS, dim=-1)
            score_HQS.sub_(lse_HQ.masked_fill(lse_HQ == -torch.inf, 0.0).unsqueeze(-1)).exp_()
            out_THV[block].copy_(torch.bmm(score_HQS, v_HSV).transpose(0, 1))
            lse_TH[block].copy_(lse_HQ.t())
