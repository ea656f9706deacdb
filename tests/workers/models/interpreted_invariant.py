"""Invariant mode on the kernels it launches on a GPU, interpreted: the whole model, layer by layer. Run with
TRITON_INTERPRET=1, see test_invariant_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from paged import ALONE, CPU, Paged  # noqa: E402
from tiny_models import VOCAB, random_tokens, write_tiny  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels import mla_decode  # noqa: E402
from workers.families import load_model  # noqa: E402
from workers.models import invariant  # noqa: E402
from workers.models.attention import absorbed_chunks  # noqa: E402
from workers.models.model import Model  # noqa: E402

PROMPTS = [random_tokens(count, count, VOCAB) for count in (76, 40, 20)]
SIZES = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "num_hidden_layers": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 2,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel takes tensors on a CPU for tensors on a small GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(mla_decode, "multiprocessors", lambda _: 3)


def load(folder: Path, dtype: torch.dtype, invariant: bool = True) -> Model:
    return load_model(folder, group=ALONE, dtype=dtype, device=CPU, max_positions=512, invariant=invariant)


Steps = list[tuple[list[int], int, list[tuple[int, int]]]]


def logits(model: Model, steps: Steps) -> Tensor:
    """Compute the logits of every token of row 0, and of the draft layer's."""
    paged = Paged(model, PROMPTS)
    found = []
    for decode, width, prefill in steps:
        step = paged.plan(decode, width, prefill)
        hidden = paged.forward(step)
        drafted = paged.draft(step, hidden)
        if 0 in hidden:
            found.append(torch.stack([model.logits(hidden[0]), model.drafter.logits(drafted[0])]))
    return torch.cat(found, 1)


ALONE_STEPS: Steps = [([], 1, [(0, 75)])]
COMPANY: Steps = [
    ([], 1, [(1, 30), (0, 5)]),
    ([1], 2, [(2, 9), (0, 33)]),
    ([2, 0], 3, []),
    ([1, 0], 2, [(2, 1)]),
    ([0], 1, []),
    ([0, 2], 4, []),
    ([], 1, [(0, 27), (1, 3)]),
]
"""Row 0's first 75 tokens: chunks, widths and company of all kinds."""


@pytest.mark.parametrize(("kind", "dtype"), [("v3-yarn", torch.bfloat16), ("v3-no-q-lora", torch.float32)])
def test_chunks_widths_and_company_change_no_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, kind, seed=1, **SIZES)
    model = load(folder, dtype)
    want = logits(model, ALONE_STEPS)
    assert want.shape == (2, 75, VOCAB)
    assert want.isfinite().all()
    assert torch.equal(logits(model, COMPANY), want)
    monkeypatch.setattr(absorbed_chunks, "PIECES", 3)
    monkeypatch.setattr(invariant, "PART_BYTES", 100_000)
    assert torch.equal(logits(model, COMPANY[:2]), want[:, :38])
    monkeypatch.undo()
    if dtype == torch.float32:
        torch.testing.assert_close(logits(load(folder, dtype, invariant=False), ALONE_STEPS), want, atol=2e-4, rtol=0)
