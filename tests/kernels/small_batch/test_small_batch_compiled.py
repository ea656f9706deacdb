"""The few-token kernels compiled for Hopper as the launchers launch them: no spills, room for two programs where the
weights fit, dependent launch in every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import small_batch_cases as cases
import torch
from torch import Tensor

from kernels.few_experts import ChosenExperts
from kernels.few_experts import fp8_launch as fp8_experts_launch
from kernels.few_experts import launch as experts_launch
from kernels.fp16_scaled import Fp16Scaled, launch_to_fp16_scaled
from kernels.head_linear import launch as head_launch
from kernels.latent_entry import fp8_entry
from kernels.linear import fp8_even_launch, fp8_launch, launch
from kernels.linear.records import Units
from kernels.matrix import BlockScaled
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling, portable_tiling
from kernels.pending_norm import PendingNorm, launch_enter
from kernels.routing_rule import RoutingRule
from tests.support.hopper import compile_only, instructions, resources

pytestmark = pytest.mark.gate

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Model:
    """The sizes of one rank."""

    hidden: int
    heads: int
    q_latent: int | None
    latent: int
    rope: int
    nope: int
    value: int
    dense: int
    expert: int
    shared: int
    experts: int
    chosen: int
    routing: RoutingRule
    vocab: int


V2_LITE_ROUTING = RoutingRule("softmax", 1, 1, False, 1.0)
V2_ROUTING, V3_ROUTING = RoutingRule("softmax", 8, 3, False, 16.0), RoutingRule("sigmoid", 8, 4, True, 2.5)
K2_ROUTING = RoutingRule("sigmoid", 1, 1, True, 2.827)
SMALL4_ROUTING = RoutingRule("softmax", 1, 1, True, 1.0)
MODELS = {
    "v2-lite": Model(2048, 16, None, 512, 64, 128, 128, 10944, 1408, 2, 64, 6, V2_LITE_ROUTING, 102400),
    "v2 on 8 ranks": Model(5120, 16, 1536, 512, 64, 128, 128, 1536, 192, 2, 160, 6, V2_ROUTING, 12800),
    "v3 on 4 ranks": Model(7168, 32, 1536, 512, 64, 128, 128, 4608, 512, 1, 256, 8, V3_ROUTING, 32320),
    "v3 on 8 ranks": Model(7168, 16, 1536, 512, 64, 128, 128, 2304, 256, 1, 256, 8, V3_ROUTING, 16160),
    "k2 on 8 ranks": Model(7168, 8, 1536, 512, 64, 128, 128, 2304, 256, 1, 384, 8, K2_ROUTING, 20480),
    "small 4": Model(4096, 32, 1024, 256, 64, 64, 128, 12288, 2048, 1, 128, 4, SMALL4_ROUTING, 131072),
    "demo": Model(192, 8, 96, 64, 16, 32, 32, 640, 128, 1, 8, 2, K2_ROUTING, 4096),
}  # fmt: skip
V3 = Model(7168, 128, 1536, 512, 64, 128, 128, 18432, 2048, 1, 256, 8, V3_ROUTING, 129280)
CASES = [
    *(pytest.param("v2-lite", tokens, marks=pytest.mark.soak if tokens in (2, 4) else ()) for tokens in (1, 2, 4, 8)),
    ("v3 on 8 ranks", 8),
    *((name, 16) for name in MODELS),
]
"""Most kernels are the same for 1 to 8 tokens, and all for 9 to 16, which need the most."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never touched, so never more than addresses


def gate(run: Callable[[], None], registers: int = 255) -> None:
    with compile_only() as compiled:
        run()
    assert compiled
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers)
        assert (found.waits, found.releases) == (True, True), f"{found.name} lacks dependent launch"
        # What is copied was written by kernels before, of which L1 may know nothing.
        assert "cp.async.ca" not in kernel.asm["ptx"], f"{found.name} copies through L1"


