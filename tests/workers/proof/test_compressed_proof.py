"""The self-test of a DeepSeek V4 passes on what is right, and finds what a step of its own may do wrong with rings of
slots and with entries that stand for several tokens. Steps are eager, as on any CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import compressed
from kernels.compressed import reference
from tests.deepseek_v4_layout import published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.models import compressed_kernels, compressed_pass
from workers.models.attention.compressed_rows import CompressedRows
from workers.models.batch import Batch
from workers.models.deepseek_v4_model import CompressedModel
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import DecodeBuckets, GraphKey
from workers.protocol.report import BucketReport
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


def state_ahead_of_accepted_drafts(patch: pytest.MonkeyPatch) -> None:
    """What a step feeds lies over tokens that the next one needs where drafts are rejected. Kernels would refuse it."""
    honest = CompressedModel.rings
    patch.setattr(compressed, "room", lambda *given: None)
    patch.setattr(CompressedModel, "rings", lambda model, width: honest(model, 1))


def an_entry_visible_a_token_early(patch: pytest.MonkeyPatch) -> None:
    honest = compressed.lay_out_rows

    def lay_out_rows(position_T: Tensor, *others: Any, **options: Any) -> None:
        honest(position_T + 1, *others, **options)

    patch.setattr(compressed, "lay_out_rows", lay_out_rows)
    patch.setattr(reference, "_complete", lambda position_Q, ratio: (position_Q + 2) // ratio)


def no_sink(patch: pytest.MonkeyPatch) -> None:
    honest = compressed_kernels.attend

    def attend(*given: Any, **options: Any) -> None:
        tensors = list(given)
        tensors[5] = torch.full_like(tensors[5], -torch.inf)
        honest(*tensors, **options)

    patch.setattr(compressed_kernels, "attend", attend)


def rows_in_each_others_slots(patch: pytest.MonkeyPatch) -> None:
    honest = compressed_pass.rows_of_pass

    def rows_of_pass(batch: Batch, *others: Any) -> list[CompressedRows]:
        assert batch.decode is not None
        assert batch.decode.slot_R is not None
        decode = dataclasses.replace(batch.decode, slot_R=batch.decode.slot_R.roll(1))
        return honest(dataclasses.replace(batch, decode=decode), *others)

    patch.setattr(compressed_pass, "rows_of_pass", rows_of_pass)


def a_ring_of_a_former_row(patch: pytest.MonkeyPatch) -> None:
    """A row reads a whole window, whatever of it is another's."""
    honest = compressed.rope_store

    def rope_store(q_THD: Tensor, *given: Any, **options: Any) -> None:
        ring_XLD, rows = given[4:]
        whole_R = 0.0 * ring_XLD[rows.slot_R + 1].flatten(1).sum(1)
        honest(q_THD, *given, **options)
        q_THD += whole_R.repeat_interleave(rows.width).view(-1, 1, 1)

    patch.setattr(compressed, "rope_store", rope_store)


def drafts_without_an_entry(patch: pytest.MonkeyPatch) -> None:
    """Entries that drafts complete are not written."""
    honest = compressed.compress

    def first_alone(made_TF: Tensor, *given: Any, **options: Any) -> None:
        *others, rows = given
        first = slice(None, None, rows.width)
        position_T, row_T = rows.position_T[first].contiguous(), rows.row_T[first].contiguous()
        own = dataclasses.replace(rows, position_T=position_T, row_T=row_T, width=1)
        honest(made_TF[first], *others, own, **options)

    patch.setattr(compressed, "compress", first_alone)


def an_entry_selected_that_scores_least(patch: pytest.MonkeyPatch) -> None:
    honest = compressed_kernels.select

    def select(q_TJI: Tensor, weight_TJ: Tensor, *given: Any) -> None:
        honest(q_TJI, -weight_TJ, *given)

    patch.setattr(compressed_kernels, "select", select)


FAULTS = {
    "state ahead of accepted drafts": (state_ahead_of_accepted_drafts, "has no room for drafts"),
    "an entry visible a token early": (an_entry_visible_a_token_early, "away from the plain forward pass"),
    "no sink": (no_sink, "away from the plain forward pass"),
    "rows in each other's slots": (rows_in_each_others_slots, "changed outside the rows' own tokens"),
    "a ring of a former row": (a_ring_of_a_former_row, "away from the plain forward pass"),
    "drafts without an entry": (drafts_without_an_entry, "lacks entries of the step"),
    "the entries that score least": (an_entry_selected_that_scores_least, "of what they choose"),
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
