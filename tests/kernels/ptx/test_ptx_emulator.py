"""The emulator computes what numpy, torch and Python compute."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ptx_kernels import boxes, collatz, of_two, products, row_figures
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.ptx import Fault, core, emulated
from tests.support.ptx.arithmetic import logic_of_three

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, params=[True, False], ids=["in C", "one by one"])
def executed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute instructions in both ways: each computes what it should."""
    monkeypatch.setattr(core, "USED", request.param)


PTX = """
.visible .entry of_two(.param .u64 of_two_param_0, .param .u64 of_two_param_1, .param .u64 of_two_param_2)
.reqntid 32
{{
    ld.param.b64 %rd1, [of_two_param_0];
    ld.param.b64 %rd2, [of_two_param_1];
    ld.param.b64 %rd3, [of_two_param_2];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd1, %r1, 4, %rd1;
    mad.wide.u32 %rd2, %r1, 4, %rd2;
    mad.wide.u32 %rd3, %r1, 4, %rd3;
    ld.global.b32 %r2, [%rd1];
    ld.global.b32 %r3, [%rd2+0];
    {body}
    st.global.b32 [%rd3], %r4;
    ret;
}}
"""
RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 1 << 32, (2, 32), dtype=np.uint64).astype(np.uint32)
WORDS[:, :4] = [[0, 1, 1 << 31, (1 << 32) - 1], [1, 0x80000000, 31, 0xFFFFFFFF]]
FLOATS = RANDOM.normal(size=(2, 32)).astype(np.float32)
FLOATS[:, :3] = [[np.nan, 3.0, -0.0], [1.0, np.nan, 5.0]]


def ran(body: str, a: Any, b: Any) -> Any:
    """Bits of %r4 that lanes with %r2 of `a` and %r3 of `b` compute."""
    x, y, out = (torch.from_numpy(np.ascontiguousarray(v).view(np.int32).copy()) for v in (a, b, np.zeros_like(a)))
    with emulated(edit=lambda _: PTX.format(body=body)):
        of_two[(1,)](x, y, out, num_warps=1)
    return out.numpy().view(np.uint32)


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add.s32 %r4, %r2, %r3;": lambda a, b: a + b,
    "sub.s32 %r4, %r2, %r3;": lambda a, b: a - b,
    "mul.lo.s32 %r4, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.u32 %r4, %r2, %r3;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %r4, %r2, %r3;": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32 %r4, %r2, %r3, 7;": lambda a, b: a * b + 7,
    "min.s32 %r4, %r2, %r3;": lambda a, b: min(signed(a), signed(b)),
    "max.relu.s32 %r4, %r2, %r3;": lambda a, b: max(signed(a), signed(b), 0),
    "div.s32 %r4, %r2, 7;": lambda a, _: math.trunc(signed(a) / 7),
    "rem.s32 %r4, %r2, 7;": lambda a, _: int(math.fmod(signed(a), 7)),
    "div.u32 %r4, %r2, 10;": lambda a, _: a // 10,
    "and.b32 %r5, %r3, 63; shl.b32 %r4, %r2, %r5;": lambda a, b: a << (b & 63),
    "and.b32 %r5, %r3, 63; shr.u32 %r4, %r2, %r5;": lambda a, b: a >> (b & 63),
    "and.b32 %r5, %r3, 63; shr.s32 %r4, %r2, %r5;": lambda a, b: signed(a) >> (b & 63),
    "shf.l.wrap.b32 %r4, %r2, %r3, 9;": lambda a, b: (b << 32 | a) << 9 >> 32,
    "bfe.u32 %r4, %r2, 5, 9;": lambda a, _: a >> 5 & 511,
    "bfe.s32 %r4, %r2, 20, 12;": lambda a, _: signed(a) >> 20,
    "prmt.b32 %r4, %r2, %r3, 0x7531;": lambda a, b: sum(
        ((b << 32 | a) >> 8 * j & 255) << 8 * i for i, j in enumerate((1, 3, 5, 7))
    ),
    "lop3.b32 %r4, %r2, %r3, 255, 0xE8;": lambda a, b: a & b | a & 255 | b & 255,
    "popc.b32 %r4, %r2;": lambda a, _: a.bit_count(),
    "clz.b32 %r4, %r2;": lambda a, _: 32 - a.bit_length(),
    "not.b32 %r4, %r2;": lambda a, _: ~a,
    "setp.lt.s32 %p1, %r2, %r3; selp.b32 %r4, 5, 9, %p1;": lambda a, b: 5 if signed(a) < signed(b) else 9,
    "setp.lt.u32 %p1, %r2, %r3; @!%p1 mov.b32 %r4, 1; @%p1 mov.b32 %r4, 2;": lambda a, b: 2 if a < b else 1,
    "setp.ge.s32 %p1, %r2, %r3; selp.b32 %r4, 5, 9, %p1;": lambda a, b: 5 if signed(a) >= signed(b) else 9,
    "mov.b32 %r4, 7; setp.lt.u32 %p1, %r2, %r3; @!%p1 mov.b32 %r4, 1;": lambda a, b: 7 if a < b else 1,
    "setp.lt.u32 %p1, %r2, %r3; setp.gt.or.u32 %p2, %r2, 1, !%p1; selp.b32 %r4, 5, 9, %p2;": (
        lambda a, b: 5 if a > 1 or a >= b else 9
    ),
    "shr.s32 %r4, %r2, 7;": lambda a, _: signed(a) >> 7,
    "min.s32 %r4, %r2, %r3; mov.b32 %r2, 5; max.s32 %r4, %r4, %r2;": lambda a, b: max(min(signed(a), signed(b)), 5),
    "cvt.u16.u32 %rs1, %r2; cvt.u32.u16 %r4, %rs1;": lambda a, _: a & 0xFFFF,
    "cvt.s8.s32 %rs1, %r2; cvt.s32.s8 %r4, %rs1;": lambda a, _: (a & 255) - (a << 1 & 256),
    "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r4, {%rs2, %rs1};": lambda a, _: a >> 16 | a << 16,
    "mul.wide.s32 %rd4, %r2, %r3; cvt.u32.u64 %r5, %rd4; shr.u64 %rd5, %rd4, 32; cvt.u32.u64 %r4, %rd5;": (
        lambda a, b: signed(a) * signed(b) >> 32
    ),
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body: str) -> None:
    want = [INTEGERS[body](int(a), int(b)) & 0xFFFFFFFF for a, b in WORDS.T]
    assert ran(body, *WORDS).tolist() == want


