"""The sum in Triton. A thread has whole pieces of 16 bytes, from its own rank's part to the sum.

Behind the last piece there are pieces of zeros, so that a program's threads all do the same; their sums alone are not
stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EMPTY: Final = -1
"""What a word holds that nobody has written: two NaN of bf16, or one of fp32."""
_OTHER_NAN: Final = 0x7FFF7FFF

_EMPTY, _NAN = tl.constexpr(EMPTY), tl.constexpr(_OTHER_NAN)

_READ = tl.constexpr("ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];")
# Relaxed, in the scope of the system: every word arrives whole, and that is all that is asked of it.
_SEND = tl.constexpr("st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
_STORE = tl.constexpr(
    """
    {
    .reg .pred inside;
    setp.ne.s32 inside, $2, 0;
    @inside st.global.v4.b32 [$1], {$3, $4, $5, $6};
    mov.b32 $0, 0;
    }
    """
)
# The numbers of bf16 in a word are the upper halves of fp32; the first one stands in the lower half.
_PACK = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


def take(ranks: int, stride: int) -> tuple[str, str]:
    """PTX, and its constraints, that waits until a piece of every rank has arrived, from an address on and `stride`
    bytes apart, reads them, and leaves their places empty."""
    words = [[f"${4 * rank + word}" for word in range(4)] for rank in range(ranks)]
    at = [f"[${4 * ranks} + {rank * stride}]" for rank in range(ranks)]
    loads = [
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(own)}}}, {place};" for own, place in zip(words, at, strict=True)
    ]
    first, *others = [word for own in words for word in own]
    tests = [f"setp.eq.s32 missing, {first}, {EMPTY};"]
    tests += [f"setp.eq.or.s32 missing, {word}, {EMPTY}, missing;" for word in others]
    nothing = ", ".join([f"${4 * ranks + 1}"] * 4)
    clears = [f"st.relaxed.sys.global.v4.b32 {place}, {{{nothing}}};" for place in at]
    lines = [".reg .pred missing;", "AGAIN:", *loads, *tests, "@missing bra AGAIN;", *clears]
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=&r"] * (4 * ranks) + ["l", "r"])


@triton.jit
def _numbers(word, FP32: tl.constexpr):
    """The two numbers in fp32 of a word of bf16, or twice the only one."""
    if FP32:
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _summed(words, WORD: tl.constexpr, RANKS: tl.constexpr, FP32: tl.constexpr):
    """One word of the sum, of every rank's pieces."""
    low, high = _numbers(words[WORD], FP32)
    for rank in tl.static_range(1, RANKS):
        more, more_high = _numbers(words[4 * rank + WORD], FP32)
        low += more
        high += more_high
    if FP32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(_PACK, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    return word


@triton.jit(do_not_specialize=["pieces", "rank"])
def one_shot_sum(
    part,
    inbox,
    addresses,
    turns,
    out,
    pieces,
    rank,
    RANKS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    RANK_BYTES: tl.constexpr,
    TAKE: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    FP32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: lanes. Of the inbox [half, rank, lane, step, thread, 16 bytes] a program has its lane."""
    lane = tl.program_id(0)
    thread = tl.arange(0, BLOCK)
    inboxes = ()  # everybody begins with another one, and ends with its own, which nobody waits for
    for other in tl.static_range(1, RANKS + 1):
        inboxes = inboxes + (tl.load(addresses + (rank + other) % RANKS),)  # noqa: RUF005 - Triton knows no other way
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: kernels after this may read before theirs what precedes this one
    turn = tl.load(turns + lane, cache_modifier=".cg")
    half = (turn & 1).to(tl.int64) * (RANKS * RANK_BYTES) + lane * LANE_BYTES
    place = half + thread * 16
    for step in tl.static_range(STEPS):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        source = part.to(tl.int64) + tl.minimum(piece, pieces - 1).to(tl.int64) * 16
        a, b, c, d = tl.inline_asm_elementwise(
            _READ, "=r,=r,=r,=r,l", [source], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
        inside = piece < pieces
        a = tl.where(inside, tl.where(a == _EMPTY, _NAN, a), 0)
        b = tl.where(inside, tl.where(b == _EMPTY, _NAN, b), 0)
        c = tl.where(inside, tl.where(c == _EMPTY, _NAN, c), 0)
        d = tl.where(inside, tl.where(d == _EMPTY, _NAN, d), 0)
        for other in tl.static_range(RANKS):
            to = inboxes[other] + rank * RANK_BYTES + place + step * (BLOCK * 16)
            tl.inline_asm_elementwise(_SEND, "=r,l,r,r,r,r", [to, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1)
    for step in tl.static_range(STEPS):
        arrived = inbox.to(tl.int64) + place + step * (BLOCK * 16)
        words = tl.inline_asm_elementwise(
            TAKE, CONSTRAINTS, [arrived, _EMPTY], dtype=(tl.int32,) * (4 * RANKS), is_pure=False, pack=1
        )
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        target = out.to(tl.int64) + piece.to(tl.int64) * 16
        tl.inline_asm_elementwise(
            _STORE,
            "=r,l,r,r,r,r,r",
            [
                target,
                (piece < pieces).to(tl.int32),
                _summed(words, 0, RANKS, FP32),
                _summed(words, 1, RANKS, FP32),
                _summed(words, 2, RANKS, FP32),
                _summed(words, 3, RANKS, FP32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()  # all threads have read whose turn it is
    tl.store(turns + lane, turn + 1)
