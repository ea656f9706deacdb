"""The references' invariant ways: a token's bits do not depend on the call it is computed in, and are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels import linear as linear_module
from kernels.head_linear import head_linear
from kernels.linear import grouped_linear, linear
from kernels.linear import reference as linear_reference
from kernels.mla_decode import mla_decode
from kernels.moe import route
from kernels.ordered_sum import ordered_sum
from kernels.page import PAGE_TOKENS, pages_for
from kernels.routing_rule import RoutingRule
from kernels.sigmoid_mul import sigmoid_mul
from kernels.silu_mul import silu_mul

COUNTS = (1, 2, 3, 5, 16, 17, 64)
DTYPES = [torch.float32, torch.bfloat16]
FEATURES = [1, 5, 8, 24, 33, 192, 1000]


@contextmanager
def few_at_once() -> Iterator[None]:
    """There is no room for more than a few products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_reference, "PRODUCTS_AT_ONCE", 1000)
        yield


def same_in_every_call(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """`function` of rows of `x`: of every number of them, at every place, beside NaN and huge numbers, and a few at a
    time."""
    want = function(x)
    with few_at_once():
        assert torch.equal(function(x), want)
    for count in COUNTS:
        for start in {0, 1, len(x) - count}:
            part = x[start : start + count].clone()
            assert torch.equal(function(part), want[start : start + count])
    poisoned = x.clone()
    poisoned[1::2] = torch.nan
    poisoned[2::4] = 3e38
    assert torch.equal(function(poisoned)[::4], want[::4])


def close(got: Tensor, want: Tensor) -> None:
    """bfloat16: the output is rounded once to 8 bits; fp32: sums of at most a thousand terms."""
    bound = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound * 0.1 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURES)
