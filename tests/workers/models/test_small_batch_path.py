"""The small-batch path computes what the general path does, one kernel boundary differently: on a CPU in fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paged import CPU, Paged, load_fp32
from rank_processes import run_ranks
from tiny_models import KINDS, VOCAB, random_tokens, write_tiny

from kernels import pending_norm
from kernels.pending_norm import PendingNorm
from workers.families.registry import load_config
from workers.memory.scratch import Scratch
from workers.models.general import DecodeOps
from workers.models.small_batch import SmallBatchOps, unsupported
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.parallel.symmetric import MOST_BYTES


def agree(folder: Path, group: Group | None = None) -> None:
    """Decode steps of several widths on both ways: hidden states, drafts and caches."""
    model = load_fp32(folder, group or Group())
    ops = SmallBatchOps(model.group, dependent=True)
    paged = Paged(model, [random_tokens(151, 0, VOCAB), random_tokens(90, 1, VOCAB), random_tokens(70, 2, VOCAB)])
    prefill = paged.plan([], 1, [(0, 70), (1, 63), (2, 1)])
    hidden = paged.forward(prefill)
    if model.drafter:
        paged.draft(prefill, hidden)
    for decode, width in [([0], 1), ([0, 2], 3), ([1], 1), ([0, 1, 2], 2)]:
        step = paged.plan(decode, width, [])
        batch = paged.batch(step, 0)
        tokens = torch.tensor([t for f in step.feeds for t in paged.rows[f.row].tokens[f.start : f.start + f.count]])
        following = torch.tensor(
            [t for f in step.feeds for t in paged.rows[f.row].tokens[f.start + 1 : f.start + f.count + 1]]
        )
        scratch = Scratch(CPU)
        got = model.segments.forward(tokens, None, batch, paged.cache, scratch, ops=ops)
        written = [layer.clone() for layer in paged.cache.layers]
        hidden = paged.forward(step)
        want = torch.cat([hidden[row] for row in decode])
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        for ours, theirs in zip(written, paged.cache.layers, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4, equal_nan=True)
        if model.drafter:
            entering = following, want, paged.batch(step, 1)
            drafted = model.drafter.segments.forward(*entering, paged.cache, scratch, ops=ops)
            theirs = paged.draft(step, hidden)
            torch.testing.assert_close(drafted, torch.cat([theirs[row] for row in decode]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("axk1")])
def test_the_way_equals_that_of_many(kind: str, tmp_path: Path) -> None:
    overrides = {} if "no-q-lora" in kind else {"q_lora_rank": 32}
    agree(write_tiny(tmp_path, kind, seed=3, **overrides))


def test_a_norm_of_the_experts_sum_is_not_on_the_way(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = load_config(write_tiny(tmp_path, "axk1", **sizes))
    assert unsupported(config, Mesh()) == "the sum of a token's experts has a norm of its own"


def test_gates_are_not_on_the_way(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = load_config(write_tiny(tmp_path, "axk2", **sizes))
    assert unsupported(config, Mesh()) == "norms have gates"
    assert unsupported(dataclasses.replace(config, norm_gate_rank=0), Mesh()) == "attention's output has a gate"
    assert unsupported(dataclasses.replace(config, norm_gate_rank=0, output_gate="none"), Mesh()) == ""


def test_streams_gates_and_clamped_experts_are_not_on_the_way(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = load_config(write_tiny(tmp_path, "hyv4", **sizes))
    assert unsupported(config, Mesh()) == "there are several residual streams"
    config = dataclasses.replace(config, streams=None)
    assert unsupported(config, Mesh()) == "attention's output has a gate"
    config = dataclasses.replace(config, output_gate="none")
    assert unsupported(config, Mesh()) == "what experts multiply is clamped"
    assert config.routing is not None
    config = dataclasses.replace(config, routing=dataclasses.replace(config.routing, limit=0.0))
    assert unsupported(config, Mesh()) == ""


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_both_ways_compute_shared_experts_of_another_format(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts are a network of their own beside INT4 experts."""
    monkeypatch.setattr("workers.models.feed_forward._apart", lambda *_: True)
    agree(write_tiny(tmp_path, kind, seed=3, q_lora_rank=32))


