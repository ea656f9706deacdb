"""Entries of the latent cache, as they are or in FP8, the one way in which the latter are rounded, and the kernel that
makes them for prefill rows: `rope_cache`, the work between the projections and attention, which is norm of the latent,
rope of query and key, and cache write.

A plain entry is the normed latent, then the roped part of the key, in the model's dtype. An FP8 entry is bytes: the
latent in e4m3, a fp32 scale for every 128 features of it (the last ones may be fewer), the roped part in the model's
dtype, and up to a multiple of 16 some bytes that nobody reads or writes. For 512 + 64 features in bf16 these are
512 + 16 + 128 = 656 bytes, as FlashMLA has them. A cache of FP8 entries is a tensor of uint8, by which kernels know it.

What is rounded are the numbers that a plain entry would hold, in fp32: scale = largest magnitude / 448, code = e4m3
(number / scale), both to nearest even. A group whose numbers are all below `LEAST` has scale 1 and becomes zeros; one
with a number that is not finite has scale NaN. Read, a number is code * scale, rounded to the model's dtype.

Shape legend: T entries, H heads, L latent features, O rope features, C = L + O, P pages, K = 64 entries per page, E
bytes of an entry, G groups.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.page import PAGE_TOKENS

GROUP: Final = 128
"""Features of a scale."""
LARGEST: Final = 448.0
"""The largest number of e4m3."""
LEAST: Final = 2.0**-100
"""Numbers below it are taken for zeros: of smaller ones the scale would lose bits, or be zero itself."""
_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)


class Entry(NamedTuple):
    """Location of the parts of an entry. All fields but `fp8` matter in FP8 alone."""

    fp8: bool
    scales: int = 0
    """The byte at which the scales begin."""
    rope: int = 0
    """The byte at which the roped features begin."""
    size: int = 0
    """Bytes from one entry to the next."""


PLAIN: Final = Entry(False)


def fp8_entry(latent: int, rope: int, dtype: torch.dtype) -> Entry:
    """An FP8 entry of so many features, the roped ones in `dtype`."""
    scales = -(-latent // 4) * 4
    behind = scales + 4 * -(-latent // GROUP)
    return Entry(True, scales, behind, -(-(behind + rope * dtype.itemsize) // 16) * 16)


def entry_of(cache: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Entry:
    """Return the layout of the entries of `cache`, in a model of `dtype`. ValueError if they do not have this number of
    features."""
    if cache.dtype != torch.uint8:
        size, entry = latent + rope, PLAIN
    else:
        entry = fp8_entry(latent, rope, dtype)
        size = entry.size
    if cache.shape[-1] != size:
        raise ValueError(f"entries of {latent} + {rope} features are {size} wide, not {cache.shape[-1]}")
    return entry


def encode(entry_TC: Tensor, latent: int) -> Tensor:
    """FP8 entries, uint8 [T, E], of plain ones; what is behind the roped features is 0."""
    rope = entry_TC.shape[1] - latent
    at = fp8_entry(latent, rope, entry_TC.dtype)
    groups = -(-latent // GROUP)
    number_TL = entry_TC[:, :latent].float()
    padded_TGK = F.pad(number_TL, (0, groups * GROUP - latent)).view(-1, groups, GROUP)
    largest_TG = padded_TGK.abs().amax(-1)
    scale_TG = torch.where(largest_TG < LEAST, 1.0, largest_TG / LARGEST)
    scale_TG = scale_TG.where(largest_TG.isfinite(), torch.nan)
    code_TL = (padded_TGK / scale_TG.unsqueeze(-1)).flatten(1)[:, :latent].to(torch.float8_e4m3fn)
    out_TE = torch.zeros(entry_TC.shape[0], at.size, dtype=torch.uint8, device=entry_TC.device)
    out_TE[:, :latent] = code_TL.view(torch.uint8)
    out_TE[:, at.scales : at.rope] = scale_TG.view(torch.uint8)
    rope_bytes = rope * entry_TC.element_size()
    out_TE[:, at.rope : at.rope + rope_bytes] = entry_TC[:, latent:].contiguous().view(torch.uint8)
    return out_TE


def decode(entry_XE: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Dequantize FP8 entries, uint8 [..., E], to [..., C] in `dtype`."""
    at = fp8_entry(latent, rope, dtype)
    # Copies, so that they lie as numbers of their size must.
    scale_XG = entry_XE[..., at.scales : at.rope].clone().view(torch.float32)
    scale_XL = scale_XG.repeat_interleave(GROUP, -1)[..., :latent]
    number_XL = entry_XE[..., :latent].view(torch.float8_e4m3fn).float() * scale_XL
    rope_XO = entry_XE[..., at.rope : at.rope + rope * dtype.itemsize].clone().view(dtype)
    return torch.cat([number_XL.to(dtype), rope_XO], -1)


