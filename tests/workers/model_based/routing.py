"""Tokens whose experts are decided by rounding.

Two experts, or groups of experts, whose scores are nearly equal can change places when numbers are added up in another
order, and then another function of the token follows, whose logits differ by far more than rounding. Of some ten
thousand tokens one is so near. Both choices are right. So the reference asks transformers for the other one, too: the
router's bias of one expert is moved, for that token alone, by a little more than rounding.

Shape legend: T tokens of a sequence, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

MARGIN = 1e-5
"""Margin of scores, which are between 0 and 1 before the bias."""
MOST = 3
"""Places of a sequence that are considered. More have never been seen."""

Place = tuple[int, int, int, float]
"""A router, a token, an expert, and what its score is moved by."""


def near_ties(model: Any, tokens: list[int]) -> list[Place]:
    """Return the places where the choice of experts is another one if one score moves by `MARGIN`; each other choice
    once."""
    found: list[Place] = []

    def chosen(router: Any, x: Tensor) -> Tensor:
        experts_TK: Tensor = type(router).forward(router, x)[-1]
        return experts_TK.sort().values

    def look(number: int, router: Any, x: Tensor) -> None:
        usual, known = chosen(router, x), set()
        for expert in range(len(router.e_score_correction_bias)):
            for by in (MARGIN, -MARGIN):
                moved = torch.zeros_like(router.e_score_correction_bias)
                moved[expert] = by
                with biased(router, moved):
                    other = chosen(router, x)
                for token in (usual != other).any(1).nonzero().flatten().tolist():
                    choice = (token, *other[token].tolist())
                    if choice not in known:
                        known.add(choice)
                        found.append((number, token, expert, 2 * by))

    with ExitStack() as hooks:
        for number, router in enumerate(routers(model)):
            hook = router.register_forward_pre_hook(lambda module, inputs, n=number: look(n, module, inputs[0]))
            hooks.callback(hook.remove)
        with torch.no_grad():
            model(torch.tensor([tokens]))
    return found[:MOST]


def routed_otherwise(model: Any, tokens: list[int]) -> Iterator[None]:
    """Leaves the model, for every other way in which its nearly equal experts can be chosen, in that state."""
    places = near_ties(model, tokens)
    for count in range(1, len(places) + 1):
        for some in combinations(places, count):
            with ExitStack() as moved:
                for number, router in enumerate(routers(model)):
                    by_TE = torch.zeros(len(tokens), len(router.e_score_correction_bias))
                    for _, token, expert, by in (place for place in some if place[0] == number):
                        by_TE[token, expert] += by
                    moved.enter_context(biased(router, by_TE))
                yield


def routers(model: Any) -> list[Any]:
    """Return the routers of all layers that have experts."""
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


@contextmanager
def biased(router: Any, by: Tensor) -> Iterator[None]:
    """Move the router's scores: [E], or [T, E] for the tokens of one sequence."""
    usual = router.e_score_correction_bias
    router.e_score_correction_bias = usual + by
    try:
        yield
    finally:
        router.e_score_correction_bias = usual