class SharedSum:
    """Stands in for `SymmetricSum`: one place for the parts of all sums, NaN until a part is written; or, in one shot,
    none, and sums that enter the residual."""

    def __init__(self, one_shot: bool) -> None:
        self._buffer = torch.empty(MOST_BYTES, dtype=torch.uint8)
        self._one_shot = one_shot
        self.added = 0

    def part(self, out: torch.Tensor) -> torch.Tensor:
        if self._one_shot:
            return out
        return self._buffer[: out.nbytes].view(out.dtype).view(out.shape).fill_(torch.nan)

    def in_one_shot(self, out: torch.Tensor) -> bool:
        return self._one_shot

    def gathers(self, part_NY: torch.Tensor) -> bool:
        return self._one_shot

    def gather(self, part_NY: torch.Tensor, out_NGY: torch.Tensor) -> None:
        parts = [torch.empty_like(part_NY) for _ in range(out_NGY.shape[1])]
        dist.all_gather(parts, part_NY)
        torch.stack(parts, dim=1, out=out_NGY)

    def add(self, part_TE: torch.Tensor, residual_TE: torch.Tensor, norm_E: torch.Tensor, out: PendingNorm) -> None:
        self.added += 1
        dist.all_reduce(part_TE)
        pending_norm.add(part_TE, residual_TE, norm_E, out)

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(out.copy_(part))


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        for kind in ("v3", "v2-no-q-lora"):
            agree(folder / kind, group)
        for one_shot in (False, True):
            symmetric = SharedSum(one_shot)
            for kind in ("v3", "v2-no-q-lora"):
                agree(folder / kind, dataclasses.replace(group, symmetric=symmetric))
            assert not one_shot or symmetric.added > 0
    finally:
        group.close()


@pytest.mark.long
def test_the_way_equals_that_of_many_on_two_ranks(tmp_path: Path) -> None:
    """Whether sums are gloo's, or of memory that all ranks share, in two shots or in one."""
    write_tiny(tmp_path / "v3", "v3", seed=4, q_lora_rank=32)
    write_tiny(tmp_path / "v2-no-q-lora", "v2-no-q-lora", seed=4)
    run_ranks(rank_main, 2, 2, tmp_path)


def test_no_pass_on_a_cpu_takes_the_way(tmp_path: Path) -> None:
    model = load_fp32(write_tiny(tmp_path, "v3", q_lora_rank=32))
    paged = Paged(model, [random_tokens(20, 0, VOCAB)])
    batch = paged.batch(paged.plan([0], 1, []), 0)
    assert isinstance(model.paths.of(batch, torch.bfloat16, CPU), DecodeOps)


@pytest.mark.parametrize(
    ("overrides", "ranks", "word"),
    [
        ({"qk_rope_head_dim": 16}, 1, "q_lora_rank"),
        ({"q_lora_rank": 32, "qk_rope_head_dim": 48}, 1, "qk_rope_head_dim"),
        ({"q_lora_rank": 32, "qk_rope_head_dim": 16}, 1, ""),
        ({"q_lora_rank": 32, "qk_rope_head_dim": 16}, 2, "value features"),
        ({"q_lora_rank": 32, "qk_rope_head_dim": 16, "kv_lora_rank": 48}, 1, "kv_lora_rank"),
    ],
)
def test_unsupported_shapes_are_named(overrides: dict[str, int], ranks: int, word: str, tmp_path: Path) -> None:
    config = load_config(write_tiny(tmp_path, "v3", **overrides))
    assert word in unsupported(config, Mesh.of(0, ranks))
    assert bool(word) == bool(unsupported(config, Mesh.of(0, ranks)))


@pytest.mark.parametrize(
    ("experts", "groups", "word"), [(480, 5, "480 experts in 5 groups"), (512, 8, ""), (384, 1, "")]
)
def test_experts_that_a_warp_cannot_choose_from_are_named(experts: int, groups: int, word: str, tmp_path: Path) -> None:
    config = load_config(write_tiny(tmp_path, "v3", q_lora_rank=32, qk_rope_head_dim=16))
    rule = dataclasses.replace(config.routing.rule, groups=groups, top_groups=1)
    routing = dataclasses.replace(config.routing, experts=experts, rule=rule)
    reason = unsupported(dataclasses.replace(config, routing=routing), Mesh())
    assert word in reason
    assert bool(word) == bool(reason)
