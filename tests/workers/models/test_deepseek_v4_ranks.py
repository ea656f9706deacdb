"""Two ranks of a DeepSeek V4 over gloo give the logits that one rank gives, and draft with DSpark what one drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import DSPARK, QUANTIZATION, VOCAB, dspark_v4, published_v4, quantized_v4, tiny_v4, write_v4
from rank_processes import run_ranks
from torch import Tensor

from workers.cache.paged import PagedCache
from workers.drafters.dspark import DsparkDrafter
from workers.families.loading import load_model
from workers.memory.scratch import Scratch
from workers.models import deepseek_v4
from workers.models.batch import Batch, PrefillBatch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import BatchLayout

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    # An expert's share has whole groups of 32, and a rank's rows whole parts of a block.
    "quantized": {"expert_dtype": "fp4", "quantization_config": QUANTIZATION, "moe_intermediate_size": 128}
    | {"head_dim": 64, "qk_rope_head_dim": 16, "o_lora_rank": 64},
}


def logits(folder: Path, group: Group, *, segments: bool = False) -> Tensor:
    """Logits of 150 tokens, fed in three chunks, of the plain forward pass or of that in segments."""
    model = load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=256)
    assert isinstance(model, CompressedModel)
    cache = PagedCache.allocate(model.caches, 4, CPU, rings=model.rings(1), slots=1)
    token_T = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(2))
    found, start = [], 0
    for own_T in token_T.split([61, 3, 86]):
        count, page_RP = len(own_T), torch.tensor([[2, 1, 3]], dtype=torch.int32)
        if segments:
            prefill = PrefillBatch((start,), (count,), page_RP, (0,))
            position_T = torch.arange(start, start + count)
            layout = BatchLayout(1, 0, (count,), (True,))
            batch = Batch(layout, position_T, torch.zeros_like(position_T), None, prefill)
            with torch.inference_mode():
                found.append(model.logits(model.forward(own_T, batch, cache)))
        else:
            at = CompressedTokens((start,), (count,), (1,), page_RP)
            found.append(deepseek_v4.forward(model, own_T, at, model.caches_of(cache)))
        start += count
    return torch.cat(found)


def dspark(folder: Path, group: Group) -> list[Tensor]:
    """What DSpark makes of a chunk's streams and of a block of two rows behind it, and what its Markov head adds."""
    model = load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=256)
    assert isinstance(model, CompressedModel)
    assert isinstance(model.drafter, DsparkDrafter)
    cache = PagedCache.allocate(model.caches, 4, CPU, rings=model.rings(3), slots=2)
    counts, random = (9, 3), torch.Generator().manual_seed(3)
    hidden_TF = torch.randn(sum(counts), model.drafter.join_EF.shape[1], generator=random)
    prefill = PrefillBatch((1, 1), counts, torch.zeros(2, 1, dtype=torch.int32), (1, 0))
    position_T = torch.cat([torch.arange(1, count + 1) for count in counts])
    layout = BatchLayout(1, 0, counts, (True, True))
    batch = Batch(layout, position_T, torch.zeros_like(position_T), None, prefill, first=1)
    token_R, start_R, slot_R = torch.tensor([5, 7]), torch.tensor(counts), torch.tensor([1, 0])
    with torch.inference_mode():
        scratch = Scratch(CPU)
        model.drafter.catch_up(position_T, hidden_TF, batch, cache, scratch)
        sums_and_norms = model.drafter.block(token_R, start_R, slot_R, cache, scratch)
        zeros_RV = torch.zeros(2, model.config.vocab_size)
        added_RV = model.drafter._logits(zeros_RV, model.drafter.markov_VM[token_R], scratch)
    return [*sums_and_norms, added_RV]


def write_dspark(folder: Path) -> None:
    config, model = tiny_v4(seed=4)
    config = {**config, **DSPARK, "compress_ratios": [*config["compress_ratios"], 0, 0, 0]}
    write_v4(folder, config, {**published_v4(model), **dspark_v4(config, seed=8)})


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        found = {(kind, own): logits(folder / kind, group, segments=own) for kind in KINDS for own in (False, True)}
        torch.save((found, dspark(folder / "dspark", group)), folder / f"rank{rank}.pt")
    finally:
        group.close()


@pytest.mark.long
def test_ranks_agree_with_one(tmp_path: Path) -> None:
    for kind, values in KINDS.items():
        config, model = tiny_v4(seed=4, **values)
        tensors = published_v4(model)
        write_v4(tmp_path / kind, config, quantized_v4(tensors)[0] if kind == "quantized" else tensors)
    write_dspark(tmp_path / "dspark")
    run_ranks(rank_main, 2, 2, tmp_path)
    ranks, drafted = zip(*(torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)), strict=True)
    for first, second, alone in zip(*drafted, dspark(tmp_path / "dspark", Group()), strict=True):
        assert torch.equal(first, second), "ranks differ in what they draft"
        torch.testing.assert_close(first, alone, atol=1e-4 * float(alone.abs().max()), rtol=0)
    for kind in KINDS:
        alone = logits(tmp_path / kind, Group())
        assert alone.shape == (150, VOCAB)
        for segments in (False, True):
            found = ranks[0][kind, segments]
            assert torch.equal(found, ranks[1][kind, segments]), "ranks differ"
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=0)