def test_lanes_that_branch_apart_meet_again() -> None:
    loop = "{ .reg .pred p; mov.b32 %r4, 0; again: add.s32 %r4, %r4, 3; setp.lt.u32 p, %r4, %r1; @p bra again; }"
    both = loop + " vote.sync.ballot.b32 %r5, 1, -1; add.s32 %r4, %r4, %r5;"
    assert ran(both, *WORDS).tolist() == [(max(3, -(-i // 3) * 3) - 1) & 0xFFFFFFFF for i in range(32)]


def test_lanes_exchange() -> None:
    lane = np.arange(32)
    assert (ran("shfl.sync.bfly.b32 %r4, %r2, 5, 31, -1;", *WORDS) == WORDS[0][lane ^ 5]).all()
    assert (ran("shfl.sync.idx.b32 %r4, %r2, %r1, 31, -1;", *WORDS) == WORDS[0]).all()
    assert (ran("shfl.sync.up.b32 %r4, %r2, 3, 0, -1;", *WORDS) == WORDS[0][np.where(lane < 3, lane, lane - 3)]).all()
    assert (ran("redux.sync.add.s32 %r4, %r2, -1;", *WORDS) == WORDS[0].sum(dtype=np.uint32)).all()
    assert (ran("redux.sync.max.u32 %r4, %r2, -1;", *WORDS) == WORDS[0].max()).all()


def fused(a: Any, b: Any) -> Any:
    return (a.astype(np.float64) * b + a).astype(np.float32)


def ordered(a: Any, b: Any) -> Any:
    return (a != b) & ~np.isnan(a) & ~np.isnan(b)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("add.f32 %r4, %r2, %r3;", np.add),
        ("div.full.f32 %r4, %r2, %r3;", np.divide),
        ("fma.rn.f32 %r4, %r2, %r3, %r2;", fused),
        ("max.f32 %r4, %r2, %r3;", np.fmax),
        ("min.NaN.f32 %r4, %r2, %r3;", np.minimum),
        ("neg.f32 %r4, %r2;", lambda a, _: -a),
        ("setp.ne.f32 %p1, %r2, %r3; selp.f32 %r4, %r2, 0f40400000, %p1;", lambda a, b: np.where(ordered(a, b), a, 3)),
        ("setp.neu.f32 %p1, %r2, %r3; selp.f32 %r4, %r3, 0f40400000, %p1;", lambda a, b: np.where(a != b, b, 3)),
        ("ex2.approx.ftz.f32 %r4, %r2;", lambda a, _: np.exp2(a.astype(np.float64))),
        ("mul.f32 %r4, %r2, 0f40400000;", lambda a, _: 3 * a),
        ("setp.neu.f32 %p1, %r2, %r3; selp.f32 %r4, %r2, %r3, %p1;", lambda a, b: a),
        ("setp.gt.f32 %p1, %r2, %r3; selp.f32 %r4, %r2, %r3, %p1;", lambda a, b: np.where(a > b, a, b)),
    ],
)
def test_floats(body: str, want: Callable[[Any, Any], Any]) -> None:
    np.testing.assert_array_equal(ran(body, *FLOATS).view(np.float32), want(*FLOATS).astype(np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_narrow_floats(name: str, dtype: torch.dtype) -> None:
    a, b = torch.from_numpy(FLOATS).to(dtype)
    want = torch.stack([b, a], 1)  # the first operand is the upper half
    got = torch.from_numpy(ran(f"cvt.rn.{name}x2.f32 %r4, %r2, %r3;", *FLOATS).view(np.int16)).view(dtype).view(32, 2)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    back = ran(f"cvt.rn.{name}.f32 %rs1, %r2; cvt.f32.{name} %r4, %rs1;", *FLOATS).view(np.float32)
    np.testing.assert_array_equal(back, a.float().numpy())


@pytest.mark.parametrize(("name", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("add.{} %r4, %r2, %r3;", lambda a, b: a + b),
        ("sub.{} %r4, %r2, %r3;", lambda a, b: a - b),
        ("mul.{} %r4, %r2, %r3;", lambda a, b: a * b),
        ("fma.rn.{} %r4, %r2, %r3, %r2;", lambda a, b: (a.double() * b.double() + a.double()).float()),
    ],
)
def test_pairs_of_narrow_floats(
    body: str, want: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], name: str, dtype: torch.dtype
) -> None:
    a, b = (torch.from_numpy(np.stack([x, 2 * x[::-1]], 1)).to(dtype) for x in FLOATS)
    words = [x.view(torch.int32).view(-1).numpy() for x in (a, b)]
    got = torch.from_numpy(ran(body.format(name), *words).view(np.int16)).view(dtype).view(32, 2)
    torch.testing.assert_close(got, want(a.float(), b.float()).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "want"), [("add", np.add), ("sub", np.subtract)])
def test_pairs_of_short_integers(name: str, want: Callable[[Any, Any], Any]) -> None:
    """They wrap, each for itself."""
    got = ran(f"{name}.s16x2 %r4, %r2, %r3;", *WORDS)
    np.testing.assert_array_equal(got.view(np.uint16), want(*(np.array(x).view(np.uint16) for x in WORDS)))


def test_every_logic_of_three() -> None:
    """Each of the eight combinations of bits gives the bit that the table has there."""
    bits = {"a": 0xF0, "b": 0xCC, "c": 0xAA}
    assert all(eval(logic_of_three(table), bits) & 0xFF == table for table in range(256))
    assert (ran("lop3.b32 %r4, %r2, %r3, 255, 0x00;", *WORDS) == 0).all()
    assert (ran("lop3.b32 %r4, %r2, %r3, 255, 0x96;", *WORDS) == WORDS[0] ^ WORDS[1] ^ 255).all()


@pytest.mark.parametrize("condition", ["setp.lt.u32 %p1, %r2, %r3;", "mov.pred %p1, 1;", "setp.eq.u32 %p1, 1, 2;"])
def test_loads_and_stores_of_some_lanes(condition: str) -> None:
    """Lanes are some, all and none; of two words, the first ones of every two lanes, of which an even lane loads its
    own."""
    chosen = {"s": WORDS[0] < WORDS[1], "m": np.ones(32, bool)}[condition[0]] & (".eq" not in condition)
    two = "mov.b32 %r4, 7; and.b64 %rd4, %rd2, -8;"
    found = ran(f"{condition} {two} @%p1 ld.global.v2.b32 {{%r5, %r4}}, [%rd4];", *WORDS)
    assert (found == np.where(chosen, WORDS[1].reshape(-1, 2)[:, 1].repeat(2), 7)).all()
    found = ran(f"{condition} mov.b32 %r4, 7; @!%p1 ld.global.b16 %r4, [%rd1+2];", *WORDS)
    assert (found == np.where(chosen, 7, WORDS[0] >> 16)).all()
    again = "mov.b32 %r5, 3; @%p1 st.global.b32 [%rd2], %r5; ld.global.b32 %r4, [%rd2];"
    assert (ran(f"{condition} {again}", *WORDS) == np.where(chosen, 3, WORDS[1])).all()


def test_memory_is_not_there_until_it_is_written() -> None:
    assert np.isnan(ran("mov.b32 %r4, %r99;", *WORDS).view(np.float32)).all()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("ld.global.b32 %r4, [%rd1+4];", "outside the arguments; the nearest is a, of 128 bytes, at byte 128"),
        ("st.global.b32 [%rd1+-4], %r2;", "nearest is a.*at byte -4"),
        ("ld.global.b32 %r4, [%rd1+2];", "no multiple of 4"),
        ("@%p9 bar.sync 0; setp.lt.u32 %p1, %r1, 7; @%p1 bar.sync 0;", "some lanes do not come"),
        ("ld.global.b32 %r4, [%rd1+-4];", "outside the arguments"),
        ("mov.b32 %r5, 65536; ld.shared.b32 %r4, [%r5];", "shared memory at byte"),
        ("mov.b64 %rd4, -16; ld.shared.v2.b64 {%rd5, %rd6}, [%rd4];", "shared memory at byte -16"),
        ("mov.b32 %r4, nowhere;", "nowhere is unknown"),
    ],
)
def test_faults_of_single_instructions(body: str, says: str) -> None:
    with pytest.raises(Fault, match=says):
        ran(body, *WORDS)


