"""Shared memory for rings of tiles, which are filled some stages ahead of those that are multiplied.

For compute capability 8.0 and above.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.tiles import ROWS

_ROWS = gl.constexpr(ROWS)


@gluon.jit
def weights_ring(weight, WIDTH: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, STORED: gl.constexpr):
    """Shared memory for STAGES tiles of weights. Eight lanes read 64 bytes of two rows: of different banks."""
    # Rows of 64 bytes are of different banks anyway, rows of 128 bytes begin at the same one.
    phases: gl.constexpr = 1 if WIDTH * 8 // STORED.piece <= 32 else 2
    layout: gl.constexpr = gl.SwizzledSharedLayout(4 * STORED.piece, 1, phases, [2, 1, 0])
    return gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, WARPS, _ROWS, WIDTH], layout)


@gluon.jit
def tokens_ring(x, TOKENS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of the tokens."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    return gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, WARPS, TOKENS, WIDTH], swizzled)
