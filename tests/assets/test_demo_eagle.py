"""The demo model's draft model as shipped, and the script that made it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.tiny_draft_models import PlainEagle3
from tests.workers.harness import InlineEngine
from workers.config import DEMO_DRAFT_MODEL, DEMO_MODEL, EngineConfig
from workers.protocol.plan import SamplingParams

ASSETS = DEMO_MODEL.parent
sys.path.insert(0, str(ASSETS))  # the script's own modules, found as `python assets/train_eagle.py` finds them

from training.corpus import EOS_ID  # noqa: E402
from training.eagle import AUX_HIDDEN_STATE_LAYERS, load_eagle  # noqa: E402
from training.evaluate import load  # noqa: E402
from training.generate import continued  # noqa: E402


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = (ASSETS / "training" / "corpus.py").read_text()
    return list(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids)[:160]


def test_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO_DRAFT_MODEL.iterdir()) <= 4e6
    assert json.loads((DEMO_DRAFT_MODEL / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == list(
        AUX_HIDDEN_STATE_LAYERS
    )


@torch.no_grad()
def test_what_is_trained_is_what_the_paper_has(tokens: list[int]) -> None:
    """Logits over a prompt, and greedy drafts behind it."""
    trunk, _ = load(DEMO_MODEL, torch.device("cpu"))
    model = load_eagle(trunk, DEMO_DRAFT_MODEL)
    plain = PlainEagle3(DEMO_DRAFT_MODEL, trunk.embed_tokens.weight)
    plain.w = {name: t.float() if t.is_floating_point() else t for name, t in plain.w.items()}
    ids = torch.tensor([tokens])
    _, aux_hidden = model.aux_hidden(ids[:, :-1])
    want, _ = plain.drafts(aux_hidden[0], tokens, 1)
    residual, _ = model.draft(ids[:, 1:], model.eagle.fc(aux_hidden), [])
    torch.testing.assert_close(model.draft_logits(residual)[0], want, atol=1e-3, rtol=1e-4)


def test_it_drafts_for_the_demo_model(tokens: list[int]) -> None:
    """More drafts are accepted than guesses would be, and no token changes."""
    found = {}
    for draft in (None, "demo-eagle3"):
        settings = {"width": 3 if draft else 1, "max_rows": 2, "token_budget": 64, "max_context": 400}
        made = InlineEngine(
            EngineConfig(model="demo", draft_model=draft, device="cpu", selftest=False, cache_pages=20, **settings)
        )
        found[draft] = made.generate([tokens[:90], tokens[:140]], SamplingParams(100, temperature=0.0))
    assert found[None] == found["demo-eagle3"]
    stats = made.scheduler.stats()
    assert stats.drafts_accepted > 0.45 * stats.drafts_offered


@torch.no_grad()
def test_what_the_model_writes_is_what_it_finds_most_probable(tokens: list[int]) -> None:
    """The model writes the same with a cache as without one, beside rows that are drawn."""
    trunk, _ = load(DEMO_MODEL, torch.device("cpu"))
    prompts_BT = torch.tensor([tokens[:30], tokens[30:60], tokens[60:90]])
    generator = torch.Generator().manual_seed(0)
    ids_BT = continued(trunk, prompts_BT, 25, torch.tensor([0.0, 0.7, 0.0]), generator)
    best_BT = trunk.lm_head(trunk.trunk(ids_BT)).argmax(-1)[:, 29:-1]
    for row in (0, 2):
        own = ids_BT[row, 30:].tolist()
        count = own.index(EOS_ID) + 1 if EOS_ID in own else len(own)
        assert own[:count] == best_BT[row, :count].tolist()
    assert ids_BT[1, 30:].tolist() != best_BT[1].tolist()


@pytest.mark.long
def test_the_script_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(ASSETS / "train_eagle.py"), "--smoke", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "step 2" in run.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.long
def test_formats_are_compared() -> None:
    command = [sys.executable, str(ASSETS / "compare_formats.py"), "--prompts", "2", "--new", "2", "--tokens", "4096"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {form}" for form in ("bf16", "fp8", "int4") for _ in range(4)]
    for row, most in zip(rows[::4], (0.0, 0.5, 3.0), strict=True):
        assert float(row[2].rstrip("%")) <= most