@pytest.mark.parametrize("instruction", ["brev.b32 %r4, %r2;", "add.sat.s32 %r4, %r2, %r3;"])
def test_unknown_instructions_are_named(instruction: str) -> None:
    with pytest.raises(NotImplementedError, match=instruction.rstrip(";")):
        ran(f"@%p1 bra $skip; {instruction} $skip:", *WORDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "turned"), [(16, 16, 64, False), (16, 32, 16, True), (64, 64, 64, False), (128, 16, 32, True)]
)
def test_products(m: int, n: int, k: int, turned: bool, dtype: torch.dtype) -> None:
    """mma.sync below 64 rows, wgmma above."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k + 8), (k, n)))
    out = torch.full((m, n), torch.nan)
    with emulated(seed=n):
        products[(1,)](a, b.T.contiguous() if turned else b, out, m, n, k, k + 8, turned)
    torch.testing.assert_close(out.double(), a[:, :k].double() @ b.double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 16, 32), (64, 128, 128), (128, 32, 64)])
def test_products_of_integers_are_exact(m: int, n: int, k: int) -> None:
    """wgmma of the numbers that 8 bits hold, each beside the smallest and the largest."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((m, k + 16), (n, k)))
    a[:3], b[:3] = torch.tensor([[-128], [127], [1]]), torch.tensor([[127], [-128], [-1]])
    out = torch.full((m, n), -1, dtype=torch.int32)
    with emulated(seed=n):
        products[(1,)](a, b, out, m, n, k, k + 16, True)
    assert torch.equal(out.long(), a[:, :k].long() @ b.long().T)


