"""Runs recorded step plans again, on one rank, and compares what comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from typing_extensions import override

from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.protocol.plan import StepPlan, StepResult
from workers.rank.device import pick_device
from workers.rank.rank import Rank
from workers.recording.file import Header, Recording


@dataclass(frozen=True)
class Difference:
    """Difference between a recorded step and its replay."""

    step: int
    row: str
    """The row of the step, in words."""
    recorded: tuple[int, ...]
    replayed: tuple[int, ...]

    @override
    def __str__(self) -> str:
        return f"step {self.step}, {self.row}: recorded {_named(self.recorded)}, replayed {_named(self.replayed)}"


def _named(tokens: tuple[int, ...]) -> str:
    return ", ".join(map(str, tokens)) if tokens else "a bad row (logits that are no finite numbers)"


def replay_config(header: Header, model: str | None = None, device: str | None = None) -> EngineConfig:
    """Settings of a rank that can run the plans: those of the replica, on one rank, with its pages. pydantic's
    ValidationError where they are none here."""
    changes: dict[str, Any] = {
        "model": model or header.engine.get("model"),
        "device": device or header.engine.get("device", "auto"),
        "tensor_parallel": 1,
        "cache_shards": 1,
        "cache_pages": header.pages,
        "max_context": header.max_context,
        "selftest": False,
        "record_plans": None,
        "record_prompts": False,
    }
    return EngineConfig(**{**header.engine, **changes})


class Replay:
    """A rank that runs the plans of a recording, one after the other."""

    def __init__(self, config: EngineConfig, recording: Recording) -> None:
        """Loads the model. Raises as `Rank` does."""
        self.recording = recording
        self.rank = Rank(config, Group(), pick_device(config, None))
        self._lengths: dict[int, int] = {}
        self._without_grammar: set[int] = set()

    def run(self) -> Iterator[Difference | None]:
        """Run the steps again, and yield the difference of each, None where there is none. After a difference in
        tokens, rows have other lengths than the plans were made for, so nobody should go on. Raises the errors that a
        step raises."""
        for step in self.recording.steps:
            plan = self._without_masks(step.plan)
            self._set_lengths(plan)
            result = self.rank.runner.execute(plan)
            yield None if step.result is None else self._compare(step.plan, step.result, result)
            if step.result is not None:
                self._follow(step.plan, step.result)

    def close(self) -> None:
        """Give graphs back."""
        self.rank.runner.close()

    def _without_masks(self, plan: StepPlan) -> StepPlan:
        """Grammars are not recorded: their rows take any token, and what those are is not compared."""
        for admission in plan.admissions:
            (self._without_grammar.add if admission.grammar else self._without_grammar.discard)(admission.slot)
        admissions = tuple([replace(admission, grammar=0) for admission in plan.admissions])
        return replace(plan, admissions=admissions, constrained=())

    def _comparable(self, slot: int) -> bool:
        return self.recording.header.prompts and slot not in self._without_grammar

    def _set_lengths(self, plan: StepPlan) -> None:
        """Other tokens have other drafts accepted. So every row gets the length that it had in the recording, which is
        what its pages were granted for: all entries up to there have been written, if only by drafts that fell."""
        length_S = self.rank.runner.parts.state.tensors.length_S
        known = [slot for slot in plan.decode_slots if slot in self._lengths and not self._comparable(slot)]
        if known:
            lengths = [self._lengths[slot] for slot in known]
            length_S[torch.tensor(known, device=length_S.device)] = torch.tensor(
                lengths, dtype=length_S.dtype, device=length_S.device
            )

    def _follow(self, plan: StepPlan, recorded: StepResult) -> None:
        for slot, tokens in zip(plan.decode_slots, recorded.tokens, strict=False):
            if slot in self._lengths:
                self._lengths[slot] += len(tokens)
        for row in plan.prefill:
            self._lengths.pop(row.slot, None)
            if row.final:
                self._lengths[row.slot] = row.start + len(row.tokens)

    def _compare(self, plan: StepPlan, recorded: StepResult, replayed: StepResult) -> Difference | None:
        rows = [(slot, f"decode row in slot {slot}") for slot in plan.decode_slots]
        rows += [(row.slot, f"end of a prompt in slot {row.slot}") for row in plan.prefill if row.final]
        for index, ((slot, row), before, now) in enumerate(zip(rows, recorded.tokens, replayed.tokens, strict=True)):
            same = (
                before == now
                if self._comparable(slot)
                else (index in recorded.nonfinite) == (index in replayed.nonfinite)
            )
            if not same:
                return Difference(plan.step, row, before, now)
        return None
