"""The layer of DeepSeek V4 that drafts, behind the scheduler on a CPU: what it proposes is what transformers' layer
makes of the same streams and tokens, and no token is another one for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from tests.deepseek_v4_layout import VOCAB, mtp_v4, published_v4, tiny_v4, write_v4
from tests.workers.called_graphs import call_graphs
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.drafters.compressed_mtp import CompressedMtp
from workers.protocol.plan import SamplingParams

WIDTH = 4


@contextmanager
def read_by(module: torch.nn.Module, seen: list[Tensor], instead: Tensor | None = None) -> Iterator[None]:
    """Note what a module of transformers reads, or let it read something else."""

    def hook(_: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        seen.append(given[0])
        return None if instead is None else (instead, *given[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Oracle:
    """A model and its layer that drafts, in transformers."""

    model: DeepseekV4ForCausalLM
    layer: DeepseekV4ForCausalLM
    extra: dict[str, Tensor]

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What is proposed behind these tokens, one by one."""
        with torch.inference_mode():
            seen: list[Tensor] = []
            with read_by(self.model.model.hc_head, seen):
                self.model(torch.tensor([tokens[:-1]]))
            (streams_1TZE,), fed = seen, list(tokens)
            for _ in range(count):
                logits, behind = self._through(streams_1TZE, fed[1:])
                fed.append(int(logits[0, -1].argmax()))
                streams_1TZE = torch.cat([streams_1TZE, behind[:, -1:]], 1)
        return fed[len(tokens) :]

    def _through(self, streams_1TZE: Tensor, token: list[int]) -> tuple[Tensor, Tensor]:
        """Logits and streams behind the layer, of tokens and the streams of the positions before them."""
        extra, eps = self.extra, self.model.config.rms_norm_eps
        norm = {name: extra[f"mtp.0.{name}.weight"] for name in ("enorm", "hnorm")}
        e_1TE = F.rms_norm(
            self.model.model.embed_tokens(torch.tensor([token])), norm["enorm"].shape, norm["enorm"], eps
        )
        x_1TZE = F.rms_norm(streams_1TZE, norm["hnorm"].shape, norm["hnorm"], eps) @ extra["mtp.0.h_proj.weight"].T
        x_1TZE = (e_1TE @ extra["mtp.0.e_proj.weight"].T).unsqueeze(2) + x_1TZE
        behind: list[Tensor] = []
        with read_by(self.layer.model.layers[0], [], instead=x_1TZE), read_by(self.layer.model.hc_head, behind):
            hidden = self.layer.model(torch.tensor([token])).last_hidden_state
        return self.model.lm_head(hidden), behind[0]


@cache
def oracle() -> Oracle:
    config, model = tiny_v4(seed=1)
    extra, layer = mtp_v4(config, seed=8)
    return Oracle(model, layer, extra)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model = tiny_v4(seed=1)
    given = {**config, "num_nextn_predict_layers": 1, "compress_ratios": [*config["compress_ratios"], 0]}
    return write_v4(tmp_path_factory.mktemp("mtp"), given, {**published_v4(model), **oracle().extra})


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300, "width": WIDTH}
    given = {**defaults, "device": "cpu", "selftest": False, **settings}
    return InlineEngine(EngineConfig(model=str(folder), **given))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_drafts_are_those_of_transformers_layer(tokens: int, folder: Path) -> None:
    """Behind prompts in several chunks, and behind steps whose drafts were rejected."""
    for prompt in prompts(1, 5, 30, 90):
        run = engine(folder, max_rows=1)
        assert isinstance(run.runner.parts.model.drafter, CompressedMtp)
        (answer,) = run.generate([prompt], greedy(tokens))
        drafted = run.runner.parts.state.tensors.draft_SK[0].tolist()
        assert drafted == oracle().drafts([*prompt, *answer], WIDTH - 1)


def test_tokens_are_those_without_drafts(folder: Path) -> None:
    """In mixed batches, behind snapshots, and after preemption."""
    asked = prompts(5, 58, 140, 33, seed=2)
    asked += [asked[2], asked[2][:130] + asked[0]]
    want = engine(folder, width=1).generate(asked, greedy(10))
    run = engine(folder)
    assert run.generate(asked, greedy(10)) == want
    assert run.generate(asked[2:3], greedy(10)) == want[2:3]
    stats = run.scheduler.stats()
    assert stats.drafts_offered > 100
    assert stats.cached_tokens > 300
    few = prompts(58, 57, 56, seed=1)
    crowded = engine(folder, max_context=100, cache_pages=4, max_rows=3)
    assert crowded.generate(few, greedy(12)) == engine(folder, width=1).generate(few, greedy(12))
    assert crowded.scheduler.stats().preemptions > 0


def test_an_entry_that_is_missing_behind_a_snapshot_is_passed_over(folder: Path) -> None:
    """Drafts stay finite, and are as if the layer had never seen that token."""
    run, (prompt,) = engine(folder, max_rows=1), prompts(140, seed=3)
    (answer,) = run.generate([prompt], greedy(1))
    before = run.runner.parts.state.tensors.draft_SK[0].tolist()
    assert run.generate([prompt], greedy(1)) == [answer]
    assert run.scheduler.stats().cached_tokens == 128
    # The window is 8: the entry at position 128 is out of sight by now.
    assert run.runner.parts.state.tensors.draft_SK[0].tolist() == before
    asked = prompt[:128] + prompt[:3]
    want = engine(folder, max_rows=1, width=1).generate([asked], greedy(9))
    assert run.generate([asked], greedy(9)) == want
    assert run.scheduler.stats().cached_tokens == 256


def test_captured_steps_pass_the_self_test_and_draft_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step has the layer's passes in it; in mixed steps they are eager, behind segments for all tokens."""
    call_graphs(monkeypatch)
    run, (prompt,) = engine(folder, max_rows=2, selftest=True), prompts(30, seed=9)
    assert {bucket.kind for bucket in run.reports[-1].buckets} == {"decode", "masked", "mixed", "tail"}
    (answer,) = run.generate([prompt], greedy(7))
    drafted = run.runner.parts.state.tensors.draft_SK.tolist()
    assert oracle().drafts([*prompt, *answer], WIDTH - 1) in drafted
    assert run.runner.stats.replays > 0


def test_a_start_without_it(folder: Path) -> None:
    assert engine(folder, drafter="none").runner.parts.model.drafter is None
    assert engine(folder, width=1).runner.parts.width == 1
