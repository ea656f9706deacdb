"""Words of 32 bits that ranks send to each other, and that say themselves whether they have arrived: how a thread
reads, sends, awaits and stores four of them at a time, and what numbers they are."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

EMPTY: Final = -1
"""Value of a word that nobody has written: two NaN of bf16, or one of fp32."""
_OTHER_NAN: Final = 0x7FFF7FFF

EMPTY_WORD, _NAN = tl.constexpr(EMPTY), tl.constexpr(_OTHER_NAN)

_READ = tl.constexpr("ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];")
# Relaxed, in the scope of the system: every word arrives whole, and that is all that is asked of it.
SEND = tl.constexpr("st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
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
def read_words(address):
    """The four words at an address, past L1."""
    a, b, c, d = tl.inline_asm_elementwise(
        _READ, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )
    return a, b, c, d


@triton.jit
def store_words(address, inside, a, b, c, d):
    """Four words, where `inside`."""
    tl.inline_asm_elementwise(
        _STORE, "=r,l,r,r,r,r,r", [address, inside.to(tl.int32), a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sendable(word, inside):
    """The word, or a word that says as much and is not `EMPTY`."""
    return tl.where(inside, tl.where(word == EMPTY_WORD, _NAN, word), 0)


@triton.jit
def numbers(word, FP32: tl.constexpr):
    """The two numbers in fp32 of a word of bf16, or twice the only one."""
    if FP32:
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def packed(low, high, FP32: tl.constexpr):
    """A word of these numbers."""
    if FP32:
        word = low.to(tl.int32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(_PACK, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    return word
