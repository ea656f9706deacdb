"""Experts with weights of four bits compiled for Hopper: calls of no value, and what their kernels' main loops are made
of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kernels.matrix import FourBits, GroupScaled, MicroScaled4
from kernels.moe import launch
from kernels.moe.pending import PendingExperts
from kernels.moe.records import Stored, stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Workspace
from kernels.pending_norm import PIECE, PendingNorm
from tests.support.hopper import compile_only, machine_code


def matrix(rows: int, features: int, format: str = "int4") -> FourBits:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
    if format == "mxfp4":
        return MicroScaled4(data, torch.empty(1, rows, features // 32, dtype=torch.uint8))
    return GroupScaled(data, torch.empty(1, rows, features // 32, dtype=torch.bfloat16))


def compiled(
    shape: ExpertsShape,
    tiled: Callable[[ExpertsShape, int, tuple[Stored, Stored]], ExpertTiling],
    format: str = "int4",
) -> list[Any]:
    """Compile both products, in the tiles that `tiled` makes for an H200; and, for few tokens, both behind a pending
    norm."""
    gate_up = matrix(2 * shape.intermediate, shape.hidden, format)
    down = matrix(shape.hidden, shape.intermediate, format)
    tiling = tiled(shape, 132, (stored(gate_up), stored(down)))
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as kernels:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, x, scratch, shape, tiling, dependent=True)
        call.gate_up()
        call.down()
        if tiling.rearranged:
            return kernels
        norm = PendingNorm(x, torch.empty(shape.tokens, shape.hidden // PIECE), 1e-6)
        PendingExperts(norm, ids, weight, gate_up, down, call).add(
            torch.empty(shape.tokens, shape.hidden), torch.empty(shape.hidden, dtype=shape.dtype), norm, settled=True
        )
    return kernels


def check_main_loop(kernel: Any, format: str = "int4") -> None:
    """Weights go from memory to registers, 16 bytes at a time, and inputs come from shared memory. A product of 256
    weights takes five logical operations, and four of each of two kinds in fp16: at an H200's bandwidth a scheduler has
    28 issue slots for it. MXFP4 weights, for which it has 26, take 15 shifts and logical operations, of which those to
    the left are multiplications of integers, and four products in bf16."""
    body = min(main_loops(kernel, "HMMA"), key=len)
    names = Counter(re.sub(r"^@!?\w+ ", "", text).split()[0] for text in body)
    int4 = format == "int4"
    products = names["HMMA.16816.F32" if int4 else "HMMA.16816.F32.BF16"]
    assert products
    scales = names["LDG.E.U16" if int4 else "LDG.E.U8"]
    assert (4 * names["LDG.E.EF.128"], 4 * scales, 2 * names["LDS.128"]) == (products,) * 3
    assert not any(name.startswith(("SHFL", "LDSM", "LDL", "STL", "STS")) for name in names)
    assert names["LOP3.LUT"] <= (4.5 if int4 else 8.5) * products
    converted = sum(count for name, count in names.items() if name.startswith(("HMUL2", "HADD2", "HFMA2")))
    assert converted <= (8.5 if int4 else 4) * products
    assert len(body) <= (22 if int4 else 26) * products


def main_loops(kernel: Any, product: str) -> list[list[str]]:
    """The instructions of the loops with products that have no such loop within."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", machine_code(kernel), re.MULTILINE)
    loops = []
    for at, text in lines:
        back = re.search(r"\bBRA.* 0x([0-9a-f]+)$", text)
        if back and int(back[1], 16) < int(at, 16):
            loops.append((int(back[1], 16), int(at, 16)))
    found = []
    for begin, end in loops:
        body = [text for place, text in lines if begin <= int(place, 16) <= end]
        if any(product in text for text in body):
            found.append((begin, end, body))
    return [
        body
        for begin, end, body in found
        if not any((begin, end) != other[:2] and begin <= other[0] and other[1] <= end for other in found)
    ]
