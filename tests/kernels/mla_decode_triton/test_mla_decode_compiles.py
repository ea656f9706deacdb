"""The decode kernels compile for Hopper without spills and fit its shared memory, at every tiling that is chosen."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import DecodeTiling, fp8_tiling, hopper_tiling, narrow_fp8_tiling, portable_tiling
from kernels.own_entries import OwnEntries
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

PROCESSORS = 132


def compiled(
    case: Case, tiling: DecodeTiling, dependent: bool = False, early: bool = False, own: bool = False, shards: int = 1
) -> dict[str, Any]:
    """The compiled kernels by name; none spills. `own`: of a shard's own entries, of which those in FP8 spill a pointer
    that is read once a tile."""
    t, workspace = case.tensors, case.workspace(tiling)
    part = OwnEntries.allocate(*t["table"].shape[:1], case.width, t["table"].shape[1], torch.empty) if own else None
    with compile_only() as kernels:
        launch.schedule(t["length"], t["table"], workspace, first=case.first, dependent=dependent)
        launch.attend(
            t["q"],
            t["cache"],
            t["table"],
            t["length"],
            t["out"],
            t["lse"],
            workspace,
            scale=case.scale,
            dependent=dependent,
            early=early,
            own=part,
        )
        out = t["out"] if shards == 1 else t["out"].float()
        launch.merge(out, t["lse"], workspace, dependent=dependent, shards=shards)
    for kernel in kernels:
        resources(kernel).check(stack=8 if own and case.fp8 else 0)
    return {kernel.metadata.name: kernel for kernel in kernels}


@pytest.mark.parametrize(
    ("rows", "width", "heads", "fp8"),
    [
        (1, 1, 16, False),
        (64, 4, 32, False),
        (64, 2, 128, False),
        (1, 1, 16, True),
        (64, 1, 32, True),
        (64, 4, 32, True),
    ],
)
def test_own_entries_of_a_shard(rows: int, width: int, heads: int, fp8: bool) -> None:
    case = hopper_case(rows, width, heads, fp8=fp8)
    tiling = hopper_tiling(case.shape, PROCESSORS, fp8=fp8, own=True)
    assert tiling.path != "triton"
    compiled(case, tiling, True, True, own=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_invariant_mode_of_shards(shards: int, fp8: bool) -> None:
    """A part of every row is merged without that the compiler makes one operation of two."""
    case = hopper_case(4, 2, 16, invariant=True, fp8=fp8)
    tiling = hopper_tiling(case.shape, PROCESSORS, fp8=fp8, own=shards > 1)
    kernels = compiled(case, tiling, own=shards > 1, shards=shards)
    assert ("attend_fp8" if fp8 else "attend_wide") in kernels
    ptx = kernels["merge_strands"].asm["ptx"]
    assert "fma.rn.f32" in ptx
    assert not re.search(r"\b(add|mul)\.f32", ptx)


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (16, 128), (17, 256), (256, 256)])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_merge_of_many_vectors_has_wider_programs(rows: int, columns: int, shards: int) -> None:
    """None spills, and ten of one warp at least stand on a multiprocessor."""
    case = hopper_case(rows, 1, 16, invariant=True)
    tiling = hopper_tiling(case.shape, PROCESSORS)
    assert tiling.merge_columns == columns
    kernel = compiled(case, tiling, True, own=shards > 1, shards=shards)["merge_strands"]
    found = resources(kernel)
    assert found.warps == 1
    found.check(65536 // (10 * 32) // 8 * 8)


@pytest.mark.parametrize("shards", [1, 8])
def test_the_merge_of_invariant_mode_is_launched_dependently(shards: int) -> None:
    """It reads pieces behind its wait, past L1, and lets the kernel behind start only then: that one may read what was
    written before the attention. What it reads before is the plan."""
    case = hopper_case(4, 2, 16, invariant=True)
    tiling = hopper_tiling(case.shape, PROCESSORS, own=shards > 1)
    kernel = compiled(case, tiling, True, own=shards > 1, shards=shards)["merge_strands"]
    before, behind = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in behind
    assert "griddepcontrol.launch_dependents" not in before
    assert len(re.findall(r"ld\.global", before)) == 2
    loads = re.findall(r"ld\.global\S*", behind)
    assert loads
    assert all(".cg" in load for load in loads)
    plain = compiled(case, tiling, own=shards > 1, shards=shards)["merge_strands"]
    assert not resources(plain).waits
    assert not resources(plain).releases


def hopper_case(rows: int, width: int, heads: int, invariant: bool = False, fp8: bool = False) -> Case:
    return Case([70] * rows, width, heads, 512, 64, torch.bfloat16, invariant=invariant, fp8=fp8)


@pytest.mark.parametrize(
    ("rows", "width", "dependent", "early"),
    [(1, 1, False, False), (1, 1, True, False), (1, 1, True, True), (32, 1, True, True), (1, 2, True, True)],
)
def test_narrow(rows: int, width: int, dependent: bool, early: bool) -> None:
    case = hopper_case(rows, width, 16)
    kernel = compiled(case, hopper_tiling(case.shape, PROCESSORS), dependent, early)["attend_narrow"]
    used = instructions(kernel)
    assert used["HMMA"] >= 36 + 4 * 8
    assert used["LDGSTS"] >= 2 * (16 + 2)
    assert resources(kernel).waits == dependent


@pytest.mark.parametrize(
    ("rows", "width", "heads", "dependent", "early"),
    [
        (1, 1, 16, True, True),
        (64, 1, 16, False, False),
        (64, 2, 16, True, True),
        (64, 2, 16, True, False),
    ],
)
def test_narrow_of_fp8_entries(rows: int, width: int, heads: int, dependent: bool, early: bool) -> None:
    """Entries are copied in pieces of 16 bytes and stay bytes in shared memory; matrices of them are read there."""
    case = hopper_case(rows, width, heads, fp8=True)
    tiling = narrow_fp8_tiling(case.shape, PROCESSORS)
    kernel = compiled(case, tiling, dependent, early)["attend_narrow"]
    used = instructions(kernel)
    assert used["HMMA"] >= (36 + 32) * tiling.block // 16
    assert used["LDSM"] >= 8 + 8 + 2
    assert "LDSM.16.MT88.4" in machine_code(kernel)  # values, transposed
    copied = set(re.findall(r"cp\.async\.c[ag]\S* .*?, (0x\w+|\d+),", kernel.asm["ptx"]))
    assert {int(size, 0) for size in copied} == {16}
    assert not re.search(r"LDS\.[US]8", machine_code(kernel))
    assert resources(kernel).waits == dependent


@pytest.mark.parametrize(("width", "dependent", "early"), [(1, False, False), (1, True, True), (2, True, True)])
def test_fp8(width: int, dependent: bool, early: bool) -> None:
    """Entries come by the copy engine. They are scored as they are, and values go into registers as matrices; there one
    instruction widens two numbers, and no product waits for the one before it."""
    case = hopper_case(64, width, 16, fp8=True)
    tiling = hopper_tiling(case.shape, PROCESSORS, fp8=True)
    assert tiling == fp8_tiling(case.shape, PROCESSORS)
    kernel = compiled(case, tiling, dependent, early)["attend_fp8"]
    used = instructions(kernel)
    # Scores of a row's first tile, then of every next one; values of either half.
    assert used["QGMMA"] == 2 * 16
    assert used["HGMMA"] == 2 * 4 + 2 * 16
    assert used["WARPGROUP"] < used["HGMMA"] + used["QGMMA"]  # arrivals and waits
    assert "HMMA" not in used
    assert used["UTMALDG"] >= 6
    assert used["LDSM"] >= 2 * 8
    assert len(re.findall(r"F2FP\.F16\.E4M3\.UNPACK_B", machine_code(kernel))) == 2 * 64
    assert "LDSM.16.MT88.4" in machine_code(kernel)  # values, transposed
    assert resources(kernel).waits == resources(kernel).releases == dependent


@pytest.mark.parametrize(
    ("latent", "rope", "heads", "width", "invariant"),
    [(512, 64, 16, 2, True), (512, 64, 16, 1, False), (64, 16, 6, 2, False), (256, 64, 32, 1, False)],
)
def test_portable_kernel_of_fp8_entries(latent: int, rope: int, heads: int, width: int, invariant: bool) -> None:
    case = Case([70, 3], width, heads, latent, rope, torch.bfloat16, invariant=invariant, fp8=True)
    compiled(case, portable_tiling(case.shape, PROCESSORS, fp8=True))


@pytest.mark.parametrize(
    ("rows", "width", "heads", "invariant", "dependent", "early"),
    [
        (2, 4, 16, False, False, False),
        (2, 4, 16, False, True, True),
        (4, 4, 128, False, True, True),
        (64, 4, 128, False, True, True),
        (3, 1, 16, True, True, True),
    ],
)
def test_wide(rows: int, width: int, heads: int, invariant: bool, dependent: bool, early: bool) -> None:
    case = hopper_case(rows, width, heads, invariant)
    kernel = compiled(case, hopper_tiling(case.shape, PROCESSORS), dependent, early)["attend_wide"]
    used = instructions(kernel)
    assert used["HGMMA"] >= 2 * 36 + 5 * 4  # scores of two tiles, five products with values
    assert not serialized(kernel)
    assert "HMMA" not in used
    assert used["UTMALDG"] >= 12
    assert used["USETMAXREG"] >= 4


@pytest.mark.parametrize(
    ("rows", "width", "heads", "dependent", "early"),
    [(64, 4, 32, False, False), (64, 1, 128, True, True)],
)
def test_wide_of_fp8_entries(rows: int, width: int, heads: int, dependent: bool, early: bool) -> None:
    """Products are those of `attend_wide`, with values in two parts each; latents are loaded, widened, and stored 16
    bytes at a time."""
    case = hopper_case(rows, width, heads, fp8=True)
    kernel = compiled(case, hopper_tiling(case.shape, PROCESSORS, fp8=True), dependent, early)["attend_wide_fp8"]
    used = instructions(kernel)
    assert used["HGMMA"] >= 2 * 36 + 5 * 2 * 4
    assert not serialized(kernel)
    assert resources(kernel).warps == 16
    assert len(re.findall(r"F2FP\.F16\.E4M3\.UNPACK_B", machine_code(kernel))) == 64 * 512 // 128 // 2
    assert len(re.findall(r"STS\.128", machine_code(kernel))) >= 64 * 512 // 128 // 8
    assert resources(kernel).waits == resources(kernel).releases == dependent


@pytest.mark.parametrize(
    ("width", "heads", "dependent", "early"),
    [
        (4, 16, False, False),
        (4, 16, True, False),
        (4, 16, True, True),
        (3, 16, True, True),
        (1, 64, True, True),
        (1, 128, True, True),
    ],
)
def test_either(width: int, heads: int, dependent: bool, early: bool) -> None:
    case = hopper_case(1, width, heads)
    kernels = compiled(case, hopper_tiling(case.shape, PROCESSORS), dependent, early)
    narrow, wide = kernels["attend_narrow"], kernels["attend_wide"]
    used = instructions(narrow)
    assert used["HMMA"] >= 36 + 4 * 8
    assert used["LDGSTS"] >= 2 * (16 + 2)
    assert "HGMMA" not in used
    used = instructions(wide)
    assert used["HGMMA"] >= 2 * 36 + 5 * 4
    assert used["UTMALDG"] >= 12
    assert resources(narrow).waits == resources(narrow).releases == dependent
    assert resources(wide).waits == resources(wide).releases == dependent


@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (4, 16), (1, 128)])
def test_portable_kernel_at_deepseek_sizes(width: int, heads: int) -> None:
    case = hopper_case(2, width, heads)
    compiled(case, portable_tiling(case.shape, PROCESSORS))


@pytest.mark.parametrize(
    ("rows", "width", "heads", "own"),
    [(1, 1, 32, False), (2, 1, 16, False), (2, 1, 16, True), (2, 2, 8, False), (1, 2, 8, False)],
)
def test_narrow_of_256_features(rows: int, width: int, heads: int, own: bool) -> None:
    """Mistral Small 4 runs on one GPU and on four."""
    case = Case([70] * rows, width, heads, 256, 64, torch.bfloat16)
    tiling = hopper_tiling(case.shape, PROCESSORS, own=own)
    kernel = compiled(case, tiling, True, True, own=own)["attend_narrow"]
    used = instructions(kernel)
    assert used["HMMA"] >= 20 + 4 * 4
    assert used["LDGSTS"] >= 3 * (8 + 2)
    assert resources(kernel).waits


@pytest.mark.parametrize(
    ("rows", "width", "invariant", "early", "own"),
    [
        (2, 1, False, False, False),
        (2, 4, False, True, False),
        (1, 2, False, True, False),
        (2, 8, False, True, True),
        (3, 1, True, True, False),
    ],
)
def test_wide_of_256_features(rows: int, width: int, invariant: bool, early: bool, own: bool) -> None:
    """Products have 128 columns, and nothing waits for them one by one."""
    case = Case([70] * rows, width, 32, 256, 64, torch.bfloat16, invariant=invariant)
    tiling = hopper_tiling(case.shape, PROCESSORS, own=own)
    kernel = compiled(case, tiling, True, early, own=own)["attend_wide"]
    used = instructions(kernel)
    assert used["HGMMA"] >= 2 * 20 + 5 * 4
    assert not serialized(kernel)
    assert "HMMA" not in used
    assert used["UTMALDG"] >= 8
    assert used["USETMAXREG"] >= 4
    assert resources(kernel).waits == resources(kernel).releases


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("width", "heads"), [(1, 32), (4, 32), (2, 8)])
def test_portable_kernel_at_sizes_of_mistral_small_4(width: int, heads: int, fp8: bool) -> None:
    """The model runs on one GPU and on four. Its entries in FP8 have no kernels of Hopper's own."""
    case = Case([70, 3], width, heads, 256, 64, torch.bfloat16, fp8=fp8)
    tiling = portable_tiling(case.shape, PROCESSORS, fp8=fp8)
    assert not fp8 or tiling == hopper_tiling(case.shape, PROCESSORS, fp8=True)
    compiled(case, tiling)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("width", "heads"), [(1, 32), (4, 16)])
