"""Models with an FP8 cache, against the same models whose latents are rounded by a few lines of torch on their way to a
plain cache.

Both are fed in the same steps, so that they add everything up in the same order. For a number that is off by a bit may
be rounded to the next code: how little that changes is another question, which the proofs and the demo model's loss
answer. In invariant mode it does not happen, as tests/workers/test_invariant.py shows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import ALONE, CPU, Paged, Step
from rounded_latents import latents_rounded
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.models.attention import expanded
from workers.models.model import Model

LONGEST, TOLERANCE = 150, 1e-4
KINDS: dict[str, dict[str, Any]] = {"v3-yarn": {}, "v2-no-q-lora": {"kv_lora_rank": 160}}
"""Kinds with one scale an entry, and with two, the second of 32 features."""
SEQUENCES = [random_tokens(LONGEST, seed, VOCAB) for seed in range(2)]


@cache
def models(kind: str) -> tuple[Model, Model]:
    """Load the model with an FP8 cache, and with a plain one."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, how = write_tiny(folder, kind, seed=1, **KINDS[kind]), {"dtype": torch.float32, "max_positions": 512}
        fp8, plain = (load_model(path, group=ALONE, device=CPU, fp8_cache=fp8, **how) for fp8 in (True, False))
    return fp8, plain


class Twins:
    """A model with an FP8 cache and one whose latents are rounded, on the same steps."""

    def __init__(self, kind: str, lengths: list[int]) -> None:
        sequences = [s[:n] for s, n in zip(SEQUENCES, lengths, strict=False)]
        self.ours, self.theirs = (Paged(model, sequences, seed=lengths[0]) for model in models(kind))
        self.rows = self.ours.rows

    def feed(self, decode: list[int], width: int, chunks: list[tuple[int, int]], drafts: bool = False) -> None:
        """Logits and drafts, which must agree."""
        step = self.ours.plan(decode, width, chunks)
        got = self._logits(self.ours, step, drafts)
        with latents_rounded() as seen:
            want = self._logits(self.theirs, step, drafts)
        layers = len(self.ours.model.layers) + drafts
        assert seen == [sum(feed.count for feed in step.feeds)] * layers
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)

    @staticmethod
    def _logits(paged: Paged, step: Step, drafts: bool) -> list[Tensor]:
        hidden = paged.forward(step)
        logits = [paged.model.logits(x) for x in hidden.values()]
        if drafts:
            assert paged.model.drafter is not None
            logits += [paged.model.drafter.logits(x) for x in paged.draft(step, hidden).values()]
        return logits


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_logits_under_every_chunking(kind: str, data: st.DataObject) -> None:
    """Chunks are in mixed steps with decode rows of any width, with cached context in pieces of any size."""
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=2), label="lengths")
    twins = Twins(kind, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded, "CONTEXT_ENTRIES", data.draw(st.sampled_from([64, 4096]), label="context piece"))
        for number in range(100):
            left = [len(row.tokens) - row.written for row in twins.rows]
            if not any(left):
                break
            width = data.draw(st.integers(1, 5), label="width")
            kinds = [data.draw(st.sampled_from(["decode", "chunk", "all"]), label="kind") for _ in left]
            decode = [row for row, what in enumerate(kinds) if what == "decode" and left[row] >= width and number < 20]
            chunks = [
                (
                    row,
                    left[row] if what == "all" or number >= 20 else data.draw(st.integers(1, left[row]), label="chunk"),
                )
                for row, what in enumerate(kinds)
                if row not in decode and left[row]
            ]
            twins.feed(decode, width, chunks)


def test_the_draft_layer() -> None:
    twins = Twins("v3-yarn", [100])
    twins.feed([], 1, [(0, 70)], drafts=True)
    twins.feed([0], 3, [], drafts=True)
    twins.feed([], 1, [(0, 20)], drafts=True)


def test_rounding_is_seen() -> None:
    """The comparison would otherwise compare nothing."""
    found = []
    for model in models("v3-yarn"):
        paged = Paged(model, [SEQUENCES[0]])
        found.append(model.logits(paged.forward(paged.plan([], 1, [(0, LONGEST)]))[0]))
    assert float((found[0] - found[1]).abs().max()) > 100 * TOLERANCE
