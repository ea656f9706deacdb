"""Models with sparse attention on a GPU, against the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import CPU, Paged
from random_model import V2_LITE_HEADS, random_model
from tiny_models import SPARSE_KINDS, VOCAB, random_tokens, write_tiny
from torch import Tensor

from kernels.runtime.repeat import nothing_repeated
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.families import load_model
from workers.graphs.capture import CapturedStep
from workers.models.attention import widened
from workers.models.choices import Choices, Recorded, Taken
from workers.models.model import Model
from workers.parallel.group import Group
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [random_tokens(count, count, VOCAB) for count in (3, 17, 40, 64, 90, 130)]


STEPS: list[tuple[list[int], int, list[tuple[int, int]]]] = [
    ([], 1, [(0, 70)]),
    ([0], 3, [(1, 65)]),
    ([0, 1], 2, []),
    ([1], 4, [(0, 40)]),
]
"""Rows that decode, their width, and (row, tokens) of prefill chunks."""


def passes(
    model: Model, choices: Choices, given: list[dict[int, Tensor]] | None = None
) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
    """Logits of all steps and of their drafts, and the hidden states that the drafts were made of, or are (`given`). A
    model without a drafter has none of either."""
    paged = Paged(model, [random_tokens(151, 0, VOCAB), random_tokens(110, 1, VOCAB)])
    drafter, logits, sources = model.drafter, list[Tensor](), list[dict[int, Tensor]]()
    with nothing_repeated(), model.paths.choosing(choices):
        for place, (decode, width, chunks) in enumerate(STEPS):
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            logits += [model.logits(hidden[row]).cpu() for row in sorted(hidden)]
            if drafter is None:
                continue
            source = hidden if given is None else given[place]
            drafts = paged.draft(step, source)
            logits += [drafter.logits(drafts[row]).cpu() for row in sorted(drafts)]
            sources.append({row: hidden_TE.cpu() for row, hidden_TE in source.items()})
    return logits, sources


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_mixed_steps_agree_with_the_cpu(kind: str, invariant: bool, fp8_cache: bool, tmp_path: Path) -> None:
    """Prefill, mixed and decode steps of two rows, drafts included, beyond what is attended to. The CPU attends to what
    the GPU has selected: of two scores that differ by less than sums are rounded either may be the larger. And it
    drafts from the GPU's hidden states, each layer of random weights amplifying what is off several times."""
    folder = write_tiny(tmp_path, kind, seed=1)
    how: dict[str, Any] = {"dtype": torch.float32, "max_positions": 512, "invariant": invariant, "fp8_cache": fp8_cache}
    cuda, cpu = (load_model(folder, group=Group(), device=device, **how) for device in (torch.device("cuda", 0), CPU))
    recorded = Recorded()
    want, sources = passes(cuda, recorded)
    recorded.calls = [(id_TK.cpu(), weight_TK.cpu()) for id_TK, weight_TK in recorded.calls]
    recorded.selected = [selected_TS.cpu() for selected_TS in recorded.selected]
    assert len(recorded.selected) >= len(STEPS)  # one at least for every pass, by an indexer that others may share
    taken = Taken(recorded, len(recorded.calls), selecting=len(recorded.selected))
    found, _ = passes(cpu, taken, sources)
    assert taken.agreement >= 0.99
    for one, other in zip(found, want, strict=True):
        # What differs in its last bits may be rounded to the next code of FP8, an eighth away, in some number. With an
        # embedding that is off by 1e-6, logits on the CPU move by up to 0.068, of a deviation of 1.5, but few of them.
        torch.testing.assert_close(other, one, atol=0.1 if fp8_cache else 1e-4, rtol=0)
        assert float((other - one).abs().mean()) <= 4e-3


WIDE: dict[str, Any] = V2_LITE_HEADS | {
    "model_type": "deepseek_v32",
    "q_lora_rank": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 3,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
}
"""Sizes with as many heads as may have their context widened, of which little is selected."""


def test_widening_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several layers, with cached context and without, beside a decode row; launches are repeated. All chunks
    are widened, so that as many tokens take a turn as without."""
    cuda = torch.device("cuda", 0)
    model = random_model(WIDE, torch.bfloat16, cuda, fp8_cache=True)
    if not widened.may_widen(model.layers[0].attention.heads, cuda):
        pytest.skip("no kernel widens entries here")
    gathered: list[int] = []
    gather = widened.gather_context

    def spied(cache_PKC: Tensor, page_NP: Tensor, cu_B1: Tensor, out_SC: Tensor, **how: Any) -> None:
        gathered.append(len(out_SC))
        gather(cache_PKC, page_NP, cu_B1, out_SC.fill_(torch.nan), **how)

    monkeypatch.setattr(widened, "gather_context", spied)

    def fed() -> list[Tensor]:
        paged, found = Paged(model, [random_tokens(400, row, 160) for row in range(3)]), []
        for decode, chunks in [([], [(0, 70), (1, 150)]), ([0], [(1, 200), (2, 64)])]:
            hidden = paged.forward(paged.plan(decode, 1, chunks))
            found += [hidden[row].clone() for row in sorted(hidden)]
        return found

    got = fed()
    # Entries of whole pages; what other layers launch is repeated.
    assert set(gathered) == {64 * (2 + 3), 64 * (6 + 1)}
    gathered.clear()
    monkeypatch.setattr(widened, "FEW_HEADS", 1000)
    want = fed()
    assert not gathered
    for ours, theirs in zip(got, want, strict=True):
        assert bool(ours.isfinite().all())
        assert torch.equal(ours, theirs)


def engine(folder: Path, device: str, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 4, "token_budget": 96, "cache_pages": 60, "dtype": "float32"}
    config = EngineConfig(model=str(folder), device=device, max_context=300, **{**defaults, **settings})
    return InlineEngine(config, torch.device(device))


@pytest.mark.parametrize(("graphs", "top_k"), [(False, 16), (True, 16), (False, 64), (True, 64)])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_greedy_tokens_are_those_of_the_cpu(
    kind: str, graphs: bool, top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, and replayed: every graph has passed the self-test, and none was left out. Of 64 entries, a page, all are
    attended to as long as no row has more."""
    folder = write_tiny(tmp_path, kind, seed=1, index_topk=top_k)
    greedy = SamplingParams(24, temperature=0.0)
    expected = engine(folder, "cpu", width=1, selftest=False).generate(PROMPTS, greedy)
    run = engine(folder, "cuda", graphs=graphs, selftest=True)
    assert run.replica.selftest is not None
    assert run.replica.selftest.passed
    assert run.generate(PROMPTS, greedy) == expected
    replayed: Counter[bool] = Counter()
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda own: (replayed.update([own.step.key.dense]), replay(own))[1])
    assert run.generate(PROMPTS[:2], greedy) == expected[:2]  # short ones alone
    if graphs:
        assert run.runner.graphs is not None
        assert run.runner.graphs.stats.replays > 10
        assert set(replayed) == {top_k == 64}
        assert not run.runner.graphs.stats.eager
