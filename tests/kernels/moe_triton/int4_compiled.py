"""Experts with INT4 weights compiled for Hopper: calls of no value, and what their kernels' main loops are made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kernels.matrix import GroupScaled
from kernels.moe import launch
from kernels.moe.pending import PendingExperts
from kernels.moe.records import Stored, stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Workspace
from kernels.pending_norm import PIECE, PendingNorm
from tests.support.hopper import compile_only, machine_code


def matrix(rows: int, features: int) -> GroupScaled:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
    return GroupScaled(data, torch.empty(1, rows, features // 32, dtype=torch.bfloat16))


def compiled(
    shape: ExpertsShape, tiled: Callable[[ExpertsShape, int, tuple[Stored, Stored]], ExpertTiling]
) -> list[Any]:
    """Compile both products, in the tiles that `tiled` makes for an H200; and, for few tokens, both behind a pending
    norm."""
    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
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


def check_main_loop(kernel: Any) -> None:
    """Weights go from memory to registers, 16 bytes at a time, and inputs come from shared memory. A product of 256
    weights takes five logical operations, and four of each of two kinds in fp16: at an H200's bandwidth a scheduler has
    28 issue slots for it."""
    body = min(main_loops(kernel, "HMMA"), key=len)
    names = Counter(re.sub(r"^@!?\w+ ", "", text).split()[0] for text in body)
    products = names["HMMA.16816.F32"]
    assert products
    assert (4 * names["LDG.E.EF.128"], 4 * names["LDG.E.U16"], 2 * names["LDS.128"]) == (products,) * 3
    assert not any(name.startswith(("SHFL", "LDSM", "LDL", "STL", "STS")) for name in names)
    assert names["LOP3.LUT"] <= 4.5 * products
    assert names["HMUL2"] + names["HADD2"] + names["HFMA2"] <= 8.5 * products
    assert len(body) <= 22 * products


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