def caches(m: Model, dtype: torch.dtype) -> list[Tensor]:
    """Make caches of plain entries, and at two sizes, which stand for all, of FP8 ones."""
    found = [empty(3, 64, m.latent + m.rope, dtype=dtype)]
    if m in (MODELS["v3 on 8 ranks"], MODELS["demo"]):
        found.append(torch.empty(3, 64, fp8_entry(m.latent, m.rope, dtype).size, dtype=torch.uint8))
    return found


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_attention(name: str, tokens: int) -> None:
    m = MODELS[name]
    width, features = m.latent + m.rope, m.nope + m.rope
    x = PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty)
    first = m.q_latent or m.heads * features
    down = empty(tokens, first + width)
    two = 128 if m.hidden <= 2048 else 255
    if m.q_latent is None:
        gate(lambda: launch.stream_linear(x.x_TE, empty(first + width, m.hidden), down, pending=x, dependent=True), two)
        query = down[:, :first]
    else:
        q = PendingNorm(down[:, :first], empty(tokens, first // 16, dtype=FP32), 1e-6)
        weight, norm = empty(first + width, m.hidden), empty(first)
        options = {"pending": x, "norm": norm, "next": q, "dependent": True}
        gate(lambda: launch.stream_linear(x.x_TE, weight, down, **options), two)
        if name == "small 4":
            scale = empty(tokens, dtype=FP32)
            gate(lambda: launch.stream_linear(x.x_TE, weight, down, scale_T=scale, **options))
        query = empty(tokens, m.heads * features)
        up = empty(m.heads * features, first)
        gate(lambda: launch.stream_linear(q.x_TE, up, query, pending=q, dependent=True), 128)
    q_THC = empty(tokens, m.heads, width)
    kv_up = empty(m.heads, m.nope + m.value, m.latent)
    ids = torch.zeros(tokens, dtype=torch.int64)
    for cache in caches(m, BF16):
        gate(
            lambda cache=cache: head_launch.rope_absorb(
                query.view(tokens, m.heads, features),
                down[:, first:],
                kv_up[:, : m.nope],
                empty(m.latent),
                empty(4096, m.rope, dtype=FP32),
                ids,
                ids,
                q_THC,
                cache,
                1e-6,
                dependent=True,
            )
        )
    gate(lambda: head_launch.absorb(query.view(tokens, m.heads, features), kv_up[:, : m.nope], q_THC, dependent=True))
    attended, out = empty(tokens, m.heads, m.latent), empty(tokens, m.heads, m.value)
    gate(lambda: launch.stream_heads(attended, kv_up[:, m.nope :], out, dependent=True))
    shape = DecodeShape(tokens, 1, m.heads, m.latent, m.rope, 64)
    tiling = hopper_tiling(shape, 132)
    buffer = torch.empty(Workspace.bytes(shape, tiling, BF16), dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, BF16)
    gate(lambda: head_launch.merge_up(attended.unsqueeze(1), workspace, kv_up[:, m.nope :], out, dependent=True))
    after = PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty)
    residual, weight_o = empty(tokens, m.hidden, dtype=FP32), empty(m.hidden, m.heads * m.value)
    options = {"residual_TF": residual, "norm": empty(m.hidden), "next": after, "dependent": True}
    gate(lambda: launch.stream_linear(out.flatten(1), weight_o, after.x_TE, **options))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tokens", "dtype"), [(64, BF16), (16, FP32), (64, FP32)])
def test_absorbing_in_tiles(name: str, tokens: int, dtype: torch.dtype) -> None:
    m = MODELS[name]
    width, features = m.latent + m.rope, m.nope + m.rope
    ids = torch.zeros(tokens, dtype=torch.int64)
    for cache in caches(m, dtype):
        gate(
            lambda cache=cache: head_launch.rope_absorb(
                empty(tokens, m.heads, features, dtype=dtype),
                empty(tokens, width, dtype=dtype),
                empty(m.heads, m.nope + m.value, m.latent, dtype=dtype)[:, : m.nope],
                empty(m.latent, dtype=dtype),
                empty(4096, m.rope, dtype=FP32),
                ids,
                ids,
                empty(tokens, m.heads, width, dtype=dtype),
                cache,
                1e-6,
                dependent=True,
            )
        )
    q, out = empty(tokens, m.heads, features, dtype=dtype), empty(tokens, m.heads, width, dtype=dtype)
    weight = empty(m.heads, m.nope + m.value, m.latent, dtype=dtype)[:, : m.nope]
    gate(lambda: head_launch.absorb(q, weight, out, dependent=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "dtype"), [(17, BF16), (64, BF16), (100, BF16), (256, BF16), (64, FP32)])
def test_merging_in_tiles(name: str, rows: int, dtype: torch.dtype) -> None:
    m = MODELS[name]
    shape = DecodeShape(rows, 1, m.heads, m.latent, m.rope, 64)
    tiling = (hopper_tiling if dtype == BF16 else portable_tiling)(shape, 132)
    buffer = torch.empty(Workspace.bytes(shape, tiling, dtype), dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, dtype)
    attended, out = empty(rows, 1, m.heads, m.latent, dtype=dtype), empty(rows, m.heads, m.value, dtype=dtype)
    weight = empty(m.heads, m.nope + m.value, m.latent, dtype=dtype)[:, m.nope :]
    gate(lambda: head_launch.merge_up(attended, workspace, weight, out, dependent=True))


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_feed_forward(name: str, tokens: int) -> None:
    m = MODELS[name]
    x, after = (PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty) for _ in range(2))
    residual, norm = empty(tokens, m.hidden, dtype=FP32), empty(m.hidden)
    act = empty(tokens, m.dense)
    gate(lambda: launch.stream_gate_up(x, empty(2 * m.dense, m.hidden), act, dependent=True))
    options = {"residual_TF": residual, "norm": norm, "next": after, "dependent": True}
    gate(lambda: launch.stream_linear(act, empty(m.hidden, m.dense), after.x_TE, **options))
    logit, length = empty(tokens, m.experts, dtype=FP32), torch.ones(tokens, dtype=torch.int32)
    for dtype in (BF16, FP32):
        weight = empty(m.experts, m.hidden, dtype=dtype)
        gate(lambda w=weight: experts_launch.router(x, w, logit, dependent=True))  # type: ignore[misc]
    choice = ChosenExperts.empty(tokens, m.experts, m.chosen, empty)
    bias = None if m.routing.scoring == "softmax" else empty(m.experts, dtype=FP32)
    gate(lambda: experts_launch.choose(logit, bias, length, choice, m.routing, dependent=True))
    act = empty(tokens * (m.chosen + m.shared), m.expert)
    stored = m.experts + m.shared
    gate_up, down = empty(stored, 2 * m.expert, m.hidden), empty(stored, m.hidden, m.expert)
    gate(lambda: experts_launch.gate_up(x, choice, gate_up, act, dependent=True))
    acts = (act, choice, down)
    gate(lambda: experts_launch.down(*acts, after.x_TE, residual, norm, after.square_TP, dependent=True))
    gate(lambda: experts_launch.down(*acts, after.x_TE, dependent=True))


