"""Narrow floats in the repaired interpreter, against torch. Run with TRITON_INTERPRET=1, see
test_interpreter_repair.py."""

from tests.support import interpreter

interpreter.repair()

import functools  # noqa: E402
import operator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
NARROW = [BF16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def convert(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a * b)
    tl.store(out + 2 * N + i, a - b)
    tl.store(out + 3 * N + i, tl.where(a < b, a, b))
    tl.store(out + 4 * N + i, tl.maximum(a, b))
    tl.store(out + 5 * N + i, tl.abs(a))
    tl.store(out + 6 * N + i, -a)


@triton.jit
def product(x, y, z, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.trans(tl.load(y + at)), tl.load(z + at)))


@triton.jit
def reductions(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(out + i, tl.sum(a, 1))
    tl.store(out + N + i, tl.max(a, 1))
    tl.store(out + 2 * N + i, tl.sum(a, 0))
    best, place = tl.max(a, 1, return_indices=True)
    tl.store(out + 3 * N + i, best)
    tl.store(out + 4 * N + i, place.to(out.dtype.element_ty))
    tl.store(out + 5 * N + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def bits(x, rows, columns, all, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(rows + i, tl.reduce_or(a, 1))
    tl.store(columns + tl.arange(0, 8)[None, :], tl.xor_sum(a, 0, keep_dims=True))
    tl.store(all, tl.reduce_or(a, None))
    tl.store(all + 1, tl.xor_sum(a, None))


def special(dtype: torch.dtype) -> torch.Tensor:
    """Random values of every size, ties of the rounding, and what lies at the edges."""
    torch.manual_seed(0)
    spread = torch.randn(400) * torch.exp2(torch.randint(-12, 9, (400,)).float())
    representable = torch.randn(100).to(dtype).float()
    neighbour = torch.nextafter(representable.to(BF16), torch.tensor(torch.inf, dtype=BF16)).float()
    edges = torch.tensor(
        [0.0, -0.0, 1.0, 447.0, 449.0, 464.0, 1e9, -1e9, 57344.0, 6.1e-5, 2.0**-9, 2.0**-10, torch.nan]
    )
    x = torch.cat([spread, (representable + neighbour) / 2, edges])
    return torch.cat([x, torch.zeros(1024 - len(x))])


@pytest.mark.parametrize("dtype", NARROW)
def test_float32_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    x = special(dtype)
    y = torch.empty(1024, dtype=dtype)
    convert[(1,)](x, y, 1024)
    largest = torch.finfo(dtype).max
    expected = (x if dtype == BF16 else torch.where(x.isnan(), x, x.clamp(-largest, largest))).to(dtype)
    torch.testing.assert_close(y.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_is_exact(dtype: torch.dtype) -> None:
    x = special(dtype).nan_to_num().clamp(-400, 400).to(dtype)
    y = torch.empty(1024)
    convert[(1,)](x, y, 1024)
    assert torch.equal(y, x.float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_convert_by_value(dtype: torch.dtype) -> None:
    x = torch.arange(-32, 32, dtype=dtype)
    y, back = torch.empty(64, dtype=BF16), torch.empty(64, dtype=dtype)
    convert[(1,)](x, y, 64)
    convert[(1,)](y, back, 64)
    assert torch.equal(y.to(dtype), x)
    assert torch.equal(back, x)


def test_bfloat16_arithmetic_rounds_every_result() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(256).to(BF16), torch.randn(256).to(BF16)
    out = torch.empty(7, 256, dtype=BF16)
    arithmetic[(1,)](x, y, out, 256)
    expected = torch.stack([x + y, x * y, x - y, torch.minimum(x, y), torch.maximum(x, y), x.abs(), -x])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_products_accumulate_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, y = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    z = torch.randn(32, 32)
    expected = z.double() + x.double() @ y.double().T
    product[(1,)](x, y, z, 32)
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)


def test_reductions_and_scans_of_bfloat16() -> None:
    torch.manual_seed(3)
    x = torch.randn(32, 32).to(BF16)
    out = torch.empty(6, 32, dtype=BF16)
    reductions[(1,)](x, out, 32)
    wide = x.float()
    expected = [wide.sum(1), wide.amax(1), wide.sum(0), wide.amax(1), wide.argmax(1), wide[0].cumsum(0)]
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got.float(), want.to(BF16).float(), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reductions_of_bits(dtype: torch.dtype) -> None:
    """Bitwise reductions are those that `quick_interpreter` leaves to numpy."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (16, 8), dtype=dtype, generator=generator)
    x &= torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (16, 1), dtype=dtype, generator=generator) >> 3
    rows, columns, all = (torch.zeros(size, dtype=dtype) for size in (16, 8, 2))
    bits[(1,)](x, rows, columns, all, 16)
    lists = x.tolist()
    assert rows.tolist() == [functools.reduce(operator.or_, row) for row in lists]
    assert columns.tolist() == [functools.reduce(operator.xor, column) for column in zip(*lists, strict=True)]
    numbers = [number for row in lists for number in row]
    assert all.tolist() == [functools.reduce(operator.or_, numbers), functools.reduce(operator.xor, numbers)]
