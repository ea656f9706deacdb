"""The host's knowledge of slots: how many pages each was granted."""

from __future__ import annotations

import torch

from kernels.page import Shards
from workers.protocol.plan import Admission, PageGrant, SamplingParams
from workers.step.parts import SlotState


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


def test_a_table_has_global_pages_and_only_their_owner_has_a_cache_slot() -> None:
    """A planted fault: whoever does not own a page writes it, too."""
    states = [SlotState(2, 0, 4, torch.device("cpu"), shards=Shards(2, index)) for index in range(2)]
    slot_T, position_T = torch.tensor([0, 0, 0, 0, -1]), torch.tensor([0, 63, 64, 130, 5])
    for state in states:
        state.grant([PageGrant(0, 0, (5, 3, 2))])
        assert state.tensors.page_SP[0].tolist() == [5, 3, 2, 0]
    own = [state.cache_slots(slot_T, position_T).tolist() for state in states]
    assert own == [[3 * 64, 3 * 64 + 63, 2 * 64, 2, 5], [0, 63, 0, 64 + 2, 5]]
