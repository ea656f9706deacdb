"""Sparse attention where it must be dense attention, and what it caches."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import ALONE, CPU, Paged
from rounded_latents import latents_rounded
from safetensors.torch import load_file, save_file
from tiny_models import SPARSE_KINDS, VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.cache.spec import IndexSpec, LatentSpec
from workers.drafters.mtp import Mtp
from workers.families import load_model
from workers.graphs.guard import capture_guard
from workers.memory.scratch import Scratch
from workers.models.attention import sparse_entries, sparse_rows, sparse_shards
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

TOP_K = 100
SEQUENCES = [random_tokens(160, seed, VOCAB) for seed in range(2)]


@cache
def twins(kind: str, fp8_cache: bool) -> tuple[Model, Model]:
    """A model in invariant mode, and the same without its indexers; or, where no family has that, one whose indexers
    choose all."""
    import tempfile

    how: dict[str, Any] = {"group": ALONE, "dtype": torch.float32, "device": CPU, "max_positions": 512}
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(name, kind, seed=1, index_topk=TOP_K)
        model = load_model(folder, invariant=True, fp8_cache=fp8_cache, **how)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        if kind.startswith(("axk2", "hyv4")):
            folder = write_tiny(name, kind, seed=1, index_topk=512)
            return model, load_model(folder, invariant=True, fp8_cache=fp8_cache, **how)
        config |= {"model_type": "deepseek_v3"}
        dense = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
        save_file(dense, folder / "model.safetensors")
        bare = {name: value for name, value in config.items() if not name.startswith(("index", "layer_types"))}
        (folder / "config.json").write_text(json.dumps(bare))
        return model, load_model(folder, invariant=True, fp8_cache=fp8_cache, **how)


def logits(paged: Paged, decode: list[int], width: int, chunks: list[tuple[int, int]]) -> dict[int, Tensor]:
    """Compute the logits of one step, by row."""
    step = paged.plan(decode, width, chunks)
    return {row: paged.model.logits(hidden) for row, hidden in paged.forward(step).items()}


@pytest.mark.parametrize("kind", ["v32", pytest.param("glm5", marks=pytest.mark.long)])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_contexts_of_up_to_top_k_tokens_are_dense_bit_for_bit(kind: str, data: st.DataObject) -> None:
    """Contexts come in any chunks, mixed with decode rows of any width; and with scores of few tokens at once."""
    models = twins(kind, data.draw(st.booleans(), label="FP8 cache"))
    lengths = data.draw(st.lists(st.integers(1, TOP_K), min_size=1, max_size=2), label="lengths")
    sequences = [tokens[:length] for tokens, length in zip(SEQUENCES, lengths, strict=False)]
    both = [Paged(model, sequences, seed=seed) for seed, model in enumerate(models)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_rows, "SCORES", data.draw(st.sampled_from([1, 1000, 1 << 26]), label="scores at once"))
        patch.setattr(sparse_rows, "QUERIES", data.draw(st.sampled_from([1, 30, 1 << 17]), label="queries at once"))
        while left := {
            row: len(own.tokens) - own.written for row, own in enumerate(both[0].rows) if len(own.tokens) > own.written
        }:
            width = data.draw(st.integers(1, 4), label="width")
            decode = [row for row in left if left[row] >= width and data.draw(st.booleans(), label="decode")]
            chunks = [
                (row, data.draw(st.integers((left[row] + 1) // 2, left[row]))) for row in left if row not in decode
            ]
            ours, theirs = (logits(paged, decode, width, chunks) for paged in both)
            for row, got in ours.items():
                assert torch.equal(got, theirs[row])


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_longer_contexts_are_not_dense(kind: str) -> None:
    """The comparison would otherwise compare nothing."""
    ours, theirs = (logits(Paged(model, SEQUENCES[:1]), [], 1, [(0, 160)])[0] for model in twins(kind, False))
    assert torch.equal(ours[:TOP_K], theirs[:TOP_K])
    assert bool(((ours - theirs)[TOP_K + 20 :].abs().amax(-1) > 1e-3).all())


@pytest.mark.parametrize(("kind", "full"), [("v32", [0, 1, 2]), ("glm5", [0, 1])])
def test_layers_with_an_indexer_cache_its_keys(kind: str, full: list[int]) -> None:
    """Keys are on the pages of the latents; the draft layer's caches come last."""
    model, dense = twins(kind, False)
    latent, index = LatentSpec(32 + 8, torch.float32), IndexSpec(16, torch.float32)
    layers = range(len(model.layers))
    assert model.cache == [spec for layer in layers for spec in ([latent, index] if layer in full else [latent])]
    assert model.caches == [*model.cache, latent, index]
    assert dense.caches == [latent] * (len(layers) + 1)
    assert sum(spec.page_bytes for spec in model.caches) == 64 * 4 * (40 * (len(layers) + 1) + 16 * (len(full) + 1))


