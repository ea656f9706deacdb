"""Which combinations of settings are tried in every run."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairs import covering, pairs


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (3, 4), (2, 3, 2), (3, 3, 3, 3), (5, 2, 4, 2)])
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in covering(cases)]
    for (a, size_a), (b, size_b) in combinations(enumerate(sizes), 2):
        assert {(case[a], case[b]) for case in chosen} == set(product(range(size_a), range(size_b)))
    assert {case[0] for case in chosen} == set(range(sizes[0]))
    assert len(chosen) <= 2 * max([a * b for a, b in combinations(sizes, 2)], default=sizes[0])


def test_the_others_are_soaked_and_none_is_lost() -> None:
    params = pairs([1, 2], "ab", [True, False], marks=[pytest.mark.long], possible=lambda n, s, b: (n, s) != (2, "b"))
    assert [param.values for param in params] == [
        case for case in product([1, 2], "ab", [True, False]) if case[:2] != (2, "b")
    ]
    marks = [[mark.name for mark in param.marks] for param in params]
    assert sorted({name for names in marks for name in names}) == ["long", "soak"]
    assert all(len(names) == 1 for names in marks)
