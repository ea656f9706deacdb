"""Mistakes that an engine could have, planted so that the model-based test can show that it finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels.sampling import tables as column
from workers.grammar.matcher import RequestMatcher
from workers.grammar.rows import ConstrainedRows
from workers.protocol.plan import Admission
from workers.scheduler import scheduler as scheduling
from workers.step import decode, mixed
from workers.step.masks import StepMasks
from workers.step.mixed import MixedStep
from workers.step.parts import SlotState
from workers.step.sampling import SamplingState

Plant = Callable[[pytest.MonkeyPatch], None]


def one_draft_too_many(patch: pytest.MonkeyPatch) -> None:
    """Take one draft more for accepted, where some drafts are accepted but not all."""
    for module in (decode, mixed):
        honest = module.accept_drafts

        def generous(target: Any, draft: Any, accepted: Any, *rest: Any, honest: Any = honest, **options: Any) -> None:
            honest(target, draft, accepted, *rest, **options)
            accepted.add_(((accepted > 0) & (accepted < draft.shape[1])).to(accepted.dtype))

        patch.setattr(module, "accept_drafts", generous)


def stale_length_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """A request that comes back keeps, on the device, the length that its slot's last tenant had."""
    admit, advance = SlotState.admit, MixedStep._advance
    stale: dict[int, int] = {}

    def admitting(state: SlotState, admissions: Any) -> None:
        for admission in admissions:
            stale.pop(admission.slot, None)
            length = int(state.tensors.length_S[admission.slot])
            if admission.generated and length:
                stale[admission.slot] = length
        admit(state, admissions)

    def advancing(step: MixedStep, rows: Any, *rest: Any) -> Any:
        newest_R = advance(step, rows, *rest)
        for slot in rows.slot_R[rows.layout.decode_rows :].tolist():
            if slot in stale:
                step._parts.state.tensors.length_S[slot] = stale.pop(slot)
        return newest_R

    patch.setattr(SlotState, "admit", admitting)
    patch.setattr(MixedStep, "_advance", advancing)


def penalty_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Count twice what a step generated."""
    honest = SamplingState.commit

    def commit(state: SamplingState, *args: Any, **options: Any) -> None:
        before = state.tables.seen_SV.clone()
        honest(state, *args, **options)
        state.tables.seen_SV.add_(state.tables.seen_SV - before)

    patch.setattr(SamplingState, "commit", commit)


def drafts_not_counted_in_the_window(patch: pytest.MonkeyPatch) -> None:
    """Penalties and min_tokens of a window's later places do not see the drafts before them."""
    honest = SamplingState.target_tokens

    def target_tokens(state: SamplingState, logits: Any, layout: Any, slot: Any, fed: Any, *rest: Any, **o: Any) -> Any:
        return honest(state, logits, layout, slot, torch.full_like(fed, -1), *rest, **o)

    patch.setattr(SamplingState, "target_tokens", target_tokens)


def min_tokens_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """Do not count what was generated before a preemption."""
    honest = scheduling._admission

    def admission(*what: Any, **options: Any) -> Admission:
        return replace(honest(*what, **options), generated=0)

    patch.setattr(scheduling, "_admission", admission)


def a_seed_for_all(patch: pytest.MonkeyPatch) -> None:
    """The lower half of a seed alone makes the noise."""
    honest = SamplingState.admit

    def admit(state: SamplingState, admissions: Any) -> None:
        honest(state, admissions)
        state.tables.whole_SI[:, column.SEED] &= 0xFFFFFFFF

    patch.setattr(SamplingState, "admit", admit)


def masks_of_the_first_place(patch: pytest.MonkeyPatch) -> None:
    """The mask of a row's first place serves its drafts, too."""
    honest = ConstrainedRows.fill

    def fill(rows: Any, layout: Any, slots: Any, constrained: Any, masks: StepMasks) -> Any:
        dead_ends = honest(rows, layout, slots, constrained, masks)
        for row in range(layout.decode_rows):
            first, *others = layout.logits_rows_of(row)
            masks._index_N[others] = masks._index_N[first]
        return dead_ends

    patch.setattr(ConstrainedRows, "fill", fill)


def masks_without_min_tokens(patch: pytest.MonkeyPatch) -> None:
    """A text may end as soon as its grammar has it complete."""
    honest = RequestMatcher.__init__

    def init(matcher: RequestMatcher, compiled: Any, sampling: Any, *rest: Any) -> None:
        honest(matcher, compiled, replace(sampling, min_tokens=0), *rest)

    patch.setattr(RequestMatcher, "__init__", init)


PLANTED: dict[str, tuple[Plant, int]] = {
    "acceptance one too long": (one_draft_too_many, 0),
    "a stale length after preemption": (stale_length_after_preemption, 1),
    "a penalty counted twice": (penalty_counted_twice, 0),
    "drafts not counted inside a window": (drafts_not_counted_in_the_window, 14),
    "min_tokens counted anew after preemption": (min_tokens_begin_anew, 14),
    "noise of half a seed": (a_seed_for_all, 0),
    "a mask for all of a window": (masks_of_the_first_place, 0),
    "masks without min_tokens": (masks_without_min_tokens, 0),
}
"""Each with the first schedule that is tried. What takes a preemption at a certain moment shows in few schedules."""
FOUND_WITHIN = 800
"""Steps from there on."""