def test_a_few_layers_launch_all_that_the_model_launches(tmp_path: Path) -> None:
    """One of each kind, among them one that attends to what another has selected; each with its own caches."""
    types = ["full", "full", "shared", "full", "shared", "shared"]
    folder = write_tiny(tmp_path, "glm5", num_hidden_layers=6, indexer_types=types)
    model = load_model(folder, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512)
    few = model.shallow()
    assert [model.layers.index(layer) for layer in few.layers] == [0, 1, 2, 5]
    paged = Paged(few, [SEQUENCES[0][:30]])
    assert bool(paged.forward(paged.plan([], 1, [(0, 30)]))[0].isfinite().all())
    written = [bool(layer.isfinite().any()) for layer in paged.cache.layers]
    #                 latents and keys of layers 0, 1, 2, 3, 4, 5, and of the draft layer
    assert written == [True, True, True, True, True, False, False, False, True, False, False]


@pytest.mark.parametrize("shards", [1, 2])
def test_attention_of_decode_rows_allocates_nothing_beside_its_kernels(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention can be captured on a GPU, where kernels stand for what is left out here; in the draft layer, too, and
    where ranks share out the cache."""
    model, _ = twins("v32", False)
    assert isinstance(model.drafter, Mtp)
    kernels = "index_scores", "select_positions", "sparse_decode", "write_index_keys", "absorb", "head_linear"
    for name in (*kernels, "refuse_out_of_bounds"):
        monkeypatch.setattr(sparse_rows, name, lambda *args, **options: None)
    launched: list[str] = []
    by_shards = "offer_candidates", "order_candidates", "keep_selected", "find_own_pages", "own_bounds"
    for name in (*by_shards, "select_positions", "sparse_decode"):
        monkeypatch.setattr(sparse_shards, name, lambda *args, name=name, **options: launched.append(name))
    for name in ("find_places", "sparse_decode"):
        monkeypatch.setattr(sparse_entries, name, lambda *args, name=name, **options: launched.append(name))
    for name in ("gather_shards", "merge_shards"):
        monkeypatch.setattr(Group, name, lambda *args, name=name: launched.append(name))
    group = Group(Mesh.of(0, shards, cache=shards)).sharing
    device = torch.device("cpu")
    paged = Paged(model, [SEQUENCES[0][:70]])
    paged.forward(paged.plan([], 1, [(0, 60)]))
    # Zeros, which are places that there are: what would find them is left out.
    scratch = Scratch(device, torch.zeros(1 << 24, dtype=torch.uint8))
    for first, layer in enumerate([model.layers[0], model.drafter.layer]):
        batch = replace(paged.batch(paged.plan([0], 3, []), first), group=group)
        attention, ops = layer.attention, model.paths.of(batch, torch.float32, device)
        projected = attention.allocate_projected(ops, 3, scratch)
        out_THV = attention.allocate_attended(3, scratch)
        with capture_guard(device):
            planned = attention.plan(batch, scratch)
            backends = attention.backends(projected, out_THV, planned, None, model.rotation_PO, scratch)
            attention.attend(backends, *paged.cache.layers[:2])
        assert planned.selection is not None
        assert planned.selection.bound_T.tolist() == [61 + first, 62 + first, 63 + first]
        assert planned.selection.row_T.tolist() == [0, 0, 0]
    assert bool(launched) == (shards > 1)
    assert launched[:2] == ["find_own_pages", "own_bounds"][: len(launched)]


def rounded(x: Tensor) -> Tensor:
    """Times a Hadamard matrix, to INT8 with a scale for the last dimension, and back."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    turned = x @ matrix
    scale = turned.abs().amax(-1, keepdim=True) / 127
    return (turned / scale).round() * scale @ matrix / len(matrix)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_fp8_caches_hold_keys_and_latents_rounded_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model on plain caches, where keys and queries of indexers, and latents, are rounded by a few
    lines of torch; the draft layer, too."""
    folder = write_tiny(tmp_path, kind, seed=1)
    how: dict[str, Any] = {"group": ALONE, "dtype": torch.float32, "device": CPU, "max_positions": 512}

    def fed(model: Model) -> list[Tensor]:
        paged, found = Paged(model, SEQUENCES), []
        for decode, width, chunks in [([], 1, [(0, 70), (1, 20)]), ([0], 3, [(1, 65)]), ([0, 1], 4, [])]:
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            found += [model.logits(hidden[row]) for row in hidden]
            if model.drafter is not None:
                found += [model.drafter.logits(drafted) for drafted in paged.draft(step, hidden).values()]
        return found

    got = fed(load_model(folder, fp8_cache=True, **how))
    write, scores = sparse_rows.write_index_keys, sparse_rows.index_scores
    monkeypatch.setattr(sparse_rows, "write_index_keys", lambda key, *rest, **more: write(rounded(key), *rest, **more))
    monkeypatch.setattr(sparse_rows, "index_scores", lambda q, *rest, **more: scores(rounded(q), *rest, **more))
    with latents_rounded():
        want = fed(load_model(folder, **how))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_an_entry_that_is_not_finite_is_attended_to() -> None:
    """The score of such an entry is above all others, so that all tokens behind it are NaN, as they are in dense
    attention."""
    model, _ = twins("v32", False)
    paged = Paged(model, [SEQUENCES[0]])
    logits(paged, [], 1, [(0, 150)])
    for layer in paged.cache.layers:
        layer[paged.rows[0].pages[0], 3] = torch.nan
    assert bool(logits(paged, [0], 3, [])[0].isnan().all())
