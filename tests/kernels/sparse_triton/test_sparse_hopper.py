"""Compilation of the kernels of sparse attention for Hopper, at the sizes of published models: no spills, products on
tensor cores of Hopper, and one variant for all lengths."""

from __future__ import annotations

import re

import pytest
import torch
from sparse_case import Sparse

from kernels.sparse.workspace import SelectWorkspace, sparse_tiling
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate


def published(
    tokens: int, width: int, index_heads: int = 64, fp8: bool = True, heads: int = 16, hopper: bool = False
) -> Sparse:
    return Sparse(
        [(300, 1)] * tokens,
        heads=heads,
        index_heads=index_heads,
        latent=512,
        rope=64,
        selected=2048,
        dtype=torch.bfloat16,
        fp8=fp8,
        width=width,
        kernels=True,
        hopper=hopper,
        dependent=hopper,
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_keys(fp8: bool) -> None:
    with compile_only() as compiled:
        published(3, 1, fp8=fp8).write()
    resources(compiled[0]).check(registers=64)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tokens", "width", "index_heads"), [(1, 1, 64), (4, 2, 64), (8, 0, 64), (8, 0, 32)])
def test_scores(tokens: int, width: int, index_heads: int, fp8: bool) -> None:
    with compile_only() as compiled:
        published(tokens, width, index_heads, fp8).score()
    used = instructions(compiled[0])
    resources(compiled[0]).check(registers=168)
    assert used["IGMMA" if fp8 else "HGMMA"] >= 2
    assert not serialized(compiled[0])
    # I2F and F2I are a quarter as quick as I2FP, and stand in divisions of indices alone.
    assert used["I2F"] + used["F2I"] <= 8
    assert "LDGSTS.E.BYPASS.128" in machine_code(compiled[0]) or "LDGSTS.E.BYPASS.LTC128B.128" in machine_code(
        compiled[0]
    )


def test_scores_of_deepseek_v4() -> None:
    """An entry stands for four tokens, so a page has 16 keys, which lie side by side."""
    found = []
    for tokens, width in ((1, 1), (24, 3), (64, 1), (64, 0)):
        rows = [(300, max(width, 1))] * (tokens // max(width, 1))
        case = Sparse(rows, index_heads=64, dtype=torch.bfloat16, width=width, kernels=True, hopper=False, keys=16)
        with compile_only() as compiled:
            case.score()
        found += compiled
    for kernel in found:
        resources(kernel).check(registers=168)
        assert instructions(kernel)["HGMMA"] >= 2
        assert not serialized(kernel)
        assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(kernel))


@pytest.mark.parametrize(
    ("tokens", "width", "index_heads"), [(1, 1, 64), (4, 2, 64), (64, 0, 64), (64, 0, 32), (2, 1, 16)]
)
@pytest.mark.parametrize("dependent", [False, True])
def test_scores_on_hopper(tokens: int, width: int, index_heads: int, dependent: bool) -> None:
    """Pages come by the copy engine, and no product waits for another one."""
    with compile_only() as compiled:
        case = published(tokens, width, index_heads)
        case.hopper, case.dependent = True, dependent
        case.score()
    assert compiled[0].metadata.name == "score_pages_hopper"
    used = instructions(compiled[0])
    resources(compiled[0]).check(registers=168)
    assert resources(compiled[0]).waits == resources(compiled[0]).releases == dependent
    assert used["IGMMA"] >= 2 * 4
    # Chunks have the products of a second page under way while those of the first are weighed.
    assert ("wgmma.wait_group.sync.aligned 1" in compiled[0].asm["ptx"]) == (width == 0)
    assert used["UTMALDG"] >= 3
    assert not serialized(compiled[0])
    assert not used["LDGSTS"]


@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("dependent", [False, True])
def test_selection_by_one_program(tokens: int, dependent: bool) -> None:
    case = published(1, 1, hopper=True)
    case.dependent = dependent
    case.tensors["score"] = torch.empty(tokens, 1 << 17)
    case.tensors["bound"] = torch.empty(tokens, dtype=torch.int32)
    case.tensors["selected"] = torch.empty(tokens, 2048, dtype=torch.int32)
    with compile_only() as compiled:
        case.select()
    assert [kernel.metadata.name for kernel in compiled] == ["select_whole"]
    resources(compiled[0]).check(registers=128)
    assert resources(compiled[0]).waits == resources(compiled[0]).releases == dependent
    assert re.search(r"LDG\.E\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("tokens", [1, 64, 600])
def test_selection(tokens: int) -> None:
    case = published(1, 1, hopper=tokens <= 16)
    case.tensors["score"] = torch.empty(tokens, 1 << 17)
    case.tensors["bound"] = torch.empty(tokens, dtype=torch.int32)
    case.tensors["selected"] = torch.empty(tokens, 2048, dtype=torch.int32)
    with compile_only() as compiled:
        case.select()
    assert [kernel.metadata.name for kernel in compiled] == ["find_maxima", "keep_candidates", "list_positions"]
    for kernel, registers in zip(compiled, (64, 128, 128), strict=True):
        resources(kernel).check(registers)
        assert re.search(r"LDG\.E\S*\.128", machine_code(kernel))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(64, 16), (64, 32), (1, 64), (300, 128)])
