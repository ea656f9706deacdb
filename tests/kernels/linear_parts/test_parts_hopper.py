"""Compilation for Hopper of products in parts, and of the kernels that add the parts up."""

import re

import pytest
import torch
from torch import Tensor

from kernels.head_linear import launch as heads
from kernels.linear.parts import Cut, part_linear
from kernels.rms_norm import launch_add_rms_norm
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

PRODUCTS = {"queries and latents": (3648, 2048), "output": (2048, 2048), "of 40 heads": (2560, 2560)}
"""Output and input features of DeepSeek-V2-Lite and MiniCPM3."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never touched, so never more than addresses


def product(tokens: int, rows: int, features: int) -> None:
    """Compiles one, inside `compile_only`."""
    cut = Cut.of(rows, features, 132)
    assert cut is not None
    out = empty(tokens, cut.parts, rows, dtype=torch.float32)
    part_linear(empty(tokens, features), empty(rows, features), out, cut, dependent=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    with compile_only() as compiled:
        product(64, *PRODUCTS[name])
    found, code = resources(compiled[0]), machine_code(compiled[0])
    found.check(registers=128)
    assert found.shared <= 200 * 1024
    assert (found.waits, found.releases) == (True, True)
    assert "HGMMA" in instructions(compiled[0])
    assert not serialized(compiled[0])
    # All weights are under way before the wait; the successor starts after it, and the tokens' first copy soon.
    before, after = code.split("ACQBULK")
    assert "UTMALDG" in before
    assert "PREEXIT" in after
    assert len(re.findall(r"; +/\*", after[: after.index("UTMALDG")])) < 40


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    with compile_only() as compiled:
        for tokens in (17, 33, 48, 64):
            product(tokens, *PRODUCTS["output"])
    assert len({kernel.hash for kernel in compiled}) == 1


def ahead(code: str) -> int:
    """Loads of 16 bytes past L1 that begin behind the wait and before the barrier among a kernel's first parts."""
    behind = code[code.index("ACQBULK") :]
    return behind[: behind.index("BAR.SYNC")].count("LDG.E.128.STRONG")


@pytest.mark.parametrize(("features", "parts"), [(2048, 4), (2048, 8), (2560, 6)])
def test_all_parts_of_a_norm_are_on_their_way_at_once(features: int, parts: int) -> None:
    with compile_only() as compiled:
        x = (empty(64, parts, features, dtype=torch.float32), empty(64, features))
        launch_add_rms_norm(*x, empty(features), empty(64, features), 1e-6, dependent=True)
    resources(compiled[0]).check(registers=128)
    block = 1 << (features - 1).bit_length()
    assert ahead(machine_code(compiled[0])) >= (parts - 1) * block // (4 * 32 * resources(compiled[0]).warps)


@pytest.mark.parametrize("parts", [4, 8])
@pytest.mark.parametrize("tokens", [17, 64])
def test_all_parts_of_queries_are_on_their_way_at_once(tokens: int, parts: int) -> None:
    count, nope, rope, latent = 16, 128, 64, 512
    features = count * (nope + rope)
    part = empty(tokens, parts, features + latent + rope, dtype=torch.float32)
    q, kv = part[..., :features].unflatten(-1, (count, nope + rope)), part[..., features:]
    ids, rotation = empty(tokens, dtype=torch.int64), empty(4096, rope, dtype=torch.float32)
    weight = empty(count, 2 * nope, latent)[:, :nope]
    out, cache = empty(tokens, count, latent + rope), empty(3, 64, latent + rope)
    with compile_only() as compiled:
        heads.rope_absorb(q, kv, weight, empty(latent), rotation, ids, ids, out, cache, 1e-6, dependent=True)
    found = resources(compiled[0])
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)
    assert "HGMMA" in instructions(compiled[0])
    # Weights reach shared memory past the registers, where loads would take turns, before the wait.
    code = machine_code(compiled[0])
    assert "UTMALDG" in code[: code.index("ACQBULK")]
    # A thread has 4 features of the queries of two tokens.
    assert ahead(code) >= 2 * (parts - 1)
