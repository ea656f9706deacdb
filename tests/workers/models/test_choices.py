"""Choices of experts that one pass records and another takes."""

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
