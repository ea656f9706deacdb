"""The host's knowledge of slots: how many pages each was granted."""

from __future__ import annotations

import torch

from workers.protocol.plan import Admission, PageGrant, SamplingParams
from workers.step.slots import SlotState


def test_a_slot_has_the_pages_that_its_own_request_was_granted() -> None:
    state, params = SlotState(3, 0, 8, torch.device("cpu")), SamplingParams(1)
    assert state.most_granted([0]) == 8  # nobody has said: any number
    state.admit([Admission(0, params), Admission(1, params)])
    assert state.most_granted([0, 1]) == 0
    state.grant([PageGrant(0, 0, (1, 2, 3)), PageGrant(1, 0, (4,))])
    state.grant([PageGrant(0, 3, (5, 6))])
    assert [state.most_granted(slots) for slots in ([0], [1], [0, 1], [1, 2])] == [5, 1, 5, 8]
    state.admit([Admission(0, params)])
    assert state.most_granted([0, 1]) == 1
    state.grant([PageGrant(0, 0, (7, 2))])
    assert state.most_granted([0, 1]) == 2
