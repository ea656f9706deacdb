"""Cases of several settings at once, without running every combination in every lane.

A fault that needs settings to meet nearly always needs two of them (Kuhn, Wallace and Gallo, Software fault
interactions and implications for software testing, IEEE TSE 30(6), 2004). So a few combinations are chosen in which
each two values of different settings meet; the others are left to `make soak`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(
    *settings: Sequence[Any], marks: Sequence[Any] = (), possible: Callable[..., bool] = lambda *_: True
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every combination of the settings' values that is `possible`.

    Those in which all possible pairs of values meet get `marks`; the others get the mark `soak`.
    """
    everything = [case for case in product(*settings) if possible(*case)]
    chosen = set(covering(everything))
    return [
        pytest.param(*case, marks=marks if index in chosen else pytest.mark.soak)
        for index, case in enumerate(everything)
    ]


def covering(cases: Sequence[tuple[Any, ...]]) -> list[int]:
    """Indices of a few cases in which all pairs of values meet that meet in any.

    Greedy: the case with the most pairs that are still missing is next, the first of equals.
    """

    def met(case: tuple[Any, ...]) -> set[tuple[int, int, int, int]]:
        numbers = [values[place].index(value) for place, value in enumerate(case)]
        places = combinations(range(len(case)), 2) if len(case) > 1 else [(0, 0)]
        return {(a, b, numbers[a], numbers[b]) for a, b in places}

    values: list[list[Any]] = [[] for _ in cases[0]] if cases else []
    for case in cases:
        for seen, value in zip(values, case, strict=True):
            if value not in seen:
                seen.append(value)
    pairs_of = [met(case) for case in cases]
    missing = set().union(*pairs_of) if cases else set()
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs_of[index] & missing))
        missing -= pairs_of[best]
        chosen.append(best)
    return sorted(chosen)
