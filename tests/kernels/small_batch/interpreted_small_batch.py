"""The few-token kernels in the repaired interpreter, Gluon ones included. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import bounds, gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()
bounds.check_bounds()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import small_batch_cases as cases  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402

from kernels.linear import launch  # noqa: E402
from kernels.routing_rule import RoutingRule  # noqa: E402

CPU = cases.Place(torch.device("cpu"))
TOKENS = [1, 3, 16, *(pytest.param(tokens, marks=pytest.mark.soak) for tokens in (2, 5, 8))]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "features"), [(53, 192), (16, 64), (33, 520), (7, 2600)])
def test_linear(tokens: int, rows: int, features: int) -> None:
    cases.check_linear(CPU, tokens, rows, features)


@pytest.mark.parametrize("tokens", [*TOKENS, 17, 33, 64])
@pytest.mark.parametrize("invariant", [False, True])
def test_tiled(tokens: int, invariant: bool) -> None:
    cases.check_tiled(CPU, tokens, 41, 72, invariant)


@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_narrow_tiles(tokens: int) -> None:
    """Tiles of 16, 32 and 64 output features: there are 132 programs at most."""
    tiles = (tokens + 63) // 64
    for rows, features, block in ((41, 72, 16), (40, 512, 16), (2200 // tiles, 128, 32)):
        assert launch.invariant_tile(tiles, rows, features, 132)[0] == block
        cases.check_narrow_tiles(CPU, tokens, rows, features)


@pytest.mark.parametrize("tokens", [17, 64, 70])
def test_parts(tokens: int) -> None:
    cases.check_parts(CPU, tokens, 41, 96, 3)


@pytest.mark.parametrize("tokens", TOKENS)
def test_heads(tokens: int) -> None:
    cases.check_heads(CPU, tokens, 3, 24, 128)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize(("rows", "blocks"), [(32, (32, 64)), (64, (16, 128))])
def test_heads_in_blocks(tokens: int, rows: int, blocks: tuple[int, int]) -> None:
    cases.check_heads_in_blocks(CPU, tokens, 3, rows, 256, blocks)


@pytest.mark.parametrize("tokens", TOKENS)
def test_normed(tokens: int) -> None:
    cases.check_normed(CPU, tokens, 88, 192, 48)


@pytest.mark.parametrize("tokens", TOKENS)
def test_residual(tokens: int) -> None:
    cases.check_residual(CPU, tokens, 64, 136)


@pytest.mark.parametrize("tokens", TOKENS)
def test_gated(tokens: int) -> None:
    cases.check_gated(CPU, tokens, 27, 192)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("features", [48, 64, 112])
def test_enter(tokens: int, features: int) -> None:
    cases.check_enter(CPU, tokens, features)


@pytest.mark.parametrize("tokens", TOKENS)
def test_router(tokens: int) -> None:
    cases.check_router(CPU, tokens, 9, 48, torch.bfloat16 if tokens % 2 else torch.float32)


ROUTINGS = {
    "v2-lite": (64, 6, RoutingRule("softmax", 1, 1, False, 1.0)),
    "v2": (160, 6, RoutingRule("softmax", 8, 3, False, 16.0)),
    "v3": (256, 8, RoutingRule("sigmoid", 8, 4, True, 2.5)),
    "one group": (24, 3, RoutingRule("sigmoid", 1, 1, True, 2.5)),
    "odd groups": (18, 2, RoutingRule("sigmoid", 3, 2, False, 1.0)),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("equal", cases.EQUAL)
@pytest.mark.parametrize("model", ROUTINGS)
def test_choose(tokens: int, equal: cases.Equal, model: str) -> None:
    experts, chosen, routing = ROUTINGS[model]
    cases.check_choose(CPU, tokens, experts, chosen, routing, dead=tokens == 5, equal=equal)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_experts(tokens: int, shared: int) -> None:
    cases.check_experts(CPU, tokens, 6, 2, 48, 40, shared, residual=tokens != 3)


BLOCKS = [(128, 128), (64, 64), (16, 128)]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_products_of_fp8_weights(tokens: int, blocks: tuple[int, int]) -> None:
    """Sizes end in the middle of blocks, too."""
    cases.check_linear(CPU, tokens, 53, 192, blocks)
    cases.check_linear(CPU, tokens, 150, 2608, blocks)
    cases.check_normed(CPU, tokens, 88, 192, 48, blocks)
    cases.check_residual(CPU, tokens, 192, 144, blocks)
    cases.check_gated(CPU, tokens, blocks[0], 336, blocks)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_experts_of_fp8_weights(tokens: int, shared: int, blocks: tuple[int, int]) -> None:
    cases.check_experts(CPU, tokens, 6, 2, 144, blocks[0], shared, tokens != 3, blocks)


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_companions_that_are_not_numbers_change_nothing(tokens: int) -> None:
    cases.check_companions(CPU, tokens, 6, 2, 48, shared=tokens % 2)


@pytest.mark.parametrize("tokens", [*TOKENS, 17, 64, 131])
def test_rope_absorb(tokens: int) -> None:
    cases.check_rope_absorb(CPU, tokens, 3, 24, 16, 64)
    cases.check_rope_absorb(CPU, tokens, 2, 20, 12, 24)
    cases.check_rope_absorb(CPU, tokens, 3, 24, 16, 64, gates=12)


@pytest.mark.parametrize(("tokens", "parts"), [(17, 4), (33, 8), (64, 1)])
def test_rope_absorb_of_parts(tokens: int, parts: int) -> None:
    cases.check_rope_absorb(CPU, tokens, 3, 24, 16, 64, parts)
    cases.check_rope_absorb(CPU, tokens, 2, 20, 12, 24, parts)
    cases.check_rope_absorb(CPU, tokens, 2, 32, 16, 40, parts)


@pytest.mark.parametrize("tokens", [*TOKENS, 17, 64, 131])
def test_absorb(tokens: int) -> None:
    cases.check_absorb(CPU, tokens, 3, 24, 16, 64)
    cases.check_absorb(CPU, tokens, 18, 20, 12, 24, gates=12)


@pytest.mark.parametrize("lengths", [[1], [63, 0, 64], [400], [0], [700, 5]])
@pytest.mark.parametrize("width", [1, 3])
def test_merge_up(lengths: list[int], width: int) -> None:
    cases.check_merge_up(CPU, lengths, width, 2, 64, 16, 24, columns=8)


@pytest.mark.parametrize(
    "lengths",
    [[1] * 17, [300] * 17, [63, 0, 64, 700, 5, 3] * 4, [129, 0, 1000] * 6, [0] * 18],
    ids=["short", "equal", "ragged", "few long", "empty"],
)
@pytest.mark.parametrize(("width", "ctas"), [(1, 3), (3, 3), (1, 40), (2, 80), (1, 300)])
def test_merge_up_of_many_tokens(lengths: list[int], width: int, ctas: int) -> None:
    cases.check_merge_up(CPU, lengths, width, 2, 64, 16, 24, ctas=ctas)


@pytest.mark.parametrize("latent", [8, 24, 96])
def test_merge_up_of_any_latent(latent: int) -> None:
    cases.check_merge_up(CPU, [129, 0, 1000] * 6, 1, 2, latent, 8, 20, ctas=40)


def test_an_access_outside_the_arguments_fails() -> None:
    """The check of bounds itself: a position that is one value repeated by its stride, read as if it were several."""
    x, out = torch.zeros(1, dtype=torch.float32).expand(4), torch.zeros(4)
    with pytest.raises(Exception, match="outside the arguments"):
        cases.copy_contiguous(x, out)


@pytest.mark.parametrize("places", [[-4, 0, 4], [0, 12, 16], [-4], [16], [14]])
def test_an_address_on_either_side_of_a_storage_is_outside(places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(4)
    begin = storage.data_ptr()
    monkeypatch.setattr(bounds, "_storages", [(begin, begin + 16)])

    def check(places: list[int], executed: list[bool]) -> None:
        pointers = TensorHandle(np.array([begin + place for place in places], np.uint64), tl.pointer_type(tl.float32))
        bounds._check("load", pointers, TensorHandle(np.array(executed), tl.int1))

    check([0, 4, 12], [True] * 3)
    check(places, [0 <= place <= 12 for place in places])
    with pytest.raises(AssertionError, match=r"1 of .* lie outside the arguments"):
        check(places, [True] * len(places))
