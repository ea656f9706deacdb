"""Repairs Triton's CPU interpreter, whose bfloat16 and float8 are silently wrong, so that it can serve as a test bench.

Triton (3.6.0 here) keeps narrow floats as raw unsigned integers and applies numpy to the bits: dot products,
arithmetic, comparisons and reductions of bfloat16 are meaningless, casts to bfloat16 truncate, casts to float8 lose
the carry of the mantissa and wrap on overflow, integer casts copy bits. `repair` routes every narrow float through
float32 and rounds the result to nearest even, as the hardware does for single operations. Dot products of all floats
accumulate in float64.

TRITON_INTERPRET=1 must be set before a kernel's module is imported, and a process that interprets can no longer
compile: run interpreted tests in a process of their own, see `interpreted_pytest`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.support.quick_interpreter import quicken

_TORCH_DTYPE = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_NARROW = frozenset(dtype.name for dtype in _TORCH_DTYPE)
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_COMPARISONS = frozenset(
    {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal},
)
_repaired = False


def widen(handle: Any) -> Any:
    """The numpy values of an interpreter handle, narrow floats as float32."""
    dtype = _TORCH_DTYPE.get(handle.dtype.scalar)
    if dtype is None:
        return handle.data
    bits = np.array(handle.data, copy=True, order="C")  # torch takes no read-only and no unsigned arrays
    signed = bits.reshape(-1).view(np.int16 if bits.itemsize == 2 else np.int8)
    return torch.from_numpy(signed).view(dtype).float().numpy().reshape(bits.shape)


def narrow(values: Any, dtype: Any) -> Any:
    """Bits of `values` in the narrow Triton float `dtype`: nearest even; float8 saturates as cvt.satfinite does."""
    wide = np.array(values, dtype=np.float32, order="C")
    x = torch.from_numpy(wide.reshape(-1))
    if dtype in _LARGEST:
        x = torch.where(x.isnan(), x, x.clamp(-_LARGEST[dtype], _LARGEST[dtype]))
    x = x.to(_TORCH_DTYPE[dtype])
    two_bytes = x.element_size() == 2
    bits = x.view(torch.int16 if two_bytes else torch.int8).numpy()
    return bits.view(np.uint16 if two_bytes else np.uint8).reshape(wide.shape)


def _handle(values: Any, dtype: Any) -> Any:
    if dtype in _TORCH_DTYPE:
        return interpreter.TensorHandle(narrow(values, dtype), dtype)
    return interpreter.TensorHandle(np.asarray(values).astype(interpreter._get_np_dtype(dtype)), dtype)


def _is_narrow(*handles: Any) -> bool:
    return not _NARROW.isdisjoint([handle.dtype.scalar.name for handle in handles])


def repair() -> None:
    """Patch the interpreter of this process. Idempotent; raises RuntimeError unless TRITON_INTERPRET=1 was set."""
    global _repaired
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before importing any kernel, then call repair()")
    if _repaired:
        return
    _repaired = True
    quicken()
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    plain_unary, plain_binary, plain_ternary = builder.unary_op, builder.binary_op, builder.ternary_op
    plain_dot, plain_fma, plain_rsqrt = builder.create_dot, builder.create_fma, builder.create_rsqrt

    def cast(self: Any, source: Any, target: Any) -> Any:
        if not _is_narrow(source) and target.scalar not in _TORCH_DTYPE:
            return plain_cast(self, source, target)
        return _handle(widen(source), target.scalar)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not _is_narrow(source) and target.scalar not in _TORCH_DTYPE:
            return plain_fp_to_fp(self, source, target, rounding)
        return _handle(widen(source), target.scalar)

    def unary(self: Any, x: Any, op: Any) -> Any:
        return _handle(op(widen(x)), x.dtype.scalar) if _is_narrow(x) else plain_unary(self, x, op)

    def binary(self: Any, x: Any, y: Any, op: Any) -> Any:
        if not _is_narrow(x, y):
            return plain_binary(self, x, y, op)
        result = op(widen(x), widen(y))
        return _handle(result, tl.int1 if op in _COMPARISONS else x.dtype.scalar)

    def ternary(self: Any, x: Any, y: Any, z: Any, op: Any) -> Any:
        if op is np.where or not _is_narrow(x, y, z):
            return plain_ternary(self, x, y, z, op)  # a selection moves bits, which is right for every type
        return _handle(op(widen(x), widen(y), widen(z)), z.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_narrow(x, y, z):
            return plain_fma(self, x, y, z)
        return _handle(widen(x) * widen(y) + widen(z), z.dtype.scalar)

    def rsqrt(self: Any, x: Any) -> Any:
        return _handle(1 / np.sqrt(widen(x)), x.dtype.scalar) if _is_narrow(x) else plain_rsqrt(self, x)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not d.dtype.scalar.is_floating():
            return plain_dot(self, a, b, d, *rest)
        # BLAS rounds a row differently at different places of a matrix; in float64 that vanishes in the final rounding,
        # so a kernel that claims equal results at any place can be held to it.
        product = np.matmul(widen(a).astype(np.float64), widen(b).astype(np.float64)) + widen(d)
        return _handle(product, d.dtype.scalar)

    def inline_asm(self: Any, asm: str, constraints: str, values: Any, *_: Any) -> Any:
        if "prefetch.global" in asm:  # which has no effect
            return _Results([_handle(np.zeros_like(values[-1].data), tl.int32)])
        assert "0x07F007F0" in asm, f"the interpreter does not know {asm}"  # bytes of e4m3 to bf16
        codes = interpreter.TensorHandle(values[0].data, tl.float8e4nv)
        return _Results([_handle(widen(codes), tl.bfloat16)])

    builder.cast_impl, builder.create_fp_to_fp = cast, fp_to_fp
    builder.create_inline_asm = inline_asm
    builder.get_bf16 = lambda self, value: _handle(np.array([value]), tl.bfloat16)
    builder.unary_op, builder.binary_op, builder.ternary_op = unary, binary, ternary
    builder.create_dot, builder.create_fma, builder.create_rsqrt = dot, fma, rsqrt
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _through_float32(operation.apply_impl)


class _Results:
    """Results of inline assembly."""

    def __init__(self, handles: list[Any]) -> None:
        self.get_result = handles.__getitem__


def _through_float32(plain: Any) -> Any:
    """Reductions and scans of narrow floats run in float32 and round once, at the end."""

    def apply_impl(self: Any, inputs: Any) -> Any:
        wide = tuple(_retype(x, tl.float32) if _is_narrow(x.handle) else x for x in inputs)
        results = plain(self, wide)
        several = isinstance(results, (list, tuple))
        back = [
            _retype(result, source.dtype) if _is_narrow(source.handle) and result.dtype == tl.float32 else result
            for result, source in zip(results if several else (results,), inputs, strict=False)
        ]
        back += list(results)[len(back) :] if several else []
        return back if several else back[0]

    return apply_impl


def _retype(x: Any, dtype: Any) -> Any:
    shape = getattr(x.type, "shape", None)
    kind = tl.block_type(dtype.scalar, list(shape)) if shape else dtype.scalar
    return tl.core.tensor(_handle(widen(x.handle), dtype.scalar), kind)


def interpreted_pytest(paths: Sequence[Path], arguments: Sequence[str] = (), timeout_s: float = 570.0) -> None:
    """Run the tests of `paths` in a process whose Triton interprets; AssertionError with their output when one fails.

    The files import their kernels freely; they must call `repair` first.
    """
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, paths), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"interpreted tests failed:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
