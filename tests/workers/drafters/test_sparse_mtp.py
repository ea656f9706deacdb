"""The draft layer of models with sparse attention, against a layer of transformers. That drafts with no such layer
itself, so the few lines around the layer are here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import load_oracle
from paged import Paged, load_fp32
from safetensors.torch import load_file
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.models.attention import sparse_rows
from workers.models.attention.indexer import Indexer
from workers.protocol.plan import BatchLayout, SamplingParams
from workers.scheduler.sequence import Phase
from workers.step.decode import DecodeStep

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {"cache_pages": 40, "max_context": 300, "selftest": True}


class OneStream:
    """A layer of a Hy4 with one residual stream, as its layer that drafts is."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.self_attn = layer, layer.self_attn

    def __call__(self, x: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        added, _, selected = self.self_attn(hidden_states=self.layer.input_layernorm(x), **how)
        x = x + added
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x)), selected


@torch.no_grad()
def oracle_drafts(folder: Path, tokens: list[int], more: int = 0) -> Tensor:
    """Draft logits over a sequence: row i is made of the hidden state of token i and of token i + 1. Behind them those
    of `more` greedy drafts, which are made of each other, and attend to what the last token of the sequence does."""
    oracle = load_oracle(folder)
    layers, eps = oracle.config.num_hidden_layers, oracle.config.rms_norm_eps
    deeper = Path(shutil.copytree(folder, f"{folder}-deeper", dirs_exist_ok=True))
    config = json.loads((deeper / "config.json").read_text()) | {"num_hidden_layers": layers + 1}
    for name, kind in ("mlp_layer_types", "sparse"), ("layer_types", "indexed_attention"), ("indexer_types", "full"):
        if name in config:
            config[name] = [*config[name], kind]
    (deeper / "config.json").write_text(json.dumps(config))
    layer, tensors = load_oracle(deeper).model.layers[layers], load_file(folder / "model.safetensors")
    prefix, last = f"model.layers.{layers}.", "shared_head.norm"
    if config["model_type"] == "hy_v4":
        prefix, last, layer = "model.mtp_layers.0.", "final_layernorm", OneStream(layer)

    def norm(x_TE: Tensor, name: str) -> Tensor:
        weight_E = tensors[f"{prefix}{name}.weight"]
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)

    ids = torch.tensor([tokens])
    hidden = oracle.model(ids[:, :-1]).last_hidden_state
    logits, selected, indexer = torch.empty(0), torch.empty(0), layer.self_attn.indexer
    for draft in range(more + 1):
        both = torch.cat([norm(oracle.model.embed_tokens(ids[:, 1:]), "enorm"), norm(hidden, "hnorm")], -1)
        x = both @ tensors[f"{prefix}eh_proj.weight"].t()
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        position = torch.arange(1, count + 1)[None]
        how = {"position_ids": position, "position_embeddings": oracle.model.rotary_emb(x, position)}
        if draft:
            layer.self_attn.indexer = None
            selected = torch.cat([selected, selected[:, -1:]], 1)
            how["prev_topk_indices"] = selected
        found = layer(x, attention_mask=mask, **how)
        x, *rest = found if isinstance(found, tuple) else (found,)
        layer.self_attn.indexer = indexer
        if not draft and more:
            [selected] = rest
        left = norm(x, last)
        logits = oracle.lm_head(left)[0]
        hidden = torch.cat([hidden, left[:, -1:]], 1)
        ids = torch.cat([ids, logits[-1:].argmax(-1, keepdim=True)], 1)
    return logits


@pytest.mark.parametrize("kind", ["v32", "glm5", "hyv4"])
@pytest.mark.parametrize(
    "feeds",
    [pytest.param([(0, 130)], marks=pytest.mark.long), [(0, 9), (0, 30), (4, 4), (2, 2), (0, 60), (4, 4), (1, 1)]],
)
def test_draft_logits(kind: str, feeds: list[tuple[int, int]], tmp_path: Path) -> None:
    """Prompts in chunks, whose width is 0 here, and verified tokens in decode rows, far beyond what is attended to."""
    folder, tokens = write_tiny(tmp_path, kind, seed=1), random_tokens(131, 5, VOCAB)
    model = load_fp32(folder)
    assert model.drafter is not None
    paged, parts = Paged(model, [tokens]), []
    for width, count in feeds:
        step = paged.plan([0], width, []) if width else paged.plan([], 1, [(0, count)])
        parts.append(model.drafter.logits(paged.draft(step, paged.forward(step))[0]))
    got = torch.cat(parts)
    torch.testing.assert_close(got, oracle_drafts(folder, tokens)[: len(got)], atol=TOLERANCE, rtol=0)
    # Entry 0 of the draft layer's caches does not exist, and is never read: it is still NaN.
    first, *others = [layer[paged.rows[0].pages[0]] for layer in paged.cache.layers[len(model.cache) :]]
    assert bool(first[0].isnan().all())
    assert len(others) == 1
    assert bool(others[0][0].isnan().all())
    assert bool(got.isfinite().all())


@pytest.mark.long
@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("chunk", [pytest.param(90, marks=pytest.mark.long), 31])
def test_all_drafts_attend_to_what_the_first_does(shares: bool, chunk: int, tmp_path: Path) -> None:
    """All drafts do so where the config says so, in decode steps and in mixed ones; transformers lets layers take what
    others select."""
    folder, prompt = write_tiny(tmp_path, "glm5", seed=1), random_tokens(70, 5, VOCAB)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index_share_for_mtp_iteration": shares}))
    run = InlineEngine(EngineConfig(model=str(folder), device="cpu", width=4, max_rows=3, token_budget=chunk, **SIZES))
    run.add("one", prompt, SamplingParams(6, temperature=0.0))
    run.add("other", random_tokens(40, 6, VOCAB), SamplingParams(8, temperature=0.0))
    kinds, equal = set(), []
    while run.step():
        plan = run.plans[run.runner._steps - 1]
        for sequence in run.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal and plan.drafts == 3:
                tokens = list(sequence.tokens.span(0, sequence.tokens.length))
                drafts = run.runner.parts.state.tensors.draft_SK[sequence.slot].tolist()
                want = oracle_drafts(folder, tokens, 2)[-3:].argmax(-1).tolist()
                assert drafts[0] == want[0]
                equal.append(drafts == want)
                kinds.add(bool(plan.prefill))
    assert kinds == {True, False}
    assert len(equal) > 8
    assert all(equal) is shares  # of their own choice other drafts would come


def test_drafts_that_share_launch_no_indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the indexer's products nor its kernels are launched."""
    folder, calls = write_tiny(tmp_path, "glm5", seed=1), []
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index_share_for_mtp_iteration": True}))
    run = InlineEngine(EngineConfig(model=str(folder), device="cpu", width=4, max_rows=3, token_budget=48, **SIZES))
    run.generate([random_tokens(40, 6, VOCAB)], SamplingParams(2, temperature=0.0))
    parts = run.runner.parts
    step = DecodeStep(parts, BatchLayout(4, 2).graph_key(2, 3), Scratch(torch.device("cpu")))
    honest, select = Indexer.project, sparse_rows.select_positions
    monkeypatch.setattr(Indexer, "project", lambda *args: (calls.append("project"), honest(*args)))
    monkeypatch.setattr(
        sparse_rows, "select_positions", lambda *args, **more: (calls.append("select"), select(*args, **more))
    )
    step.run()
    assert calls == ["project", "select"] * 3  # two layers of the target, and the draft layer once
