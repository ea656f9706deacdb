"""Compilation of products of groups for Hopper, at the sizes of DeepSeek V4's output projection: no spills, FP8 weights
that are copied asynchronously, and products on tensor cores."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.linear import fp8_groups_launch, launch
from kernels.linear.fp8_groups_launch import fp8_groups
from kernels.linear.groups import launch_group_linear
from kernels.linear.w8a8_groups_launch import launch_w8a8_groups
from kernels.matrix import BlockScaled
from kernels.pending_norm import PendingNorm
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

FEATURES, ROWS = 4096, 1024


def matrix_of(groups: int) -> BlockScaled:
    data = torch.empty(groups * ROWS, FEATURES, dtype=torch.float8_e4m3fn)
    return BlockScaled(data, torch.empty(groups * ROWS // 128, FEATURES // 128))


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_few_tokens_in_fp8(tokens: int) -> None:
    x, out = (torch.empty(tokens, 8, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    with compile_only() as compiled:
        launch.stream_heads(x, matrix_of(8), out, dependent=True)
    resources(compiled[0]).check()


@pytest.mark.parametrize(("tokens", "groups"), [(1, 8), (8, 16), (16, 4)])
def test_few_tokens_in_a_ring(tokens: int, groups: int) -> None:
    x, out = (torch.empty(tokens, groups, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    with compile_only() as compiled:
        fp8_groups(x, matrix_of(groups), out, dependent=True)
    found, code = resources(compiled[0]), machine_code(compiled[0])
    found.check()
    assert (found.waits, found.releases) == (True, True)
    before, behind = code.split("ACQBULK")
    # The first weights are under way before the wait; tokens are asked for past L1, and only behind it.
    assert before.count("UTMALDG") >= 4
    assert "UTMALDG" in behind
    assert "LDG.E.128.STRONG.GPU" in behind
    assert not re.search(r"LDG(STS)?\.E\.\S*128", before)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("features", [8192, 12288])
def test_a_matrix_alone_in_a_ring(features: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That which brings DeepSeek V4's groups together, and what DSpark's context is made of: 128 programs."""
    data = torch.empty(4096, features, dtype=torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.empty(32, features // 128))
    monkeypatch.setattr(fp8_groups_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_groups_launch, "multiprocessors", lambda device: 132)
    assert fp8_groups_launch.takes_alone(tokens, matrix)
    x, out = torch.empty(tokens, 1, features).bfloat16(), torch.empty(tokens, 1, 4096)
    with compile_only() as compiled:
        for made in (out, out.bfloat16()):
            tiling = fp8_groups_launch.ALONE if tokens == 1 else fp8_groups_launch.FEW_ALONE
            fp8_groups(x, matrix, made, tiling=tiling, dependent=True)
    for kernel in compiled:
        found = resources(kernel)
        found.check()
        assert (found.waits, found.releases) == (True, True)
        before, behind = machine_code(kernel).split("ACQBULK")
        assert "UTMALDG" in before
        assert "UTMALDG" in behind


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("rows", [32768, 16384, 8192])
def test_queries_behind_a_latent_whose_norm_is_pending(rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank and of two, and an indexer's. Two programs at least stand on a multiprocessor."""
    matrix = BlockScaled(torch.empty(rows, 1024, dtype=torch.float8_e4m3fn), torch.empty(rows // 128, 8))
    monkeypatch.setattr(fp8_groups_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_groups_launch, "multiprocessors", lambda device: 132)
    assert fp8_groups_launch.takes_normed(tokens, matrix)
    x, out = torch.empty(tokens, 1024).bfloat16(), torch.empty(tokens, 1, rows).bfloat16()
    pending = PendingNorm(x, torch.empty(tokens, 64), 1e-6)
    with compile_only() as compiled:
        fp8_groups(x.unsqueeze(1), matrix, out, pending=pending, dependent=True)
    found = resources(compiled[0])
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)
    assert 2 * (found.shared + 1024) <= 228 * 1024
    assert machine_code(compiled[0]).split("ACQBULK")[0].count("UTMALDG") == 4


@pytest.mark.parametrize(("rows", "features"), [(32768, 1024), (4096, 2048), (2048, 8192), (8192, 4096)])
def test_other_matrices_have_kernels_of_their_own(rows: int, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.empty(rows, features, dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(fp8_groups_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_groups_launch, "multiprocessors", lambda device: 132)
    assert not fp8_groups_launch.takes_alone(1, BlockScaled(data, torch.empty(rows // 128, features // 128)))


@pytest.mark.parametrize("tokens", [17, 128, 256, 512, 8192])
def test_rounded_tokens(tokens: int) -> None:
    number, scale = torch.empty(tokens, 8 * FEATURES).to(torch.float8_e4m3fn), torch.empty(8 * FEATURES // 128, tokens)
    out = torch.empty(tokens, 8, ROWS, dtype=torch.bfloat16)
    with compile_only() as compiled:
        launch_w8a8_groups(number, scale.t(), matrix_of(8), out, dependent=tokens <= 512)
    found, code = resources(compiled[0]), machine_code(compiled[0])
    found.check()
    assert found.waits == found.releases == (tokens <= 512)
    assert found.warps == 12
    width, blocks = (64, 1) if tokens <= 128 else (128, 1) if tokens <= 256 else (128, 2)
    # Two partitions, of each four products of 32 features for a block; one instruction adds one to a thread's sum.
    assert re.findall(r"[HQ]GMMA\.(\S+)", code) == [f"64x{width}x32.F32.E4M3.E4M3"] * (8 * blocks)
    assert instructions(compiled[0])["FFMA"] >= width * blocks
    assert not serialized(compiled[0])


@pytest.mark.parametrize("groups", [8, 1])
@pytest.mark.parametrize("tokens", [24, 64, 2048])
def test_fp8(tokens: int, groups: int) -> None:
    x, out = (torch.empty(tokens, groups, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    with compile_only() as compiled:
        launch_group_linear(x, matrix_of(groups), out)
    resources(compiled[0]).check()
    assert not serialized(compiled[0])
    assert instructions(compiled[0])["HGMMA"] >= 8
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("tokens", [1, 64])
def test_plain(tokens: int) -> None:
    x, out = (torch.empty(tokens, 8, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    weight = torch.empty(8, ROWS, FEATURES, dtype=torch.bfloat16)
    with compile_only() as compiled:
        (launch.stream_heads(x, weight, out) if tokens == 1 else launch.tiled(x, weight, out, invariant=False))
    resources(compiled[0]).check()
