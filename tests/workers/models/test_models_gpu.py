"""The same steps on a GPU and on the CPU, and with every layer launching for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import CPU, Paged, load_fp32
from random_model import V2_LITE_HEADS, random_model
from tiny_models import KINDS, VOCAB, random_tokens, write_tiny

from kernels.runtime.repeat import Repeat, nothing_repeated
from workers.models.attention import expanded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_steps_agree_with_the_cpu(kind: str, tmp_path: Path) -> None:
    """Prefill, mixed and decode steps of two rows, drafts included; many tokens of a prefill and few of a decode
    step take different ways through the experts."""
    folder = write_tiny(tmp_path, kind, seed=1)
    sequences = [random_tokens(151, 0, VOCAB), random_tokens(90, 1, VOCAB)]
    results = []
    for device in (CPU, torch.device("cuda", 0)):
        model = load_fp32(folder, device=device)
        paged = Paged(model, sequences)
        outputs = []
        for decode, width, chunks in [([], 1, [(0, 70)]), ([0], 3, [(1, 65)]), ([0, 1], 2, []), ([1], 4, [(0, 40)])]:
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            outputs += [model.logits(hidden[row]).cpu() for row in sorted(hidden)]
            if model.drafter:
                drafts = paged.draft(step, hidden)
                outputs += [model.drafter.logits(drafts[row]).cpu() for row in sorted(drafts)]
        results.append(outputs)
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, atol=1e-4, rtol=0)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": 64}], ids=["query", "latent query"])
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (3, 4), (20, 1), (70, 2)])
def test_repeated_layers_give_the_bits_of_their_own_launches(
    rows: int,
    width: int,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode rows alone; beside chunks, short and long, with and without context; chunks alone. Context comes in two
    pieces, once in one of 14 entries."""
    monkeypatch.setattr(expanded, "CONTEXT_ENTRIES", 256)
    values = V2_LITE_HEADS | {"num_hidden_layers": 4} | overrides
    model = random_model(values, dtype, torch.device("cuda"), invariant=invariant)
    sequences = [random_tokens(80, row, 160) for row in range(rows)]
    sequences += [random_tokens(700, 1000, 160), random_tokens(300, 1001, 160)]
    long, other, some = rows, rows + 1, list(range(rows))
    ran = 0

    def counted(self: Repeat, own: Any, call: Any) -> None:
        nonlocal ran

        def layer() -> None:
            nonlocal ran
            ran += 1
            call()

        plain(self, own, layer)

    @torch.inference_mode()  # as steps run: to watch operators from within Python shows others there
    def results() -> list[torch.Tensor]:
        paged = Paged(model, sequences)
        found = []
        for decode, tokens, chunks in [
            ([], 1, [(row, 60) for row in some]),
            (some, width, [(long, 270)]),
            (some, width, [(long, 17), (other, 280)]),
            (some, width, []),
            ([], 1, [(long, 350)]),
        ]:
            found += paged.forward(paged.plan(decode, tokens, chunks)).values()
        return [*found, *paged.cache.layers]

    plain = Repeat.__call__
    monkeypatch.setattr(Repeat, "__call__", counted)
    got, first = results(), ran
    with nothing_repeated():
        wanted = results()
    assert ran - first == 4 * first  # every layer ran, where only the first did
    for one, other_one in zip(got, wanted, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other_one.nan_to_num(7.0))
