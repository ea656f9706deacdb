"""Any step with any tenants: each row's token is that of a slot which never had another tenant, sampled by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.step.sampling import SamplingState

CPU = torch.device("cpu")
VOCAB = 40
SLOTS = 4

tokens = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, 0.7, -0.4])
samplings = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-4.0, 3.0]), max_size=3).map(lambda d: tuple(d.items())),
    stop_ids=st.lists(tokens, max_size=8).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 12]),
)


@dataclass
class Tenant:
    """Tenant of a slot: what it asked for, and its tokens so far."""

    sampling: SamplingParams
    prompt: list[int]
    generated: list[int]

    def admission(self, slot: int, *more: int) -> Admission:
        """Make the admission as after a preemption, with `more` tokens generated."""
        generated = [*self.generated, *more]
        history = (*self.prompt, *generated) if self.sampling.has_penalties else ()
        return Admission(slot, self.sampling, len(generated), history)

    def next_token(self, logits_V: torch.Tensor, position: int, *drafts: int) -> int:
        """The token behind `drafts`, by itself."""
        alone = SamplingState(1, VOCAB, CPU)
        alone.admit([self.admission(0, *drafts)])
        return int(alone.draft_tokens(logits_V.unsqueeze(0), torch.tensor([0]), torch.tensor([position])))


tenants = st.builds(
    Tenant,
    samplings,
    st.lists(tokens, min_size=1, max_size=4),
    st.lists(tokens, max_size=2),
)
bystanders = st.builds(Tenant, st.just(SamplingParams(99, temperature=0.0)), st.just([1]), st.just([]))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_step_with_any_tenants(data: st.DataObject) -> None:
    """Decode rows, final prompts, both or one of them; widths above and below what was drafted; slots whose tenants
    have left, and may have needed what nobody needs now."""
    state = SamplingState(SLOTS, VOCAB, CPU)
    if data.draw(st.booleans()):
        state.reserve()
    held = {}
    for slot in range(SLOTS):
        for tenant in data.draw(st.lists(st.one_of(tenants, bystanders), max_size=2)):
            held[slot] = tenant
            state.admit([tenant.admission(slot)])
    for _ in range(data.draw(st.integers(1, 3))):
        slots = data.draw(st.permutations(list(held)))
        rows = data.draw(st.integers(0, len(slots)))
        finals = data.draw(st.integers(0, len(slots) - rows))
        if rows + finals:
            _step(state, held, slots[: rows + finals], rows, data)


def _step(state: SamplingState, held: dict[int, Tenant], slots: list[int], rows: int, data: st.DataObject) -> None:
    """One step: every token against the plain one, then what was accepted is committed."""
    width, finals = data.draw(st.integers(1, 8)), len(slots) - rows
    layout = BatchLayout(width, rows, (3,) * finals, (True,) * finals)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits_NV = torch.randn(layout.logits_rows, VOCAB, generator=generator) * 2
    fed_DW = torch.randint(0, VOCAB, (rows, width), generator=generator)
    position_N = torch.randint(0, 1000, (layout.logits_rows,), generator=generator)
    slot_R = torch.tensor(slots)
    token_N = state.target_tokens(logits_NV, layout, slot_R, fed_DW, position_N, ahead=1)
    for row, slot in enumerate(slots):
        for place in range(width if row < rows else 1):
            n = layout.logits_row(row, place)
            drafts = fed_DW[row, 1 : 1 + place].tolist() if row < rows else []
            want = held[slot].next_token(logits_NV[n], int(position_N[n]) + 1, *drafts)
            assert int(token_N[n]) == want, f"place {place} of row {row} in {layout}"
    # The draft layer's next tokens, after as many drafts as there may be.
    before = data.draw(st.integers(0, width - 1))
    drafted_SX = torch.randint(0, VOCAB, (SLOTS + 1, before), generator=generator)
    logits_RV, position_R = logits_NV[: len(slots)], position_N[: len(slots)]
    draft_R = state.draft_tokens(logits_RV, slot_R, position_R, drafted_SX if before else None)
    for row, slot in enumerate(slots):
        want = held[slot].next_token(logits_RV[row], int(position_R[row]), *drafted_SX[slot].tolist())
        assert int(draft_R[row]) == want
    count_R = torch.randint(1, width + 1, (len(slots),), generator=generator)
    count_R[rows:] = 1
    token_RW = torch.randint(0, VOCAB, (len(slots), width), generator=generator)
    state.commit(slot_R, token_RW, count_R)
    for slot, gained, count in zip(slots, token_RW.tolist(), count_R.tolist(), strict=True):
        held[slot].generated += gained[:count]
    assert int(state.fault_1) == 0
