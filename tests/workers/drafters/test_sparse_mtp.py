"""The draft layer of models with sparse attention, against a layer of transformers. That drafts with no such layer
itself, so the few lines around the layer are here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import load_oracle, random_tokens
from paged import Paged, load_fp32
from safetensors.torch import load_file
from tiny_models import SPARSE_KINDS, VOCAB, write_tiny
from torch import Tensor

TOLERANCE = 1e-4


@torch.no_grad()
def oracle_drafts(folder: Path, tokens: list[int]) -> Tensor:
    """Draft logits over a sequence: row i is made of the hidden state of token i and of token i + 1."""
    oracle = load_oracle(folder)
    layers, eps = oracle.config.num_hidden_layers, oracle.config.rms_norm_eps
    deeper = Path(shutil.copytree(folder, folder / "deeper"))
    config = json.loads((deeper / "config.json").read_text()) | {"num_hidden_layers": layers + 1}
    for name, kind in ("mlp_layer_types", "sparse"), ("layer_types", "indexed_attention"), ("indexer_types", "full"):
        if name in config:
            config[name] = [*config[name], kind]
    (deeper / "config.json").write_text(json.dumps(config))
    layer, tensors = load_oracle(deeper).model.layers[layers], load_file(folder / "model.safetensors")

    def norm(x_TE: Tensor, name: str) -> Tensor:
        weight_E = tensors[f"model.layers.{layers}.{name}.weight"]
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)

    ids = torch.tensor([tokens])
    hidden = oracle.model(ids[:, :-1]).last_hidden_state
    both = torch.cat([norm(oracle.model.embed_tokens(ids[:, 1:]), "enorm"), norm(hidden, "hnorm")], -1)
    x = both @ tensors[f"model.layers.{layers}.eh_proj.weight"].t()
    count = x.shape[1]
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    position = torch.arange(1, count + 1)[None]
    found = layer(
        x, attention_mask=mask, position_ids=position, position_embeddings=oracle.model.rotary_emb(x, position)
    )
    x = found[0] if isinstance(found, tuple) else found
    return oracle.lm_head(norm(x, "shared_head.norm"))[0]


@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("feeds", [[(0, 130)], [(0, 9), (0, 30), (4, 4), (2, 2), (0, 60), (4, 4), (1, 1)]])
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
