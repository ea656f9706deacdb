"""The self-test of a DeepSeek V4 passes on what is right, and finds what a step of its own may do wrong with rings of
slots and with entries that stand for several tokens. Steps are eager, as on any CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.deepseek_v4_layout import published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.models import deepseek_v4, deepseek_v4_pass
from workers.models.batch import Batch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens, OwnTokens, Ring
from workers.models.deepseek_v4_pass import CompressedPass
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import GraphKey
from workers.protocol.report import BucketReport
from workers.step.buckets import DecodeBuckets
from workers.step.decode import DecodeStep
from workers.step.parts import StepOutput, StepParts

KEY = GraphKey(4, 4, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published ratios: most pages leave the place of an entry for 128 tokens empty."""
    layers: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "compress_rate_hca": 128}
    config, model = tiny_v4(seed=1, num_hash_layers=1, index_topk=40, **layers)
    return write_v4(tmp_path_factory.mktemp("v4"), config, published_v4(model))


def parts_of(folder: Path, width: int = 4) -> StepParts:
    settings: dict[str, Any] = {"max_rows": 6, "token_budget": 48, "cache_pages": 40, "max_context": 300}
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        selftest=False,
        width=width,
        drafter="ngram" if width > 1 else "none",
        **settings,
    )
    return InlineEngine(config).runner.parts


def found(parts: StepParts, replay: Callable[[DecodeStep], StepOutput] = DecodeStep.run) -> list[str]:
    """What the self-test says of a bucket, in two states."""
    step = DecodeStep(parts, KEY, Scratch(parts.device))
    reports: list[BucketReport] = []
    for seed in range(2):
        reports += SelfTest(parts, seed).run([Candidate(step, lambda: replay(step))])
    return [problem for report in reports for problem in report.problems]


@pytest.mark.parametrize("width", [1, 4])
def test_every_bucket_passes(width: int, folder: Path) -> None:
    parts = parts_of(folder, width)
    steps = [DecodeStep(parts, key, Scratch(parts.device)) for key in DecodeBuckets(6, width)]
    reports = SelfTest(parts).run([Candidate(step, step.run) for step in steps])
    assert [report.problems for report in reports] == [()] * len(reports)
    assert max(report.logits_error for report in reports) < 1e-5
    if width > 1:
        assert sum(report.accepted for report in reports) > 5
    assert not any(tensor.any() for tensor in [*parts.cache.layers, *parts.cache.rings])


@contextmanager
def mistaken(name: str, wrong: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek_v4, name, wrong)
        yield


def in_steps(patch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    """Let a part of the forward pass be another one in steps alone, as a kernel's mistake would be."""
    honest = CompressedPass._hidden

    def hidden(own: CompressedPass, *given: Any) -> Tensor:
        with mistaken(name, wrong):
            return honest(own, *given)

    patch.setattr(CompressedPass, "_hidden", hidden)


def state_ahead_of_accepted_drafts(patch: pytest.MonkeyPatch) -> None:
    """What a step feeds lies over tokens that the next one needs where drafts are rejected."""
    honest = CompressedModel.rings
    patch.setattr(CompressedModel, "rings", lambda model, width: honest(model, 1))


def an_entry_visible_a_token_early(patch: pytest.MonkeyPatch) -> None:
    def early(own: OwnTokens, ratio: int) -> Tensor:
        return torch.arange(1, own.end // ratio + 1) * ratio <= own.position_T.unsqueeze(1) + 2

    in_steps(patch, "complete", early)


def no_sink(patch: pytest.MonkeyPatch) -> None:
    in_steps(patch, "sunk", lambda score_HTS, sink_H: score_HTS.softmax(2))


def rows_in_each_others_slots(patch: pytest.MonkeyPatch) -> None:
    honest = deepseek_v4_pass.rows_of

    def rows_of(batch: Batch) -> CompressedTokens:
        at = honest(batch)
        return dataclasses.replace(at, slot=at.slot[1:] + at.slot[:1])

    patch.setattr(deepseek_v4_pass, "rows_of", rows_of)


def a_ring_of_a_former_row(patch: pytest.MonkeyPatch) -> None:
    """A row reads a whole window, whatever of it is another's."""
    honest = Ring.read

    def stale(ring: Ring, slot: int, first: int, end: int) -> Tensor:
        length = ring.data_XLC.shape[1]
        return (
            honest(ring, slot, first, end)
            + 0.0 * ring.data_XLC[slot, torch.arange(end, end + length // 8) % length].sum()
        )

    patch.setattr(Ring, "read", stale)


def drafts_without_an_entry(patch: pytest.MonkeyPatch) -> None:
    """Entries that drafts complete are not written."""
    honest = deepseek_v4.compress

    def first_alone(x_TE: Tensor, own: OwnTokens, *others: Any) -> None:
        honest(x_TE[:1], dataclasses.replace(own, count=1), *others)

    in_steps(patch, "compress", first_alone)


FAULTS = {
    "state ahead of accepted drafts": (state_ahead_of_accepted_drafts, "has no room for drafts"),
    "an entry visible a token early": (an_entry_visible_a_token_early, "away from the plain forward pass"),
    "no sink": (no_sink, "away from the plain forward pass"),
    "rows in each other's slots": (rows_in_each_others_slots, "changed outside the rows' own tokens"),
    "a ring of a former row": (a_ring_of_a_former_row, "away from the plain forward pass"),
    "drafts without an entry": (drafts_without_an_entry, "lacks entries of the step"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, said = FAULTS[name]
    plant(monkeypatch)
    problems = found(parts_of(folder))
    assert any(said in problem for problem in problems), problems


def test_one_bit_of_a_ring_is_found(folder: Path) -> None:
    """Of a token that the row writes, of one that it may not, and of a slot that nobody has."""
    parts = parts_of(folder)
    ring_XLC = parts.cache.rings[2]

    def replay(step: DecodeStep, where: str) -> StepOutput:
        slot = int(step.slot_R[0])
        position = int(parts.state.tensors.length_S[slot])
        output = step.run()
        place = slot + 1
        if where == "nobody's":
            place = 1 + next(slot for slot in range(parts.state.slots) if slot not in step.slot_R.tolist())
        offset = position if where == "own" else position - 1
        ring_XLC.view(torch.int32)[place, offset % ring_XLC.shape[1], 0] ^= 1
        return output

    assert "ring 2 differs" in found(parts, lambda step: replay(step, "own"))
    for where in ("others", "nobody's"):
        assert "ring 2 changed outside the rows' own tokens" in found(parts, lambda step, w=where: replay(step, w))
