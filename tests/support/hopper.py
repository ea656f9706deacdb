"""Compiles Triton and Gluon kernels for Hopper on a machine without a GPU, and reads what the compiler made of them.

Inside `compile_only`, launching a kernel compiles it for the arguments given (CPU tensors do) and runs nothing, so a
test gates exactly the kernels a launcher would launch. `Resources` are read from the machine code with the tools that
Triton's wheel carries. A process that interprets kernels (TRITON_INTERPRET=1) cannot compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes of shared memory one block may use on Hopper. Triton does not check it before the launch."""

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/ +(?:@!?\w+ +)?([A-Z0-9]+)", re.MULTILINE)
_disassembled: dict[str, str] = {}

read: set[str] = set()
"""Names, `qualified`, of the kernels whose resources this process has read."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs of a multiprocessor."""

    name: str
    registers: int
    """Registers a thread, at most 255."""
    stack: int
    """Bytes of stack a thread: spills and dynamically indexed arrays. Should be 0."""
    shared: int
    """Bytes of shared memory a block."""
    warps: int
    """Warps a block, those of warp-specialised partitions included."""
    waits: bool
    """Whether it waits for the kernel before it, as a dependent launch must."""
    releases: bool
    """Whether it lets the kernel after it begin."""

    def check(self, registers: int = 255) -> None:
        """AssertionError when the kernel spills, or needs more shared memory than a block may have or more than
        `registers`."""
        assert self.stack == 0, f"{self.name} spills: {self}"
        assert self.shared <= SHARED_MEMORY_LIMIT, f"{self.name} needs too much shared memory: {self}"
        assert self.registers <= registers, f"{self.name} needs too many registers: {self}"


class _NoDevice:
    """Stands in for Triton's driver: names the target and the device, and owns neither."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -int(self.target.arch)  # never a real device's index: kernels cached here are never launched

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextmanager
def instead_of_launches(do: Callable[..., None], capability: int = 90) -> Iterator[None]:
    """Within this context a launch compiles for the given compute capability, and `do` is called in its stead: with
    Triton's compiled kernel, the function it was compiled from, the launch's arguments, grid and options."""
    plain_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = plain_run(self, *args, grid=grid, warmup=True, **options)
        do(kernel, self, args, grid, options)
        return kernel

    before = driver._active
    driver.set_active(_NoDevice(capability))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain_run
        driver._active = before


@contextmanager
def compile_only(capability: int = 90) -> Iterator[list[Any]]:
    """Within this context launches compile for the given compute capability and do not run.

    Yields the list that fills with Triton's compiled kernels, one for each launch.
    """
    compiled: list[Any] = []
    with instead_of_launches(lambda kernel, *_: compiled.append(kernel), capability):
        yield compiled


def resources(kernel: Any) -> Resources:
    """Read the resources of a compiled kernel from its machine code."""
    read.add(qualified(kernel.src.fn))
    usage = _cuobjdump(kernel, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, f"cuobjdump printed no resource usage:\n{usage}"
    return Resources(
        name=kernel.metadata.name,
        registers=int(found[1]),
        stack=int(found[2]),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        waits="griddepcontrol.wait" in kernel.asm["ptx"],
        releases="griddepcontrol.launch_dependents" in kernel.asm["ptx"],
    )


def qualified(function: JITFunction[Any]) -> str:
    """A kernel's module and name."""
    return f"{function.fn.__module__}.{function.fn.__name__}"


def instructions(kernel: Any) -> Counter[str]:
    """How often each machine instruction occurs in a compiled kernel, by its name up to the first dot."""
    return Counter(_INSTRUCTION.findall(machine_code(kernel)))


def machine_code(kernel: Any) -> str:
    """The disassembly of a compiled kernel. It takes a quarter of a second, so each kernel's is kept."""
    if kernel.hash not in _disassembled:
        _disassembled[kernel.hash] = _cuobjdump(kernel, "--dump-sass")
    return _disassembled[kernel.hash]


def serialized(kernel: Any) -> bool:
    """Whether ptxas says that it could not let products of a compiled kernel run asynchronously."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
        assert target
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        remarks = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "Compiling entry function" in remarks, f"ptxas says nothing: {remarks}"
    return "serialized" in remarks


def _cuobjdump(kernel: Any, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
