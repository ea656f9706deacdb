"""Launches of Triton and Gluon kernels on CPU tensors, which the emulator runs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from tests.support.hopper import instead_of_launches
from tests.support.ptx.copies import Box
from tests.support.ptx.machine import Block, Launch, executions
from tests.support.ptx.memory import Fault, GlobalMemory, Region
from tests.support.ptx.order import Order
from tests.support.ptx.parse import Program, parse
from tests.support.ptx.step import Execute
from tests.support.ptx.translate import Translation

_BOXES_FROM = 1 << 62
"""Stands for the address of the first tensor map."""


@contextmanager
def emulated(
    seed: int = 0, *, consecutive: bool = False, fences: bool = True, edit: Callable[[str], str] = lambda ptx: ptx
) -> Iterator[list[str]]:
    """Let launches of kernels on CPU tensors, within this context, run their PTX for Hopper in the emulator.

    Yields the list that fills with the kernels' names, one for each launch.

    Args:
        seed: of the schedules: which warp is next, when copies arrive, when products are computed.
        consecutive: whether the launches follow each other on a stream with nothing in between, as in a captured graph.
            Then what one may read of what another writes is checked.
        fences: whether products must be fenced from what threads have stored, cp.async included. Loops that Triton
            pipelines itself do without the fence behind cp.async.
        edit: changes a kernel's PTX before it runs: to plant faults.

    Raises:
        Fault: from a launch; a kernel did what it may not do.
        Unordered: from a launch; a kernel may not see what one before has written.
        NotImplementedError: from a launch; an instruction is unknown here.
    """
    names: list[str] = []
    emulator = _Emulator(random.Random(seed), Order() if consecutive else None, fences, edit)

    def run(kernel: Any, function: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        names.append(kernel.metadata.name)
        emulator.launch(kernel, function, args, grid, options)

    with instead_of_launches(run, assembled=False):
        yield names


class _Emulator:
    def __init__(self, random: random.Random, order: Order | None, fences: bool, edit: Callable[[str], str]) -> None:
        self.random, self.order, self.fences, self.edit = random, order, fences, edit
        self.regions: dict[int, Region] = {}  # by address; while launches are ordered, their memory is kept

    def launch(self, kernel: Any, function: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        if self.order is None:
            self.regions.clear()
        arguments = dict(zip(function.arg_names, args, strict=False))
        arguments |= {name: value for name, value in options.items() if name in function.arg_names}
        given = [
            (name, arguments[name]) for name in function.arg_names if kernel.src.signature.get(name) != "constexpr"
        ]
        program, execute, translation = _program(self.edit(kernel.asm["ptx"]))
        regions = [self._region(name, value) for name, value in given if isinstance(value, torch.Tensor)]
        boxes: dict[int, Box] = {}
        values: list[Any] = []
        for name, value in given:
            if hasattr(value, "block_shape"):
                meta = kernel.metadata.tensordesc_meta[len(boxes)]
                regions.append(self._region(name, value.base))
                shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.strides))
                box = tuple(meta["block_size"]), meta["elem_size"], meta["swizzle"]
                values += [_BOXES_FROM + len(boxes), *shape, *strides]
                boxes[_BOXES_FROM + len(boxes)] = Box(value.base.data_ptr(), shape, strides, *box)
            else:
                values.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
        sizes = tuple(grid(arguments) if callable(grid) else grid)
        sizes += (1,) * (3 - len(sizes))
        constants = _bits(program, values) | {f"%nctaid.{axis}": n for axis, n in zip("xyz", sizes, strict=True)}
        memory = GlobalMemory(regions, self.order)
        dependent = bool(options.get("launch_pdl"))
        waits = dependent or program.uses("griddepcontrol", "wait")
        if self.order is not None:
            self.order.begin(program.name, dependent)
        state, _alive = memory.state(waits)
        translation.describe(state)
        shared = kernel.metadata.shared
        launch = Launch(program, execute, translation, shared, constants, boxes, memory, waits, self.fences, state)
        blocks = list(product(*map(range, sizes)))
        self.random.shuffle(blocks)
        waited = 0
        with np.errstate(all="ignore"):
            for index in blocks:
                block = Block(launch, (index[0], index[1], index[2]), self.random)
                block.run()
                waited += block.waited
        memory.stored |= bool(state.stored)
        if waits and waited < (len(blocks) if memory.stored else 1):
            raise Fault(f"{program.name} ends without griddepcontrol.wait in {len(blocks) - waited} blocks")

    def _region(self, name: str, tensor: torch.Tensor) -> Region:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.regions:
            bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self.regions[storage.data_ptr()] = Region(name, storage.data_ptr(), bytes)
        self.regions[storage.data_ptr()].name = name
        return self.regions[storage.data_ptr()]


@lru_cache(maxsize=64)
def _program(ptx: str) -> tuple[Program, tuple[Execute, ...], Translation]:
    program = parse(ptx)
    execute = executions(program)
    return program, execute, Translation(program, execute)


def _bits(program: Program, values: list[Any]) -> dict[str, int]:
    """The bits of the parameters; those behind the arguments are Triton's own scratch memory, which nothing uses."""
    spare = len(program.parameters) - len(values)
    assert 0 <= spare <= 2, f"{len(values)} arguments for {program.parameters}"
    found = {"global_smem": 0}
    for (kind, name), value in zip(program.parameters, values + [0] * spare, strict=True):
        bits = int(kind[1:]) if kind != "b8" else 64  # a tensor map is its address
        found[name] = int.from_bytes(struct.pack("<f", value), "little") if kind == "f32" else int(value) % (1 << bits)
    return found
