"""The pass of DeepSeek V4 in segments gives transformers' logits: chunks of any size, decode rows with rejected drafts,
padding beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepseek_v4_reference import CHUNKS, KINDS, TOLERANCE, WIDTH, Rows, case, far
from torch import Tensor
from typing_extensions import override

from kernels.page import PAGE_TOKENS
from tests.support.interpreter import interpreted_pytest
from workers.memory.scratch import Scratch, on_device
from workers.models import compressed_kernels
from workers.models.attention import compressed_rows
from workers.models.attention.compressed_rows import rows_of_pass
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.protocol.plan import BatchLayout

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("most", [1, 7])
def test_tokens_that_attend_in_turn_give_transformers_logits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: most)
    assert far(case("plain"), CHUNKS["two rows"], kind=Chunks) < TOLERANCE


def test_decode_rows_are_laid_out_in_memory_of_the_step() -> None:
    """A graph that is replayed finds them there."""
    model = case("plain").model
    slot_R, length_R = torch.tensor([1, -1]), torch.tensor([9, 0], dtype=torch.int32)
    decode = DecodeBatch(length_R, torch.zeros(2, 3, dtype=torch.int32), slot_R=slot_R)
    batch = Batch(BatchLayout(2, 2), torch.tensor([7, 8, 0, 0]), torch.zeros(4, dtype=torch.int64), decode, None)
    memory, fault_1 = torch.empty(1 << 14, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    (rows,) = rows_of_pass(batch, model.compression, 1e-6, None, fault_1, Scratch(CPU, memory))
    for own in (rows._rows.row_T, *rows._bounds.values()):
        assert own.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert rows._rows.row_T.tolist() == [0, 0, 1, 1]
    assert {ratio: bound_T.tolist() for ratio, bound_T in rows._bounds.items()} == {4: [2, 2, 0, 0]}


@pytest.mark.parametrize("count", [3, 3000])
def test_as_much_is_uploaded_of_chunks_of_any_length(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits for it. Chunks of nobody, as warm-up has them, see no entry."""
    model, uploaded = case("plain").model, []

    def noted(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = on_device(values, dtype, device)
        uploaded.append(tensor.numel())
        return tensor

    monkeypatch.setattr(compressed_rows, "on_device", noted)
    counts, start = (count, 1, 5), (8, 0, 2)
    prefill = PrefillBatch(start, counts, torch.zeros(3, 50, dtype=torch.int32), (2, 0, -1))
    position_T = torch.cat([begin + torch.arange(own) for begin, own in zip(start, counts, strict=True)])
    layout = BatchLayout(1, 0, counts, (True,) * 3)
    batch = Batch(layout, position_T, torch.zeros_like(position_T), None, prefill)
    scratch, fault_1 = Scratch(CPU, torch.empty(1 << 18, dtype=torch.uint8)), torch.zeros(1, dtype=torch.int64)
    (rows,) = rows_of_pass(batch, model.compression, 1e-6, None, fault_1, scratch)
    assert uploaded == [6]
    assert rows._rows.slot_R.tolist() == [2, 0, -1]
    assert rows._rows.row_T.tolist() == [0] * count + [1] + [2] * 5
    assert rows._bounds[4].tolist() == [(8 + place + 1) // 4 for place in range(count)] + [0] * 6


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        *((kind, "rejected drafts") for kind in KINDS),
        ("published ratios", "one by one"),
        ("published ratios", "two rows"),
        ("quantized", "across every border"),
    ],
)
def test_decode_rows_give_transformers_logits(kind: str, chunks: str) -> None:
    assert far(case(kind), CHUNKS[chunks], kind=Steps) < TOLERANCE


def test_the_published_factor_of_index_scores_changes_no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass leaves it out; here it is in scores of float64."""
    given, honest, left_out = case("published ratios"), compressed_kernels.select, 0
    factor = (given.model.compression.index_heads * given.model.compression.index_features) ** -0.5

    def select(q_TJI: Tensor, weight_TJ: Tensor, key_PKI: Tensor, ratio: int, bound_T: Tensor, *rest: Any) -> None:
        nonlocal left_out
        honest(q_TJI, weight_TJ, key_PKI, ratio, bound_T, *rest)
        selected_TS, rows, _ = rest
        for token, bound in enumerate(bound_T.tolist()):
            last_N = torch.arange(1, bound + 1) * ratio - 1
            page_N = rows.page_RP[rows.row_T[token]][last_N // PAGE_TOKENS].long()
            key_NI = key_PKI[page_N, last_N % PAGE_TOKENS // ratio].double()
            score_JN = (q_TJI[token].double() @ key_NI.T).relu()
            score_N = (weight_TJ[token].double() * factor) @ score_JN
            best_N = score_N.topk(min(bound, selected_TS.shape[1])).indices.sort().values
            assert selected_TS[token, : len(best_N)].tolist() == best_N.tolist()
            left_out += bound - len(best_N)

    monkeypatch.setattr(compressed_kernels, "select", select)
    assert far(given, CHUNKS["two rows"], kind=Steps) < TOLERANCE
    assert left_out > 100


@pytest.mark.long
def test_the_kernels_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_compressed_pass.py")])


def test_lists_of_tokens_that_attend_at_once_take_bounded_memory() -> None:
    """As many tokens as lists allow, never fewer than fill a GPU; with a million tokens of context, too."""
    for ratio, pages, selected, wanted in ((0, 128, 0, 8192), (4, 16384, 512, 8192), (128, 16384, 0, 2016)):
        entries = compressed_kernels.listed_entries(128, ratio, pages, selected)
        assert compressed_rows.attending(entries) == wanted
        assert wanted * entries <= 1 << 24
    assert compressed_rows.attending(1 << 20) == 1024
