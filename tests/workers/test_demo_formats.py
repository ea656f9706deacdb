"""The demo model in FP8 and in INT4: what it costs in loss on held-out text, as the engine's model computes it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paged import ALONE, CPU, Paged
from tokenizers import Tokenizer

from workers.config import DEMO_MODEL
from workers.families import load_model
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS
from workers.weights.formats.format import Format

ASSETS = DEMO_MODEL.parent
sys.path.insert(0, str(ASSETS))  # as `python assets/quantize_demo.py` finds the script's own modules

from training import corpus  # noqa: E402
from training.quantize import quantize  # noqa: E402

TOKENS, TEXTS = 400, 10


@cache
def held_out() -> list[list[int]]:
    """The beginnings of some files that the model was not trained on."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [text for _, text in sorted(corpus.collect().held_out.items())]
    return [ids[:TOKENS] for ids in corpus.encode_documents(tokenizer, texts) if len(ids) >= TOKENS][:TEXTS]


@cache
def loss(folder: Path, invariant: bool = False, fp8_cache: bool = False) -> tuple[float, frozenset[Format]]:
    """Mean cross-entropy in nats per token, and the formats of the model's experts."""
    how = {"invariant": invariant, "fp8_cache": fp8_cache}
    model = load_model(folder, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512, **how)
    total, count = 0.0, 0
    for ids in held_out():
        paged = Paged(model, [ids])
        logits = model.logits(paged.forward(paged.plan([], 1, [(0, len(ids) - 1)]))[0])
        total += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    mixtures = [layer.feed_forward.mixture for layer in model.layers[1:]]
    return total / count, frozenset(weight.format for m in mixtures for weight in (m.gate_up_XFE, m.down_XEI))


@pytest.mark.long
@pytest.mark.parametrize(("form", "stored", "share"), [
    ("fp8", FP8_BLOCKS, 0.005), ("int4", INT4_GROUPS, 0.03)
])  # fmt: skip
def test_quantized_weights_cost_little(form: str, stored: Format, share: float, tmp_path: Path) -> None:
    """Quantized weights add at most so much to the loss in bf16, which is that of a model that has learnt the text."""
    assert len(held_out()) >= 4
    quantize(DEMO_MODEL, tmp_path, form)
    got, formats = loss(tmp_path)
    want, _ = loss(DEMO_MODEL)
    assert want < 3
    assert formats == {stored}
    assert got < want * (1 + share)


@pytest.mark.long
def test_an_fp8_cache_costs_little() -> None:
    """Keys and values of all tokens are read as they are cached, those of a chunk's own tokens, too."""
    (got, _), (want, _) = loss(DEMO_MODEL, fp8_cache=True), loss(DEMO_MODEL)
    assert got != want
    assert got < want * 1.002
