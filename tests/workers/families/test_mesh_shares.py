"""Shares of a mesh whose heads and experts are shared by different ranks: each rank loads its heads and its part of the
experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.families.loading import counted
from workers.families.registry import load_config
from workers.models.feed_forward import DenseFeedForward, MixtureOfExperts
from workers.models.layer import DecoderLayer
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

CPU = torch.device("cpu")
EXPERTS = 8


def loaded(folder: Path, mesh: Mesh) -> Model:
    """The share of one rank, with nobody to agree with."""
    return load_model(folder, group=Group(mesh), dtype=torch.float32, device=CPU, max_positions=64)


def nth(tensor: Tensor, index: int, of: int, dim: int = 0) -> Tensor:
    """One of so many equal parts."""
    return tensor.chunk(of, dim)[index]


def check_layer(
    layer: DecoderLayer, files: dict[str, Tensor], prefix: str, heads: tuple[int, int], experts: int
) -> None:
    """`heads`: which part of how many; `experts`: which of four."""
    attention, mlp = layer.attention, f"{prefix}mlp."
    names = ("q_b_proj", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa")
    query, up, out, down = (files[f"{prefix}self_attn.{name}.weight"] for name in names)
    assert torch.equal(attention.q_up_QA.plain, nth(query, *heads))
    assert torch.equal(attention.heads.up_HFL.flatten(0, 1), nth(up, *heads))
    assert torch.equal(attention.out_EF.plain, nth(out, *heads, dim=1))
    assert torch.equal(attention.down_FE.plain[-len(down) :], down)  # the latent is whole on every rank
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, DenseFeedForward):
        gate, up, down = (files[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(feed_forward.gate_up_FE.plain, torch.cat([nth(gate, experts, 4), nth(up, experts, 4)]))
        assert torch.equal(feed_forward.down_EI.plain, nth(down, experts, 4, dim=1))
        return
    assert isinstance(feed_forward, MixtureOfExperts)
    mixture = feed_forward.mixture
    for place, name in enumerate([*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"]):
        gate, up, down = (files[f"{mlp}{name}.{half}_proj.weight"] for half in ("gate", "up", "down"))
        want = torch.cat([nth(gate, experts, 4), nth(up, experts, 4)])
        assert torch.equal(mixture.gate_up_XFE.plain[place], want)
        assert torch.equal(mixture.down_XEI.plain[place], nth(down, experts, 4, dim=1))


@pytest.mark.parametrize("heads", [1, 2])
def test_each_rank_has_its_heads_and_its_part_of_the_experts(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)  # the other ranks are not there
    folder = write_tiny(tmp_path, "v3", seed=4)
    files = load_file(folder / "model.safetensors")
    rows = -(-VOCAB // heads)
    for rank in range(4):
        model = loaded(folder, Mesh.of(rank, 4, heads=heads))
        own = rank % heads
        head = files["lm_head.weight"][own * rows : (own + 1) * rows]
        assert model.head_YE.shape == (rows, head.shape[1])
        assert torch.equal(model.head_YE.plain[: len(head)], head)
        assert torch.equal(model.embedding_YE, files["model.embed_tokens.weight"])
        for index, layer in enumerate(model.layers):
            check_layer(layer, files, f"model.layers.{index}.", (own, heads), rank)
        assert {type(layer.feed_forward) for layer in model.layers} == {DenseFeedForward, MixtureOfExperts}


def test_a_tied_head_is_shared_as_heads_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)
    folder = write_tiny(tmp_path, "v3-tied", seed=4)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for rank, first in enumerate((0, 66, 0, 66)):
        own = table[first : first + 66]
        head = loaded(folder, Mesh.of(rank, 4, heads=2)).head_YE.plain
        assert head.shape == (66, own.shape[1])
        assert torch.equal(head[: len(own)], own)
    assert torch.equal(loaded(folder, Mesh.of(3, 4, heads=1)).head_YE.plain, table)


def test_the_census_counts_what_such_a_rank_loads(tmp_path: Path) -> None:
    """16 heads cannot be shared by 32 ranks, nor need they be where only the experts are."""
    folder = write_tiny(tmp_path, "v3", moe_intermediate_size=32, num_attention_heads=16, num_key_value_heads=16)
    config = load_config(folder)

    def bytes_of(mesh: Mesh) -> int:
        how = {"draft_layer": False, "invariant": False}
        return counted(config, Group(mesh), torch.float32, lambda name: None, **how)[1].bytes

    with pytest.raises(ValueError, match="num_attention_heads = 16 is not divisible by the 32 ranks of the axis heads"):
        bytes_of(Mesh.of(0, 32))
    shared, lanes = bytes_of(Mesh.of(0, 16)), bytes_of(Mesh.of(0, 16, heads=1))
    files = load_file(folder / "model.safetensors")
    of_heads = ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj")
    layers = [f"model.layers.{index}.{name}.weight" for index in range(3) for name in of_heads]
    more = sum(files[name].nbytes for name in layers) * 15 // 16
    head = files["lm_head.weight"]
    assert lanes - shared == more + (len(head) - -(-len(head) // 16)) * head[0].nbytes
    assert bytes_of(Mesh.of(0, 32, heads=16)) < shared