def test_portable_kernel_at_sizes_of_axk2_light(width: int, heads: int, fp8: bool) -> None:
    """Its short rows attend to all of their tokens; on one GPU and on two."""
    case = Case([70, 3], width, heads, 128, 32, torch.bfloat16, fp8=fp8)
    compiled(case, hopper_tiling(case.shape, PROCESSORS, fp8=fp8))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_portable_kernel_at_the_demo_models_sizes(dtype: torch.dtype, invariant: bool) -> None:
    case = Case([70, 3], 3, 6, 64, 16, dtype, invariant=invariant)
    compiled(case, hopper_tiling(case.shape, PROCESSORS))


@pytest.mark.parametrize(("latent", "rope"), [(32, 8), (48, 24)])
def test_portable_kernel_at_sizes_that_are_no_powers_of_two(latent: int, rope: int) -> None:
    case = Case([70, 3], 3, 6, latent, rope, torch.float32)
    compiled(case, hopper_tiling(case.shape, PROCESSORS))


def test_other_lengths_and_batches_compile_nothing_new() -> None:
    """Integers that change from step to step are not compiled in; the plan is compiled once for a power of two of
    rows."""
    names = []
    for lengths in ([70] * 17, [1] * 30, [4096] * 32):
        case = Case(lengths, 2, 16, 512, 64, torch.bfloat16, least_columns=80)
        tiling = hopper_tiling(case.shape, PROCESSORS)
        tiling = replace(tiling, **{name: getattr(tiling, name) for name in ("merge_queries", "merge_pieces")})
        with compile_only() as kernels:
            launch.schedule(case.tensors["length"], case.tensors["table"], case.workspace(tiling))
            t = case.tensors
            launch.attend(
                *(t[n] for n in ("q", "cache", "table", "length", "out", "lse")), case.workspace(tiling), scale=0.1
            )
        names.append([kernel.hash for kernel in kernels])
    assert names[0] == names[1] == names[2]