def test_reductions_scans_and_atomics() -> None:
    x = torch.randn(3, 301, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(3, 6)
    with emulated():
        row_figures[(3,)](x, out, 301, SIZE=512)
    want = torch.stack([x.sum(1), x.amax(1), x.argmax(1).float(), x[:, :-1].sum(1), (x > 0).sum(1).float()], 1)
    torch.testing.assert_close(out[:, :5], want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out[0, 5], x.sum(), atol=1e-4, rtol=1e-5)


def test_loops_whose_length_is_data() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    with emulated() as launches:
        collatz[lambda _: (4,)](torch.tensor([1, 7, 27, 6], dtype=torch.int32), out, 1)
    assert (out.tolist(), launches) == ([0, 16, 111, 8], ["collatz"])


@pytest.mark.parametrize(("row", "column"), [(0, 0), (-3, 40), (17, 8)])
@pytest.mark.parametrize("columns", [16, 64])
def test_boxes_are_zero_outside_their_tensor(row: int, column: int, columns: int) -> None:
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.full((8, columns), torch.nan, dtype=torch.bfloat16)
    with emulated():
        boxes[(1,)](TensorDescriptor.from_tensor(x, [8, columns]), out, 8, columns, row, column)
    around = torch.zeros(60, 160).bfloat16()
    around[20:40, 48:96] = x
    assert torch.equal(out, around[20 + row : 28 + row, 48 + column : 48 + column + columns])
