"""The noise of sampling: Gumbel variables that are a pure function of (seed, position, token id).

Philox-4x32-10 is a counter-based generator: four random 32-bit words are a function of a 128-bit counter and a 64-bit
key, with no state to carry, to freeze in a captured graph or to reorder when the batch changes. Source: Salmon, Moraes,
Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

Layout, the one `tl.philox(seed, c0, c1, c2, c3)` computes when its counters are 32-bit:

    key      (low word of the seed, high word of the seed)
    counter  (token id // 4, low word of the position, high word of the position, 0)
    word     token id % 4

Shape legend: N logits rows, V vocabulary, Q = ceil(V / 4) counters per row, C single ids.
"""

from __future__ import annotations

import numpy as np
import torch

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
