"""Filters that say of a row's logits how large the least is that stays, before top_k and top_p look at what is left.

min_p is one, and so is every other filter that keeps the ids whose probability reaches some value. One that is stated
by the largest probability, such as top_a (p >= a * p_max^2), takes p / p_max = exp(scaled logit) for what it is: its
floor is log(a * p_max), where p_max is 1 / sum(exp(scaled logits)).

On a GPU `kernel.slot_floor` computes them, from the row's parameters alone, and `search.search` where a look at all
logits of the row is needed. A filter that neither knows is refused on a GPU (`launch.sample`).

Shape legend: N logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Floor = Callable[[Tensor, Tensor], Tensor]
"""(the parameter of every row, float32 [N]; scaled logits, [N, V], whose largest is 0 in every row) -> float32 [N], the
least scaled logit that stays: at most 0, and -inf where the parameter is neutral. No operation may mix rows, and sums
run in the order of the ids, in float64: a row's tokens must not depend on its batch."""


def min_p(share_N: Tensor, scaled_NV: Tensor) -> Tensor:
    """Keeps ids at least `share_N` as probable as the most probable one (arXiv:2407.01082)."""
    return share_N.log()


FLOORS: dict[str, Floor] = {"min_p": min_p}
"""Filters by the name of their parameter, which is also that of its column in `tables.SlotTables.real_SF`. All look at
the whole row, so their order does not matter."""
