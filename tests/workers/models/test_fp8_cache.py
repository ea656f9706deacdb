"""Models with an FP8 cache, against the same models whose latents are rounded by a few lines of torch on their way to a
plain cache.

In float64 but for the cache's numbers, most of it: where sums are taken in another order, a number hardly ever comes
to lie on the other side of a boundary between two codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_tokens
from paged import ALONE, CPU, Paged
from tiny_models import VOCAB, write_tiny
from torch import Tensor

from kernels import rope_cache as plain_rope_cache
from tests.support.fp8_entries import encoded, read
from workers.families import load_model
from workers.models.attention import expanded, latent
from workers.models.model import Model

LONGEST, TOLERANCE = 150, 1e-4
KINDS: dict[str, dict[str, Any]] = {"v3-yarn": {}, "v2-no-q-lora": {"kv_lora_rank": 160}}
"""With one scale an entry, and with two, the second of 32 features."""
SEQUENCES = [random_tokens(LONGEST, seed, VOCAB) for seed in range(2)]


def load(folder: Path, fp8: bool, dtype: torch.dtype = torch.float64) -> Model:
    return load_model(folder, group=ALONE, dtype=dtype, device=CPU, max_positions=512, fp8_cache=fp8)


@contextmanager
def latents_rounded() -> Iterator[list[int]]:
    """Within this context passes with prefill rows round the latents of a plain cache. Yields their layers' tokens."""
    seen: list[int] = []

    def rounding(q: Tensor, kv: Tensor, weight: Tensor, rotation: Tensor, slot: Tensor, own: Tensor, cache: Tensor,
                 *, eps: float) -> None:  # fmt: skip
        plain_rope_cache.rope_cache(q, kv, weight, rotation, slot, own, cache, eps=eps)
        features = weight.shape[0]
        own.copy_(read(encoded(own, features), features, own.shape[1] - features, own.dtype))
        cache.view(-1, cache.shape[-1])[slot] = own
        seen.append(len(own))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "rope_cache", rounding)
        yield seen


@cache
def pair(kind: str) -> tuple[Model, list[Tensor], list[Tensor]]:
    """A model with an FP8 cache; of each sequence the logits with rounded latents, and with those that are not."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(folder, kind, seed=1, **KINDS[kind])
        ours, plain = load(path, fp8=True), load(path, fp8=False)

    def logits(tokens: list[int]) -> Tensor:
        paged = Paged(plain, [tokens])
        return plain.logits(paged.forward(paged.plan([], 1, [(0, len(tokens))]))[0])

    with latents_rounded() as seen:
        want = [logits(tokens) for tokens in SEQUENCES]
    assert seen == [LONGEST] * len(SEQUENCES) * len(plain.layers)
    return ours, want, [logits(tokens) for tokens in SEQUENCES]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_logits_under_every_chunking(kind: str, data: st.DataObject) -> None:
    """In mixed steps of chunks and decode rows of any width, with cached context in pieces of any size."""
    ours, want, unrounded = pair(kind)
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=2), label="lengths")
    paged = Paged(ours, [s[:n] for s, n in zip(SEQUENCES, lengths, strict=False)], seed=lengths[0])
    got: list[list[Tensor]] = [[] for _ in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded, "CONTEXT_ENTRIES", data.draw(st.sampled_from([64, 4096]), label="context piece"))
        while any(left := [len(row.tokens) - row.written for row in paged.rows]):
            width = data.draw(st.integers(1, 5), label="width")
            kinds = [data.draw(st.sampled_from(["decode", "chunk", "all"]), label="kind") for _ in left]
            decode = [row for row, what in enumerate(kinds) if what == "decode" and left[row] >= width]
            chunks = [
                (row, left[row] if what == "all" else data.draw(st.integers(1, left[row]), label="chunk"))
                for row, what in enumerate(kinds)
                if row not in decode and left[row]
            ]
            for row, hidden in paged.forward(paged.plan(decode, width, chunks)).items():
                got[row].append(ours.logits(hidden))
    for parts, rounded, plain, length in zip(got, want, unrounded, lengths, strict=False):
        torch.testing.assert_close(torch.cat(parts), rounded[:length], atol=TOLERANCE, rtol=0)
        assert length < 20 or float((rounded[:length] - plain[:length]).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_fp32(kind: str, tmp_path: Path) -> None:
    """In the same chunks on both sides, which add up in the same order."""
    path, found = write_tiny(tmp_path, kind, seed=1, **KINDS[kind]), []
    for fp8 in (True, False):
        model = load(path, fp8, torch.float32)
        paged = Paged(model, [SEQUENCES[0]])
        with latents_rounded() if not fp8 else pytest.MonkeyPatch.context():
            chunks = [paged.forward(paged.plan([], 1, [(0, count)]))[0] for count in (70, 1, 79)]
        found.append(model.logits(torch.cat(chunks)))
    torch.testing.assert_close(*found, atol=TOLERANCE, rtol=0)
