"""Norm, rotation and cache write against naive fp64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.latent_entry import rope_cache
from kernels.page import PAGE_TOKENS

LATENT, ROPE, HEADS, EPS = 6, 8, 3, 1e-6


def naive_rotation(x: Tensor, angles: list[float]) -> Tensor:
    out = x.double().clone()
    for i, angle in enumerate(angles):
        a, b = x[..., 2 * i].double(), x[..., 2 * i + 1].double()
        out[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def case(slots: list[int], pages: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(len(slots))
    tokens = len(slots)
    angle = torch.rand(tokens, ROPE // 2) * 6
    down = torch.randn(tokens, 10 + LATENT + ROPE, dtype=dtype)  # the caller passes a slice of a wider projection
    query = torch.randn(tokens, HEADS, 4 + ROPE, dtype=dtype)
    return {
        "q_THO": query[..., 4:],
        "kv_TC": down[:, 10:],
        "weight_L": torch.rand(LATENT, dtype=dtype) + 0.5,
        "rotation_TO": torch.stack([angle.cos(), angle.sin()], -1).flatten(1),
        "cache_slot_T": torch.tensor(slots),
        "latent_TC": torch.full((tokens, LATENT + ROPE), torch.nan, dtype=dtype),
        "cache_PKC": torch.zeros(pages, PAGE_TOKENS, LATENT + ROPE, dtype=dtype),
    } | {"angle": angle}


def run(c: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute what the kernel is to produce, before it runs: queries [T, H, O], cache entries [T, C]."""
    kv, angle = c["kv_TC"].double(), c["angle"].tolist()
    latent = kv[:, :LATENT] / (kv[:, :LATENT].square().mean(-1, keepdim=True) + EPS).sqrt() * c["weight_L"].double()
    key = torch.stack([naive_rotation(kv[t, LATENT:], angle[t]) for t in range(len(kv))])
    query = torch.stack([naive_rotation(c["q_THO"][t], angle[t]) for t in range(len(kv))])
    rope_cache(**{name: tensor for name, tensor in c.items() if name != "angle"}, eps=EPS)
    return query, torch.cat([latent, key], -1)


def test_matches_fp64_and_writes_only_its_slots() -> None:
    slots = [PAGE_TOKENS * 2 + 63, PAGE_TOKENS, PAGE_TOKENS * 3, PAGE_TOKENS + 1]
    c = case(slots, pages=4)
    query, entry = run(c)
    torch.testing.assert_close(c["q_THO"].double(), query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(c["latent_TC"].double(), entry, atol=1e-5, rtol=1e-5)
    flat = c["cache_PKC"].view(-1, LATENT + ROPE)
    assert torch.equal(flat[slots], c["latent_TC"])
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[slots] = False
    assert not flat[untouched].any()


def test_suppressed_writes_stay_in_the_null_page() -> None:
    c = case([0, 0, PAGE_TOKENS + 5, 0], pages=3)
    run(c)
    assert not c["cache_PKC"][1:].view(-1, LATENT + ROPE)[[i for i in range(128) if i != 5]].any()
    assert torch.equal(c["cache_PKC"][1, 5], c["latent_TC"][2])


@pytest.mark.parametrize("slot", [-1, 2 * PAGE_TOKENS])
def test_a_slot_outside_the_cache_is_refused_and_nothing_wraps(slot: int) -> None:
    c = case([slot], pages=2)
    with pytest.raises(IndexError):
        run(c)
    assert not c["cache_PKC"].any()


def test_bfloat16_is_rounded_once() -> None:
    c = case([70, 71], pages=2, dtype=torch.bfloat16)
    query, entry = run(c)
    torch.testing.assert_close(c["latent_TC"].double(), entry, atol=1e-6, rtol=2**-8)
    torch.testing.assert_close(c["q_THO"].double(), query, atol=1e-2, rtol=2**-7)


def test_addresses_past_two_to_the_31_elements() -> None:
    pages = 2**31 // (PAGE_TOKENS * (LATENT + ROPE)) + 3
    c = case([pages * PAGE_TOKENS - 1], pages=1, dtype=torch.bfloat16)
    c["cache_PKC"] = torch.empty(pages, PAGE_TOKENS, LATENT + ROPE, dtype=torch.bfloat16)
    run(c)
    assert torch.equal(c["cache_PKC"][pages - 1, 63], c["latent_TC"][0])
