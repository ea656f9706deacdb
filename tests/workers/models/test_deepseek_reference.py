"""The plain forward pass gives transformers' logits, and those of the pass that serves, on the same paged cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle, oracle_logits
from paged import ALONE, CPU, Paged, Step, load_fp32
from quantized_pairs import CHECKPOINTS, checkpoints
from tiny_models import KINDS, SPARSE_KINDS, VOCAB, random_tokens, write_tiny
from torch import Tensor

from kernels.latent_entry import entries
from workers.families import load_model
from workers.models import deepseek
from workers.models.deepseek_parts import PagedTokens
from workers.models.layer_ops import Mixture
from workers.models.model import Model

TOLERANCE = 1e-4
SEQUENCES = [random_tokens(count, count, VOCAB) for count in (150, 70)]
"""Over three pages, and over two."""
STEPS: list[tuple[list[int], int, list[tuple[int, int]]]] = [
    ([], 1, [(0, 60), (1, 1)]),
    ([1], 4, [(0, 30)]),
    ([0, 1], 3, []),
    ([], 1, [(1, 60), (0, 56)]),
    ([0, 1], 1, []),
    ([1], 1, []),
]
"""Chunks that begin and end within pages, decode rows of several widths, and both at once."""
Run = Callable[[Paged, Step], dict[int, Tensor]]
QUICK = ("v3", "v2-no-q-lora", "v3-yarn", "kimi", "glm5", "int4")


def kinds(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


@dataclass(frozen=True)
class Case:
    """A model, and transformers' logits of the sequences."""

    model: Model
    want: list[Tensor]


@cache
def case(kind: str) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        if kind in CHECKPOINTS:  # quantized, beside transformers' model of the same numbers
            path, plain = checkpoints(Path(folder), kind)
        else:
            path = plain = write_tiny(folder, kind, seed=1)
        oracle = load_oracle(plain)
        return Case(load_fp32(path), [oracle_logits(oracle, tokens) for tokens in SEQUENCES])


def plainly(paged: Paged, step: Step) -> dict[int, Tensor]:
    """Logits of a step by the plain forward pass, by row."""
    batch = paged.batch(step, 0)
    tables = ([] if batch.decode is None else [batch.decode.page_RP]) + (
        [] if batch.prefill is None else [batch.prefill.page_NP]
    )
    counts = torch.tensor([feed.count for feed in step.feeds])
    at = PagedTokens(torch.arange(len(counts)).repeat_interleave(counts), batch.position_T, torch.cat(tables))
    tokens = [t for f in step.feeds for t in paged.rows[f.row].tokens[f.start : f.start + f.count]]
    logit_TB = deepseek.forward(paged.model, torch.tensor(tokens), at, paged.cache)
    for feed in step.feeds:
        paged.rows[feed.row].written = feed.start + feed.count
    return {feed.row: part for feed, part in zip(step.feeds, logit_TB.split(counts.tolist()), strict=True)}


def served(paged: Paged, step: Step) -> dict[int, Tensor]:
    """The same by the pass that serves."""
    return {row: paged.model.logits(hidden) for row, hidden in paged.forward(step).items()}


def in_turn(*runs: Run) -> Run:
    """One way after the other, each on what the others have cached."""
    turn = iter([*runs] * len(STEPS))
    return lambda paged, step: next(turn)(paged, step)


