"""Telling the L2 cache ahead of what will be read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LINE = gl.constexpr(128)
"""Bytes of a line of the L2 cache."""


@gluon.jit
def ask_for_lines(at, asks):
    """Ask for the lines at the addresses `at`, int64, to be brought into the L2 cache, where `asks` is true."""
    ask: gl.constexpr = """{
        .reg .pred asks;
        setp.ne.b32 asks, $2, 0;
        @asks prefetch.global.L2 [$1];
        mov.b32 $0, 0;
    }"""
    gl.inline_asm_elementwise(ask, "=r,l,r", [at, asks.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)
