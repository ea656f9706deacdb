"""Programmatic dependent launch in Gluon (compute capability 9.0 and above).

The rules are in docs/internals/kernels.md.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_kernel_before():
    """Wait, under programmatic dependent launch, until the kernel before has finished and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_kernel_after_start():
    """Let the kernel after start, under programmatic dependent launch; it still waits for this one where it must."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def hand_on():
    """Let the kernel after start at once. Called in place of the work, in every program of a dependently launched
    kernel that has none. One program waits, so that the kernel's end still proves that all before have ended; the
    others make room."""
    if gl.program_id(0) == 0:
        let_kernel_after_start()
        wait_for_kernel_before()