def test_attention(tokens: int, heads: int, fp8: bool) -> None:
    """The portable kernel: entries are copied asynchronously, in pieces of 16 bytes."""
    with compile_only() as compiled:
        published(tokens, 1, fp8=fp8, heads=heads).attend()
    for kernel in compiled:
        resources(kernel).check()
    used = instructions(compiled[0])
    assert used["HGMMA" if heads > 32 else "HMMA"] >= 36
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))
    assert len(compiled) == (1 if tokens == 300 else 2)


@pytest.mark.parametrize(("heads", "fp8"), [(128, False), (16, True), (32, True), (128, True)])
def test_attention_on_hopper(heads: int, fp8: bool) -> None:
    """No product waits for another one, and entries are copied without passing through registers, but for latents that
    are widened there."""
    with compile_only() as compiled:
        published(64, 1, fp8=fp8, heads=heads, hopper=True).attend()
    names = [kernel.metadata.name for kernel in compiled]
    of_fp8 = "attend_selected_wide_fp8" if heads == 128 else "attend_selected_fp8"
    assert names[:2] == ["find_places", of_fp8 if fp8 else "attend_selected"]
    assert names[2:] == ([] if heads == 128 else ["merge"])
    for kernel in compiled:
        resources(kernel).check()
    code = machine_code(compiled[1])
    assert not serialized(compiled[1])
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\S*\.128", code)) == len(re.findall("LDGSTS\\.", code)) > 0
    used = instructions(compiled[1])
    assert used["HGMMA"] + used["QGMMA"] >= 36
    assert ("CCTL.E.PF2" in code) == (heads == 128 and fp8)  # the L2 cache is told of entries


@pytest.mark.parametrize("fp8", [False, True])
def test_gather_for_invariant_mode(fp8: bool) -> None:
    case = published(3, 1, fp8=fp8)
    case.invariant = True
    with compile_only() as compiled:
        case.attend()
    resources(compiled[0]).check()
    assert compiled[0].metadata.name == "gather"
    assert re.search(r"LDG\.E\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("fp8", [False, True])
def test_attention_of_small_models(fp8: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Sparse([(300, 2)], latent=64, rope=16, selected=64, dtype=dtype, fp8=fp8, kernels=True)
        with compile_only() as compiled:
            if dtype != torch.float32:  # scores in fp32, for models of tests, spill a few registers
                case.score()
            case.attend()
        for kernel in compiled:
            resources(kernel).check()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [2, 64, 600])
def test_sizes_of_axk2_light(tokens: int, fp8: bool) -> None:
    sizes = {"heads": 32, "index_heads": 16, "latent": 128, "rope": 32, "selected": 2048}
    case = Sparse([(300, 1)] * tokens, **sizes, dtype=torch.bfloat16, fp8=fp8, width=1, kernels=True, hopper=True)
    with compile_only() as compiled:
        case.write()
        case.score()
        case.attend()
    assert len(compiled) >= 3
    for kernel in compiled:
        resources(kernel).check()


def test_lengths_rows_and_tables_compile_nothing_new() -> None:
    kernels = set()
    for rows in ([(1, 1)], [(700, 1)], [(64, 1)]):
        for least in (0, 17):
            case = Sparse(
                rows,
                heads=16,
                latent=512,
                rope=64,
                selected=2048,
                dtype=torch.bfloat16,
                fp8=True,
                width=1,
                kernels=True,
                least_pages=3 * least,
            )
            case.tensors["score"] = torch.empty(1, 4096)
            case.tensors["page"] = torch.zeros(1, 64 + least, dtype=torch.int32)
            with compile_only() as compiled:
                case.write()
                case.score()
                case.select()
                case.attend()
            kernels |= {kernel.hash for kernel in compiled}
    assert len(kernels) == 1 + 1 + 3 + 2


def test_other_numbers_of_tokens_compile_little() -> None:
    """The number of parts is a power of two, whatever the number of tokens; and blocks of the selection do not depend
    on it."""
    sizes = {"multiprocessors": 132, "fp8": True}
    parts = {sparse_tiling(tokens, 16, 512, 2048, torch.bfloat16, **sizes).part for tokens in range(1, 1000)}
    assert parts == {32, 64, 128, 256, 512, 1024, 2048}
    cut = {SelectWorkspace.allocate(tokens, 1 << 17, _size_alone).block for tokens in range(1, 1000)}
    assert cut == {4096}


def _size_alone(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
