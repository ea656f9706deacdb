"""Compilation of Hopper's products of many tokens with weights of four bits, at the sizes of Kimi K2 and ranks."""

import re
from collections import Counter

import pytest
import torch
from four_bit_compiled import compiled, main_loops, matrix

from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, machine_code, resources, serialized

pytestmark = pytest.mark.gate

SIZES = {"K2": 2048, "on 2 ranks": 1024, "on 4": 512, "on 8": 256}


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 64), (8192, 128)])
@pytest.mark.parametrize(
    "inner",  # the widest, the narrowest, and those between them
    [
        pytest.param(inner, marks=() if inner in (2048, 256) else pytest.mark.soak, id=name)
        for name, inner in SIZES.items()
    ],
)
def test_compiles_to_what_it_was_written_for(inner: int, tokens: int, rows: int) -> None:
    kernels = compiled(ExpertsShape(tokens, 8, 384, 7168, inner), schedule.four_bit_grouped)
    assert [kernel.metadata.name for kernel in kernels] == ["product", "product"]
    for kernel, features in zip(kernels, (7168, inner), strict=True):
        found = resources(kernel)
        found.check()
        assert found.warps == 12
        assert not serialized(kernel)
        code = machine_code(kernel)
        # Results, and the counter that is put back.
        assert {*re.findall(r"STG\.E[.\w]*", code)} == {"STG.E.128", "STG.E"}
        # 128 sums, two chunks of weights and addresses for a multiplying thread.
        given = {int(size, 16) for size in re.findall(r"USETMAXREG\.\S+ (?:UP0, )?(0x\w+)", code)}
        assert given >= {216, 224, 64}
        if features > 512:  # else its stages are no loop of their own
            # What waits once more stands elsewhere and branches back into a loop: that is none of its own.
            loops = [body for body in main_loops(kernel, "HGMMA") if sum("HGMMA" in text for text in body) == 2 * 16]
            assert len(loops) == 2 * 2, "either partition has one for either width"
            for body in loops:
                check_stage(body, rows)


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 64), (8192, 128)])
def test_mxfp4(tokens: int, rows: int) -> None:
    """Of DeepSeek-V4-Flash, whole and on four ranks."""
    for inner in (2048, 512):
        shape = ExpertsShape(tokens, 6, 256, 4096, inner, limit=10.0)
        for kernel in compiled(shape, schedule.four_bit_grouped, "mxfp4"):
            resources(kernel).check()
            assert not serialized(kernel)
            bodies = main_loops(kernel, "HGMMA")
            loops = [body for body in bodies if sum("HGMMA" in text for text in body) == 4 * 16]
            assert len(loops) == 2 * 2 or inner == 512
            for body in loops:
                check_stage(body, rows, mxfp4=True)


def check_stage(body: list[str], rows: int, mxfp4: bool = False) -> None:
    """Check a loop with products of a turn's stages: eight of 16 features for either chunk of each. A product takes
    four conversions of two numbers. Of INT4 each is a logical operation, a difference and a product, and there are
    three shifts: 15 instructions of 23.5 at most. Of MXFP4 there are eight logical operations, seven shifts and four
    products: 19 of 27. Products of 64 rows and 128 pairs take the tensor cores 64 cycles, and two partitions share a
    scheduler's slots."""
    names = Counter(re.sub(r"^@!?\w+ ", "", text).split()[0] for text in body)
    products = {name: count for name, count in names.items() if name.startswith("HGMMA")}
    [(name, count)] = products.items()
    assert name in (f"HGMMA.64x{rows}x16.F32.BF16", f"HGMMA.64x{rows // 2}x16.F32.BF16")
    assert not any(part.startswith(("LDL", "STL", "STS", "SHFL", "LDG")) for part in names)
    conversions = sum(count for part, count in names.items() if part.startswith(("HADD2", "HMUL2", "HFMA2")))
    assert conversions == (4 if mxfp4 else 8) * count
    assert len(body) <= (27 if mxfp4 else 23.5) * count


def test_rearranging_compiles() -> None:
    shape = ExpertsShape(1024, 8, 384, 7168, 2048)
    gate_up, down = matrix(4096, 7168), matrix(7168, 2048)
    tiling = schedule.four_bit_grouped(shape, 132, (stored(gate_up), stored(down)))
    x, ids = torch.empty(1024, 7168, dtype=torch.bfloat16), torch.zeros(1024, 8, dtype=torch.int64)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as kernels:
        launch.ExpertLaunches(x, ids, ids.float(), gate_up, down, x, scratch, shape, tiling).rearrange()
    resources(kernels[0]).check(64)
    assert "STG.E.128" in machine_code(kernels[0])


def test_tokens_compile_no_more() -> None:
    """Every number of tokens runs the machine code of its height of tile."""
    hashes = {
        kernel.hash
        for tokens in (576, 1024, 2688, 2689, 4096)
        for kernel in compiled(ExpertsShape(tokens, 8, 384, 7168, 256), schedule.four_bit_grouped)
    }
    assert len(hashes) == 4
