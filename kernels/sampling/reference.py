"""Sampling in plain torch, row by row in effect: no operation here mixes rows, so a row's token does not depend on its
batch. The order of the steps is the launcher's contract.

The noise of sampling are Gumbel variables that are a pure function of (seed, position, token id). Philox-4x32-10 is a
counter-based generator: four random 32-bit words are a function of a 128-bit counter and a 64-bit key, with no state to
carry, to freeze in a captured graph or to reorder when the batch changes. Source: Salmon, Moraes, Dror, Shaw, "Parallel
Random Numbers: As Easy as 1, 2, 3" (SC 2011).

Layout, the one `tl.philox(seed, c0, c1, c2, c3)` computes when its counters are 32-bit:

    key      (low word of the seed, high word of the seed)
    counter  (token id // 4, low word of the position, high word of the position, 0)
    word     token id % 4

Shape legend: N logits rows, V vocabulary, Q = ceil(V / 4) counters per row, C single ids, S slots, X drafts per row, K
stop ids, B bias entries, H head of the sorted row, R sampled rows, W width, M masked rows.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch

from kernels.sampling import tables as column
from kernels.sampling.filters import FLOORS
from kernels.sampling.tables import FILTERS, LOGIT_FEATURES, Feature, SlotTables
from kernels.sampling.workspace import MASK_BITS, TokenMasks

WORD_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
LANES = 4
"""Words, and so token ids, a counter yields."""

_NUMPY_MULTIPLIER_0, _NUMPY_MULTIPLIER_1 = np.uint64(_MULTIPLIER_0), np.uint64(_MULTIPLIER_1)
_NUMPY_WEYL_0, _NUMPY_WEYL_1 = np.uint64(_WEYL_0), np.uint64(_WEYL_1)
_NUMPY_MASK, _NUMPY_32 = np.uint64(WORD_MASK), np.uint64(32)

_LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def philox_4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words for every counter.

    All tensors are int64, hold values below 2**32 and broadcast against each other; so do the results. A product of
    two words wraps int64 without losing a bit: its low word is `product & mask`, its high word `(product >> 32) &
    mask`. The low words are carried unmasked between rounds, since only the exclusive or that follows is masked.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & WORD_MASK
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & WORD_MASK
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _WEYL_0) & WORD_MASK, (k1 + _WEYL_1) & WORD_MASK
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK


def random_words(seed_N: torch.Tensor, position_N: torch.Tensor, vocab: int) -> torch.Tensor:
    """int64 [N, V]: the random word of every token id. `seed_N` and `position_N` are int64; all 64 bits count."""
    quad_1Q = torch.arange(-(-vocab // LANES), device=seed_N.device).unsqueeze(0)
    words = _words(quad_1Q, seed_N.unsqueeze(1), position_N.unsqueeze(1))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]


def random_words_at(seed_C: torch.Tensor, position_C: torch.Tensor, token_C: torch.Tensor) -> torch.Tensor:
    """int64 [C]: the random words of single token ids (int64 all)."""
    words_C4 = torch.stack(_words(token_C >> 2, seed_C, position_C), dim=-1)
    return words_C4.gather(-1, (token_C & 3).unsqueeze(-1)).squeeze(-1)


def _words(quad: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
    low, high = position & WORD_MASK, (position >> 32) & WORD_MASK
    counter = (quad, low, high, torch.zeros_like(low))
    key = (seed & WORD_MASK, (seed >> 32) & WORD_MASK)
    return _philox_on_cpu(counter, key) if quad.device.type == "cpu" else philox_4x32(counter, key)


def _philox_on_cpu(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """`philox_4x32` in NumPy, whose calls cost half as much on arrays as small as a vocabulary."""
    c0, c1, c2, c3 = (word.numpy().view(np.uint64) for word in counter)
    k0, k1 = (word.numpy().view(np.uint64) for word in key)
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _NUMPY_MULTIPLIER_0, c2 * _NUMPY_MULTIPLIER_1
        c0 = ((product_1 >> _NUMPY_32) ^ c1 ^ k0) & _NUMPY_MASK
        c2 = ((product_0 >> _NUMPY_32) ^ c3 ^ k1) & _NUMPY_MASK
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _NUMPY_WEYL_0) & _NUMPY_MASK, (k1 + _NUMPY_WEYL_1) & _NUMPY_MASK
    words = (c0, c1 & _NUMPY_MASK, c2, c3 & _NUMPY_MASK)
    return tuple(torch.from_numpy(word.view(np.int64)) for word in words)


def gumbel_from_words(word: torch.Tensor) -> torch.Tensor:
    """float32 Gumbel variables -log(-log u) from random words, elementwise; between -2.82 and 22.88.

    With v = (word + 1/2) / 2**32 and u = 1 - v the inner logarithm is log1p(-v): large values of the result, the ones
    that win an argmax, come from small v, where a float is finest. The other way around (v near 1) they would come in
    steps of 2**-24, and a token of probability 1e-7 would be drawn never or far too often.
    """
    v = (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=_LARGEST_UNIFORM)
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise(seed_N: torch.Tensor, position_N: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [N, V] Gumbel noise of the token sampled at `position_N` by the request with `seed_N` (int64 both)."""
    return gumbel_from_words(random_words(seed_N, position_N, vocab))


