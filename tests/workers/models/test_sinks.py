"""Attention sinks in every form of attention, against the softmax with one more score in its denominator."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from paged import ALONE, CPU, Paged
from test_deepseek_reference import TOLERANCE, far, fed, plainly, served
from tiny_models import VOCAB, random_tokens, write_tiny

from workers.families import load_model
from workers.models.attention import expanded
from workers.models.attention.backend import Backend, Heads
from workers.models.attention.decode_rows import DecodeRows
from workers.models.attention.expanded import ExpandedChunks
from workers.models.attention.sparse_rows import SparseRows
from workers.models.model import Model

KINDS = ["v3", "v2-no-q-lora", "hyv4"]
"""Dense attention with a query's latent and without, and sparse attention."""


@cache
def model_of(kind: str, invariant: bool) -> Model:
    """A model each of whose heads has a sink, the same in either mode; none of them counts for little."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(folder, kind, seed=1)
        how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_positions": 512, "draft_layer": False}
        model = load_model(path, group=ALONE, invariant=invariant, **how)
    generator = torch.Generator().manual_seed(3)
    for layer in model.layers:
        sink_H = 2 * torch.randn(layer.attention.heads.count, generator=generator)
        layer.attention.heads = replace(layer.attention.heads, sink_H=sink_H)
    return model


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached context is attended to in pieces, which are merged."""
    monkeypatch.setattr(expanded, "CONTEXT_ENTRIES", 64)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_is_a_score_in_the_denominator(kind: str, invariant: bool) -> None:
    model = model_of(kind, invariant)
    (want, _), (got, _) = fed(model, plainly), fed(model, served)
    assert far(got, want) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [0, 1])
def test_a_token_that_sees_itself_alone(kind: str, width: int) -> None:
    """As a chunk, or as a decode row."""
    model = model_of(kind, False)
    outputs = []
    for run in (plainly, served):
        paged = Paged(model, [random_tokens(1, 1, VOCAB)])
        [logits] = run(paged, paged.plan([0] * width, 1, [] if width else [(0, 1)])).values()
        outputs.append(logits)
    torch.testing.assert_close(outputs[1], outputs[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize(
    ("kind", "form"),
    [("v3", DecodeRows), ("v3", ExpandedChunks), ("hyv4", SparseRows)],
    ids=["decode", "prefill", "sparse"],
)
def test_a_sink_that_is_forgotten_or_added_twice_shows(
    kind: str, form: type[Backend], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, add = form.attend, Heads.add_sinks

    def wrong(self: Backend, heads: Heads, *caches: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Heads, "add_sinks", lambda *args: [add(*args) for _ in range(times)])
            attend(self, heads, *caches)

    model = model_of(kind, False)
    want, _ = fed(model, plainly)
    monkeypatch.setattr(form, "attend", wrong)
    got, _ = fed(model, served)
    assert far(got, want) > 1000 * TOLERANCE
