"""The few-token kernels on a GPU: against fp64 formulas, replayed, and a token alone against the token in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import small_batch_cases as cases
import torch

from kernels.linear import launch
from kernels.routing_rule import RoutingRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = [1, 2, 3, 5, 8, 16]


def place() -> cases.Place:
    return cases.Place(torch.device("cuda"), dependent=torch.cuda.get_device_capability() >= (9, 0))


@pytest.mark.parametrize("tokens", TOKENS)
def test_v2_lite_products(tokens: int) -> None:
    cases.check_normed(place(), tokens, 3648, 2048, 1536)
    cases.check_residual(place(), tokens, 2048, 2048)
    cases.check_residual(place(), tokens, 2048, 10944)
    cases.check_gated(place(), tokens, 10944, 2048)
    cases.check_linear(place(), tokens, 10001, 2048)
    cases.check_linear(place(), tokens, 1000, 192)
    cases.check_heads(place(), tokens, 16, 128, 512)
    cases.check_heads_in_blocks(place(), tokens, 4, 1024, 4096, (128, 128))
    cases.check_enter(place(), tokens, 2048)


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_v3_products(tokens: int) -> None:
    cases.check_normed(place(), tokens, 2112, 7168, 1536)
    cases.check_normed(place(), tokens, 3072, 1536, 48)
    cases.check_linear(place(), tokens, 7168, 2048)
    cases.check_gated(place(), tokens, 2304, 7168)
    cases.check_enter(place(), tokens, 7168)


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_v3_products_in_fp8(tokens: int) -> None:
    blocks = (128, 128)
    cases.check_normed(place(), tokens, 2112, 7168, 1536, blocks)
    cases.check_normed(place(), tokens, 3072, 1536, 48, blocks)
    cases.check_residual(place(), tokens, 7168, 2048, blocks)
    cases.check_gated(place(), tokens, 2304, 7168, blocks)
    cases.check_gated(place(), tokens, 640, 192, (64, 64))
    cases.check_linear(place(), tokens, 10001, 2048, blocks)
    cases.check_experts(place(), tokens, 24, 8, 7168, 256, 1, True, blocks)
    cases.check_experts(place(), tokens, 8, 2, 192, 128, 1, True, (64, 64))


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_v4_products_in_fp8(tokens: int) -> None:
    """Those of DeepSeek V4 Flash, which does not take the small-batch path as a whole."""
    for rows, features in cases.V4_PRODUCTS:
        cases.check_linear(place(), tokens, rows, features, (128, 128))
    cases.check_to_norm(place(), tokens, 1536, 4096, 1024, (128, 128))
    if tokens == 1:
        cases.check_normed(place(), tokens, 32768, 1024, 16, (128, 128))


@pytest.mark.parametrize("tokens", [1, 2])
def test_long_rows_in_fp8(tokens: int) -> None:
    """Rows are those of DeepSeek-V3, which a kernel of their own multiplies by one token."""
    cases.check_residual(place(), tokens, 7168, 16384, (128, 128))
    cases.check_residual(place(), tokens, 7168, 18432, (128, 128))
    cases.check_experts(place(), tokens, 12, 8, 7168, 2048, 1, True, (128, 128))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 16, 17, 33, 64, 300])
@pytest.mark.parametrize("invariant", [False, True])
def test_tiled(tokens: int, invariant: bool) -> None:
    cases.check_tiled(place(), tokens, 1001, 576, invariant)
    cases.check_tiled(place(), tokens, 65, 192, invariant, torch.float32)


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 65, 200])
@pytest.mark.parametrize(("rows", "features"), [(3648, 2048), (64, 2048), (1001, 1088), (256, 7168), (192, 192)])
def test_narrow_tiles_have_the_bits_of_wide_ones(rows: int, features: int, tokens: int) -> None:
    """At magnitudes that cancel: other steps or another instruction would round otherwise."""
    cases.check_narrow_tiles(place(), tokens, rows, features)


@pytest.mark.parametrize("tokens", [17, 64, 256, 512])
def test_parts(tokens: int) -> None:
    cases.check_parts(place(), tokens, 64, 2048, 16)
    cases.check_parts(place(), tokens, 384, 7168, 16)


@pytest.mark.parametrize("tokens", TOKENS)
def test_routers_and_choices(tokens: int) -> None:
    cases.check_router(place(), tokens, 64, 2048, torch.bfloat16)
    cases.check_router(place(), tokens, 256, 7168)
    for equal in cases.EQUAL:
        cases.check_choose(place(), tokens, 64, 6, RoutingRule("softmax", 1, 1, False, 1.0), tokens == 5, equal=equal)
        cases.check_choose(place(), tokens, 160, 6, RoutingRule("softmax", 8, 3, False, 16.0), equal=equal)
        cases.check_choose(place(), tokens, 256, 8, RoutingRule("sigmoid", 8, 4, True, 2.5), tokens == 16, equal=equal)
        cases.check_choose(place(), tokens, 384, 8, RoutingRule("sigmoid", 1, 1, True, 2.827), equal=equal)


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_companions_that_are_not_numbers_change_nothing(tokens: int) -> None:
    cases.check_companions(place(), tokens, 64, 6, 2048, shared=2)


@pytest.mark.parametrize("tokens", TOKENS)
def test_experts(tokens: int) -> None:
    cases.check_experts(place(), tokens, 64, 6, 2048, 1408, 2, residual=True)
    cases.check_experts(place(), tokens, 32, 8, 7168, 256, 1, residual=False)
    cases.check_experts(place(), tokens, 8, 2, 256, 2048, 0, residual=True)


@pytest.mark.parametrize("tokens", [*TOKENS, 17, 64, 131, 256])
def test_rope_absorb(tokens: int) -> None:
    cases.check_rope_absorb(place(), tokens, 16, 128, 64, 512)
    cases.check_rope_absorb(place(), tokens, 128, 128, 64, 512)
    cases.check_rope_absorb(place(), tokens, 32, 64, 32, 128, gates=64)


@pytest.mark.parametrize("tokens", [*TOKENS, 17, 64, 131, 256])
def test_absorb(tokens: int) -> None:
    cases.check_absorb(place(), tokens, 16, 128, 64, 512)
    cases.check_absorb(place(), tokens, 20, 192, 64, 512)
    cases.check_absorb(place(), tokens, 32, 64, 32, 128, gates=64)


@pytest.mark.parametrize("tokens", [17, 33, 48, 64])
@pytest.mark.parametrize("parts", [1, 4, 8])
def test_rope_absorb_of_parts(tokens: int, parts: int) -> None:
    cases.check_rope_absorb(place(), tokens, 16, 128, 64, 512, parts)
    cases.check_rope_absorb(place(), tokens, 40, 64, 32, 256, parts)


@pytest.mark.parametrize("lengths", [[1], [1024], [64, 0, 700], [30000], [0]])
@pytest.mark.parametrize("width", [1, 4])
def test_merge_up(lengths: list[int], width: int) -> None:
    cases.check_merge_up(place(), lengths, width, 16, 512, 64, 128)


@pytest.mark.parametrize("rows", [17, 64, 100, 256])
@pytest.mark.parametrize("lengths", [[1024], [1, 2000, 0, 64], [5000] + [70] * 7], ids=["equal", "ragged", "one long"])
@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (1, 128)])
def test_merge_up_of_many_tokens(rows: int, lengths: list[int], width: int, heads: int) -> None:
    cases.check_merge_up(place(), (lengths * rows)[:rows], width, heads, 512, 64, 128)


def alone_and_together(product: Callable[[torch.Tensor], torch.Tensor], features: int) -> None:
    """Rows of one call equal the same rows in calls of every other size, bitwise."""
    x = place().normal(16, features)
    want = product(x)
    for count in (1, 3, 8, 11):
        assert torch.equal(product(x[:count]), want[:count])
        assert torch.equal(product(x[16 - count :]), want[16 - count :])


@pytest.mark.parametrize("features", [192, 2048, 7168])
def test_streamed_products_do_not_depend_on_the_other_tokens(features: int) -> None:
    weight = place().normal(500, features)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = place().poison(len(x), 500, dtype=torch.float32)
        launch.stream_linear(x, weight, out)
        return out

    alone_and_together(product, features)


@pytest.mark.parametrize("features", [192, 2048])
def test_invariant_tiles_do_not_depend_on_the_other_tokens(features: int) -> None:
    weight = place().normal(1, 500, features)
    x = place().normal(900, 1, features)

    def product(part: torch.Tensor) -> torch.Tensor:
        out = place().poison(len(part), 1, 500)
        launch.tiled(part, weight, out, invariant=True)
        return out

    want = product(x)
    for count in (1, 16, 17, 65, 300):
        assert torch.equal(product(x[:count]), want[:count])
        assert torch.equal(product(x[-count:]), want[-count:])
