"""Checks of the few-token kernels against fp64 formulas, on any device: interpreted on a CPU, for real on a GPU.

Every case calls the launcher itself, poisons what must not matter with NaN, and states its bound: bf16 inputs are exact
in fp64, sums are fp32, so what is left is the one rounding of the output (2^-8 relative) and, for activations that are
rounded on the way, theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.few_experts import ChosenExperts
from kernels.few_experts import launch as experts_launch
from kernels.few_experts import reference as experts_reference
from kernels.fp16_scaled import Fp16Scaled, launch_to_fp16_scaled
from kernels.head_linear import launch as head_launch
from kernels.linear import fp8_even_launch, fp8_launch, launch, takes_fp16_scaled
from kernels.matrix import BlockScaled, Matrix
from kernels.mla_decode import launch as attention_launch
from kernels.mla_decode.schedule import DecodeShape, Workspace, portable_tiling
from kernels.pending_norm import PIECE, PendingNorm, launch_enter
from kernels.routing_rule import RoutingRule
from kernels.runtime.hopper import is_hopper
from tests.support.fp8_entries import agree, encoded

BF16 = torch.bfloat16
EPS = 1e-5


@triton.jit
def _copy(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at))


def copy_contiguous(x: Tensor, out: Tensor) -> None:
    """A kernel that takes `x` for contiguous, whether it is or not."""
    _copy[(1,)](x, out, SIZE=out.numel())


Blocks = tuple[int, int] | None
"""Rows and features of weights in FP8 that share a scale; None: weights in bf16."""


V4_PRODUCTS = [
    *((1536, 4096), (32768, 1024), (16384, 1024), (512, 4096), (4096, 8192), (4096, 4096), (8192, 1024)),
    *((4096, 2048), (4096, 1024), (4096, 12288)),
]
"""Rows and features of matrices in FP8 of DeepSeek V4 Flash on one rank and on two: of attention, of its indexers, of
shared experts, and what DSpark's context is made of."""