def gumbel_noise_at(seed_C: torch.Tensor, position_C: torch.Tensor, token_C: torch.Tensor) -> torch.Tensor:
    """float32 [C]: single values of `gumbel_noise`."""
    return gumbel_from_words(random_words_at(seed_C, position_C, token_C))


_HEAD = 256
"""Most probable ids that the filters look at first on a CPU; only if those do not settle it the row is sorted."""

_SPARSE = 8
"""Ratio of ids to kept ids above which, on a CPU, a step draws noise for the kept ids alone."""

NEGATIVE_INFINITY = float("-inf")


def sample(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    tables: SlotTables,
    token_N: torch.Tensor,
    fault_1: torch.Tensor,
    features: Feature,
    draft_NX: torch.Tensor | None,
    window_N: torch.Tensor | None,
    nonfinite_N: torch.Tensor | None = None,
    masks: TokenMasks | None = None,
) -> None:
    logits_NV = logits_NV.to(torch.float32)
    if masks is not None:
        logits_NV = masked_logits(logits_NV, masks)
    if features & LOGIT_FEATURES:
        logits_NV = adjusted_logits(logits_NV, slot_N, tables, features, draft_NX, window_N)
    peak_N, best_N = logits_NV.max(dim=-1)  # first of equal maxima: the lowest id
    if features & Feature.NOISE:
        temperature_N = tables.real_SF[slot_N, column.TEMPERATURE]
        greedy_N = temperature_N == 0
        divisor_N = torch.where(greedy_N, 1.0, temperature_N)
        # The maximum is taken off first: differences near it stay exact, and no temperature can overflow.
        scaled_NV = (logits_NV - peak_N.unsqueeze(1)) / divisor_N.unsqueeze(1)
        seed_N = tables.whole_SI[slot_N, column.SEED]
        if features & FILTERS:
            kept_NV = kept(scaled_NV, *filter_floor(scaled_NV, slot_N, tables, features))
            score_NV = _scores_of_kept(scaled_NV, kept_NV, seed_N, position_N)
        else:
            score_NV = scaled_NV + gumbel_noise(seed_N, position_N, logits_NV.shape[1])
        best_N = torch.where(greedy_N, best_N, score_NV.max(dim=-1).indices)
    # NaN anywhere in a row makes its maximum NaN.
    owned_N, sound_N = _owned(slot_N, tables), peak_N.isfinite()
    token_N.copy_(torch.where(owned_N & sound_N, best_N, 0))
    if nonfinite_N is None:
        fault_1.add_((owned_N & ~sound_N).sum())
    else:
        nonfinite_N.copy_(owned_N & ~sound_N)


