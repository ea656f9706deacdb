"""Products of up to 64 tokens on Hopper whose sums over the input features are shared by several programs, on wgmma.

A program owns BLOCK weight rows and one of P groups of neighbouring input features, for all tokens, and leaves its part
of the sums in fp32. Everything it needs has a place of its own in shared memory: so all its weights, which never
change, are under way before it waits for the kernel before (programmatic dependent launch), and only the tokens come
after. There are no more programs than multiprocessors: the weights of the whole matrix stream while the kernel before
still runs.

The copy engine fills with zeros what lies past the last token, the last weight row and the last input feature.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before

TOKENS = gl.constexpr(64)
"""Rows of a wgmma."""
STEP = gl.constexpr(64)
"""Input features of a stage: 128 bytes, the width of a swizzled row."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def box(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches `rows` x 64 elements of a matrix of 16-bit floats."""
    return TensorDescriptor.from_tensor(matrix, [rows, STEP.value], TILED.value)


@gluon.jit(do_not_specialize=["tokens"])
def part_linear(
    x_box, weight_box, out, tokens,
    F: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_PART: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[t, p] = weight · x[t] over the p-th STAGES * 64 input features. Grid: blocks of BLOCK weight rows, parts.

    `x_box` and `weight_box`: descriptors of tokens and weights, both in rows of input features, with boxes of 64 and of
    BLOCK rows. Lets its successor start only after its own wait.
    """
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16]
    )
    block = gl.program_id(0)
    part = gl.program_id(1)
    x_s = gl.allocate_shared_memory(x_box.dtype, [STAGES, TOKENS, STEP], TILED)
    weight_s = gl.allocate_shared_memory(weight_box.dtype, [STAGES, BLOCK, STEP], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    first = part * (STAGES * STEP)
    # program_id(2) is 0, which the compiler does not know: unrolled, it would prepare all of the tokens' copies, a
    # hundred instructions, before it starts the first.
    stages = STAGES + gl.program_id(2)
    for stage in range(stages):
        mbarrier.expect(full.index(stage), x_box.block_type.nbytes + weight_box.block_type.nbytes)
        tma.async_copy_global_to_shared(
            weight_box, [block * BLOCK, first + stage * STEP], full.index(stage), weight_s.index(stage)
        )
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()
    for stage in range(stages):
        tma.async_copy_global_to_shared(x_box, [0, first + stage * STEP], full.index(stage), x_s.index(stage))
    sums = gl.zeros([TOKENS, BLOCK], gl.float32, sums_layout)
    for stage in range(STAGES):
        mbarrier.wait(full.index(stage), 0)
        sums = warpgroup_mma(x_s.index(stage), weight_s.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
    sums = warpgroup_mma_wait(0, deps=(sums,))
    t = gl.arange(0, TOKENS, gl.SliceLayout(1, sums_layout))
    f = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, sums_layout))
    to = out + t.to(gl.int64)[:, None] * OUT_TOKEN + part * OUT_PART + f[None, :]
    gl.store(to, sums, mask=(t < tokens)[:, None] & (f < F)[None, :], eviction_policy="evict_last")