@dataclass(frozen=True)
class Place:
    """Device of a case, and how it launches."""

    device: torch.device
    dependent: bool = False

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        """Random numbers; the same on every device."""
        return (torch.randn(*shape) * scale).to(self.device, dtype)

    def matrix(self, *shape: int, blocks: Blocks = None, scale: float = 1.0) -> tuple[Matrix, Tensor]:
        """Random weights in bf16, or in FP8 with a scale for each of such blocks; and what they are in fp64."""
        if blocks is None:
            plain = self.normal(*shape, scale=scale)
            return plain, plain.double()
        rows, features = blocks
        codes = torch.randn(shape) * 64
        codes[torch.rand(shape) < 0.1] *= 2**-13  # zero and subnormal numbers
        scales = torch.rand(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // features)).add(0.5) * scale / 64
        data = codes.to(torch.float8_e4m3fn).to(self.device)
        stored = BlockScaled(data, scales.to(self.device), rows, features)
        wide = stored.scales.double().repeat_interleave(rows, -2)[..., : shape[-2], :]
        return stored, data.double() * wide.repeat_interleave(features, -1)[..., : shape[-1]]

    def poison(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Memory nobody has written."""
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for a kernel's own use, poisoned."""
        if dtype.is_floating_point:
            return self.poison(*shape, dtype=dtype)
        return torch.full(shape, 2147480000, dtype=dtype, device=self.device)


def close(got: Tensor, want: Tensor, bound: float = 2**-8, share: float = 0.25) -> None:
    """Check that values are within `bound` of every value's size, plus `share` of it of the tensor's typical size (sums
    cancel)."""
    got, want = got.double(), want.double()
    typical = want.square().mean().sqrt()
    torch.testing.assert_close(got, want, rtol=bound, atol=float(bound * typical) * share)


def close_squares(got: PendingNorm, stream: Tensor, weight: Matrix) -> None:
    """The sums of squares of 16 features of `stream` each; of `fp8_even`, whose programs may end within such a piece,
    their sum."""
    square, want = got.square_TP, stream.double().square().unflatten(1, (-1, PIECE)).sum(-1)
    if fp8_even_launch.even(len(stream), weight):
        square, want = square.sum(1), want.sum(1)
    close(square, want, 1e-4)


def within(got: Tensor, want: Tensor, reach: Tensor) -> None:
    """Check that values are within one rounding to bf16 (2^-8) of every summand, whose sizes add up to `reach`, and a
    rounding in fp32."""
    worst = float(((got.double() - want).abs() - reach * 2**-8).max())
    assert worst <= 1e-5 * float(want.abs().max()), worst


def pending(place: Place, tokens: int, features: int, scale: float = 1.0) -> tuple[PendingNorm, Tensor]:
    """A pending norm, and the finished norm in fp64."""
    residual, norm = place.normal(tokens, features, dtype=torch.float32, scale=scale), place.normal(features)
    x = (residual * norm.float()).to(BF16)
    square = residual.square().unflatten(1, (-1, PIECE)).sum(-1)
    rms = (residual.double().square().mean(1, keepdim=True) + EPS).sqrt()
    return PendingNorm(x, square, EPS), x.double() / rms


def rows_of(place: Place, x: Tensor, weight: Matrix, tokens: int) -> Tensor | Fp16Scaled:
    """The rows of so many tokens as products with this matrix take them."""
    if not takes_fp16_scaled(tokens, weight):
        return x
    rows = Fp16Scaled.empty(x, place.empty)
    launch_to_fp16_scaled(x, rows.fp16_TF, rows.unit_T, dependent=place.dependent)
    return rows


def product(place: Place, x: Tensor, weight: Matrix, out: Tensor, **options: Any) -> None:
    """The launch of a product without a norm before it."""
    rows = rows_of(place, x, weight, x.shape[0])
    if isinstance(rows, Fp16Scaled):
        assert isinstance(weight, BlockScaled)
        fp8_launch.fp8_linear(rows, weight, out, **options, dependent=place.dependent)
    elif isinstance(weight, BlockScaled) and fp8_even_launch.even(len(rows), weight):
        into = [
            options.get("residual_TF"),
            options.get("norm"),
            next.square_TP if (next := options.get("next")) else None,
        ]
        fp8_even_launch.fp8_even(rows, weight, out, *into, dependent=place.dependent)
    elif isinstance(weight, BlockScaled) and fp8_launch.whole(len(rows), weight):
        fp8_launch.fp8_whole(rows, weight, out, **options, dependent=place.dependent)
    else:
        launch.stream_linear(rows, weight, out, **options, dependent=place.dependent)


def check_linear(place: Place, tokens: int, rows: int, features: int, blocks: Blocks = None) -> None:
    """Plain products, bf16 and fp32 out, from strided rows."""
    torch.manual_seed(tokens)
    x, (weight, wide) = place.normal(tokens, 2 * features)[:, :features], place.matrix(rows, features, blocks=blocks)
    for dtype in (BF16, torch.float32):
        out = place.poison(tokens, rows + 3, dtype=dtype)
        product(place, x, weight, out[:, :rows])
        close(out[:, :rows], x.double() @ wide.T, 2**-8 if dtype == BF16 else 1e-5)
        assert out[:, rows:].isnan().all()


def check_tiled(
    place: Place, tokens: int, rows: int, features: int, invariant: bool, dtype: torch.dtype = BF16
) -> None:
    """Products in tiles, one a head, weights transposed or not."""
    torch.manual_seed(tokens)
    x, weight = place.normal(tokens, 2, features, dtype=dtype), place.normal(2, rows, features, dtype=dtype)
    out = place.poison(tokens, 2, rows, dtype=dtype)
    want = torch.einsum("thn,hln->thl", x.double(), weight.double())
    for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        launch.tiled(x, w, out.fill_(torch.nan), invariant=invariant, dependent=place.dependent)
        close(out, want, 2**-8 if dtype == BF16 else 1e-5)


def check_narrow_tiles(place: Place, tokens: int, rows: int, features: int) -> None:
    """Tiles of invariant mode with fewer output features, bit for bit those of 64: on Hopper, which alone has them. The
    interpreter multiplies whole steps at once, in an order of its own: there they are as close to the exact sums."""
    torch.manual_seed(tokens)
    factor = place.normal(features, dtype=torch.float32).mul(3).exp2()
    x = (place.normal(tokens, 1, features, dtype=torch.float32) * factor).to(BF16)
    weight = place.normal(1, rows, features)
    results = []
    for few in (False, True):
        out = place.poison(tokens, 1, rows, dtype=torch.float32)
        launch.tiled(x, weight, out, invariant=True, few=few, dependent=place.dependent)
        results.append(out)
    want = torch.einsum("thn,hln->thl", x.double(), weight.double())
    for out in results:
        size = torch.einsum("thn,hln->thl", x.double().abs(), weight.double().abs())
        assert ((out.double() - want).abs() <= 1e-5 * size).all()
    if is_hopper(place.device):
        assert torch.equal(results[0], results[1])


def check_parts(place: Place, tokens: int, rows: int, features: int, parts: int) -> None:
    """Parts of the sums of a product, over neighbouring features."""
    torch.manual_seed(tokens)
    x, weight = place.normal(tokens, 2 * features)[:, :features], place.normal(rows, features)
    out = place.poison(tokens, parts, rows, dtype=torch.float32)
    x_groups, weight_groups = x.unflatten(1, (parts, -1)), weight.unflatten(1, (parts, -1)).transpose(0, 1)
    launch.tiled(x_groups, weight_groups, out, invariant=False, dependent=place.dependent)
    close(out, torch.einsum("tpn,pln->tpl", x_groups.double(), weight_groups.double()), 1e-5)


def check_heads(place: Place, tokens: int, heads: int, rows: int, features: int) -> None:
    """One product a head."""
    torch.manual_seed(tokens)
    x, weight = place.normal(tokens, heads, features), place.normal(heads, 2 * rows, features)[:, rows:]
    out = place.poison(tokens, heads, rows)
    launch.stream_heads(x, weight, out, dependent=place.dependent)
    close(out, torch.einsum("thn,hln->thl", x.double(), weight.double()))


def check_heads_in_blocks(place: Place, tokens: int, heads: int, rows: int, features: int, blocks: Blocks) -> None:
    """One product a head with FP8 weights, the rows of a head whole blocks."""
    torch.manual_seed(tokens)
    x, (weight, wide) = place.normal(tokens, heads, features), place.matrix(heads * rows, features, blocks=blocks)
    out = place.poison(tokens, heads, rows)
    launch.stream_heads(x, weight, out, dependent=place.dependent)
    close(out, torch.einsum("thn,hln->thl", x.double(), wide.view(heads, rows, features)))


def check_normed(
    place: Place, tokens: int, rows: int, features: int, next_features: int, blocks: Blocks = None
) -> None:
    """norm(x) times a matrix, with and without a norm of the first columns behind it, by the kernel that serves it."""
    torch.manual_seed(tokens)
    x, normed = pending(place, tokens, features, 30.0)
    (weight, wide), out = place.matrix(rows, features, blocks=blocks, scale=0.1), place.poison(tokens, rows)

    def multiply(**options: Any) -> None:
        if isinstance(weight, BlockScaled) and fp8_launch.whole(tokens, weight, normed=True):
            fp8_launch.fp8_whole(x, weight, out, **options, dependent=place.dependent)
        else:
            launch.stream_linear(x.x_TE, weight, out, pending=x, **options, dependent=place.dependent)

    multiply()
    want = normed @ wide.T
    close(out, want)
    norm, out = place.normal(next_features), place.poison(tokens, rows)
    after = PendingNorm(out[:, :next_features], place.poison(tokens, next_features // PIECE, dtype=torch.float32), EPS)
    multiply(norm=norm, next=after)
    close(out[:, :next_features], want[:, :next_features] * norm.double())
    close(out[:, next_features:], want[:, next_features:])
    scale = place.normal(tokens, dtype=torch.float32).abs() + 1
    multiply(norm=norm, next=after, scale_T=scale)
    close(out[:, :next_features], want[:, :next_features] * norm.double() * scale.double().unsqueeze(1))
    close(out[:, next_features:], want[:, next_features:])
    close(after.square_TP, want[:, :next_features].square().unflatten(1, (-1, PIECE)).sum(-1), 1e-4)


def check_to_norm(place: Place, tokens: int, rows: int, features: int, next_features: int, blocks: Blocks) -> None:
    """A product of tokens that no norm precedes, and the pending norm of its first columns."""
    torch.manual_seed(tokens)
    x, norm = place.normal(tokens, features), place.normal(next_features)
    (weight, wide), out = place.matrix(rows, features, blocks=blocks, scale=0.1), place.poison(tokens, rows)
    assert isinstance(weight, BlockScaled)
    after = PendingNorm(out[:, :next_features], place.poison(tokens, next_features // PIECE, dtype=torch.float32), EPS)
    fp8_launch.fp8_whole(x, weight, out, norm=norm, next=after, dependent=place.dependent)
    want = x.double() @ wide.T
    close(out[:, :next_features], want[:, :next_features] * norm.double())
    close(out[:, next_features:], want[:, next_features:])
    close(after.square_TP, want[:, :next_features].square().unflatten(1, (-1, PIECE)).sum(-1), 1e-4)


def check_residual(place: Place, tokens: int, rows: int, features: int, blocks: Blocks = None) -> None:
    """A product added to the residual, and the pending norm of the sum."""
    torch.manual_seed(tokens)
    x, norm = place.normal(tokens, features), place.normal(rows)
    weight, wide = place.matrix(rows, features, blocks=blocks, scale=0.1)
    residual = place.normal(tokens, rows, dtype=torch.float32)
    want = residual.double() + x.double() @ wide.T
    out = PendingNorm.empty(tokens, rows, EPS, BF16, place.empty)
    product(place, x, weight, out.x_TE, residual_TF=residual, norm=norm, next=out)
    close(residual, want, 1e-5, 1.0)
    close(out.x_TE, want * norm.double())
    close_squares(out, want, weight)


def check_gated(place: Place, tokens: int, intermediate: int, features: int, blocks: Blocks = None) -> None:
    """The gate of a feed-forward layer."""
    torch.manual_seed(tokens)
    x, normed = pending(place, tokens, features)
    weight, wide = place.matrix(2 * intermediate, features, blocks=blocks, scale=0.1)
    out = place.poison(tokens, intermediate)
    if isinstance(weight, BlockScaled) and fp8_launch.kept(tokens, weight):
        fp8_launch.fp8_gate_up(x, weight, out, dependent=place.dependent)
    else:
        launch.stream_gate_up(x, weight, out, dependent=place.dependent)
    gate, up = (normed @ wide.T).chunk(2, dim=1)
    close(out, F.silu(gate) * up)


def check_enter(place: Place, tokens: int, features: int) -> None:
    """Rows into the residual stream, gathered or added."""
    torch.manual_seed(tokens)
    table, norm = place.normal(7, features), place.normal(features)
    ids = torch.randint(0, 7, (tokens,)).to(place.device)
    residual = place.poison(tokens, features, dtype=torch.float32)
    out = PendingNorm.empty(tokens, features, EPS, BF16, place.empty)
    launch_enter(table, ids, residual, norm, out, dependent=place.dependent)
    assert torch.equal(residual, table[ids].float())
    close(out.x_TE, residual.double() * norm.double())
    close(out.square_TP, residual.double().square().unflatten(1, (-1, PIECE)).sum(-1), 1e-5)
    more, before = place.normal(tokens, features), residual.clone()
    launch_enter(more, None, residual, norm, out, add=True, dependent=place.dependent)
    assert torch.equal(residual, before + more.float())
    close(out.x_TE, residual.double() * norm.double())


def check_router(place: Place, tokens: int, experts: int, features: int, dtype: torch.dtype = torch.float32) -> None:
    """Router logits in fp32."""
    torch.manual_seed(tokens)
    x, normed = pending(place, tokens, features)
    weight, out = (
        place.normal(experts, features, dtype=dtype),
        place.poison(tokens, experts, dtype=torch.float32),
    )
    experts_launch.router(x, weight, out, dependent=place.dependent)
    close(out, normed @ weight.double().T, 1e-5)


Equal = Literal["none", "some", "all", "nearly"]
"""Scores of a token that are equal: also those of logits that differ by less than a rounding of the softmax."""
EQUAL: tuple[Equal, ...] = get_args(Equal)


def check_choose(
    place: Place,
    tokens: int,
    experts: int,
    chosen: int,
    routing: RoutingRule,
    dead: bool = False,
    rows: int | None = None,
    equal: Equal = "some",
) -> ChosenExperts:
    """The choice of experts, ties and padding included, equals the reference's."""
    torch.manual_seed(tokens)
    logit = torch.randn(tokens, experts)
    bias = torch.randn(experts) * 0.3 if routing.scoring == "sigmoid" else None
    if equal == "some":
        logit[:, 1] = logit[:, 0]
        logit[0] = logit[0].round()
    elif equal == "all":
        logit.fill_(0.25)
        if bias is not None:
            bias.fill_(0.5)
    elif equal == "nearly":  # 4 - 0.01 and 4 - (0.01 + 2^-30) are equal in fp32
        logit[:] = -8 + logit.argsort(1).argsort(1) / experts
        logit[:, experts // 2] = 4
        logit[:, 1:3] = torch.tensor([0.01, 0.01 + 2**-30])
    length = torch.randint(1, 9, (tokens if rows is None else rows,), dtype=torch.int32)
    if dead:
        length[::2] = 0
    want = ChosenExperts.empty(tokens, experts, chosen, Place(torch.device("cpu")).empty)
    experts_reference.choose(logit, bias, length, want, routing)
    got = ChosenExperts.empty(tokens, experts, chosen, place.empty)
    on_device = [None if x is None else x.to(place.device) for x in (logit, bias, length)]
    assert on_device[0] is not None
    assert on_device[2] is not None
    experts_launch.choose(on_device[0], on_device[1], on_device[2], got, routing, dependent=place.dependent)
    assert torch.equal(got.slot_S.cpu(), want.slot_S)
    assert torch.equal(got.place_TX.cpu(), want.place_TX)
    alive = (length > 0).repeat_interleave(tokens // len(length)).unsqueeze(1)
    torch.testing.assert_close(
        torch.where(alive, got.weight_TK.cpu(), 0), torch.where(alive, want.weight_TK, 0), rtol=1e-5, atol=1e-6
    )
    return got


def check_experts(
    place: Place,
    tokens: int,
    experts: int,
    chosen: int,
    hidden: int,
    intermediate: int,
    shared: int,
    residual: bool,
    blocks: Blocks = None,
) -> None:
    """Check both halves of the experts, with a residual and without."""
    routing = RoutingRule("softmax", 1, 1, True, 1.5)
    choice = check_choose(place, tokens, experts, chosen, routing, dead=tokens > 2)
    x, normed = pending(place, tokens, hidden)
    gate_up, wide_up = place.matrix(experts + shared, 2 * intermediate, hidden, blocks=blocks, scale=0.1)
    down, wide_down = place.matrix(experts + shared, hidden, intermediate, blocks=blocks, scale=0.1)
    want = torch.zeros(tokens, hidden, dtype=torch.float64, device=place.device)
    reach = torch.zeros_like(want)  # of the summands, whatever their signs
    if shared:  # as the one network they are: all gate rows, all up rows
        gate, up = (torch.cat([*rows]) for rows in wide_up[experts:].chunk(2, dim=1))
        act, wide = F.silu(normed @ gate.T) * (normed @ up.T), torch.cat([*wide_down[experts:]], 1).T
        want += act @ wide
        reach += act.abs() @ wide.abs()
    for token in range(tokens):
        for expert in range(experts):
            rank = int(choice.place_TX[token, expert])
            if rank >= 0:
                gate, up = (wide_up[expert] @ normed[token]).chunk(2)
                act = F.silu(gate) * up * float(choice.weight_TK[token, rank])
                want[token] += wide_down[expert] @ act
                reach[token] += wide_down[expert].abs() @ act.abs()
    choice.weight_TK[choice.place_TX.amax(1) < 0] = torch.nan
    act = place.poison(tokens * (chosen + shared), intermediate)
    experts_launch.gate_up(x, choice, gate_up, act, dependent=place.dependent)
    weights = (rows_of(place, act, down, tokens), choice, down)
    if residual:
        stream, norm = place.normal(tokens, hidden, dtype=torch.float32), place.normal(hidden)
        want += stream.double()
        out = PendingNorm.empty(tokens, hidden, EPS, BF16, place.empty)
        experts_launch.down(*weights, out.x_TE, stream, norm, out.square_TP, dependent=place.dependent)
        within(stream, want, reach)
        close(out.x_TE, stream.double() * norm.double())
        close_squares(out, stream, down)
    else:
        y = place.poison(tokens, hidden)
        experts_launch.down(*weights, y, dependent=place.dependent)
        within(y, want, reach + want.abs())


def check_companions(
    place: Place, tokens: int, experts: int, chosen: int, hidden: int, shared: int, blocks: Blocks = None
) -> None:
    """A token that is no number, and chooses by what is none, changes no bit of the others, and has experts that there
    are."""
    results = []
    for broken in (False, True):
        torch.manual_seed(tokens)
        logit = torch.randn(tokens, experts)
        length = torch.ones(tokens, dtype=torch.int32)
        x, _ = pending(place, tokens, hidden)
        if broken:
            for values in (logit, x.x_TE, x.square_TP):
                values[tokens // 2] = torch.nan
        choice = ChosenExperts.empty(tokens, experts, chosen, place.empty)
        routing = RoutingRule("softmax", 1, 1, False, 1.5)
        experts_launch.choose(
            logit.to(place.device), None, length.to(place.device), choice, routing, dependent=place.dependent
        )
        intermediate = 32 if blocks is None else blocks[1]
        gate_up, _ = place.matrix(experts + shared, 2 * intermediate, hidden, blocks=blocks, scale=0.1)
        down, _ = place.matrix(experts + shared, hidden, intermediate, blocks=blocks, scale=0.1)
        act, y = place.poison(tokens * (chosen + shared), intermediate), place.poison(tokens, hidden)
        experts_launch.gate_up(x, choice, gate_up, act, dependent=place.dependent)
        experts_launch.down(rows_of(place, act, down, tokens), choice, down, y, dependent=place.dependent)
        assert ((choice.place_TX >= 0).sum(1) == chosen).all()
        assert choice.place_TX.max() < chosen
        others = torch.arange(tokens, device=place.device) != tokens // 2
        results.append((choice.place_TX[others], y[others]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[1][1].isnan().any()


def _queries(place: Place, tokens: int, heads: int, features: int, gates: int) -> Tensor:
    """Queries of tokens that lie apart, and behind each head's so many features of its gate."""
    made = heads * (features + gates)
    return place.normal(tokens, made + 16)[:, :made].unflatten(1, (heads, -1))[..., :features]


def check_rope_absorb(
    place: Place, tokens: int, heads: int, nope: int, rope: int, latent: int, parts: int = 0, gates: int = 0
) -> None:
    """Absorbed and rotated queries, and cache entries; nothing else in the cache changes. With `parts`: of queries and
    latents that are so many parts of sums, side by side as `part_linear` leaves them. `gates`: features behind each
    head's query. FP8 entries are the plain ones, rounded."""
    torch.manual_seed(tokens)
    q = _queries(place, tokens, heads, nope + rope, gates)
    kv, norm = place.normal(tokens, latent + rope + 8)[:, : latent + rope], place.normal(latent)
    given_q, given_kv = q, kv
    if parts:
        both = place.normal(tokens, parts, heads * (nope + rope) + latent + rope, dtype=torch.float32)
        given_q, given_kv = both[..., : -latent - rope].unflatten(2, (heads, -1)), both[..., -latent - rope :]
        q, kv = (sum(x.unbind(1)[1:], x[:, 0]).to(BF16) for x in (given_q, given_kv))  # in the order of the parts
    weight = place.normal(heads, nope + 16, latent, scale=0.1)[:, :nope]
    angle = torch.randn(300, rope // 2)
    rotation = torch.stack([angle.cos(), angle.sin()], -1).flatten(1).to(place.device)
    position = torch.randint(0, 300, (tokens,)).to(place.device)
    slot = torch.randperm(4 * 64)[:tokens].to(place.device)
    cache, out = place.poison(4, 64, latent + rope), place.poison(tokens, heads, latent + rope)
    tables = (norm, rotation, position, slot, out, cache)
    head_launch.rope_absorb(given_q, given_kv, weight, *tables, EPS, dependent=place.dependent)

    def turned(x: Tensor) -> Tensor:
        pair = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        turn = torch.polar(torch.ones_like(angle).double(), angle.double()).to(place.device)[position]
        return torch.view_as_real(pair * (turn if x.dim() == 2 else turn.unsqueeze(1))).flatten(-2)

    close(out[..., :latent], torch.einsum("thn,hnl->thl", q[..., :nope].double(), weight.double()))
    close(out[..., latent:], turned(q[..., nope:]), 2**-7)
    entries = cache.view(-1, latent + rope)
    rms = (kv[:, :latent].double().square().mean(1, keepdim=True) + EPS).sqrt()
    close(entries[slot, :latent], kv[:, :latent].double() / rms * norm.double())
    close(entries[slot, latent:], turned(kv[:, latent:]), 2**-7)
    others = torch.ones(len(entries), dtype=torch.bool, device=place.device)
    others[slot] = False
    assert entries[others].isnan().all()
    coded = encoded(entries[slot].cpu(), latent)
    bytes = torch.full((4, 64, coded.shape[1]), 255, dtype=torch.uint8, device=place.device)
    again = place.poison(tokens, heads, latent + rope)
    tables = (norm, rotation, position, slot, again, bytes)
    head_launch.rope_absorb(given_q, given_kv, weight, *tables, EPS, dependent=place.dependent)
    torch.testing.assert_close(again, out)
    assert agree(bytes.view(256, -1)[slot], coded, latent, rope, BF16)
    assert bytes.view(256, -1)[others].eq(255).all()


def check_absorb(place: Place, tokens: int, heads: int, nope: int, rope: int, latent: int, gates: int = 0) -> None:
    """Absorbed queries, and behind them the rope as it was. `gates`: features behind each head's query."""
    torch.manual_seed(tokens)
    q = _queries(place, tokens, heads, nope + rope, gates)
    weight = place.normal(heads, nope + 16, latent, scale=0.1)[:, :nope]
    out = place.poison(tokens, heads, latent + rope)
    head_launch.absorb(q, weight, out, dependent=place.dependent)
    _compare_absorbed(out, q, weight)
    if rope & (rope - 1) == 0:  # invariant mode
        nope_THN, latent_THL = q[..., :nope], out.fill_(torch.nan)[..., :latent]
        how = {"invariant": True, "behind": rope, "dependent": place.dependent}
        launch.tiled(nope_THN, weight.transpose(1, 2), latent_THL, **how)
        _compare_absorbed(out, q, weight)


def _compare_absorbed(out: Tensor, q: Tensor, weight: Tensor) -> None:
    nope, latent = weight.shape[1:]
    close(out[..., :latent], torch.einsum("thn,hnl->thl", q[..., :nope].double(), weight.double()))
    assert torch.equal(out[..., latent:], q[..., nope:])


def check_merge_up(
    place: Place,
    lengths: list[int],
    width: int,
    heads: int,
    latent: int,
    rope: int,
    value: int,
    *,
    columns: int = 32,
    ctas: int | None = None,
) -> None:
    """Split attention, W_UV and the weighted sum equal attention, merge and W_UV."""
    torch.manual_seed(width)
    rows, pages = len(lengths), max(-(-max(lengths) // 64), 1)
    shape = DecodeShape(rows, width, heads, latent, rope, pages)
    tiling = portable_tiling(shape, 132 if place.device.type == "cuda" else 3)
    if ctas is not None:
        tiling = replace(tiling, ctas=ctas)
    size = Workspace.bytes(shape, tiling, BF16)
    buffer = torch.full((size,), 255, dtype=torch.uint8, device=place.device)  # NaN in every float
    workspace = Workspace.over(buffer, shape, tiling, BF16)
    q, cache = place.normal(rows, width, heads, latent + rope), place.normal(rows * pages + 1, 64, latent + rope)
    table = (torch.randperm(rows * pages).view(rows, pages).int() + 1).to(place.device)
    length = torch.tensor(lengths, dtype=torch.int32, device=place.device)
    attended, lse = place.poison(rows, width, heads, latent), place.poison(rows, width, heads, dtype=torch.float32)
    weight = place.normal(heads, 2 * value, latent, scale=0.1)[:, value:]
    out = place.poison(rows * width, heads, value)
    scale = (latent + rope) ** -0.5
    attention_launch.schedule(length, table, workspace)
    attention_launch.attend(q, cache, table, length, attended, lse, workspace, scale=scale)
    head_launch.merge_up(attended, workspace, weight, out, columns=columns, dependent=place.dependent)
    attention_launch.merge(attended, lse, workspace)
    want = torch.einsum("rwhl,hvl->rwhv", attended.double(), weight.double()).flatten(0, 1)
    # Merged attention is rounded to bf16 before the product, pieces are not.
    close(out, want, 2**-6, 1.0)
