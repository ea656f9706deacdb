"""Compilation of products of some rounded tokens, at the sizes of DeepSeek-V3, and one of DeepSeek V4."""

import re

import pytest
import torch

from kernels.linear import stream_k_launch
from kernels.matrix import BlockScaled
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized
from tests.support.rounded_norm_case import memory_of

pytestmark = pytest.mark.gate

SIZES = {"queries and latents": (2112, 7168), "queries": (24576, 1536), "output": (7168, 16384), "dense": (36864, 7168)}
SIZES["latents of V4"] = (1536, 4096)
"""Output and input features."""


def products(tokens: int, rows: int, features: int) -> list[object]:
    """The product and the sum of its pieces, of no value: nothing runs."""
    data = torch.empty(rows, features, dtype=torch.float8_e4m3fn)
    weight = BlockScaled(data, torch.empty(-(-rows // 128), features // 128))
    number = torch.empty(-(-tokens // 4) * 4, features, dtype=torch.float8_e4m3fn)
    scale = torch.empty(features // 128, number.shape[0]).t()
    out = torch.empty(tokens, rows, dtype=torch.bfloat16)
    pieces = torch.empty(stream_k_launch.pieces(tokens, weight, 132))
    with compile_only() as compiled:
        stream_k_launch.stream_k(number, scale, weight, out, pieces, programs=132, dependent=True)
    return compiled


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_compiles_to_what_it_was_written_for(name: str, tokens: int) -> None:
    multiply, add_pieces = products(tokens, *SIZES[name])
    found, code = resources(multiply), machine_code(multiply)
    found.check(registers=255)
    assert found.shared <= 200 * 1024
    assert (found.waits, found.releases) == (True, True)
    made = re.findall(r"[HQ]GMMA\.(\S+)", code)
    assert set(made) == {f"64x{tokens}x32.F32.E4M3.E4M3"}
    assert not serialized(multiply)
    # The first weights are under way before the wait, and the loop has one product of two halves of four.
    assert "UTMALDG" in code.split("ACQBULK")[0]
    assert len(made) == 8
    assert instructions(multiply)["FFMA"] >= tokens
    found = resources(add_pieces)
    found.check(registers=255)
    assert (found.waits, found.releases) == (True, True)


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    hashes = {kernel.hash for tokens in (33, 36, 47, 64) for kernel in products(tokens, *SIZES["output"])}
    assert len(hashes) == 2


def test_the_norm_behind_queries_and_latents() -> None:
    rows, features, normed = 2112, 7168, 1536
    weight = BlockScaled(torch.empty(rows, features, dtype=torch.float8_e4m3fn), torch.empty(17, features // 128))
    number, scale = torch.empty(16, features, dtype=torch.float8_e4m3fn), torch.empty(features // 128, 16).t()
    out, pieces = torch.empty(16, rows).bfloat16(), torch.empty(stream_k_launch.pieces(16, weight, 132))
    normed_TA, rounded = memory_of(16, normed, "cpu")
    with compile_only() as compiled:
        into = torch.empty(normed).bfloat16(), normed_TA, rounded
        stream_k_launch.stream_k_norm(number, scale, weight, out, pieces, *into, 1e-6, programs=132, dependent=True)
    _, pieces_norm = compiled
    found = resources(pieces_norm)
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize(("rows", "features"), [(7168, 16384), (7168, 2048), (4096, 4096)])
def test_the_norm_behind_what_is_added_to_the_residual(rows: int, features: int, tokens: int) -> None:
    """At the sizes of DeepSeek-V3, alone and as a rank of eight has them, and of Mistral Small 4."""
    weight = BlockScaled(
        torch.empty(rows, features, dtype=torch.float8_e4m3fn), torch.empty(rows // 128, features // 128)
    )
    number, scale = torch.empty(tokens, features, dtype=torch.float8_e4m3fn), torch.empty(features // 128, tokens).t()
    out, rounded = memory_of(tokens, rows, "cpu")
    pieces = torch.empty(stream_k_launch.pieces(tokens, weight, 132))
    with compile_only() as compiled:
        into = torch.empty(rows).bfloat16(), out, rounded, 1e-6
        how = {"residual_TF": torch.empty_like(out), "programs": 132, "dependent": True}
        stream_k_launch.stream_k_norm(number, scale, weight, out, pieces, *into, **how)
    found = resources(compiled[1])
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)
