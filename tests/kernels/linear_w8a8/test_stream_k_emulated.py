"""Products of some rounded tokens as they were compiled, run by the PTX emulator under drawn schedules."""

import pytest
import torch
from w8a8_case import case, check

from kernels.linear import stream_k_launch
from kernels.rounded_norm import launch_rounded_norm
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered
from tests.support.rounded_norm_case import EPS, check_norm, memory_of

pytestmark = pytest.mark.long


def run(tokens: int, features: int, outputs: int, programs: int, seed: int = 0, **more: int) -> None:
    number, scale, weight = case(tokens, features, outputs, "cpu")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(stream_k_launch.pieces(tokens, weight, programs), torch.nan)
    with emulated(seed, consecutive=True) as launches:
        stream_k_launch.stream_k(number, scale, weight, out, pieces, programs=programs, dependent=True, **more)
    assert launches == ["multiply", "add_pieces"]
    check(number, scale, weight, out)


@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 32, 64])
def test_any_number_of_tokens(tokens: int) -> None:
    run(tokens, 256, 256, 2, tokens)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 9])
def test_shares_that_end_in_the_middle_of_blocks(programs: int) -> None:
    """Three blocks of three steps: pieces of one and two programs, whole blocks, and programs with one step."""
    run(10, 384, 304, programs, programs, stages=2)


def test_a_block_of_many_pieces() -> None:
    run(12, 768, 128, 6)


def run_norm(
    tokens: int, features: int, outputs: int, normed: int, programs: int, *, scaled: bool = False, **options: object
) -> None:
    """A product, the norm of its first columns, and that in FP8."""
    number, scale, weight = case(tokens, features, outputs, "cpu")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(stream_k_launch.pieces(tokens, weight, programs), torch.nan)
    norm_A = torch.rand(normed).bfloat16() + 0.5
    scale_T = torch.rand(tokens) + 0.5 if scaled else None
    normed_TA, rounded = memory_of(tokens, normed, "cpu")
    with emulated(tokens, consecutive=True, **options) as launches:  # type: ignore[arg-type]
        product = number, scale, weight, out, pieces
        into = norm_A, normed_TA, rounded
        stream_k_launch.stream_k_norm(*product, *into, 1e-6, scale_T, programs=programs, stages=2, dependent=True)
    assert launches == ["multiply", "pieces_norm"]
    check(number, scale, weight, out)
    check_norm(out[:, :normed], norm_A, normed_TA, rounded, scale_T)


@pytest.mark.parametrize(
    ("features", "outputs", "normed", "programs"),
    [
        pytest.param(384, 304, 256, 1, id="one program has all"),
        pytest.param(384, 304, 128, 2, id="whole blocks and blocks in pieces"),
        pytest.param(384, 304, 256, 9, id="a program for each step"),
        pytest.param(1280, 128, 128, 10, id="more pieces than a batch"),
    ],
)
def test_the_norm_behind(features: int, outputs: int, normed: int, programs: int) -> None:
    run_norm(10, features, outputs, normed, programs)


@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_the_norm_of_any_number_of_tokens(tokens: int) -> None:
    run_norm(tokens, 256, 256, 128, 3, scaled=True)


def run_add_norm(tokens: int, features: int, outputs: int, programs: int, **options: object) -> None:
    """A product that is added to the residual, and the norm of that. The residual has the bits of three launches."""
    number, scale, weight = case(tokens, features, outputs, "cpu")
    pieces = torch.full(stream_k_launch.pieces(tokens, weight, programs), torch.nan)
    wide = torch.full((tokens, outputs + 16), torch.nan).bfloat16()
    residual, weight_E = wide[:, :outputs], torch.rand(outputs).bfloat16() + 0.5
    begun = (100 * torch.randn(tokens, outputs)).bfloat16()
    want, (product, _) = begun.clone(), memory_of(tokens, outputs, "cpu")
    with emulated():
        stream_k_launch.stream_k(number, scale, weight, product, pieces, programs=programs, stages=2)
        launch_rounded_norm(product, weight_E, *memory_of(tokens, outputs, "cpu"), EPS, want)
    residual.copy_(begun)
    pieces.fill_(torch.nan)
    out, rounded = memory_of(tokens, outputs, "cpu")
    with emulated(tokens, consecutive=True, **options) as launches:  # type: ignore[arg-type]
        into = weight_E, out, rounded, EPS
        how = {"residual_TF": residual, "programs": programs, "stages": 2, "dependent": True}
        stream_k_launch.stream_k_norm(number, scale, weight, out, pieces, *into, **how)
    assert launches == ["multiply", "pieces_norm"]
    assert torch.equal(residual, want)
    check_norm(residual, weight_E, out, rounded)


@pytest.mark.parametrize(
    ("tokens", "features", "outputs", "programs"),
    [(10, 384, 256, 1), (9, 384, 384, 2), (17, 384, 384, 9), (1, 1280, 128, 10), (64, 256, 640, 3)],
)
def test_what_is_added_to_the_residual(tokens: int, features: int, outputs: int, programs: int) -> None:
    """One program that has all, whole blocks beside blocks in pieces, a program for each step, and more pieces than a
    batch; scales that are kept once, and twice."""
    run_add_norm(tokens, features, outputs, programs)


def test_a_residual_of_another_size_is_refused() -> None:
    number, scale, weight = case(4, 256, 256, "cpu")
    out, rounded = memory_of(4, 128, "cpu")
    pieces, residual = torch.empty(stream_k_launch.pieces(4, weight, 2)), torch.zeros(4, 256).bfloat16()
    with pytest.raises(ValueError, match="a residual of 256 features does not have a norm of 128"):
        stream_k_launch.stream_k_norm(
            number, scale, weight, residual, pieces, out[0], out, rounded, EPS, residual_TF=residual, programs=2
        )


def test_without_its_wait_the_norm_would_be_noticed() -> None:
    def broken(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if "pieces_norm" in ptx else ptx

    with pytest.raises((AssertionError, Fault, Unordered)):
        run_norm(10, 384, 304, 256, 9, edit=broken)
    with pytest.raises((AssertionError, Fault, Unordered)):
        run_add_norm(10, 384, 384, 9, edit=broken)
