"""Accepted drafts, against the definition spelled out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decode_state import accept_drafts


def leading_matches(target, draft):
    count = 0
    while count < len(draft) and draft[count] == target[count]:
        count += 1
    return count


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(1, 8), rows=st.integers(0, 9))
def test_leading_matches(data, width, rows):
    ids = st.integers(0, 2)
    target = data.draw(st.lists(st.lists(ids, min_size=width, max_size=width), min_size=rows, max_size=rows))
    draft = data.draw(st.lists(st.lists(ids, min_size=width - 1, max_size=width - 1), min_size=rows, max_size=rows))
    accepted, fault = torch.full((rows,), -5), torch.zeros(1, dtype=torch.int64)
    accept_drafts(
        torch.tensor(target, dtype=torch.int64).view(rows, width),
        torch.tensor(draft, dtype=torch.int64).view(rows, width - 1),
        accepted,
        vocab=3,
        fault_1=fault,
    )
    assert accepted.tolist() == [leading_matches(*pair) for pair in zip(target, draft, strict=True)]
    assert int(fault) == 0


@pytest.mark.parametrize("bad", [-1, -(2**40), 50, 2**31 - 1])
@pytest.mark.parametrize("both", [False, True])
def test_an_id_that_is_no_token_is_never_accepted(bad, both):
    target = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    draft = target[:, :3].clone()
    draft[1, 1] = bad
    if both:
        target[1, 1] = bad
    accepted, fault, faults = torch.zeros(2, dtype=torch.int64), torch.tensor([7]), torch.zeros(1, dtype=torch.int64)
    accept_drafts(target, draft, accepted, vocab=50, fault_1=fault, faults_1=faults)
    assert accepted.tolist() == [3, 1]
    assert int(fault) == int(faults) == 8 + both


def test_negative_ids_are_never_accepted_without_a_vocabulary_either():
    target = torch.tensor([[-1, -1, 3]])
    accepted = torch.zeros(1, dtype=torch.int64)
    accept_drafts(target, target[:, :2], accepted)
    assert accepted.tolist() == [0]
