"""The plain forward pass of DeepSeek V4 gives transformers' logits, however the tokens come in chunks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import QUANTIZATION, VOCAB, YARN, published_v4, quantized_v4, tiny_v4, write_v4
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from kernels.page import pages_for
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.families.loading import load_model
from workers.models import deepseek_v4
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import (
    CompressedTokens,
    MixedStreams,
    OwnTokens,
    Ring,
)
from workers.parallel.group import Group
from workers.weights.formats import FP8_BLOCKS, MXFP4

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LENGTHS = (200, 90)
WIDTH = 4
SLOTS = 4
QUANTIZED: dict[str, Any] = {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}
KINDS: dict[str, dict[str, Any]] = {
    "quantized": QUANTIZED,
    "plain": {},
    "yarn": {"rope_scaling": YARN, "rms_norm_eps": 1e-3, "hc_eps": 1e-3},
    "published ratios": {"compress_ratios": [128, 128, 4, 128, 4, 0], "compress_rate_hca": 128, "num_hash_layers": 3}
    | {"sliding_window": 16, "hc_mult": 2, "hc_sinkhorn_iters": 1, "o_groups": 4, "index_topk": 40},
}


@dataclass(frozen=True)
class Case:
    """A model, sequences, and transformers' logits after each of their tokens."""

    model: CompressedModel
    tokens: list[Tensor]
    want: list[Tensor]


@cache
def case(kind: str, device: torch.device = CPU) -> Case:
    config, oracle = tiny_v4(seed=1, **KINDS[kind])
    with tempfile.TemporaryDirectory() as folder:
        tensors = published_v4(oracle)
        if "expert_dtype" in config:
            tensors, meant = quantized_v4(tensors)
            plain = {name: value for name, value in config.items() if name not in QUANTIZED}
            oracle = DeepseekV4ForCausalLM.from_pretrained(
                write_v4(Path(folder) / "plain", plain, meant), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        write_v4(Path(folder), config, tensors)
        model = load_model(folder, group=Group(), dtype=torch.float32, device=device, max_positions=256)
    assert isinstance(model, CompressedModel)
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        return Case(model, tokens, [oracle(own[None]).logits[0] for own in tokens])


def poisoned(model: CompressedModel, width: int = WIDTH) -> PagedCache:
    """Caches full of NaN: what is read before it is written shows."""
    cache = PagedCache.allocate(model.caches, 12, model.norm_E.device, rings=model.rings(width), slots=SLOTS)
    for tensor in [*cache.layers, *cache.rings]:
        tensor.fill_(torch.nan)
    return cache


class Rows:
    """Sequences on their way into the caches, in slots and on pages of no order."""

    def __init__(self, given: Case, cache: PagedCache) -> None:
        self.case, self.cache, self.written = given, cache, [0] * len(given.tokens)
        self.slots = [2, 1]
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3)) + 1
        counts = [pages_for(len(own)) for own in given.tokens]
        self.pages = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)
        for row, own in enumerate(order[: sum(counts)].split(counts)):
            self.pages[row, : len(own)] = own.int()

    def feed(self, *given: tuple[int, int], rejected: int = 0) -> list[tuple[int, int, Tensor]]:
        """Feed the next tokens of some rows, as (row, count); of each row the last `rejected` are other tokens, which
        the next chunk repeats as they should be. Row, first position and logits of each."""
        fed, start = [], []
        for row, count in given:
            begin = self.written[row]
            own = self.case.tokens[row][begin : begin + count].clone()
            own[count - rejected :] = (own[count - rejected :] + 1) % VOCAB
            fed.append(own)
            start.append(begin)
            self.written[row] += count - rejected
        at = CompressedTokens(
            tuple(start),
            tuple(count for _, count in given),
            tuple(self.slots[row] for row, _ in given),
            self.pages[torch.tensor([row for row, _ in given])],
        )
        parts = self.logits(torch.cat(fed), at).split([count for _, count in given])
        return [
            (row, begin, part[: count - rejected])
            for (row, count), begin, part in zip(given, start, parts, strict=True)
        ]

    def logits(self, token_T: Tensor, at: CompressedTokens) -> Tensor:
        """Logits after each token, [T, B]."""
        return deepseek_v4.forward(self.case.model, token_T, at, self.case.model.caches_of(self.cache))


def far(given: Case, chunks: Sequence[Any], width: int = WIDTH, kind: type[Rows] = Rows) -> float:
    """Greatest difference to transformers' logits. Each chunk has rows with their tokens, and the rejected ones."""
    rows, worst = kind(given, poisoned(given.model, width)), 0.0
    for chunk, rejected in chunks:
        for row, begin, logit_TB in rows.feed(*chunk, rejected=rejected):
            difference = (logit_TB - given.want[row][begin : begin + len(logit_TB)]).abs().max()
            worst = max(worst, float(difference.nan_to_num(torch.inf)))
    assert rows.written[0] == len(given.tokens[0])
    return worst


