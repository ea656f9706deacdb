"""Compiles Triton and Gluon kernels for Hopper on a machine without a GPU, and reads what the compiler made of them.

Inside `compile_only`, launching a kernel compiles it for the arguments given (CPU tensors do) and runs nothing, so a
test gates exactly the kernels a launcher would launch. `Resources` are read from the machine code with the tools that
Triton's wheel carries. A process that interprets kernels (TRITON_INTERPRET=1) cannot compile.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes of shared memory one block may use on Hopper. Triton does not check it before the launch."""

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/ +(?:@!?\w+ +)?([A-Z0-9]+)", re.MULTILINE)
_COMPILED = "Compiling entry function"
"""Remark of ptxas when it compiles anything."""
_dumped: dict[tuple[str, ...], str] = {}
"""Output of cuobjdump, by a kernel's hash and the options."""
_remarks: dict[str, str] = {}
"""Remarks of ptxas when this process compiled a kernel, by the kernel's hash."""

read: set[str] = set()
"""Names, `qualified`, of the kernels whose resources this process has read."""


@dataclass(frozen=True)
class Resources:
    """Resources of a multiprocessor that one compiled kernel needs."""

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

    def check(self, registers: int = 255, stack: int = 0) -> None:
        """AssertionError when the kernel spills more than `stack` bytes of a thread, or needs more shared memory than a
        block may have or more than `registers`."""
        assert self.stack <= stack, f"{self.name} spills: {self}"
        assert self.shared <= SHARED_MEMORY_LIMIT, f"{self.name} needs too much shared memory: {self}"
        assert self.registers <= registers, f"{self.name} needs too many registers: {self}"


class _NoDevice:
    """Stands in for Triton's driver: names the target and the device, and owns neither."""

    def __init__(self, capability: int, number: int) -> None:
        self.target, self.number = GPUTarget("cuda", capability, 32), number

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextmanager
def instead_of_launches(do: Callable[..., None], capability: int = 90, *, assembled: bool = True) -> Iterator[None]:
    """Let a launch, within this context, compile for the given compute capability, and call `do` in its stead: with
    Triton's compiled kernel, the function it was compiled from, the launch's arguments, grid and options.

    Without `assembled` kernels are compiled as far as PTX, which takes a third less time: they have no machine code.
    """
    plain_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        said = io.StringIO()
        try:
            with redirect_stdout(said):
                kernel = plain_run(self, *args, grid=grid, warmup=True, **options)
        finally:
            if (text := said.getvalue()) and _COMPILED not in text:
                sys.stdout.write(text)
        if _COMPILED in said.getvalue():
            _remarks[kernel.hash] = said.getvalue()
        do(kernel, self, args, grid, options)
        return kernel

    before, hook = driver._active, knobs.runtime.add_stages_inspection_hook
    # Never a real device's number: kernels that are kept for it are never launched.
    driver.set_active(_NoDevice(capability, -capability if assembled else -1000 - capability))
    JITFunction.run = run
    try:
        with knobs.cache.scope(), knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            if not assembled:
                knobs.runtime.add_stages_inspection_hook = _as_far_as_ptx
                knobs.cache.dir = str(Path(knobs.cache.dir) / "ptx")  # where nobody looks for machine code
            yield
    finally:
        JITFunction.run = plain_run
        driver._active, knobs.runtime.add_stages_inspection_hook = before, hook


def _as_far_as_ptx(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    assert list(stages)[-2:] == ["ptx", "cubin"]
    stages["cubin"] = lambda ptx, metadata: b""


@contextmanager
def compile_only(capability: int = 90) -> Iterator[list[Any]]:
    """Let launches, within this context, compile for the given compute capability and not run.

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
    """Count each machine instruction in a compiled kernel, by its name up to the first dot."""
    return Counter(_INSTRUCTION.findall(machine_code(kernel)))


def machine_code(kernel: Any) -> str:
    """The disassembly of a compiled kernel."""
    return _cuobjdump(kernel, "--dump-sass")


def serialized(kernel: Any) -> bool:
    """Whether ptxas says that it could not let products of a compiled kernel run asynchronously.

    It says so when it compiles: a kernel that was compiled before this process began is compiled once more.
    """
    if kernel.hash not in _remarks:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
            assert target
            command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
            _remarks[kernel.hash] = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert _COMPILED in _remarks[kernel.hash], f"ptxas says nothing: {_remarks[kernel.hash]}"
    return "serialized" in _remarks[kernel.hash]


def _cuobjdump(kernel: Any, *options: str) -> str:
    """Return what cuobjdump prints of a compiled kernel. It takes a quarter of a second, so that is kept."""
    if (kernel.hash, *options) not in _dumped:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, *options, file.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        _dumped[kernel.hash, *options] = printed
    return _dumped[kernel.hash, *options]
