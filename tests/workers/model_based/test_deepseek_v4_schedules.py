"""A DeepSeek V4 under random schedules, against the reference that takes one request at a time: rings of slots that
come and go, pages that are shared where a snapshot of rings is beside them, rejected drafts, preemptions and rows that
are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from typing_extensions import override

from tests.deepseek_v4_layout import DSPARK, dspark_v4, mtp_v4, published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from tests.workers.model_based.drive import Bench
from tests.workers.model_based.schedules import MAX_CONTEXT, POISON, VOCAB, Schedule
from tests.workers.model_based.soak import soak
from workers.cache.snapshots import RingSnapshots
from workers.models import compressed_pass
from workers.models.attention.compressed_rows import CompressedRows
from workers.models.batch import Batch
from workers.models.deepseek_v4_model import CompressedModel
from workers.scheduler.snapshots import Snapshots


class CompressedBench(Bench):
    """A tiny model with layers of every kind. Its indexers select all entries: which of nearly equal ones they would
    select, rounding decides."""

    @override
    def _written(self, folder: Path, kind: str, overrides: dict[str, Any]) -> tuple[Path, dict[str, Path]]:
        layers: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
        config, model = tiny_v4(seed=3, vocab_size=VOCAB, index_topk=MAX_CONTEXT, **layers)
        declared = self._declared(config)
        tensors = {**published_v4(model), **self._drafter(declared)}
        tensors["embed.weight"][POISON] = torch.nan
        return write_v4(folder, declared, tensors), {}

    def _declared(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config.json that declares the layers that draft."""
        return {**config, "num_nextn_predict_layers": 1}

    def _drafter(self, config: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of these layers."""
        return mtp_v4(config, seed=4)[0]

    @override
    def engine(self, schedule: Schedule) -> InlineEngine:
        """Drafts are looked up in the prompt, or made by a layer. There are so few snapshots that they make room for
        each other."""
        others = ("draft_model", "drafter", "host_pages", "disk_pages", "invariant")
        settings = {name: value for name, value in schedule.engine.items() if name not in others}
        return super().engine(
            replace(
                schedule, engine={**settings, "drafter": ("ngram", "mtp")[schedule.seed % 2], "prefix_snapshots": 2}
            )
        )


class BlockBench(CompressedBench):
    """The same, whose layers draft blocks. Many drafts are left out as unlikely."""

    @override
    def _declared(self, config: dict[str, Any]) -> dict[str, Any]:
        ratios, read = [*config["compress_ratios"], 0, 0, 0], {"dspark_target_layer_ids": [0, 2]}
        block = {"dspark_block_size": 7, "dspark_noise_token_id": 0}
        return {**config, **DSPARK, **read, **block, "compress_ratios": ratios}

    @override
    def _drafter(self, config: dict[str, Any]) -> dict[str, Tensor]:
        return dspark_v4(config, seed=4)

    @override
    def engine(self, schedule: Schedule) -> InlineEngine:
        confidence = {"least_draft_confidence": (0.0, 0.2, 0.5)[schedule.seed % 3]}
        return super().engine(replace(schedule, engine={**schedule.engine, **confidence}))


@pytest.fixture
def bench(tmp_path: Path) -> CompressedBench:
    return CompressedBench(tmp_path / "v4")


@pytest.mark.parametrize(
    ("steps", "seed"),
    [pytest.param(700, 0, marks=pytest.mark.long), pytest.param(4000, 50_000, marks=pytest.mark.soak)],
)
def test_nothing_differs_from_the_reference(steps: int, seed: int, bench: CompressedBench) -> None:
    outcome = soak(bench, steps, seed, behind=None)  # prompts that others begin with, in every third
    assert not outcome.problem
    seen = outcome.seen
    assert seen["drafts offered"] > seen["drafts accepted"] > 10
    assert min(seen["preemptions"], seen["bad rows"], seen["with a grammar"], seen["prompts scored"]) > 0
    assert seen["cached tokens"] > 500
    assert seen["near ties"] < seen["tokens"] / 100


@pytest.mark.parametrize(
    ("steps", "seed"),
    [pytest.param(250, 3, marks=pytest.mark.long), pytest.param(4000, 60_000, marks=pytest.mark.soak)],
)
def test_blocks_of_drafts_change_nothing(steps: int, seed: int, tmp_path: Path) -> None:
    outcome = soak(BlockBench(tmp_path / "v4"), steps, seed, behind=True if steps < 1000 else None)
    assert not outcome.problem
    seen = outcome.seen
    assert seen["drafts offered"] > seen["drafts accepted"] > 3
    assert min(seen["with a grammar"], seen["bad rows"], seen["prompts scored"], seen["cached tokens"]) > 0


def all_in_one_slot(patch: pytest.MonkeyPatch) -> None:
    """Rows read each other's rings."""
    honest = compressed_pass.rows_of_pass

    def rows_of_pass(batch: Batch, *others: Any) -> list[CompressedRows]:
        decode, prefill = batch.decode, batch.prefill
        if decode is not None and decode.slot_R is not None:
            decode = dataclasses.replace(decode, slot_R=torch.zeros_like(decode.slot_R))
        if prefill is not None:
            prefill = dataclasses.replace(prefill, slot=(0,) * len(prefill.slot))
        return honest(dataclasses.replace(batch, decode=decode, prefill=prefill), *others)

    patch.setattr(compressed_pass, "rows_of_pass", rows_of_pass)


def rings_without_room_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts lie over what the next token needs."""
    honest = CompressedModel.rings
    patch.setattr(CompressedModel, "rings", lambda model, width: honest(model, 1))


def a_window_stale_behind_a_hit(patch: pytest.MonkeyPatch) -> None:
    """A row begins behind shared pages with the rings that its slot had."""
    patch.setattr(RingSnapshots, "restore", lambda *given: None)


def a_snapshot_behind_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """Rings are copied when the row has fed more tokens, for which they have no room beside what is wanted."""
    honest = RingSnapshots.save

    def save(own: RingSnapshots, rings: list[Tensor], slot: int, snapshot: int, tokens: int) -> None:
        fed = [ring_XLC.clone() for ring_XLC in rings]
        for ring_XLC in fed:
            length = ring_XLC.shape[1]
            ring_XLC[slot + 1, torch.arange(tokens, tokens + length - 3) % length] = 0.5
        honest(own, fed, slot, snapshot, tokens)

    patch.setattr(RingSnapshots, "save", save)


def a_snapshot_of_another_prompt(patch: pytest.MonkeyPatch) -> None:
    """Snapshots of entries that are forgotten stay where they are, and the next ones are written over them."""
    patch.setattr(Snapshots, "drop", lambda own, snapshot: own._free.append(snapshot.number))


FAULTS = {
    all_in_one_slot: 1,
    rings_without_room_for_drafts: 0,
    a_window_stale_behind_a_hit: 0,
    a_snapshot_behind_a_rejected_draft: 0,
    a_snapshot_of_another_prompt: 2,
}
"""What is planted, and the seed of the first schedule."""


@pytest.mark.long
@pytest.mark.parametrize("plant", FAULTS)
def test_what_is_planted_is_found(plant: Any, bench: CompressedBench, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert soak(bench, 1000, FAULTS[plant], behind=True).problem
