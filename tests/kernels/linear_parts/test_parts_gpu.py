"""Products in parts on a GPU: eager, captured, and replayed on other values."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from parts_case import Product

from kernels.linear.parts import Cut
from kernels.runtime.hopper import is_hopper, multiprocessors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and is_hopper(torch.device("cuda"))), reason="needs Hopper"),
]

SIZES = [(3648, 2048), (2048, 2048), (2560, 2560), (1000, 1304), (72, 64)]


def case(tokens: int, sizes: tuple[int, int], seed: int = 0) -> Product:
    cut = Cut.of(*sizes, multiprocessors(torch.device("cuda")))
    assert cut is not None
    return Product(tokens, *sizes, cut, "cuda", seed)


@pytest.mark.parametrize("tokens", [17, 33, 48, 64])
@pytest.mark.parametrize("sizes", SIZES)
def test_eager(tokens: int, sizes: tuple[int, int]) -> None:
    own = case(tokens, sizes)
    own.run()
    own.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_replayed_on_other_values(sizes: tuple[int, int], dependent: bool) -> None:
    own, other = case(33, sizes), case(33, sizes, seed=1)
    graph = capture(lambda: own.run(dependent))

    def refill() -> None:
        own.x.copy_(other.x)
        own.weight.copy_(other.weight)
        own.out.fill_(torch.nan)

    check_replays(graph, refill, [own.out[:-1, : own.cut.parts, :-2]])
    own.check()


@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_does_not_depend_on_the_others(sizes: tuple[int, int]) -> None:
    whole, some = case(64, sizes), case(19, sizes)
    some.x.copy_(whole.x[:19])
    some.weight.copy_(whole.weight)
    whole.run()
    some.run()
    assert torch.equal(some.out[:-1, : some.cut.parts, :-2], whole.out[:19, : some.cut.parts, :-2])
