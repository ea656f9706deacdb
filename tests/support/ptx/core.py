"""Compiles `core.c`, which executes the common instructions, and describes its structures.

Triton needs a C compiler, too, and this one is found as Triton finds its own. What is compiled is kept beside what
Triton keeps, by the text and by what the compiler says of the machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from triton import knobs

from tests.support.ptx.values import Lanes

_SOURCE = Path(__file__).with_name("core.c")
_FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-w"),
    # Integers wrap, sums and products are rounded one by one, and bits are read as any type.
    *("-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
USED = True
"""Tests set it to false, to compare the core with the definitions by themselves."""
FULL = 0xFFFFFFFF
"""All lanes."""

OPERATION = np.dtype(
    [("op", "u2"), ("width", "u2"), *((name, "i4") for name in ("d", "a", "b", "c", "slot")), ("n", "i8")], align=True
)
INSTRUCTION = np.dtype([(name, "i4") for name in ("first", "count", "guard", "negated", "unknown")])
REGION = np.dtype([("begin", "u8"), ("size", "u8"), *((f, "u8") for f in ("written", "line_written", "line_cached"))])


class LaunchState(ctypes.Structure):
    """`Launch` of core.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("code", "operations", "regions", "halves", "wide")),
        *((name, ctypes.c_int32) for name in ("regions_count", "last", "ordered", "running_from", "now", "emptied")),
        *((name, ctypes.c_int32) for name in ("waits", "stored")),
    )


class SharedState(ctypes.Structure):
    """`Shared` of core.c."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("stored_at", "storer", "fenced_at", "now")),
        ("fences", ctypes.c_int64),
    )


class WarpState(ctypes.Structure):
    """`Warp` of core.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("file", "defined", "launch", "shared")),
        *((name, ctypes.c_int32) for name in ("together", "number", "waited")),
        ("ended", ctypes.c_uint32),
        ("at", ctypes.c_int32 * 32),
        ("place", ctypes.c_int32),
        ("lanes", ctypes.c_uint32),
    )


class ProductState(ctypes.Structure):
    """`Product` of core.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("offsets", "numbers")),
        *((name, ctypes.c_int32) for name in ("columns", "kind", "left_transposed", "right_transposed")),
    )


PRODUCT_KINDS = ("f16", "bf16", "e4m3", "s8")
"""What `kind` of a product numbers."""


def pointer(array: Lanes) -> int:
    """Where an array begins."""
    return int(array.ctypes.data)


def in_use() -> ctypes.CDLL | None:
    """The compiled core, if it is to execute what it can."""
    return library() if USED else None


def find_compiler() -> str | None:
    """The C compiler that Triton takes, if there is one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled core, if there is a C compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    machine = subprocess.run(
        [compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, check=True
    ).stdout
    name = hashlib.sha256(b"".join((_SOURCE.read_bytes(), repr(_FLAGS).encode(), machine))).hexdigest()
    folder = Path(knobs.cache.dir) / "ptx-core"
    file = folder / f"{name}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:  # processes that compile it at once do not meet
            made = Path(beside) / file.name
            subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"], check=True)
            made.replace(file)
    loaded = ctypes.CDLL(str(file))
    loaded.run.argtypes, loaded.run.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    pointers = (ctypes.c_void_p,) * 3
    loaded.multiply.argtypes = (*pointers, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    return loaded


@cache
def operations() -> dict[str, int]:
    """The numbers of the operations, by their names: none without a compiler."""
    numbers: dict[str, int] = {}
    if (core := library()) is None:
        return numbers
    found = (ctypes.c_char_p * 1000).in_dll(core, "names")
    while (name := found[len(numbers)]) is not None:
        numbers[name.decode()] = len(numbers)
    return numbers