def fp8(*shape: int) -> BlockScaled:
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return BlockScaled(empty(*shape, dtype=torch.float8_e4m3fn), empty(*blocks, dtype=FP32))


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("name", ["v3 on 4 ranks", "v3 on 8 ranks", "k2 on 8 ranks"])
def test_fp8_weights(name: str, tokens: int) -> None:
    """There are as many tokens as take FP8 weights: see `workers.weights.formats.fp8_blocks.MOST_FP8`."""
    m = MODELS[name]
    x, after = (PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty) for _ in range(2))
    residual, norm = empty(tokens, m.hidden, dtype=FP32), empty(m.hidden)
    assert m.q_latent is not None
    down = empty(tokens, m.q_latent + m.latent + m.rope)
    q = PendingNorm(down[:, : m.q_latent], empty(tokens, m.q_latent // 16, dtype=FP32), 1e-6)
    first, second = fp8(down.shape[1], m.hidden), fp8(m.heads * (m.nope + m.rope), m.q_latent)
    q_norm, query = empty(m.q_latent), empty(tokens, second.shape[0])
    gate(lambda: launch.stream_linear(x.x_TE, first, down, pending=x, norm=q_norm, next=q, dependent=True), 128)
    gate(lambda: launch.stream_linear(q.x_TE, second, query, pending=q, dependent=True), 128)
    act, options = empty(tokens, m.dense), {"residual_TF": residual, "norm": norm, "next": after, "dependent": True}
    gate(lambda: launch.stream_gate_up(x, fp8(2 * m.dense, m.hidden), act, dependent=True), 128)
    gate(lambda: launch.stream_linear(act, fp8(m.hidden, m.dense), after.x_TE, **options), 128)
    choice = ChosenExperts.empty(tokens, m.experts, m.chosen, empty)
    stored, chosen = m.experts + m.shared, empty(tokens * (m.chosen + m.shared), m.expert)
    gate_up, down_up = fp8(stored, 2 * m.expert, m.hidden), fp8(stored, m.hidden, m.expert)
    gate(lambda: experts_launch.gate_up(x, choice, gate_up, chosen, dependent=True), 168)
    acts = (chosen, choice, down_up)
    gate(lambda: experts_launch.down(*acts, after.x_TE, residual, norm, after.square_TP, dependent=True), 128)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(("rows", "features"), cases.V4_PRODUCTS)
def test_dense_products_of_v4(rows: int, features: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the kernel that serves it, without a norm before and a sum behind it."""
    monkeypatch.setattr(fp8_launch, "is_hopper", lambda device: True)
    for own in (fp8_launch, fp8_even_launch):
        monkeypatch.setattr(own, "multiprocessors", lambda device: 132)
    place = cases.Place(torch.device("cpu"), dependent=True)
    gate(lambda: cases.product(place, empty(tokens, features), fp8(rows, features), empty(tokens, rows)))


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_products_of_v4_that_leave_a_norm_pending(tokens: int) -> None:
    x, out, norm = empty(tokens, 4096), empty(tokens, 1536), empty(1024)
    latent = PendingNorm(out[:, :1024], empty(tokens, 64, dtype=FP32), 1e-6)
    gate(lambda: fp8_launch.fp8_whole(x, fp8(1536, 4096), out, norm=norm, next=latent, dependent=True))
    gate(lambda: fp8_launch.fp8_whole(latent, fp8(32768, 1024), empty(tokens, 32768), dependent=True))


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("hidden", [8192, 9216, 11264])
def test_fp8_gates_of_wider_models(hidden: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token stays in shared memory; several stream beside the weights, as they would fit, but spill."""
    x, choice = PendingNorm.empty(tokens, hidden, 1e-6, BF16, empty), ChosenExperts.empty(tokens, 8, 2, empty)
    act, gate_up = empty(tokens * 2, 256), fp8(8, 512, hidden)
    monkeypatch.setattr(fp8_launch, "is_hopper", lambda device: True)
    assert fp8_launch.kept(tokens, gate_up) == (tokens == 1)
    with compile_only() as compiled:
        experts_launch.gate_up(x, choice, gate_up, act, dependent=True)
    for kernel in compiled:
        resources(kernel).check()


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("name", ["v3", "v3 on 8 ranks", pytest.param("k2 on 8 ranks", marks=pytest.mark.soak)])
def test_fp8_weights_that_the_copy_engine_fetches(name: str, tokens: int) -> None:
    m = V3 if name == "v3" else MODELS[name]
    x, after = (PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty) for _ in range(2))
    residual, norm = empty(tokens, m.hidden, dtype=FP32), empty(m.hidden)
    stored, act = m.experts + m.shared, empty(tokens * (m.chosen + m.shared), m.expert)
    gate_up, down = fp8(stored, 2 * m.expert, m.hidden), fp8(stored, m.hidden, m.expert)
    choice = ChosenExperts.empty(tokens, m.experts, m.chosen, empty)
    dense, rows = Fp16Scaled.empty(empty(tokens, m.dense), empty), Fp16Scaled.empty(act, empty)
    with compile_only() as compiled:
        fp8_experts_launch.gate_up(x, choice, m.shared, gate_up, act, dependent=True)
        fp8_launch.fp8_gate_up(x, fp8(2 * m.dense, m.hidden), dense.fp16_TF, dependent=True)
        launch_to_fp16_scaled(act, rows.fp16_TF, rows.unit_T, dependent=True)
        into = (after.x_TE, residual, norm, after.square_TP)
        fp8_experts_launch.down(rows, choice, m.shared, down, *into, dependent=True)
        fp8_experts_launch.down(rows, choice, m.shared, down, after.x_TE, dependent=True)
        weight = fp8(m.hidden, m.dense)
        options = {"residual_TF": residual, "norm": norm, "next": after, "dependent": True}
        fp8_launch.fp8_linear(dense, weight, after.x_TE, **options)
        fp8_launch.fp8_linear(dense, weight, after.x_TE, dependent=True)
        assert m.q_latent is not None
        first = empty(tokens, m.q_latent + m.latent + m.rope)
        latent = PendingNorm(first[:, : m.q_latent], empty(tokens, m.q_latent // 16, dtype=FP32), 1e-6)
        weight, norm = fp8(first.shape[1], m.hidden), empty(m.q_latent)
        fp8_launch.fp8_whole(x, weight, first, norm=norm, next=latent, dependent=True)
        query = empty(tokens, m.heads * (m.nope + m.rope))
        fp8_launch.fp8_whole(latent, fp8(query.shape[1], m.q_latent), query, dependent=True)
        if m.heads * m.value <= 4096:
            attended, output = empty(tokens, m.heads * m.value), fp8(m.hidden, m.heads * m.value)
            fp8_launch.fp8_whole(attended, output, after.x_TE, dependent=True)
            fp8_launch.fp8_whole(attended, output, after.x_TE, **{**options, "norm": empty(m.hidden)})
    for kernel in compiled:
        found = resources(kernel)
        found.check()
        assert (found.waits, found.releases) == (True, True)
        assert "cp.async.ca" not in kernel.asm["ptx"]
        if found.name != "to_fp16_scaled_kernel":
            used = instructions(kernel)
            # One instruction makes fp16 of two numbers: a tile of 16 x 16 has four of them a thread, and one product.
            # A fence before the copy engine would wait for what threads have asked for.
            assert ("UTMALDG" in used) == ("MEMBAR" in used) == (found.name != "down_short")
            assert 4 * used["HMMA"] <= used["F2FP"] <= 4 * used["HMMA"] + 64 * (2 * tokens > 8) + 128
            assert used["HMUL2"] == 0
    # Of products without a norm before them several programs stand on a multiprocessor, and of the query's.
    assert all(2 * (resources(kernel).shared + 1024) <= 228 * 1024 for kernel in compiled[2:7])
    assert all(4 * (resources(kernel).shared + 1024) <= 228 * 1024 for kernel in compiled[8:])


def test_two_programs_of_one_tokens_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand on a multiprocessor, a third does not."""
    m = MODELS["small 4"]
    monkeypatch.setattr(fp8_launch, "is_hopper", lambda device: True)
    assert fp8_experts_launch.gate_up_ring(1, m.hidden) == (2, 4)
    x, choice = PendingNorm.empty(1, m.hidden, 1e-6, BF16, empty), ChosenExperts.empty(1, m.experts, m.chosen, empty)
    weight, act = fp8(m.experts + m.shared, 2 * m.expert, m.hidden), empty(m.chosen + m.shared, m.expert)
    with compile_only() as compiled:
        experts_launch.gate_up(x, choice, weight, act, dependent=True)
    (kernel,) = compiled
    found = resources(kernel)
    found.check(128)
    assert found.name == "gate_up"
    assert (found.waits, found.releases) == (True, True)
    assert 2 * (found.shared + 1024) <= 228 * 1024
    registers = -(-found.registers // 8) * 8 * 32 * found.warps
    assert 3 * (found.shared + 1024) > 228 * 1024 or 3 * registers > 65536


def test_rows_of_fp8_weights_that_are_dealt_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    m = V3
    monkeypatch.setattr(fp8_even_launch, "multiprocessors", lambda device: 132)
    after = PendingNorm.empty(1, m.hidden, 1e-6, BF16, empty)
    residual, norm = empty(1, m.hidden, dtype=FP32), empty(m.hidden)
    stored, act = m.experts + m.shared, empty(m.chosen + m.shared, m.expert)
    choice = ChosenExperts.empty(1, m.experts, m.chosen, empty)
    units = choice.slot_S, choice.place_TX, choice.slots, Units(True, m.experts, m.shared, m.chosen)
    into = residual, norm, after.square_TP
    down, output = fp8(stored, m.hidden, m.expert), fp8(m.hidden, m.heads * m.value)
    with compile_only() as compiled:
        fp8_even_launch.fp8_even(act, down, after.x_TE, *into, units, dependent=True)
        fp8_even_launch.fp8_even(act, down, after.x_TE, units=units, dependent=True)
        for weight in (output, fp8(m.hidden, m.dense)):
            fp8_even_launch.fp8_even(empty(1, weight.shape[1]), weight, after.x_TE, *into, dependent=True)
            fp8_even_launch.fp8_even(empty(1, weight.shape[1]), weight, after.x_TE, dependent=True)
    for kernel in compiled:
        found, used = resources(kernel), instructions(kernel)
        found.check(128)
        assert (found.waits, found.releases) == (True, True)
        # Four blocks, of whose 128 features each of a warp's tiles of 16 x 16 has one product.
        assert used["HMMA"] == 4 * 8
        assert 4 * used["HMMA"] <= used["F2FP"] <= 4 * used["HMMA"] + 32
        assert used["HMUL2"] == 0
        assert "UTMALDG" in used
        # Two stand on a multiprocessor, and beside them there is room for the weights of the kernel behind.
        assert 2 * (found.shared + 1024) <= 100 * 1024


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_ends(name: str, tokens: int) -> None:
    m = MODELS[name]
    x = PendingNorm.empty(tokens, m.hidden, 1e-6, BF16, empty)
    residual, ids = empty(tokens, m.hidden, dtype=FP32), torch.zeros(tokens, dtype=torch.int64)
    gate(lambda: launch_enter(empty(m.vocab, m.hidden), ids, residual, empty(m.hidden), x, dependent=True))
    gate(lambda: launch_enter(empty(tokens, m.hidden), None, residual, empty(m.hidden), x, add=True, dependent=True))
    logits, head = empty(tokens, m.vocab, dtype=FP32), empty(m.vocab, m.hidden)
    gate(lambda: launch.stream_linear(x.x_TE, head, logits, dependent=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tiles(dtype: torch.dtype) -> None:
    for tokens, invariant in ((1, True), (3, False), (30, False), (64, False), (4000, True)):
        x, weight, out = (
            empty(tokens, 4, 128, dtype=dtype),
            empty(4, 512, 128, dtype=dtype),
            empty(tokens, 4, 512, dtype=dtype),
        )
        gate(lambda x=x, w=weight, o=out, i=invariant: launch.tiled(x, w, o, invariant=i, dependent=True))  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [17, 64])
def test_parts_of_logits(name: str, tokens: int) -> None:
    m, parts = MODELS[name], 4 if name == "demo" else 16
    x, out = empty(tokens, m.hidden).unflatten(1, (parts, -1)), empty(tokens, parts, m.experts, dtype=FP32)
    weight = empty(m.experts, m.hidden).unflatten(1, (parts, -1)).transpose(0, 1)
    gate(lambda: launch.tiled(x, weight, out, invariant=False, dependent=True))


def merged(rows: int, width: int) -> str:
    """The kernel that merges so many rows of DeepSeek-V2-Lite."""
    shape = DecodeShape(rows, width, 16, 512, 64, 64)
    tiling = hopper_tiling(shape, 132)
    workspace = Workspace.over(
        torch.empty(Workspace.bytes(shape, tiling, BF16), dtype=torch.uint8), shape, tiling, BF16
    )
    attended, out = empty(rows, width, 16, 512), empty(rows * width, 16, 128)
    with compile_only() as compiled:
        head_launch.merge_up(attended, workspace, empty(16, 128, 512), out)
    return str(compiled[0].hash)


@pytest.mark.parametrize("width", [1, 2])
def test_powers_of_two_of_rows_compile_all_merges(width: int) -> None:
    """Powers of two are the numbers of rows that the warm-up of mixed steps uses."""
    for power in (32, 64, 128, 256):
        assert {merged(rows, width) for rows in range(power // 2 + 1, power, 13)} == {merged(power, width)}


def test_one_kernel_serves_every_number_of_tokens_of_a_bucket() -> None:
    """Token counts, slots and eps are not specialised, so no batch size compiles anything new under load."""
    weight = empty(512, 256)
    with compile_only() as compiled:
        for tokens in (1, 2, 7, 8):
            launch.stream_linear(empty(tokens, 256), weight, empty(tokens, 512), dependent=True)
    assert len({kernel.hash for kernel in compiled}) == 1
    length, routing = torch.ones(1, dtype=torch.int32), RoutingRule("softmax", 1, 1, False, 1.0)
    with compile_only() as compiled:
        for tokens in (5, 6, 7, 8):
            choice = ChosenExperts.empty(tokens, 64, 6, empty)
            experts_launch.choose(empty(tokens, 64, dtype=FP32), None, length, choice, routing, dependent=True)
    assert len({kernel.hash for kernel in compiled}) == 1


@pytest.mark.parametrize(
    ("tokens", "rows", "features", "served"),
    [
        *((1, 64, 18432, True), (8, 64, 18432, True), (9, 129280, 2048, True), (9, 129280, 2112, False)),
        *((9, 2624, 4096, True), (16, 4096, 4096, True), (16, 4112, 4096, False)),
    ],
)
def test_products_that_cublas_does_better(tokens: int, rows: int, features: int, served: bool) -> None:
    """Products of more tokens than eight columns, where they do not stay in shared memory, are left to cuBLAS, unless
    the matrix is small."""
    assert launch.served(empty(tokens, features), empty(rows, features)) is served
    assert not launch.served(empty(tokens, features).float(), empty(rows, features))


@pytest.mark.parametrize(("experts", "groups"), [(520, 1), (320, 64)])
def test_more_experts_than_a_warp_holds_are_refused(experts: int, groups: int) -> None:
    choice, length = ChosenExperts.empty(4, experts, 8, empty), torch.ones(4, dtype=torch.int32)
    routing = RoutingRule("softmax", groups, 2, False, 1.0)
    with compile_only() as compiled, pytest.raises(ValueError, match="do not fit a warp"):
        experts_launch.choose(empty(4, experts, dtype=FP32), None, length, choice, routing)
    assert not compiled
