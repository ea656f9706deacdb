"""Sampling: from logits to token ids, every row by the parameters of its slot.

The steps, in order, for one row (the meaning of each parameter is the OpenAI API's and vLLM's; the order is part of the
contract, because it changes results):

1. logits to float32; ids that the row's mask forbids get -inf
2. repetition penalty over prompt and generated ids, then frequency and presence penalties over generated ids
3. logit bias
4. stop ids are masked while fewer than min_tokens tokens were generated
5. temperature 0: argmax, the lowest id of equal ones; done
6. logits / temperature, then the filters min_p (and others of `filters.FLOORS`), top_k, top_p, each on what the one
   before it left. top_k keeps all ids that are as probable as the k-th. top_p keeps the smallest set that reaches
   it: of equally probable ids at its border the lowest, as many as it takes
7. argmax of (filtered logit + Gumbel noise), which is a draw from the softmax of the filtered logits

Row i of a decode row's window counts the drafts before it as generated, in steps 2 and 4: those are the tokens it
follows if it is used at all, so the tokens do not depend on the width. The noise of step 7 is a function of (seed,
position, id) alone (`kernels.sampling.reference`).

Shape legend: N logits rows, V vocabulary, S slots, X drafts per row, R sampled rows, W width.
"""

from __future__ import annotations

import torch

from kernels.sampling import launch, reference
from kernels.sampling.filters import FLOORS, Floor
from kernels.sampling.reference import gumbel_noise
from kernels.sampling.tables import ALL_FEATURES, NEUTRAL_REAL, Feature, SlotTables, real_columns
from kernels.sampling.workspace import SampledRows, SampleWorkspace, TokenMasks, mask_words

__all__ = [
    "ALL_FEATURES",
    "FLOORS",
    "NEUTRAL_REAL",
    "Feature",
    "Floor",
    "SampleWorkspace",
    "SampledRows",
    "SlotTables",
    "TokenMasks",
    "count_tokens",
    "gumbel_noise",
    "mask_words",
    "real_columns",
    "sample_rows",
    "sample_tokens",
]


def sample_rows(
    logits_NV: torch.Tensor,
    rows: SampledRows,
    tables: SlotTables,
    token_N: torch.Tensor,
    fault_1: torch.Tensor,
    features: Feature,
    workspace: SampleWorkspace | None = None,
    *,
    nonfinite_N: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """`sample_tokens` for the logits rows of a step, without a tensor for what follows from their order.

    On a GPU it takes a `workspace` for as many rows, and runs straight-line whatever the rows need: it can be captured,
    and parameters, positions and drafts are those of the replay. `dependent`: programmatic dependent launch, see
    `launch`.
    """
    assert token_N.shape == logits_NV.shape[:1] == (rows.logits_rows,)
    assert nonfinite_N is None or nonfinite_N.shape == token_N.shape
    assert not features & Feature.PENALTIES or tables.seen_SV.shape[1] == logits_NV.shape[1]
    if not logits_NV.is_cuda:
        slot_N, position_N, draft_NX, window_N = rows.expanded()
        reference.sample(
            logits_NV,
            slot_N,
            position_N,
            tables,
            token_N,
            fault_1,
            features,
            draft_NX,
            window_N,
            nonfinite_N,
            rows.masks,
        )
        return
    if workspace is None or workspace.peak_NP.shape[0] != rows.logits_rows:
        raise ValueError("sampling on a GPU needs a workspace for as many rows: SampleWorkspace.allocate")
    launch.sample(
        logits_NV, rows, tables, token_N, fault_1, features, workspace, nonfinite_N=nonfinite_N, dependent=dependent
    )


def sample_tokens(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    tables: SlotTables,
    token_N: torch.Tensor,
    fault_1: torch.Tensor,
    features: Feature = ALL_FEATURES,
    draft_NX: torch.Tensor | None = None,
    window_N: torch.Tensor | None = None,
    workspace: SampleWorkspace | None = None,
    *,
    nonfinite_N: torch.Tensor | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """Write the token of every row to `token_N` (int64 [N]).

    `logits_NV`: any float dtype, read only. `slot_N`, `position_N`: int64 slot and absolute position of the token to
    be sampled; the slot of nobody (the tables' last, or -1) marks a padded row, which gets token 0. `features`: what
    at least one row needs; leaving out a feature that a row needs is an error of the caller, naming one that no row
    needs costs time only. `draft_NX`, `window_N` (int64): the drafts that a row's sequence feeds and how many of them
    lie before it; None where there are none. `masks`: which ids rows may have. `workspace`: on a GPU, see
    `sample_rows`.

    A row without a finite maximum (NaN or +inf anywhere, allowed or not, or every id masked) is bad: it gets token 0,
    so that nothing is indexed out of bounds, and such a token means nothing. The caller has to look which rows those
    are: `nonfinite_N` (int64 [N]) gets 1 for them and 0 for the others. Without it each adds 1 to `fault_1` (int64
    [1]).
    """
    assert (draft_NX is None) == (window_N is None)
    rows = SampledRows(slot_N, position_N, draft=draft_NX, window_N=window_N, masks=masks)
    sample_rows(logits_NV, rows, tables, token_N, fault_1, features, workspace, nonfinite_N=nonfinite_N)


def count_tokens(
    tables: SlotTables,
    slot_R: torch.Tensor,
    token_RW: torch.Tensor,
    count_R: torch.Tensor,
    vocab: int,
    fault_1: torch.Tensor,
    penalties: bool = True,
    *,
    more: int = 0,
    dependent: bool = False,
) -> None:
    """Add the first `count_R` + `more` tokens of each row of `token_RW` (int64) to what their slots generated.

    `penalties`: also count them by id in `tables.seen_SV`. A padded row (the slot of nobody, or -1) writes nothing.
    An id outside the vocabulary is not counted and adds 1 to `fault_1`.
    """
    assert token_RW.shape[0] == slot_R.shape[0] == count_R.shape[0]
    if token_RW.is_cuda:
        launch.count_tokens(tables, slot_R, token_RW, count_R, vocab, fault_1, penalties, more, dependent=dependent)
        return
    reference.count_tokens(tables, slot_R, token_RW, count_R + more, vocab, fault_1, penalties)
