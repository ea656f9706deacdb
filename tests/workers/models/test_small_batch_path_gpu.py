"""The small-batch path on a GPU: the model takes it, and it agrees with the general path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import ALONE, Paged, load_fp32
from random_model import V2_LITE_HEADS, decode_step, random_model
from tiny_models import VOCAB, random_tokens, write_tiny

from kernels.linear import MOST_STREAMED
from kernels.runtime.dependent import launches_dependently
from kernels.runtime.repeat import nothing_repeated
from workers.families import load_model
from workers.models.batch import Batch
from workers.models.choices import Recorded, Taken
from workers.models.execution_paths import ExecutionPaths
from workers.models.model import Model
from workers.models.small_batch import SmallBatchOps, unsupported
from workers.parallel.mesh import Mesh
from workers.weights.formats.int4_groups import MOST_WITH_INT4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device with programmatic dependent launch",
    ),
]
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


INT4: dict[str, Any] = V3 | {"hidden_size": 512, "moe_intermediate_size": 256}
"""Sizes that Hopper's kernels for few tokens with INT4 weights take."""
V32: dict[str, Any] = V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 128,
}


ATTEMPTS = 8
"""States on which the comparison is tried: rounding may turn a router's choice over and move a whole token, which
happens to a token now and then, where a mistake happens in every state."""


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Every token's relative error."""
    return (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The worst token's relative error; bf16 at every boundary of some twenty products, elsewhere on each side."""
    return float(errors(got, want).max())


def never(self: ExecutionPaths, batch: Batch, dtype: torch.dtype, device: torch.device) -> bool:
    return False


@pytest.mark.parametrize("overrides", [{}, V3, INT4], ids=["v2", "v3", "INT4"])
@pytest.mark.parametrize("rows", [[600], [1], [200, 65], [130, 0, 70, 1], [3000, 100, 64, 63], [100] * 16])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_the_way_agrees_with_that_of_many(
    rows: list[int], width: int, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(rows) * width > (MOST_WITH_INT4 if overrides is INT4 else MOST_STREAMED):
        pytest.skip("not of few tokens")
    lengths = [max(length, width) if length else 0 for length in rows]
    model = random_model(
        V2_LITE_HEADS | overrides, torch.bfloat16, torch.device("cuda"), int4_experts=overrides is INT4
    )
    live_T = (torch.tensor(lengths).repeat_interleave(width) > 0).to("cuda")
    errors = []
    for seed in range(ATTEMPTS):
        token_T, batch, cache = decode_step(model, lengths, width, seed)
        assert isinstance(model.paths.of(batch, torch.bfloat16, token_T.device), SmallBatchOps)
        before = [layer.clone() for layer in cache.layers]
        got_TE = model.forward(token_T, batch, cache)
        written = [layer.clone() for layer in cache.layers]
        assert torch.equal(model.forward(token_T, batch, cache)[live_T], got_TE[live_T])
        for layer, old in zip(cache.layers, before, strict=True):
            layer.copy_(old)
        with monkeypatch.context() as patch:
            patch.setattr(ExecutionPaths, "takes_small_batch", never)
            want_TE = model.forward(token_T, batch, cache)
        error = off(got_TE[live_T], want_TE[live_T])
        touched = torch.zeros(cache.layers[0].shape[0] * 64, dtype=torch.bool, device="cuda")
        touched[batch.cache_slot_T] = True
        live = batch.cache_slot_T[live_T]
        for old, ours, theirs in zip(before, written, cache.layers, strict=True):
            assert torch.equal(old.flatten(0, 1)[~touched], ours.flatten(0, 1)[~touched])
            error = max(error, off(ours.flatten(0, 1)[live], theirs.flatten(0, 1)[live]))
        errors.append(error)
    assert min(errors) < 2e-2, errors


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("heads", [4, 128])
@pytest.mark.parametrize(
    ("rows", "width"), [([1], 1), ([600], 1), ([300, 65], 4), ([400, 0, 70, 1], 2), ([150] * 16, 1)]
)
def test_sparse_attention_agrees_with_that_of_many(
    rows: list[int], width: int, heads: int, fp8_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The general path attends to what the small-batch path has selected: of two positions that score alike, rounding
    takes one or the other."""
    lengths = [max(length, width) if length else 0 for length in rows]
    values = V2_LITE_HEADS | V32 | {"num_attention_heads": heads}
    model = random_model(values, torch.bfloat16, torch.device("cuda"), fp8_cache=fp8_cache)
    live_T = (torch.tensor(lengths).repeat_interleave(width) > 0).to("cuda")
    errors, agreed = [], []
    for seed in range(ATTEMPTS):
        token_T, batch, cache = decode_step(model, lengths, width, seed)
        assert isinstance(model.paths.of(batch, torch.bfloat16, token_T.device), SmallBatchOps)
        before, recorded = [layer.clone() for layer in cache.layers], Recorded()
        with nothing_repeated(), model.paths.choosing(recorded):
            got_TE = model.forward(token_T, batch, cache)
        for layer, old in zip(cache.layers, before, strict=True):
            layer.copy_(old)
        taken = Taken(recorded, layers=1, selecting=2)
        with nothing_repeated(), monkeypatch.context() as patch, model.paths.choosing(taken):
            patch.setattr(ExecutionPaths, "takes_small_batch", never)
            want_TE = model.forward(token_T, batch, cache)
        errors.append(off(got_TE[live_T], want_TE[live_T]))
        agreed.append(taken.agreement)
    # A latent, or a query, that differs in its last bits may be rounded to the next code of FP8.
    assert min(errors) < (4e-2 if fp8_cache else 2e-2), errors
    assert max(agreed) > 0.9, agreed


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_as_exact_as_on_the_general_path(
    seed: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify steps, the draft layer's pass over them, and a step of width 1 behind them, against fp32 on a CPU.

    What one pass rounds the next one finds in the cache, and of a choice between experts rounding makes another token;
    so every token takes all experts, and the bound is what the same roundings cost the layers.
    """
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
    folder = write_tiny(tmp_path, "v3", seed=3, **sizes)
    model = load_model(folder, group=ALONE, dtype=torch.bfloat16, device=torch.device("cuda"), max_positions=512)
    assert unsupported(model.config, Mesh()) == ""
    assert launches_dependently(model.norm_E.device)
    sequences = [random_tokens(151, seed, VOCAB), random_tokens(90, seed + 9, VOCAB)]

    def outputs(model: Model) -> torch.Tensor:
        paged, found = Paged(model, sequences), []
        step = paged.plan([], 1, [(0, 70), (1, 63)])
        paged.draft(step, paged.forward(step))
        for decode, tokens in (([0], width), ([0, 1], width), ([0, 1], 1)):
            step = paged.plan(decode, tokens, [])
            hidden = paged.forward(step)
            found += [*hidden.values(), *paged.draft(step, hidden).values()]
        return torch.cat(found).cpu()

    want_TE = outputs(load_fp32(folder))
    ours_T = errors(outputs(model), want_TE)
    monkeypatch.setattr(ExecutionPaths, "takes_small_batch", never)
    theirs_T = errors(outputs(model), want_TE)
    assert ours_T.max() < 2 * theirs_T.max(), (ours_T, theirs_T)
    assert ours_T.median() < 1.5 * theirs_T.median(), (ours_T, theirs_T)
