"""The exchange in Triton. A thread has whole pieces of 16 bytes, from its own rank's part to the result.

Behind the last piece there are pieces of zeros, so that a program's threads all do the same; their results alone are
not stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EMPTY: Final = -1
"""Value of a word that nobody has written: two NaN of bf16, or one of fp32."""
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
def _read(address):
    """The four words at an address, past L1."""
    a, b, c, d = tl.inline_asm_elementwise(
        _READ, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )
    return a, b, c, d


@triton.jit
def _store(address, inside, a, b, c, d):
    """Four words, where `inside`."""
    tl.inline_asm_elementwise(
        _STORE, "=r,l,r,r,r,r,r", [address, inside.to(tl.int32), a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sendable(word, inside):
    """The word, or a word that says as much and is not `EMPTY`."""
    return tl.where(inside, tl.where(word == _EMPTY, _NAN, word), 0)


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
    """The numbers of one word of the sum, of every rank's pieces."""
    low, high = _numbers(words[WORD], FP32)
    for rank in tl.static_range(1, RANKS):
        more, more_high = _numbers(words[4 * rank + WORD], FP32)
        low += more
        high += more_high
    return low, high


@triton.jit
def _packed(low, high, FP32: tl.constexpr):
    """A word of these numbers."""
    if FP32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(_PACK, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    return word


@triton.jit
def _summed_word(words, WORD: tl.constexpr, RANKS: tl.constexpr, FP32: tl.constexpr):
    """Return one word of the sum."""
    low, high = _summed(words, WORD, RANKS, FP32)
    return _packed(low, high, FP32)


@triton.jit
def _entered(words, WORD: tl.constexpr, residual, residual_high, norm, RANKS: tl.constexpr):
    """Two numbers of the residual with the sum added, as words; the word of both times the norm's weights; the sum of
    their squares."""
    low, high = _summed(words, WORD, RANKS, False)
    low += residual.to(tl.float32, bitcast=True)
    high += residual_high.to(tl.float32, bitcast=True)
    weight, weight_high = _numbers(norm, False)
    word = _packed(low * weight, high * weight_high, False)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True), word, low * low + high * high


@triton.jit(do_not_specialize=["pieces", "rank"])
def one_shot(
    part,
    inbox,
    addresses,
    turns,
    out,
    pieces,
    rank,
    residual,
    norm,
    square,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    RANK_BYTES: tl.constexpr,
    TAKE: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    WHAT: tl.constexpr,
    FP32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = the sum of the parts ("sum"), or every rank's part, with those of a row of ROW pieces side by side
    ("gather"). "add": residual += the sum, out = residual * norm, sums of squares by 16 features.

    Grid: lanes. Of the inbox [half, rank, lane, step, thread, 16 bytes] a program has its lane."""
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
        inside = piece < pieces
        a, b, c, d = _read(part.to(tl.int64) + tl.minimum(piece, pieces - 1).to(tl.int64) * 16)
        a = _sendable(a, inside)
        b = _sendable(b, inside)
        c = _sendable(c, inside)
        d = _sendable(d, inside)
        for other in tl.static_range(RANKS):
            to = inboxes[other] + rank * RANK_BYTES + place + step * (BLOCK * 16)
            tl.inline_asm_elementwise(_SEND, "=r,l,r,r,r,r", [to, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1)
    for step in tl.static_range(STEPS):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        inside = piece < pieces
        if WHAT == "add":  # read while parts arrive
            kept = tl.minimum(piece, pieces - 1).to(tl.int64)
            r0, r1, r2, r3 = _read(residual.to(tl.int64) + kept * 32)
            r4, r5, r6, r7 = _read(residual.to(tl.int64) + kept * 32 + 16)
            w0, w1, w2, w3 = _read(norm.to(tl.int64) + kept % ROW * 16)
        arrived = inbox.to(tl.int64) + place + step * (BLOCK * 16)
        words = tl.inline_asm_elementwise(
            TAKE, CONSTRAINTS, [arrived, _EMPTY], dtype=(tl.int32,) * (4 * RANKS), is_pure=False, pack=1
        )
        if WHAT == "gather":
            first = (piece // ROW * RANKS) * ROW + piece % ROW
            for source in tl.static_range(RANKS):
                at = out.to(tl.int64) + (first + source * ROW).to(tl.int64) * 16
                _store(
                    at, inside, words[4 * source], words[4 * source + 1], words[4 * source + 2], words[4 * source + 3]
                )
        else:
            at = out.to(tl.int64) + piece.to(tl.int64) * 16
            if WHAT == "add":
                r0, r1, a, square_a = _entered(words, 0, r0, r1, w0, RANKS)
                r2, r3, b, square_b = _entered(words, 1, r2, r3, w1, RANKS)
                r4, r5, c, square_c = _entered(words, 2, r4, r5, w2, RANKS)
                r6, r7, d, square_d = _entered(words, 3, r6, r7, w3, RANKS)
                _store(residual.to(tl.int64) + piece.to(tl.int64) * 32, inside, r0, r1, r2, r3)
                _store(residual.to(tl.int64) + piece.to(tl.int64) * 32 + 16, inside, r4, r5, r6, r7)
                of_16 = tl.sum(tl.reshape(square_a + square_b + square_c + square_d, [BLOCK // 2, 2]), 1)
                pair = (step * tl.num_programs(0) + lane) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
                tl.store(square + pair, of_16, mask=pair * 2 < pieces)
            else:
                a = _summed_word(words, 0, RANKS, FP32)
                b = _summed_word(words, 1, RANKS, FP32)
                c = _summed_word(words, 2, RANKS, FP32)
                d = _summed_word(words, 3, RANKS, FP32)
            _store(at, inside, a, b, c, d)
    tl.debug_barrier()  # all threads have read whose turn it is
    tl.store(turns + lane, turn + 1)