def _scores_of_kept(
    scaled_NV: torch.Tensor, kept_NV: torch.Tensor, seed_N: torch.Tensor, position_N: torch.Tensor
) -> torch.Tensor:
    """float32 [N, V]: logit + noise where `kept_NV`, -inf elsewhere. A CPU makes noise for a few kept ids only."""
    if scaled_NV.device.type == "cpu":
        row_C, token_C = kept_NV.nonzero(as_tuple=True)
        if len(row_C) * _SPARSE < kept_NV.numel():
            score_NV = torch.full_like(scaled_NV, NEGATIVE_INFINITY)
            noise_C = gumbel_noise_at(seed_N[row_C], position_N[row_C], token_C)
            score_NV[row_C, token_C] = scaled_NV[row_C, token_C] + noise_C
            return score_NV
    noise_NV = gumbel_noise(seed_N, position_N, scaled_NV.shape[1])
    return (scaled_NV + noise_NV).masked_fill_(~kept_NV, NEGATIVE_INFINITY)


def masked_logits(logits_NV: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """float32 [N, V]: a copy of `logits_NV` (float32) with -inf for ids that a row's mask forbids. What is no finite
    number stays, or the row would pass for sound."""
    number, vocab = logits_NV.shape
    index_N = masks.index_N[:number]
    row_M = (index_N >= 0).nonzero().squeeze(1)
    out_NV = logits_NV.clone()
    token_V = torch.arange(vocab, device=logits_NV.device)
    word_MV = masks.bits_MB[index_N[row_M].long()][:, token_V // MASK_BITS]
    allowed_MV = ((word_MV >> (token_V % MASK_BITS)) & 1).bool()
    rows_MV = logits_NV[row_M]
    out_NV[row_M] = rows_MV.masked_fill(~allowed_MV & (rows_MV < float("inf")), NEGATIVE_INFINITY)
    return out_NV


def adjusted_logits(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    tables: SlotTables,
    features: Feature,
    draft_NX: torch.Tensor | None,
    window_N: torch.Tensor | None,
) -> torch.Tensor:
    """float32 [N, V]: a copy of `logits_NV` (float32) with penalties, bias and the min_tokens mask applied."""
    out_NV = logits_NV.clone()
    if features & Feature.PENALTIES:
        _apply_penalties(out_NV, slot_N, tables, draft_NX, window_N)
    if features & Feature.BIAS:
        out_NV.scatter_add_(1, tables.bias_id_SB[slot_N], tables.bias_SB[slot_N])
    if features & Feature.MIN_TOKENS:
        whole_NI = tables.whole_SI[slot_N]
        generated_N = whole_NI[:, column.GENERATED]
        if window_N is not None:
            generated_N = generated_N + window_N
        masked_N1 = (generated_N < whole_NI[:, column.MIN_TOKENS]).unsqueeze(1)
        stop_NK = tables.stop_SK[slot_N]
        # Repeated ids (free columns) scatter the same value.
        out_NV.scatter_(1, stop_NK, out_NV.gather(1, stop_NK).masked_fill_(masked_N1, NEGATIVE_INFINITY))
    return out_NV


def _apply_penalties(
    out_NV: torch.Tensor,
    slot_N: torch.Tensor,
    tables: SlotTables,
    draft_NX: torch.Tensor | None,
    window_N: torch.Tensor | None,
) -> None:
    """Repetition penalty (CTRL, arXiv:1909.05858, as in transformers), then frequency and presence penalties
    (OpenAI)."""
    vocab = out_NV.shape[1]
    seen_NV = tables.seen_SV[slot_N]
    if draft_NX is not None and window_N is not None and draft_NX.shape[1]:
        index_X = torch.arange(draft_NX.shape[1], device=out_NV.device)
        counted_NX = (index_X < window_N.unsqueeze(1)) & in_vocabulary(draft_NX, vocab)
        seen_NV.scatter_add_(1, draft_NX.clamp(0, vocab - 1), counted_NX.to(torch.int32) * 2)
    real_NF = tables.real_SF[slot_N]
    repetition_N1 = real_NF[:, column.REPETITION : column.REPETITION + 1]
    penalised_NV = torch.where(out_NV > 0, out_NV / repetition_N1, out_NV * repetition_N1)
    torch.where(seen_NV != 0, penalised_NV, out_NV, out=out_NV)
    count_NV = seen_NV >> 1
    out_NV.sub_(count_NV * real_NF[:, column.FREQUENCY : column.FREQUENCY + 1])
    out_NV.sub_((count_NV != 0) * real_NF[:, column.PRESENCE : column.PRESENCE + 1])


def kept(scaled_NV: torch.Tensor, floor_N: torch.Tensor, last_N: torch.Tensor) -> torch.Tensor:
    """bool [N, V]: the ids that filters keep, by what `filter_floor` says."""
    floor_N1 = floor_N.unsqueeze(1)
    id_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    return (scaled_NV > floor_N1) | ((scaled_NV == floor_N1) & (id_V <= last_N.unsqueeze(1)))


def filter_floor(
    scaled_NV: torch.Tensor, slot_N: torch.Tensor, tables: SlotTables, features: Feature
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] and int64 [N]: the smallest scaled logit that `FLOORS` (min_p), then top_k, then top_p keep, and the
    highest id that is kept of those that have it. The maximum of a row is 0.

    min_p and top_k keep the ids at or above some value, so equal logits stand or fall together: top_k keeps all ids
    tied with the k-th. top_p keeps the smallest set that reaches top_p of what the filters before left. Where several
    ids have the least logit of that set, the lowest ones of them belong to it, as many as it takes.
    """
    real_NF = tables.real_SF[slot_N]
    floor_N = _first_floor(scaled_NV, slot_N, tables)
    vocab = scaled_NV.shape[1]
    last_N = torch.full_like(slot_N, vocab)
    if not features & (Feature.TOP_K | Feature.TOP_P):
        return floor_N, last_N
    if scaled_NV.device.type == "cpu" and vocab > 2 * _HEAD:
        head_NH = scaled_NV.topk(_HEAD).values
        floor_N, tied_N, settled_N = _prefix_floor(scaled_NV, head_NH, floor_N, real_NF, slot_N, tables)
        open_M = settled_N.logical_not().nonzero().squeeze(1)
        if len(open_M):
            rows_MV, slot_M, real_MF = scaled_NV[open_M], slot_N[open_M], real_NF[open_M]
            sorted_MV = rows_MV.sort(dim=-1, descending=True).values
            first_M = _first_floor(rows_MV, slot_M, tables)
            floor_N[open_M], tied_N[open_M], _ = _prefix_floor(rows_MV, sorted_MV, first_M, real_MF, slot_M, tables)
    else:
        sorted_NV = scaled_NV.sort(dim=-1, descending=True).values
        floor_N, tied_N, _ = _prefix_floor(scaled_NV, sorted_NV, floor_N, real_NF, slot_N, tables)
    tied_M = tied_N.nonzero().squeeze(1)
    if len(tied_M):
        equal_MV = scaled_NV[tied_M] == floor_N[tied_M].unsqueeze(1)
        at_MV = equal_MV & (equal_MV.cumsum(1) == tied_N[tied_M].unsqueeze(1))
        last_N[tied_M] = at_MV.to(torch.uint8).argmax(1)
    return floor_N, last_N


def _first_floor(scaled_NV: torch.Tensor, slot_N: torch.Tensor, tables: SlotTables) -> torch.Tensor:
    """Compute the highest floor of the filters that need no order of the logits."""
    return reduce(torch.maximum, (floor(tables.real(name)[slot_N], scaled_NV) for name, floor in FLOORS.items()))


def _prefix_floor(
    scaled_NV: torch.Tensor,
    head_NH: torch.Tensor,
    floor_N: torch.Tensor,
    real_NF: torch.Tensor,
    slot_N: torch.Tensor,
    tables: SlotTables,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The floor after top_k and top_p, from the H largest values of each row in descending order; how many ids top_p
    keeps of those at the floor, 0 for all; and whether those H were enough. All sums are sequential and in float64, so
    more columns give the same result, bit for bit."""
    head = head_NH.shape[1]
    top_k_N, top_p_N = tables.whole_SI[slot_N, column.TOP_K], real_NF[:, column.TOP_P]
    kth_N = head_NH.gather(1, (top_k_N - 1).clamp(0, head - 1).unsqueeze(1)).squeeze(1)
    floor_N = torch.where(top_k_N > 0, torch.maximum(floor_N, kth_N), floor_N)
    settled_N = top_k_N <= head
    kept_NV = scaled_NV.double().exp().masked_fill_(scaled_NV < floor_N.unsqueeze(1), 0.0)
    total_N = kept_NV.cumsum(dim=-1)[:, -1]  # in id order: a tree reduction could depend on the number of rows
    mass_NH = head_NH.double().exp().cumsum(dim=-1)
    nucleus_N = (mass_NH < (top_p_N.double() * total_N).unsqueeze(1)).sum(dim=-1)
    last_N = head_NH.gather(1, nucleus_N.clamp(max=head - 1).unsqueeze(1)).squeeze(1)
    filtering_N = top_p_N < 1
    # The next value, in descending order, tells whether ids are left out that are as probable as the last one.
    next_N = head_NH.gather(1, (nucleus_N + 1).clamp(max=head - 1).unsqueeze(1)).squeeze(1)
    tied_N = filtering_N & (nucleus_N + 1 < head) & (next_N == last_N) & (last_N >= floor_N)
    above_N = (head_NH > last_N.unsqueeze(1)).sum(dim=-1)
    settled_N = settled_N & (~filtering_N | (nucleus_N + 1 < head))
    floor_N = torch.where(filtering_N, torch.maximum(floor_N, last_N), floor_N)
    return floor_N, torch.where(tied_N, nucleus_N + 1 - above_N, 0), settled_N


def _owned(slot: torch.Tensor, tables: SlotTables) -> torch.Tensor:
    """Tell which rows are not padding."""
    return (slot >= 0) & (slot < tables.real_SF.shape[0] - 1)


def in_vocabulary(token: torch.Tensor, vocab: int) -> torch.Tensor:
    """Whether each id is one of the vocabulary."""
    return (token >= 0) & (token < vocab)


def count_tokens(
    tables: SlotTables,
    slot_R: torch.Tensor,
    token_RW: torch.Tensor,
    count_R: torch.Tensor,
    vocab: int,
    fault_1: torch.Tensor,
    penalties: bool,
) -> None:
    owned_R = _owned(slot_R, tables)
    count_R = count_R.masked_fill(~owned_R, 0)
    slot_R = torch.where(owned_R, slot_R, tables.real_SF.shape[0] - 1)
    tables.whole_SI[:, column.GENERATED].index_add_(0, slot_R, count_R)
    emitted_RW = torch.arange(token_RW.shape[1], device=token_RW.device) < count_R.unsqueeze(1)
    valid_RW = in_vocabulary(token_RW, vocab)
    fault_1.add_((emitted_RW & ~valid_RW).sum())
    if penalties:
        cell_RW = slot_R.unsqueeze(1) * vocab + token_RW.clamp(0, vocab - 1)
        step_RW = (emitted_RW & valid_RW).to(torch.int32) * 2
        tables.seen_SV.view(-1).scatter_add_(0, cell_RW.flatten(), step_RW.flatten())
