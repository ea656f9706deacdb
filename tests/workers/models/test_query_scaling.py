"""Queries that are scaled by their position, across the published borders, whatever way a token takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from oracle import load_oracle
from paged import ALONE, CPU, Paged, Step
from tiny_models import SCALED, VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.models.batch import Batch
from workers.models.model import Model

TOKENS = random_tokens(40, 7, VOCAB)
ROPE = {**SCALED, "factor": 128.0, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.5}


class Shifted(Paged):
    """Tokens whose positions begin far behind 0: attention knows of no other order than the cache's."""

    begin = 0

    def batch(self, step: Step, shift: int) -> Batch:
        plain = super().batch(step, shift)
        return replace(plain, position_T=plain.position_T + self.begin)


@cache
def models(invariant: bool, beta: float) -> tuple[Model, Any]:
    rope = {**ROPE, "llama_4_scaling_beta": beta}
    sizes: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 20_000, "num_hidden_layers": 2}
    with TemporaryDirectory() as folder:
        write_tiny(folder, "mistral4", seed=4, **sizes)
        own: dict[str, Any] = {
            "group": ALONE,
            "dtype": torch.float32,
            "device": CPU,
            "max_positions": 20_000,
            "invariant": invariant,
        }
        return load_model(Path(folder), **own), load_oracle(Path(folder))


@torch.no_grad()
def theirs(oracle: Any, begin: int) -> Tensor:
    position = torch.arange(begin, begin + len(TOKENS)).unsqueeze(0)
    logits: Tensor = oracle(torch.tensor([TOKENS]), position_ids=position).logits[0]
    return logits


def ours(model: Model, begin: int, width: int) -> Tensor:
    """A chunk, another behind it, then rows that decode, the last beside a chunk of another row."""
    paged = Shifted(model, [TOKENS, TOKENS])
    paged.begin = begin
    hidden = [paged.forward(paged.plan([], 1, [(0, count)]))[0] for count in (5, 11)]
    while (left := len(TOKENS) - paged.rows[0].written) > width:
        hidden.append(paged.forward(paged.plan([0], width, []))[0])
    hidden.append(paged.forward(paged.plan([0], left, [(1, 30)]))[0])
    return model.logits(torch.cat(hidden))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("border", [8192, 16384])
@pytest.mark.parametrize("invariant", [False, True])
def test_borders(invariant: bool, border: int, width: int) -> None:
    """The last token before a border, and the first behind it, lie within each kind of pass."""
    model, oracle = models(invariant, 0.5)
    for begin in (border - 3, border - 10, border - 20):
        torch.testing.assert_close(ours(model, begin, width), theirs(oracle, begin), atol=1e-4, rtol=0)


def test_a_scale_that_is_left_out_shows() -> None:
    model, _ = models(False, 0.5)
    _, unscaled = models(False, 0.0)
    assert float((ours(model, 8180, 1) - theirs(unscaled, 8180)).abs().max()) > 1e-2
    torch.testing.assert_close(ours(model, 0, 1), theirs(unscaled, 0), atol=1e-4, rtol=0)
