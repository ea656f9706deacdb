"""A DeepSeek V4 under random schedules, against the reference that takes one request at a time: rings of slots that
come and go, pages that nobody shares, rejected drafts and rows that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from typing_extensions import override

from tests.deepseek_v4_layout import published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from tests.workers.model_based.drive import Bench
from tests.workers.model_based.schedules import MAX_CONTEXT, POISON, VOCAB, Schedule
from tests.workers.model_based.soak import soak
from workers.models import deepseek_v4_pass
from workers.models.batch import Batch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.protocol.messages import Ready


class CompressedBench(Bench):
    """A tiny model with layers of every kind. Its indexers select all entries: which of nearly equal ones they would
    select, rounding decides."""

    @override
    def _written(self, folder: Path, kind: str, overrides: dict[str, Any]) -> tuple[Path, dict[str, Path]]:
        layers: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
        config, model = tiny_v4(seed=3, vocab_size=VOCAB, index_topk=MAX_CONTEXT, **layers)
        tensors = published_v4(model)
        tensors["embed.weight"][POISON] = torch.nan
        return write_v4(folder, config, tensors), {}

    @override
    def engine(self, schedule: Schedule) -> InlineEngine:
        """Drafts are looked up in the prompt: there is no other drafter yet."""
        others = ("draft_model", "drafter", "host_pages", "disk_pages", "invariant")
        settings = {name: value for name, value in schedule.engine.items() if name not in others}
        return super().engine(replace(schedule, engine={**settings, "drafter": "ngram"}))


@pytest.fixture
def bench(tmp_path: Path) -> CompressedBench:
    return CompressedBench(tmp_path / "v4")


@pytest.mark.parametrize(
    ("steps", "seed"),
    [pytest.param(1000, 0, marks=pytest.mark.long), pytest.param(4000, 50_000, marks=pytest.mark.soak)],
)
def test_nothing_differs_from_the_reference(steps: int, seed: int, bench: CompressedBench) -> None:
    outcome = soak(bench, steps, seed)
    assert not outcome.problem
    seen = outcome.seen
    assert seen["drafts offered"] > seen["drafts accepted"] > 10
    assert min(seen["preemptions"], seen["bad rows"], seen["with a grammar"], seen["prompts scored"]) > 0
    assert seen["cached tokens"] == 0
    assert seen["near ties"] < seen["tokens"] / 100


def all_in_one_slot(patch: pytest.MonkeyPatch) -> None:
    """Rows read each other's rings."""
    honest = deepseek_v4_pass.rows_of

    def rows_of(batch: Batch) -> CompressedTokens:
        at = honest(batch)
        return dataclasses.replace(at, slot=(1,) * len(at.slot))

    patch.setattr(deepseek_v4_pass, "rows_of", rows_of)


def rings_without_room_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts lie over what the next token needs."""
    honest = CompressedModel.rings
    patch.setattr(CompressedModel, "rings", lambda model, width: honest(model, 1))


def prompts_share_pages(patch: pytest.MonkeyPatch) -> None:
    """A row begins behind pages whose window and state it does not have."""
    patch.setattr(Ready, "shares_prefixes", True)


@pytest.mark.long
@pytest.mark.parametrize("plant", [all_in_one_slot, rings_without_room_for_drafts, prompts_share_pages])
def test_what_is_planted_is_found(plant: Any, bench: CompressedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert soak(bench, 300).problem
