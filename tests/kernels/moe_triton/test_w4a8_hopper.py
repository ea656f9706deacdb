"""Compilation of Hopper's products of activations in FP8 with weights in MXFP4, at the sizes of published models."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from four_bit_compiled import main_loops

from kernels.matrix import MicroScaled4
from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, machine_code, resources, serialized

pytestmark = pytest.mark.gate

MODELS = {
    "V4-Flash": (6, 256, 4096, 2048),
    "on 4 ranks": (6, 256, 4096, 512),
    "V4-Pro": (6, 384, 7168, 3072),
}


def matrix(rows: int, features: int) -> MicroScaled4:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
    scales = torch.empty(1, rows, features // 32, dtype=torch.uint8)
    return MicroScaled4(data, scales, torch.empty(1, rows, dtype=torch.uint8))


def compiled(shape: ExpertsShape) -> list[Any]:
    """gather, gate_up and down."""
    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    tiling = schedule.w4a8(shape, 132, (stored(gate_up), stored(down)))
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as kernels:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, torch.empty_like(x), scratch, shape, tiling)
        call.gather()
        call.gate_up()
        call.down()
    return kernels


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.soak if name == "V4-Pro" else ()) for name in MODELS]
)
def test_compiles_to_what_it_was_written_for(model: str) -> None:
    gather, *products = compiled(ExpertsShape(300, *MODELS[model], limit=10.0))
    resources(gather).check(64)
    assert {*re.findall(r"(?:LDG|STG)\.E\.128", machine_code(gather))} == {"LDG.E.128", "STG.E.128"}
    for kernel in products:
        found = resources(kernel)
        found.check(stack=32)  # addresses, once for each item: no loop with products or conversions has any
        assert found.warps == 16
        assert not serialized(kernel)
        code = machine_code(kernel)
        assert {*re.findall(r"[HQ]GMMA\.(\S+)", code)} == {"64x128x32.F32.E4M3.E4M3"}
        # Results come 16 bytes a thread; else there are scales, and the counter that is put back.
        assert {*re.findall(r"STG\.E[.\w]*", code)} == {"STG.E.128", "STG.E"}
        given = {int(size, 16) for size in re.findall(r"USETMAXREG\.\S+ (?:UP0, )?(0x\w+)", code)}
        assert given >= {216, 56, 24}
        check_multiplied(kernel)
        check_converted(kernel)


def check_multiplied(kernel: Any) -> None:
    """Check the loops with products, of one chunk or two in either partition: of each four of 32 features. To each of a
    thread's 64 sums of a chunk a product is added by one instruction; there is little else."""
    found = []
    for body in main_loops(kernel, "QGMMA"):
        names = Counter(map(name_of, body))
        chunks = sum(count for name, count in names.items() if name.startswith("QGMMA")) // 4
        # What waits once more stands elsewhere and branches back into a loop: that is none of its own.
        if names["FFMA"] == 64 * chunks and len(body) <= 64 * chunks + 80:
            found.append(chunks)
            assert not any(name.startswith(("LDL", "STL", "STS", "SHFL")) for name in names)
    assert sorted(found) == [1, 1, 2, 2]


def check_converted(kernel: Any) -> None:
    """Check the loop that converts a row's 128 numbers: 16 words, each of which takes four permutations, four logical
    operations and shifts."""
    body = min((body for body in main_loops(kernel, "STS.128") if sum("PRMT" in text for text in body) >= 64), key=len)
    names = Counter(map(name_of, body))
    assert (names["LDS.128"], names["STS.128"]) == (5, 8)
    assert names["PRMT"] <= 4 * 16 + 4
    assert names["LOP3.LUT"] <= 3 * 16 + 8
    assert names["BAR.SYNC.DEFER_BLOCKING"] <= 4
    assert len(body) <= 272
    assert not any(name.startswith(("LDL", "STL", "SHFL")) for name in names)


def name_of(text: str) -> str:
    """The name of an instruction."""
    return re.sub(r"^@!?\w+ ", "", text).split()[0]


def test_tokens_compile_no_more() -> None:
    """Every number of tokens runs the same machine code."""
    hashes = {kernel.hash for tokens in (7, 300, 1000) for kernel in compiled(ExpertsShape(tokens, 2, 8, 512, 512))}
    assert len(hashes) == 3