def one_row(*counts: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    return [(((0, count),), 0) for count in counts]


CHUNKS: dict[str, list[Any]] = {
    "whole": one_row(200),
    "one by one": one_row(*[1] * 90, 55, *[1] * 30, 25),
    "across every border": one_row(3, 1, 4, 1, 7, 8, 9, 31, 1, 63, 64, 8),
    "in sevens": one_row(*[7] * 28, 4),
    "two rows": [(((0, 60), (1, 1)), 0), (((1, 50), (0, 30)), 0), (((0, 5), (1, 3)), 0), (((1, 36), (0, 105)), 0)],
    "rejected drafts": [(((0, 61), (1, 9)), 0)]
    + [(((0, 4), (1, 4)), rejected) for rejected in (3, 2, 1, 0, 3, 1, 3, 3, 2, 0, 1)] * 2
    + [(((0, 4), (1, 4)), 3)] * 9
    + [(((1, 2), (0, 4)), 0)]
    + one_row(76),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_logits_are_transformers(kind: str, chunks: str) -> None:
    assert far(case(kind), CHUNKS[chunks]) < TOLERANCE


def test_matrices_stay_as_they_are_stored() -> None:
    model = case("quantized").model
    for block in model.blocks:
        attention, mixture = block.attention, block.experts
        assert mixture.gate_up_XFE.format is mixture.down_XEI.format is MXFP4
        kept = [attention.q_down_AE, attention.q_up_QA, attention.kv_DE, attention.out_FD, attention.out_EF]
        kept += [mixture.shared.gate_up_FE, mixture.shared.down_EI]
        if attention.indexer is not None:
            kept.append(attention.indexer.q_FA)
        assert {weight.format for weight in kept} == {FP8_BLOCKS}


def test_transformers_reads_the_names_of_checkpoints(tmp_path: Path) -> None:
    config, model = tiny_v4(seed=2)
    write_v4(tmp_path, config, published_v4(model))
    read = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


def seen_early(own: OwnTokens, ratio: int) -> Tensor:
    return torch.arange(1, own.end // ratio + 1) * ratio <= own.position_T.unsqueeze(1) + 2


def without_sink(score_HTS: Tensor, sink_H: Tensor | None) -> Tensor:
    return score_HTS.softmax(2)


def kept_streams(self: MixedStreams, x_TE: Tensor) -> None:
    self.h_TZE = self.h_TZE + self._add_TZ.unsqueeze(2) * x_TE.unsqueeze(1)


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "a compressed entry is seen a token early": (deepseek_v4, "complete", seen_early, "two rows"),
    "the sink is dropped": (deepseek_v4, "sunk", without_sink, "whole"),
    "the output is not turned back": (deepseek_v4, "back", torch.ones_like, "whole"),
    "streams are not mixed": (MixedStreams, "add", kept_streams, "whole"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, chunks = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    assert far(case("plain"), CHUNKS[chunks]) > 100 * TOLERANCE


@pytest.mark.parametrize("index", [0, 3, 4, 6])
def test_rings_have_room_for_rejected_drafts(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place less would do here, where the newest tokens are read before they are written."""
    right = CompressedModel.rings

    def shorter(self: CompressedModel, width: int) -> list[RingSpec]:
        """One ring alone: of a window, of both states of a layer with an indexer, of that of a layer without."""
        rings = right(self, width)
        rings[index] = replace(rings[index], tokens=rings[index].tokens - 2)
        return rings

    monkeypatch.setattr(CompressedModel, "rings", shorter)
    assert far(case("plain"), CHUNKS["rejected drafts"]) > 100 * TOLERANCE


def test_a_stale_ring_is_seen() -> None:
    given = case("plain")
    rows = Rows(given, poisoned(given.model))
    rows.feed((0, 64))
    for layer in given.model.caches_of(rows.cache):
        layer.window.data_XLC[rows.slots[0]] = 0.0
    ((_, begin, logit_TB),) = rows.feed((0, 8))
    assert float((logit_TB - given.want[0][begin : begin + 8]).abs().max()) > 100 * TOLERANCE


def test_experts_of_the_first_layers_follow_the_table() -> None:
    given = case("plain")
    blocks = given.model.blocks
    assert [block.experts.expert_YK is None for block in blocks] == [False, False, True, True, True]
    token, table = int(given.tokens[0][0]), blocks[0].experts.expert_YK
    assert table is not None
    shifted = table.clone()
    shifted[token] = (shifted[token] + 1) % 8
    given.model.blocks[0] = replace(blocks[0], experts=replace(blocks[0].experts, expert_YK=shifted))
    try:
        assert far(given, CHUNKS["whole"]) > 100 * TOLERANCE
    finally:
        given.model.blocks[0] = blocks[0]


def test_a_ring_keeps_the_newest() -> None:
    ring = Ring(torch.zeros(2, 5, 1))
    own = OwnTokens(slice(0, 12), 3, 12, 1, torch.zeros(1))
    ring.write(own, torch.arange(3.0, 15.0).unsqueeze(1))
    assert ring.read(1, 10, 15).flatten().tolist() == [10, 11, 12, 13, 14]
