"""Instructions that move data between registers and memory as threads do (PTX ISA: data movement, atom, ldmatrix)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.memory import Fault
from tests.support.ptx.step import Step, Warp, executes
from tests.support.ptx.values import BITS, LANES, Lanes, Type, packed, size

if TYPE_CHECKING:
    from tests.support.ptx.machine import Block

_CACHE = "v2 v4 v8 cg ca nc cs L1::evict_first L1::evict_last L2::cache_hint L2::evict_first"


@executes("ld.param")
def _load_parameter(step: Step) -> None:
    step.write(step.value(step.vector(1)[0], BITS[size(step.type)]))


@executes("ld.global ld.shared ld.relaxed.sys.global", _CACHE)
def _load(step: Step) -> None:
    names, lanes = step.vector(0), step.lanes
    found = loaded(step.block, step.warp, step.parts, step.address(step.operands[1])[lanes], step.type, len(names))
    for name, value in zip(names, found, strict=True):
        if len(value) < LANES:
            executed, value = value, np.zeros(LANES, step.type)
            value[lanes] = executed
        step.set(name, value)


def loaded(block: Block, warp: Warp, parts: tuple[str, ...], address: Lanes, kind: Type, count: int) -> Lanes:
    """[count, n], so many values from each of n addresses; `parts` is the opcode."""
    width = size(kind) * count
    if parts[1] == "shared":
        found = block.shared.load(address, width)
    else:
        cached = not {"cg", "relaxed", "L1::no_allocate"} & set(parts)
        found = block.memory.load(address, width, waited=warp.waited, cached=cached)
    values = np.ascontiguousarray(found).view(kind)
    return values.T.copy() if count > 1 else values.reshape(1, -1)


@executes("st.global st.shared st.relaxed.sys.global", _CACHE)
def _store(step: Step) -> None:
    kind, lanes = BITS[size(step.type)], step.lanes
    values = np.concatenate([_bytes(step.value(name, kind)) for name in step.vector(1)], 1)[lanes]
    stored(step.block, step.warp, step.parts, step.address(step.operands[0])[lanes], values)


def stored(block: Block, warp: Warp, parts: tuple[str, ...], address: Lanes, values: Lanes) -> None:
    """Write bytes [n, width] to n addresses; `parts` is the opcode."""
    if parts[1] == "shared":
        block.shared.store(address, values, warp.number)
        return
    if block.waits and not warp.waited:
        raise Fault("stores before griddepcontrol.wait")
    block.memory.store(address, values)


def _bytes(value: Lanes) -> Lanes:
    return np.ascontiguousarray(value).view(np.uint8).reshape(LANES, -1)


@executes("atom red", "global shared relaxed acq_rel release acquire gpu cta sys add min max and or xor exch")
def _atomic(step: Step) -> None:
    """Lane by lane."""
    kind, how, shared = step.type, step.parts[-2], "shared" in step.parts
    result = step.parts[0] == "atom"
    address, value, old = step.address(step.operands[result]), step.read(1 + result), np.zeros(LANES, kind)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    if not shared and step.block.waits and not step.warp.waited:
        raise Fault("stores before griddepcontrol.wait")
    for lane in np.flatnonzero(step.lanes):
        place = address[lane : lane + 1]
        if shared:
            found = step.block.shared.load(place, size(kind))
        else:
            found = step.block.memory.load(place, size(kind), waited=step.warp.waited, cached=False)
        before = packed(found, kind)
        old[lane] = before[0]
        after = value[lane : lane + 1] if how == "exch" else functions[how](before, value[lane : lane + 1])
        raw = np.ascontiguousarray(after, kind).view(np.uint8).reshape(1, -1)
        if shared:
            step.block.shared.store(place, raw, step.warp.number)
        else:
            step.block.memory.store(place, raw)
    if result:
        step.write(old)


@executes("ldmatrix.sync.aligned.m8n8 stmatrix.sync.aligned.m8n8", "x1 x2 x4 trans shared")
def _matrices(step: Step) -> None:
    """8 x 8 matrices of 16 bits; lane 8 i + j gives the address of row j of matrix i, lane 4 j + k holds its elements
    2 k and 2 k + 1."""
    step.whole_warp()
    load, shared = step.parts[0] == "ldmatrix", step.block.shared
    address = step.address(step.operands[1 if load else 0])
    names = step.vector(0 if load else 1)
    rows = address[: 8 * len(names)]
    if load:
        matrices = shared.load(rows, 16).view(np.uint16).reshape(-1, 8, 8)
        matrices = matrices.transpose(0, 2, 1) if "trans" in step.parts else matrices
        for name, words in zip(names, np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, LANES), strict=True):
            step.set(name, words)
        return
    words = np.concatenate([step.value(name, np.uint32) for name in names])
    matrices = words.view(np.uint16).reshape(-1, 8, 8)
    matrices = matrices.transpose(0, 2, 1) if "trans" in step.parts else matrices
    shared.store(rows, np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16), step.warp.number)
