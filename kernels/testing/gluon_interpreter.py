"""Runs simple Gluon kernels in Triton's interpreter, which knows no Gluon: layouts are forgotten, the values remain.

`install` puts a stand-in in the place of Gluon's language, whose functions are Triton's own, so a module of Gluon
kernels imported afterwards is interpreted. It covers loads, stores, reductions, copies into shared memory and mma.sync;
barriers do nothing, so what it cannot show is a race. Import `interpreter` and call its `repair` first.
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


class _Layout:
    """Any layout: remembers nothing but what is asked of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def parent(self) -> _Layout:
        return self


class _Shared:
    """A piece of shared memory: one tensor, or one for each index."""

    def __init__(self) -> None:
        self.value: Any = None
        self.parts: dict[int, _Shared] = {}

    def index(self, i: Any) -> _Shared:
        return self.parts.setdefault(int(np.asarray(getattr(getattr(i, "handle", i), "data", i)).item()), _Shared())

    def permute(self, order: Any) -> _Shared:
        other = _Shared()
        other.value = tl.permute(self.value, order)
        return other

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        other = _Shared()
        handle = self.value.handle
        data = np.take(handle.data, range(start, start + length), axis=dim)
        kind = tl.block_type(self.value.dtype, list(data.shape))
        other.value = tl.core.tensor(interpreter.TensorHandle(data, handle.dtype), kind)
        return other

    def store(self, value: Any) -> None:
        self.value = value

    def load(self, layout: Any) -> Any:
        return self.value


def _copy(smem: _Shared, pointer: Any, mask: Any = None, **_: Any) -> None:
    smem.value = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=0.0)


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

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any) -> _Shared:
        return _Shared()

    thread_barrier = staticmethod(_nothing)


def _mma(left: Any, right: Any, total: Any) -> Any:
    return tl.dot(left, right, total)


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
    copies = SimpleNamespace(async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing)
    ampere = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    ampere.__dict__.update(async_copy=copies, mma_v2=_mma)
    nvidia = ModuleType("triton.experimental.gluon.language.nvidia")
    gluon.jit, gluon.constexpr_function, gluon.language = _jit, lambda function: function, language
    sys.modules |= {module.__name__: module for module in (language, nvidia, ampere)}
