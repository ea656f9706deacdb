"""Least bytes that a decode step reads, against the parameters that transformers has of the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny
from tests.workers.models.oracle import load_oracle
from workers.families import load_model
from workers.parallel.group import Group
from workers.rank.step_reads import step_reads

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["v3", "v2-no-q-lora", "glm"])
def test_all_matrices_but_the_embedding(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, kind, seed=3)
    model = load_model(folder, group=Group(), dtype=torch.float32, device=CPU, max_positions=64)
    reads = step_reads(model, CPU)
    sizes = {
        name: parameter.numel() * 4
        for name, parameter in load_oracle(folder).named_parameters()
        if parameter.dim() > 1 and "embed_tokens" not in name
    }
    routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    assert reads["step_expert_bytes"] == routed > 0
    assert reads["step_weight_bytes"] == sum(sizes.values()) - routed
    assert reads["step_expert_share"] == model.config.routing.experts_per_token / model.config.routing.experts
    assert reads["step_entry_bytes"] == len(model.layers) * model.config.cache_width * 4
    assert reads["step_bandwidth"] == 0


def test_sparse_attention_reads_no_more_latents_for_a_longer_context(tmp_path: Path) -> None:
    model = load_model(
        write_tiny(tmp_path, "glm5", seed=3), group=Group(), dtype=torch.float32, device=CPU, max_positions=64
    )
    caches = [spec for layer in model.layers for spec in layer.attention.caches[1:]]
    assert step_reads(model, CPU)["step_entry_bytes"] == sum(spec.entry_bytes for spec in caches)