def test_linear(features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(features)
    x, weight = torch.randn(70, features).to(dtype), torch.randn(41, features).to(dtype)

    def product(part: Tensor) -> Tensor:
        out = torch.full((len(part), 41), torch.nan, dtype=dtype)
        linear(part, weight, out, invariant=True)
        return out

    same_in_every_call(product, x)
    close(product(x), x.double() @ weight.double().T)


@pytest.mark.parametrize("features", [24, 192])
@pytest.mark.parametrize("transposed", [False, True])
def test_head_linear(features: int, transposed: bool) -> None:
    torch.manual_seed(features)
    x, weight = torch.randn(70, 3, features + 2)[..., 1:-1], torch.randn(3, features, 40)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)

    def product(part: Tensor) -> Tensor:
        out = torch.full((len(part), 3, 40), torch.nan)
        head_linear(part, weight, out, invariant=True)
        return out

    same_in_every_call(product, x)
    close(product(x), torch.einsum("thn,hnl->thl", x.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [8, 24, 96, 640, 1368])
def test_ranks_parts_of_a_sum_are_the_parts_of_one(features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(features)
    x, weight = torch.randn(70, features).to(dtype), torch.randn(41, features).to(dtype)

    def parts(part: Tensor, columns: slice = slice(None), groups: int = 8) -> Tensor:
        out = torch.full((len(part), groups, 41), torch.nan)
        grouped_linear(part[:, columns], weight[:, columns], out)
        return out

    same_in_every_call(parts, x)
    whole, alone = parts(x), torch.empty(70, 41, dtype=dtype)
    ordered_sum(whole.transpose(0, 1), alone)
    close(alone, x.double() @ weight.double().T)
    for ranks in (2, 4, 8):
        share = features // ranks
        sums = torch.empty(ranks, 70, 41)
        for rank in range(ranks):
            mine = parts(x, slice(rank * share, (rank + 1) * share), 8 // ranks)
            assert torch.equal(mine, whole[:, rank * 8 // ranks : (rank + 1) * 8 // ranks])
            ordered_sum(mine.transpose(0, 1), sums[rank])
        together = torch.empty_like(alone)
        ordered_sum(sums, together)
        assert torch.equal(together, alone)


@pytest.mark.parametrize(("parts", "total"), [([2.0**24, 1, 1, -(2.0**24)], 1), ([2.0**24, -(2.0**24), 1, 1], 2)])
def test_ordered_sum_is_a_tree_in_order(parts: list[float], total: float) -> None:
    """One after the other the first sum is 0; first with third and second with fourth the second sum is 1."""
    out = torch.empty(1, 1)
    ordered_sum(torch.tensor(parts).view(4, 1, 1), out)
    assert out.item() == total
    with pytest.raises(ValueError, match="power of two"):
        ordered_sum(torch.zeros(3, 1, 1), out)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="12 features do not make 8 equal groups"):
        grouped_linear(torch.zeros(1, 12), torch.zeros(2, 12), torch.zeros(1, 8, 2))


@pytest.mark.parametrize("features", [5, 16, 200])
def test_silu_mul(features: int) -> None:
    torch.manual_seed(0)

    def gate(part: Tensor) -> Tensor:
        out = torch.full((len(part), features), torch.nan)
        silu_mul(part, out)
        return out

    same_in_every_call(gate, torch.randn(70, 2 * features))


@pytest.mark.parametrize("features", [5, 16, 200])
def test_sigmoid_mul(features: int) -> None:
    torch.manual_seed(0)

    def gated(part: Tensor) -> Tensor:
        out = torch.full((len(part), 1, features), torch.nan)
        sigmoid_mul(part[:, None, :features], part[:, None, features:], out)
        return out

    same_in_every_call(gated, torch.randn(70, 2 * features))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [6, 64])
def test_route(experts: int, scoring: str) -> None:
    torch.manual_seed(0)

    def weights(part: Tensor) -> Tensor:
        ids, weight = torch.empty(len(part), 3, dtype=torch.int64), torch.empty(len(part), 3)
        route(part, None, ids, weight, RoutingRule(scoring, 1, 1, True, 1.5))  # type: ignore[arg-type]
        return torch.cat([ids.float(), weight], 1)

    same_in_every_call(weights, torch.randn(70, experts))


def test_attention_in_any_company_at_any_width() -> None:
    """Every token of a sequence, in rows of any width, beside longer rows and rows of NaN, with any number of heads."""
    heads, latent, rope, entries, first = 5, 24, 8, 200, 1
    torch.manual_seed(0)
    pages = pages_for(entries)
    cache = torch.full((2 * pages + 1, PAGE_TOKENS, latent + rope), torch.nan)
    cache[1 : pages + 1].view(-1, latent + rope)[first:entries] = torch.randn(entries - first, latent + rope)
    table = torch.arange(1, 2 * pages + 1, dtype=torch.int32).view(2, pages)  # the second row's pages are all NaN
    q = torch.randn(entries, heads, latent + rope)

    def attend(end: int, width: int, others: int = 0, heads: slice = slice(None)) -> Tensor:
        """The last `width` of the first `end` tokens."""
        rows_q = torch.full((1 + others, width, *q[0, heads].shape), torch.nan)
        rows_q[0] = q[end - width : end, heads]
        length = torch.tensor([end, *[entries] * others], dtype=torch.int32)
        out = torch.full((*rows_q.shape[:3], latent + 1), torch.nan)
        mla_decode(
            rows_q,
            cache,
            table[[0, *[1] * others]],
            length,
            out[..., :-1],
            out[..., -1],
            scale=0.3,
            first=first,
            invariant=True,
        )
        return out[0]

    alone = torch.cat([attend(end, 1) for end in range(1, entries + 1)])
    for width in (2, 3, 8):
        for end in (width, 63, 64, 65, 66, 130, entries):
            assert torch.equal(attend(end, width, others=end % 2), alone[end - width : end])
            assert torch.equal(attend(end, width, heads=slice(2, 4)), alone[end - width : end, 2:4])
            with few_at_once():  # four pages, two or one, by width
                assert torch.equal(attend(end, width), alone[end - width : end])


class _OnGpu(Tensor):
    """A tensor of the CPU that says that it is on a GPU: nothing is launched for it here."""

    is_cuda = True


@pytest.mark.parametrize("hopper", [False, True])
def test_narrow_tiles_are_for_hopper(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    """Nobody has compared their bits with those of wide ones on another GPU: a few tokens and many would disagree."""
    launched: list[bool] = []
    monkeypatch.setattr(linear_module, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(linear_module.launch, "tiled", lambda *tensors, few, **rest: launched.append(few))
    x, weight = torch.zeros(2, 64).as_subclass(_OnGpu), torch.zeros(32, 64)
    linear_module.linear(x, weight, torch.empty(2, 32), invariant=True)
    assert launched == [hopper]
