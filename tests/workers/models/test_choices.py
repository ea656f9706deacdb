"""Choices of experts, and selected positions, that one pass records and another takes."""

import pytest
import torch

from workers.models.choices import Recorded, Taken


def recorded() -> Recorded:
    found = Recorded()
    found.settle(torch.tensor([[3, 1], [2, 0], [-1, -1]]), torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.0, 0.0]]))
    place_TX = torch.tensor([[-1, 0, -1, 1], [1, -1, 0, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    found.note(place_TX, torch.tensor([[0.7, 0.3], [0.8, 0.2], [9.0, 9.0]]))
    return found


def test_the_first_tokens_take_theirs() -> None:
    taken = Taken(recorded(), layers=2)
    id_TK, weight_TK = torch.tensor([[1, 3], [2, 1]]), torch.zeros(2, 2)
    taken.settle(id_TK, weight_TK)
    assert id_TK.tolist() == [[3, 1], [2, 0]]
    torch.testing.assert_close(weight_TK, torch.tensor([[0.6, 0.4], [0.9, 0.1]]))
    assert taken.agreement == 0.75  # in another order, and all but one
    taken.settle(id_TK, weight_TK)
    assert id_TK.tolist() == [[1, 3], [2, 0]]
    torch.testing.assert_close(weight_TK, torch.tensor([[0.7, 0.3], [0.8, 0.2]]))
    assert taken.agreement == 0.75


def test_copies_take_theirs_again_and_again() -> None:
    taken = Taken(recorded(), layers=1, period=2)
    id_TK, weight_TK = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    taken.settle(id_TK, weight_TK)
    assert id_TK.tolist() == [[3, 1], [2, 0], [3, 1], [2, 0], [3, 1]]


def test_calls_behind_the_target_keep_their_own() -> None:
    taken, own = Taken(recorded(), layers=1), torch.tensor([[0, 2]])
    taken.note(torch.zeros(1, 4), torch.zeros(1, 2))
    taken.settle(own, torch.zeros(1, 2))
    assert own.tolist() == [[0, 2]]
    assert taken.agreement == 1.0


SELECTED = torch.tensor([[0, 1, 2, -1], [1, 2, 4, 5], [0, 3, 5, 6]], dtype=torch.int32)
BOUNDS = torch.tensor([3, 6, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("own", "agreed"),
    [
        (SELECTED.tolist(), 1.0),
        # Of five positions that two tokens leave out, one is another one.
        ([[0, 1, 2, -1], [0, 2, 4, 5], [0, 3, 5, 6]], 0.8),
        ([[0, 1, 2, -1], [0, 2, 3, 4], [0, 2, 5, 6]], 0.4),
        # What sees three positions attends to all of them.
        ([[0, 1, -1, -1], [1, 2, 4, 5], [0, 3, 5, 6]], 0.0),
    ],
)
def test_selections_are_taken(own: list[list[int]], agreed: float) -> None:
    noted = Recorded()
    noted.select(SELECTED, BOUNDS)
    taken = Taken(noted, layers=0, selecting=1)
    own_TS = torch.tensor(own, dtype=torch.int32)
    taken.select(own_TS, BOUNDS)
    assert torch.equal(own_TS, SELECTED)
    assert taken.agreement == pytest.approx(agreed)
    taken.select(own_TS.zero_(), BOUNDS)  # of another pass
    assert not own_TS.any()


def test_a_selection_beyond_the_bound_agrees_with_nothing() -> None:
    """However many others are the same."""
    noted, own_TS = Recorded(), SELECTED.clone()
    noted.select(SELECTED, BOUNDS)
    taken = Taken(noted, layers=0, selecting=1)
    taken.select(own_TS, BOUNDS - torch.tensor([0, 0, 1]))
    assert taken.agreement == 0.0
