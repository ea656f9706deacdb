"""Prompt look-up: what followed the newest tokens of a row where they last stood before (Saxena, "Prompt Lookup
Decoding", 2023). Text repeats itself, most of all answers that quote their prompt.

Of the newest tokens, `MOST` of them down to `LEAST`, the most are looked for that stood before in the row's own prompt
and output; of several places the last. Drafts are the tokens behind that place. Where those reach the row's end they
go on with the first of them: a row that ends in a period goes on with it.

Where nothing is found drafts are token 0. Verification is exact, so any id of the vocabulary would do, and 0 is in
every one.

Shape legend: S slots, R rows, X most tokens of a row, K most drafts of a slot, C blocks of `BLOCK` places.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.ngram import kernel, reference
from kernels.ngram.size import BLOCK, LEAST, MOST

__all__ = ["BLOCK", "LEAST", "MOST", "blocks", "propose"]


def blocks(tokens: int) -> int:
    """C, of rows of so many tokens."""
    return -(-tokens // BLOCK)


def propose(
    token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, found_RC: Tensor
) -> None:
    """Write the first `drafts` columns of `draft_SK` (int64) in the rows' slots; a slot of -1 has none.

    `token_SX` (int32): the rows' tokens, of which those up to position `newest_S` (int64) count. `found_RC` (int64):
    memory for what is found on the way.
    """
    assert found_RC.shape == (slot_R.shape[0], blocks(token_SX.shape[1]))
    assert 0 < drafts <= draft_SK.shape[1]
    if not slot_R.is_cuda:
        reference.propose(token_SX, newest_S, slot_R, draft_SK, drafts)
        return
    launch_propose(token_SX, newest_S, slot_R, draft_SK, drafts, found_RC)


def launch_propose(
    token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, found_RC: Tensor
) -> None:
    """`propose` as Triton kernels."""
    rows, parts = found_RC.shape
    tokens = token_SX.shape[1]
    kernel.find[(rows, parts)](token_SX, newest_S, slot_R, found_RC, tokens, BLOCK=BLOCK, num_warps=4)
    kernel.take[(rows,)](
        token_SX,
        newest_S,
        slot_R,
        found_RC,
        draft_SK,
        tokens,
        parts,
        draft_SK.shape[1],
        drafts,
        PARTS=triton.next_power_of_2(parts),
        LANES=triton.next_power_of_2(draft_SK.shape[1]),
        num_warps=1,
    )