def entries(found_XE: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Convert entries of either form to numbers: [..., C], in `dtype` where they are FP8."""
    if entry_of(found_XE, latent, rope, dtype).fp8:
        return decode(found_XE, latent, rope, dtype)
    return found_XE


def write(entry_TC: Tensor, latent: int, slot_T: Tensor, cache_PKC: Tensor) -> None:
    """Write plain entries to a cache of either form at the slots (int64, of all pages laid end to end), and make them
    what will be read there. IndexError for a slot outside the cache."""
    at = entry_of(cache_PKC, latent, entry_TC.shape[1] - latent, entry_TC.dtype)
    flat_NC = cache_PKC.view(-1, cache_PKC.shape[-1])
    if at.fp8:
        code_TE = encode(entry_TC, latent)
        rope = entry_TC.shape[1] - latent
        entry_TC.copy_(decode(code_TE, latent, rope, entry_TC.dtype))
        used = at.rope + rope * entry_TC.element_size()
        flat_NC[:, :used].index_copy_(0, slot_T, code_TE[:, :used])
    else:
        # index_copy_ refuses a negative slot, where plain indexing would wrap to the cache's end.
        flat_NC.index_copy_(0, slot_T, entry_TC)


def rope_cache_reference(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    eps: float,
) -> None:
    """Work that `rope_cache` and `rope_absorb` share, in plain torch: norm of the latent, rope of the key and of the
    queries `q_THO`, and `write`. `latent_TC` gets what is read where something was written."""
    latent = weight_L.shape[0]
    compute = torch.promote_types(kv_TC.dtype, torch.float32)
    turn_TO = rotation_TO.to(compute)
    normed_TL = F.rms_norm(kv_TC[:, :latent].to(compute), weight_L.shape, weight_L.to(compute), eps)
    latent_TC[:, :latent].copy_(normed_TL)
    latent_TC[:, latent:].copy_(_rotated(kv_TC[:, latent:].to(compute), turn_TO))
    q_THO.copy_(_rotated(q_THO.to(compute), turn_TO.unsqueeze(1)))
    write(latent_TC, latent, cache_slot_T, cache_PKC)


def _rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1), each a complex number."""
    x_2, turn_2 = x.view(*x.shape[:-1], -1, 2), turn.view(*turn.shape[:-1], -1, 2)
    return torch.view_as_real(torch.view_as_complex(x_2) * torch.view_as_complex(turn_2)).flatten(-2)


@triton.jit
def rounded(x, BLOCK: tl.constexpr):
    """Round a latent in fp32, [BLOCK], 0 past its features. Return the bytes of its codes, the scales of its groups,
    and the numbers that it is read as, in fp32."""
    GROUPS: tl.constexpr = (BLOCK + _GROUP - 1) // _GROUP
    grouped = tl.reshape(x, [GROUPS, BLOCK // GROUPS])
    # Maxima pass NaN over; 0 times what is not finite is NaN.
    largest = tl.max(tl.abs(grouped), 1) + tl.sum(grouped * 0.0, 1)
    scale = tl.where(largest < _LEAST, 1.0, tl.div_rn(largest, tl.full([GROUPS], _LARGEST, tl.float32)))
    each = tl.broadcast_to(scale[:, None], [GROUPS, BLOCK // GROUPS])
    code = tl.div_rn(grouped, each).to(tl.float8e4nv)
    read = code.to(tl.float32) * each
    return tl.reshape(code.to(tl.uint8, bitcast=True), [BLOCK]), scale, tl.reshape(read, [BLOCK])


@triton.jit
def store_entry(entry, latent, key, exists, LATENT: tl.constexpr, ROPE: tl.constexpr, ENTRY: tl.constexpr):
    """Write the entry at `entry`, if it `exists`: a latent and a roped key in the model's dtype, of as many features as
    LATENT and ROPE say. Returns what the latent is read as, in that dtype."""
    BLOCK: tl.constexpr = latent.shape[0]
    c = tl.arange(0, BLOCK)
    o = tl.arange(0, key.shape[0])
    inside = (c < LATENT) & exists
    roped = (o < ROPE) & exists
    if ENTRY.fp8:
        GROUPS: tl.constexpr = (BLOCK + _GROUP - 1) // _GROUP
        g = tl.arange(0, GROUPS)
        code, scale, read = rounded(latent.to(tl.float32), BLOCK)
        tl.store(entry + c, code, mask=inside)
        scales = (entry + ENTRY.scales).to(tl.pointer_type(tl.float32))
        tl.store(scales + g, scale, mask=(g * _GROUP < LATENT) & exists)
        tl.store((entry + ENTRY.rope).to(tl.pointer_type(key.dtype)) + o, key, mask=roped)
        latent = read.to(latent.dtype)
    else:
        tl.store(entry + c, latent, mask=inside)
        tl.store(entry + LATENT + o, key, mask=roped)
    return latent


@triton.jit
def load_latents(at, mask, dtype: tl.constexpr, LATENT: tl.constexpr, LANES: tl.constexpr, ENTRY: tl.constexpr):
    """The latents [entries, LANES] of the entries at `at` that `mask` allows, in `dtype`; 0 elsewhere."""
    c = tl.arange(0, LANES)
    wanted = mask[:, None]
    if LATENT != LANES:
        wanted = wanted & (c < LATENT)[None, :]
    if ENTRY.fp8:
        ENTRIES: tl.constexpr = at.shape[0]
        GROUPS: tl.constexpr = (LANES + _GROUP - 1) // _GROUP
        g = tl.arange(0, GROUPS)
        code = tl.load(at[:, None] + c[None, :], mask=wanted, other=0)
        scales = (at + ENTRY.scales).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales[:, None] + g[None, :], mask=mask[:, None] & (g * _GROUP < LATENT)[None, :], other=0.0)
        number = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ENTRIES, GROUPS, LANES // GROUPS])
        latent = tl.reshape(number * scale[:, :, None], [ENTRIES, LANES]).to(dtype)
    else:
        latent = tl.load(at[:, None] + c[None, :], mask=wanted, other=0.0)
    return latent


@triton.jit
def load_keys(
    at, mask, dtype: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LANES: tl.constexpr, ENTRY: tl.constexpr
):
    """The roped features [entries, LANES] of the entries at `at` that `mask` allows; 0 elsewhere."""
    o = tl.arange(0, LANES)
    wanted = mask[:, None]
    if ROPE != LANES:
        wanted = wanted & (o < ROPE)[None, :]
    keys = at + LATENT
    if ENTRY.fp8:
        keys = (at + ENTRY.rope).to(tl.pointer_type(dtype))
    return tl.load(keys[:, None] + o[None, :], mask=wanted, other=0.0)


_HEADS = 16
"""Heads a program rotates."""


def rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Rotate the rope part of the queries in place; norm the latent and rotate the key; write both to the cache.

    - `q_THO`: rope part of every head's query, usually a strided view. Features (2i, 2i + 1) are one pair that turns by
      the token's i-th angle (Su et al., RoFormer, 2021), the order of the published checkpoints.
    - `kv_TC`: output of the down-projection, latent then rope key, not yet normed. L = `weight_L`.shape[0].
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1).
    - `cache_slot_T`: int64 index into the flattened cache [pages * 64]. Padding and suppressed writes point into the
      null page. A slot outside the cache, -1 included, is the caller's error and never written (on a CPU it raises).
    - `latent_TC`: receives what is read where something was written, for prefill's own keys. In the model's dtype.
    - `cache_PKC`: entries in that dtype, or FP8 entries as bytes, [P, K, E] (see the top of this file).

    Strides between tokens and heads are even, O and L too. The norm and the rotation are computed in fp32 and rounded
    once; FP8 entries then once more.

    `dependent`: programmatic dependent launch (compute capability 9.0 and above). It is safe when the rotation and the
    cache slots were not written by the kernel launched just before; they are read ahead of the wait for it. The kernel
    lets its successor start only after its own wait, as early reads of attention want it.
    """
    tensors = (q_THO, kv_TC, weight_L, rotation_TO, cache_slot_T, latent_TC, cache_PKC)
    if q_THO.is_cuda:
        launch_rope_cache(*tensors, eps, dependent=dependent)
    else:
        rope_cache_reference(*tensors, eps)


def launch_rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    """`rope_cache` as a Triton kernel."""
    tokens, heads, rope = q_THO.shape
    if not tokens:
        return
    latent = weight_L.shape[0]
    if cache_PKC.stride(0) != PAGE_TOKENS * cache_PKC.stride(1):
        raise ValueError(f"cache entries must be equally spaced, but the strides are {cache_PKC.stride()}")
    group = min(_HEADS, triton.next_power_of_2(heads))
    latent_block = triton.next_power_of_2(latent)
    entry = entry_of(cache_PKC, latent, rope, latent_TC.dtype)
    rope_cache_kernel[(tokens, 1 + triton.cdiv(heads, group))](
        q_THO,
        kv_TC,
        weight_L,
        rotation_TO,
        cache_slot_T,
        latent_TC,
        cache_PKC,
        cache_PKC.shape[0] * PAGE_TOKENS,
        eps,
        Q_TOKEN=q_THO.stride(0),
        Q_HEAD=q_THO.stride(1),
        KV_STRIDE=kv_TC.stride(0),
        ROTATION_STRIDE=rotation_TO.stride(0),
        LATENT_STRIDE=latent_TC.stride(0),
        CACHE_STRIDE=cache_PKC.stride(1),
        HEADS=heads,
        GROUP=group,
        LATENT=latent,
        LATENT_BLOCK=latent_block,
        ROPE=rope,
        ROPE_BLOCK=triton.next_power_of_2(rope),
        ENTRY=entry,
        DEPENDENT=dependent,
        num_warps=min(max(latent_block // 128, 1), 4),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _rotate(x, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th (cos, sin) of `turn`, [BLOCK]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(turn, [1, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit(do_not_specialize=["slots"])
def rope_cache_kernel(
    q,
    kv,
    weight,
    rotation,
    cache_slot,
    latent,
    cache,
    slots,
    eps,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    ROTATION_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    ENTRY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (token, part): part 0 makes the token's cache entry, the others rotate GROUP heads each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    o = tl.arange(0, ROPE_BLOCK)
    roped = o < ROPE
    turn = tl.load(rotation + token * ROTATION_STRIDE + o, mask=roped, other=0.0)
    if part == 0:
        c = tl.arange(0, LATENT_BLOCK)
        inside = c < LATENT
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        slot = tl.load(cache_slot + token)
        # Trigger after the wait: attention may then read what was written before this kernel.
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        source = kv + token * KV_STRIDE
        value = tl.load(source + c, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        key = tl.load(source + LATENT + o, mask=roped, other=0.0, cache_modifier=".cg").to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * w
        turned = tl.reshape(_rotate(tl.reshape(key, [1, ROPE_BLOCK]), turn, 1, ROPE_BLOCK), [ROPE_BLOCK])
        turned = turned.to(latent.dtype.element_ty)
        exists = (slot >= 0) & (slot < slots)
        cached = cache + slot * CACHE_STRIDE
        normed = store_entry(cached, normed.to(latent.dtype.element_ty), turned, exists, LATENT, ROPE, ENTRY)
        entry = latent + token * LATENT_STRIDE
        tl.store(entry + c, normed, mask=inside)
        tl.store(entry + LATENT + o, turned, mask=roped)
    else:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        at = q + token * Q_TOKEN + head[:, None] * Q_HEAD + o[None, :]
        mask = (head < HEADS)[:, None] & roped[None, :]
        x = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(at, _rotate(x, turn, GROUP, ROPE_BLOCK).to(q.dtype.element_ty), mask=mask)
