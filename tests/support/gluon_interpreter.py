"""Runs simple Gluon kernels in Triton's interpreter, which knows no Gluon: layouts are forgotten, the values remain.

`install` puts a stand-in in the place of Gluon's language, whose functions are Triton's own, so a module of Gluon
kernels imported afterwards is interpreted. It covers loads, stores, reductions, copies into shared memory and mma.sync;
barriers of threads do nothing, so a race between warps does not show. What Hopper adds can be imported, not run:
`tests.support.ptx` runs it. Import `interpreter` and call its `repair` first.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.runtime import interpreter, jit

from tests.support import gluon_memory


class _Layout:
    """Any layout: remembers nothing but what is asked of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def parent(self) -> _Layout:
        return self


def _copy(smem: gluon_memory.Shared, pointer: Any, mask: Any = None, **_: Any) -> None:
    value = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0.0)
    gluon_memory.copy_async(smem, value)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Language(ModuleType):
    """`gluon.language`: what is not defined here is Triton's."""

    constexpr = tl.constexpr

    def __init__(self) -> None:
        super().__init__("triton.experimental.gluon.language")
        for name in (
            "BlockedLayout",
            "SliceLayout",
            "DotOperandLayout",
            "NVMMADistributedLayout",
            "NVMMASharedLayout",
            "SwizzledSharedLayout",
        ):
            setattr(self, name, _Layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        return tl.arange(start, end)

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.zeros(shape, dtype)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    def convert_layout(self, value: Any, layout: Any, **_: Any) -> Any:
        return value

    def inline_asm_elementwise(self, asm: Any, constraints: Any, args: Any, dtype: Any, **_: Any) -> Any:
        if len(args) == 0:  # a wait, or a zero that the compiler must not see through
            return 0
        instructions = str(getattr(asm, "value", asm))
        if "even" in instructions:  # pairs of e4m3 to bf16, too small, the lower ones first
            bytes = np.ascontiguousarray(args[0].handle.data).view(np.uint8)
            shape = list(args[0].shape)
            both = (bytes.reshape(*shape, 2)[..., i] for i in range(2))
            codes = (
                tl.core.tensor(
                    interpreter.TensorHandle(np.ascontiguousarray(x), tl.float8e4nv),
                    tl.block_type(tl.float8e4nv, shape),
                )
                for x in both
            )
            return tuple((x.to(tl.float32) * 2.0**-120).to(tl.bfloat16) for x in codes)
        if "0x07F007F0" in instructions:  # bytes of e4m3 to bf16
            return _reinterpreted(args[0], tl.float8e4nv).to(tl.bfloat16)
        assert instructions == "popc.b32 $0, $1;", f"the interpreter does not know {instructions}"
        bits = np.bitwise_count(args[0].handle.data.view(np.uint32)).astype(np.int32)
        return tl.core.tensor(interpreter.TensorHandle(bits, tl.int32), args[0].type)

    allocate_shared_memory = staticmethod(gluon_memory.Shared.allocate)
    thread_barrier = staticmethod(_nothing)


def _reinterpreted(x: Any, dtype: Any) -> Any:
    """The same bits as another type of the same size."""
    return tl.core.tensor(interpreter.TensorHandle(x.handle.data, dtype), tl.block_type(dtype, x.shape))


def _mma(left: Any, right: Any, total: Any) -> Any:
    return tl.dot(left, right, total)


def _hopper_modules() -> list[ModuleType]:
    """Names that modules of kernels import, for those of their kernels that are not interpreted."""
    names = {
        "language.nvidia.hopper": ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
        "nvidia.hopper": ("TensorDescriptor",),
    }
    modules = [ModuleType(f"triton.experimental.gluon.{name}") for name in names]
    for module, attributes in zip(modules, names.values(), strict=True):
        module.__dict__.update(dict.fromkeys(attributes))
    return modules


def _jit(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda function: _jit(function, **options)
    function.__globals__["_triton_language"] = tl  # the interpreter wants to see it there
    return triton.jit(function, **options)


def install() -> None:
    """Make modules of Gluon kernels interpretable; only before their first import."""
    language = _Language()
    plain_normalize = jit._normalize_ty
    jit._normalize_ty = lambda kind: plain_normalize(kind.removeprefix("gl.") if isinstance(kind, str) else kind)
    copies = SimpleNamespace(
        async_copy_global_to_shared=_copy,
        commit_group=gluon_memory.commit_group,
        wait_group=gluon_memory.wait_group,
    )
    tl.constexpr.__rmod__ = lambda self, left: left % self.value  # compiled, both are constants
    ampere = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    ampere.__dict__.update(async_copy=copies, mma_v2=_mma)
    nvidia = ModuleType("triton.experimental.gluon.language.nvidia")
    gluon.jit, gluon.constexpr_function, gluon.language = _jit, lambda function: function, language
    hopper = _hopper_modules()
    sys.modules |= {module.__name__: module for module in (language, nvidia, ampere, *hopper)}