def fed(model: Model, run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of both sequences, and the layers' caches, in which all that nobody has written is NaN."""
    paged = Paged(model, SEQUENCES)
    got: list[list[Tensor]] = [[] for _ in SEQUENCES]
    for decode, width, chunks in STEPS:
        for row, logit_TB in run(paged, paged.plan(decode, width, chunks)).items():
            got[row].append(logit_TB)
    assert [row.written for row in paged.rows] == [len(tokens) for tokens in SEQUENCES]
    return [torch.cat(parts) for parts in got], paged.cache.layers[: len(model.cache)]


def far(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", kinds(*KINDS, *SPARSE_KINDS, *CHECKPOINTS))
def test_logits_are_transformers(kind: str) -> None:
    got, _ = fed(case(kind).model, plainly)
    assert far(got, case(kind).want) < TOLERANCE


@pytest.mark.parametrize("kind", kinds(*KINDS, *SPARSE_KINDS, *CHECKPOINTS))
def test_it_is_the_pass_that_serves(kind: str) -> None:
    """Logits and cache entries, and logits where one way reads what the other has written."""
    model = case(kind).model
    (got, ours), (want, theirs) = fed(model, plainly), fed(model, served)
    assert far(got, want) < TOLERANCE
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0, equal_nan=True)
    mixed, _ = fed(model, in_turn(plainly, served))
    assert far(mixed, want) < TOLERANCE


def test_it_reads_an_fp8_cache(tmp_path: Path) -> None:
    """An entry that differs in its last bits may become the next number of FP8, which a few logits show a little."""
    folder = write_tiny(tmp_path, "v3", seed=1)
    model = load_model(folder, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512, fp8_cache=True)
    (got, ours), (want, theirs) = fed(model, plainly), fed(model, served)
    assert ours[0].dtype == torch.uint8
    error_T = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(got, want, strict=True)])
    assert float(error_T.median()) < TOLERANCE
    config = model.config
    sizes = config.kv_lora_rank, config.qk_rope_head_dim, torch.float32
    for a, b in zip(ours, theirs, strict=True):
        equal = torch.isclose(entries(a, *sizes), entries(b, *sizes), rtol=0, atol=TOLERANCE, equal_nan=True)
        assert float(equal.float().mean()) > 0.99
    assert far(got, case("v3").want) > 100 * TOLERANCE  # what FP8 has rounded


def test_index_keys_in_int8_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v32", seed=1)
    model = load_model(folder, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512, fp8_cache=True)
    with pytest.raises(ValueError, match="load the model without fp8_cache"):
        fed(model, plainly)


def of_halves(x_TO: Tensor, turn_TO: Tensor) -> Tensor:
    """Rope of pairs (i, i + half)."""
    a, b = x_TO.chunk(2, -1)
    cos, sin = turn_TO.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


HONEST = deepseek.attention, deepseek.experts


def unscaled(layer: Any, *rest: Any) -> Tensor:
    """Softmax without the temperature of YaRN."""
    other = copy(layer)
    other.heads = replace(layer.heads, scale=(layer.heads.nope + layer.heads.rope) ** -0.5)
    return HONEST[0](other, *rest)


def unnormed(layer: Any, *rest: Any) -> Tensor:
    """Latents as they come out of their product."""
    other = copy(layer)
    other.heads = replace(layer.heads, norm_L=torch.ones_like(layer.heads.norm_L))
    return HONEST[0](other, *rest)


def with_routing(change: Callable[[Mixture], Mixture]) -> Callable[..., Tensor]:
    return lambda x_TE, mixture, choices: HONEST[1](x_TE, change(mixture), choices)


def with_rule(**changes: Any) -> Callable[..., Tensor]:
    return with_routing(
        lambda mixture: replace(
            mixture, routing=replace(mixture.routing, rule=replace(mixture.routing.rule, **changes))
        )
    )


FAULTS: dict[str, tuple[str, Any]] = {
    "rope of halves": ("rope", of_halves),
    "softmax scale": ("attention", unscaled),
    "norm of the latent": ("attention", unnormed),
    "experts of any group": ("experts", with_rule(groups=1, top_groups=1)),
    "weights that are not normalised": ("experts", with_rule(normalize=False)),
    "weights that are not scaled": ("experts", with_rule(scale=1.0)),
    "no bias of the router": ("experts", with_routing(lambda mixture: replace(mixture, bias_X=None))),
    "no shared experts": (
        "experts",
        with_routing(lambda mixture: replace(mixture, routing=replace(mixture.routing, shared_experts=0))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_it_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The comparisons above can fail."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}
    folder = write_tiny(tmp_path, "v3", seed=1, rope_parameters=rope)
    model = load_fp32(folder)
    want, _ = fed(model, served)
    assert far(fed(model, plainly)[0], want) < TOLERANCE
    name, planted = FAULTS[fault]
    monkeypatch.setattr(deepseek, name, planted)
    assert far(fed(model, plainly)[0], want) > 100 * TOLERANCE


def test_a_future_that_is_seen_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that see all of their row's entries, those behind them too."""
    honest = PagedTokens.contexts

    def all_seen(self: PagedTokens, cache_PKC: Tensor) -> Any:
        for own_T, found_SC, seen_TS in honest(self, cache_PKC):
            yield own_T, found_SC, torch.ones_like(seen_TS)

    monkeypatch.setattr(PagedTokens, "contexts", all_seen)
    assert far(fed(case("v3").model, plainly)[0], case("v3").want) > 100 * TOLERANCE
