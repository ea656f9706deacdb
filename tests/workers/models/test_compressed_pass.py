"""The pass of DeepSeek V4 in segments gives transformers' logits: chunks of any size, decode rows with rejected drafts,
padding beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_deepseek_v4_reference import CHUNKS, KINDS, TOLERANCE, WIDTH, Rows, case, far
from torch import Tensor
from typing_extensions import override

from tests.support.interpreter import interpreted_pytest
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.compressed_kernels import KernelOps
from workers.models.compressed_pass import CompressedPass
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.protocol.plan import BatchLayout


class Chunks(Rows):
    """Rows whose tokens go through the segments as chunks of prompts."""

    @override
    def logits(self, token_T: Tensor, at: CompressedTokens) -> Tensor:
        slots = tuple(place - 1 for place in at.slot)
        prefill = PrefillBatch(at.start, at.count, at.page_RP, slots)
        layout = BatchLayout(1, 0, at.count, (True,) * len(at.count))
        return self.passed(token_T, Batch(layout, at.position_T, torch.zeros_like(token_T), None, prefill))

    def passed(self, token_T: Tensor, batch: Batch) -> Tensor:
        with torch.inference_mode():
            model = self.case.model
            return model.logits(model.forward(token_T, batch, self.cache))


class Steps(Chunks):
    """The same, as decode rows where the rows have equally many tokens and few; the last row is padding then."""

    @override
    def logits(self, token_T: Tensor, at: CompressedTokens) -> Tensor:
        width = at.count[0]
        if set(at.count) != {width} or width > WIDTH:
            return super().logits(token_T, at)
        slot_R = torch.tensor([*(place - 1 for place in at.slot), -1])
        length_R = torch.tensor([*(start + width for start in at.start), 0], dtype=torch.int32)
        page_RP = torch.cat([at.page_RP, torch.zeros_like(at.page_RP[:1])])
        position_T = torch.cat([at.position_T, torch.zeros(width, dtype=torch.int64)])
        token_T = torch.cat([token_T, torch.zeros(width, dtype=torch.int64)])
        decode = DecodeBatch(length_R, page_RP, slot_R=slot_R)
        layout = BatchLayout(width, len(slot_R))
        logit_TB = self.passed(token_T, Batch(layout, position_T, torch.zeros_like(token_T), decode, None))
        assert logit_TB.isfinite().all()
        return logit_TB[:-width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", ["whole", "across every border", "two rows"])
def test_chunks_give_transformers_logits(kind: str, chunks: str) -> None:
    assert far(case(kind), CHUNKS[chunks], kind=Chunks) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "chunks"), [*((kind, "rejected drafts") for kind in KINDS), ("published ratios", "one by one")]
)
def test_decode_rows_give_transformers_logits(kind: str, chunks: str) -> None:
    assert far(case(kind), CHUNKS[chunks], kind=Steps) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("plain", "rejected drafts"), ("published ratios", "two rows"), ("quantized", "across every border")],
)
def test_the_kernels_references_give_transformers_logits(
    kind: str, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = case(kind).model
    monkeypatch.setattr(model, "segments", CompressedPass(model, KernelOps()))
    assert far(case(kind), CHUNKS[chunks], kind=Steps) < TOLERANCE


@pytest.mark.long
def test_the_kernels_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_compressed_pass.py")])
