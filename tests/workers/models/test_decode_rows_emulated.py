"""Attention of a step of many decode rows as it was compiled, run by the PTX emulator: its launches are dependent, and
follow each other on memory that holds poison."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_model import V2_LITE_HEADS, decode_step, random_model
from torch import Tensor

from kernels import linear
from kernels.attention_sink import launch_attention_sink
from kernels.head_linear import launch as heads
from kernels.linear import launch as products
from kernels.linear import parts
from kernels.linear.parts import Cut
from kernels.mla_decode import launch as attention_launch
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling
from kernels.moe import launch as moe
from kernels.moe import reference
from kernels.rms_norm import AddNorm, launch_add_rms_norm
from kernels.routing_rule import RoutingRule
from tests.support.fp8_entries import numbers
from tests.support.ptx import Fault, Unordered, emulated
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models import general
from workers.models.attention import backend, decode_rows
from workers.models.batch import Batch
from workers.models.layer import PassBuffers
from workers.models.model import Model
from workers.parallel.group import Group

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
SMALL = V2_LITE_HEADS | {"hidden_size": 64, "num_attention_heads": 1, "qk_nope_head_dim": 32, "v_head_dim": 32}
LENGTHS = [70, 0, 130, 64] + [1] * 13
LIVE = torch.tensor(LENGTHS) > 0


def absorb(*tensors: Any, eps: float, dependent: bool) -> None:
    """Call what the model calls, on tensors of a CPU."""
    heads.rope_absorb(*tensors, eps, dependent=dependent)


def planned(model: Model, batch: Batch) -> Batch:
    assert batch.decode is not None
    own, page_RP = model.layers[0].attention, batch.decode.page_RP
    shape = DecodeShape(len(LENGTHS), 1, own.heads.count, own.heads.latent, own.heads.rope, page_RP.shape[1])
    tiling = hopper_tiling(shape, 12, fp8=own.heads.fp8_cache)  # the longest row is split
    assert tiling.path == "narrow"
    buffer = torch.full((Workspace.bytes(shape, tiling, torch.bfloat16),), 255, dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    attention_launch.schedule(batch.decode.length_R, page_RP, workspace)
    return replace(batch, decode=replace(batch.decode, workspace=workspace))


def up(x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor, *, dependent: bool = False) -> None:
    """Call what `head_linear` calls, on tensors of a CPU."""
    products.tiled(x_THN, weight_HNL.transpose(1, 2), out_THL, invariant=False, dependent=dependent)


def attended(
    dtype: torch.dtype, plan: Callable[[Model, Batch], Batch], fp8: bool, sink: float | None = None
) -> tuple[Tensor, PagedCache, Tensor]:
    """A layer's attention over a cache of which this step writes every row's last entry; the cache, and those slots."""
    model = random_model(SMALL, dtype, CPU, fp8_cache=fp8)
    if sink is not None:
        own = model.layers[0].attention
        own.heads = replace(own.heads, sink_H=torch.full((own.heads.count,), sink))
    _, batch, cache = decode_step(model, LENGTHS, 1)
    scratch = Scratch(CPU, torch.full((1 << 20,), 255, dtype=torch.uint8))
    buffers = model.segments.buffers(len(LENGTHS), scratch, general.DecodeOps(Group()))
    torch.manual_seed(7)
    buffers.projected.down_TF.copy_(torch.randn(buffers.projected.down_TF.shape).bfloat16())
    own, tensors = model.layers[0].attention, (buffers.projected, buffers.attended_THV)
    backends = own.backends(*tensors, plan(model, batch), None, model.rotation_PO, scratch)
    for _ in range(2):  # the second finds the first one's lines in L1
        own.attend(backends, cache.layers[0])
    return buffers.attended_THV.float(), cache, batch.cache_slot_T


def layered(
    dtype: torch.dtype, plan: Callable[[Model, Batch], Batch]
) -> tuple[PassBuffers[Tensor], PagedCache, Tensor]:
    """Two layers' attention, from the norm before to the norm behind, in the same memory and with the same weights."""
    model = random_model(SMALL | {"hidden_size": 136, "v_head_dim": 72}, dtype, CPU)
    _, batch, cache = decode_step(model, LENGTHS, 1)
    scratch = Scratch(CPU, torch.full((1 << 21,), 255, dtype=torch.uint8))
    buffers = model.segments.buffers(len(LENGTHS), scratch, general.DecodeOps(Group()))
    torch.manual_seed(7)
    for x in (buffers.normed, buffers.residual_TE):
        x.copy_(torch.randn(x.shape).bfloat16())
    own, tensors = model.layers[0].attention, (buffers.projected, buffers.attended_THV)
    backends = own.backends(*tensors, plan(model, batch), None, model.rotation_PO, scratch)
    ops, slot_T = buffers.ops, batch.cache_slot_T
    norm = AddNorm(buffers.residual_TE, model.layers[0].feed_forward_norm_E, 1e-6)
    for _ in range(2):
        own.project(ops, buffers.normed, None, slot_T, cache.layers[0], buffers.projected, scratch)
        own.attend(backends, cache.layers[0])
        own.output(ops, buffers.attended_THV, norm, buffers.normed, scratch)
    return buffers, cache, slot_T


def launch_part_linear(x_TE: Tensor, weight_FE: Tensor, out_TPF: Tensor, *, dependent: bool) -> None:
    """Call what the model calls, on tensors of a CPU."""
    cut = Cut.of(*weight_FE.shape, 132)
    assert cut is not None
    parts.part_linear(x_TE, weight_FE, out_TPF, cut, dependent=dependent)


def check_parts(**how: Any) -> list[str]:
    want, wide_cache, slot_T = layered(torch.float32, lambda model, batch: batch)
    with pytest.MonkeyPatch.context() as patch, emulated(consecutive=True, fences=False, **how) as launches:
        patch.setattr(linear, "is_hopper", lambda device: True)
        patch.setattr(decode_rows, "rope_absorb", absorb)
        patch.setattr(general, "part_linear", launch_part_linear)
        patch.setattr(general, "add_rms_norm", lambda *args, eps, dependent: launch_add_rms_norm(
            *args, eps, dependent=dependent
        ))  # fmt: skip
        for module in (decode_rows, general):
            patch.setattr(module, "launches_dependently", lambda device: True)
        got, cache, _ = layered(torch.bfloat16, planned)
    assert got.projected.down_TF.shape[1:-1] == (3,)
    for ours, theirs in ((got.residual_TE, want.residual_TE), (got.normed, want.normed)):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 1e-2
    entries, wide_entries = (x.layers[0].flatten(0, 1)[slot_T[LIVE]].float() for x in (cache, wide_cache))
    # Of the second layer: its input has been rounded several times.
    assert float((entries - wide_entries).norm() / wide_entries.norm()) < 1e-2
    return launches


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_attention_with_products_in_parts_is_right_and_in_order(seed: int) -> None:
    attention_launches = ["part_linear", "rope_absorb", "attend_narrow", "merge_tile", "part_linear", "rms_norm_kernel"]
    assert check_parts(seed=seed) == ["schedule_splits"] + 2 * attention_launches


@pytest.mark.parametrize(
    ("kernel", "what", "by"),
    [
        ("part_linear", r"griddepcontrol\.wait;", ""),
        ("rope_absorb", r"griddepcontrol\.wait;", ""),
        ("rms_norm_kernel", r"griddepcontrol\.wait;", ""),
        ("rms_norm_kernel", r"ld\.global\.cg", "ld.global"),
        ("rope_absorb", r"ld\.global\.cg", "ld.global"),
    ],
    ids=["a product", "rope", "a norm", "a norm through L1", "rope through L1"],
)
def test_planted_faults_around_parts_are_found(kernel: str, what: str, by: str) -> None:
    with pytest.raises((Fault, Unordered)):  # a store before the wait is a fault at once
        check_parts(edit=lambda ptx: edited(ptx, kernel, what, by))


def check(fp8: bool = False, sink: float | None = None, **how: Any) -> list[str]:
    want, wide_cache, slot_T = attended(torch.float32, lambda model, batch: batch, fp8, sink)
    with pytest.MonkeyPatch.context() as patch, emulated(consecutive=True, fences=False, **how) as launches:
        patch.setattr(decode_rows, "rope_absorb", absorb)
        patch.setattr(decode_rows, "launches_dependently", lambda device: True)
        patch.setattr(backend, "attention_sink", launch_attention_sink)
        if sink is not None:
            patch.setattr(decode_rows, "head_linear", up)
        got, cache, _ = attended(torch.bfloat16, planned, fp8, sink)
    assert got[~LIVE].eq(0).all()
    if fp8:
        # A number that is off by a bit may get the next code, up to an eighth away: some in a hundred do.
        entries = (x.layers[0].flatten(0, 1)[slot_T[LIVE]] for x in (cache, wide_cache))
        dtypes = torch.bfloat16, torch.float32
        ours, theirs = (numbers(entry, 512, 64, dtype) for entry, dtype in zip(entries, dtypes, strict=True))
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2
        assert float((got - want)[LIVE].norm() / want[LIVE].norm()) < 3e-2
        return launches
    # bf16 at every boundary: the absorbed query, the entry, the pieces, the output.
    assert float((got - want)[LIVE].norm() / want[LIVE].norm()) < 1e-2
    ours, theirs = (x.layers[0].flatten(0, 1)[slot_T[LIVE]].float() for x in (cache, wide_cache))
    torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=1e-3)
    return launches


@pytest.mark.parametrize(("seed", "fp8"), [(0, False), pytest.param(1, False, marks=pytest.mark.soak), (2, True)])
def test_attention_is_right_and_in_order(seed: int, fp8: bool) -> None:
    assert check(fp8, seed=seed) == ["schedule_splits"] + 2 * ["rope_absorb", "attend_narrow", "merge_tile"]


def test_a_sink_is_added_behind_the_merge_of_all_pieces() -> None:
    """Rows of no entry, of one, and of several pieces."""
    launches = ["rope_absorb", "attend_narrow", "merge", "tiled_linear", "attention_sink_kernel"]
    assert check(sink=0.5) == ["schedule_splits"] + 2 * launches
    without, with_sink = (attended(torch.float32, lambda model, batch: batch, False, sink)[0] for sink in (None, 0.5))
    assert float((without - with_sink)[LIVE].norm() / with_sink[LIVE].norm()) > 0.1


def of_roped_queries(
    dtype: torch.dtype, plan: Callable[[Model, Batch], Batch], fp8: bool, invariant: bool = False
) -> Tensor:
    """Attention of a mixed step's decode rows, whose queries are roped and whose entries are in the cache."""
    model = random_model(SMALL, dtype, CPU, fp8_cache=fp8)
    _, batch, cache = decode_step(model, LENGTHS, 1)
    heads, scratch = model.layers[0].attention.heads, Scratch(CPU, torch.full((1 << 20,), 255, dtype=torch.uint8))
    heads = replace(heads, invariant=invariant)
    shape = len(LENGTHS), heads.count
    q_THD = torch.randn(*shape, heads.nope + heads.rope, generator=torch.Generator().manual_seed(7)).bfloat16()
    memory = decode_rows.DecodeMemory.of(heads, len(LENGTHS), 1, scratch)
    out_THV, rows = scratch.empty(*shape, heads.value, dtype=dtype), plan(model, batch).decode
    assert rows is not None
    own = decode_rows.DecodeRows(rows, batch.first, q_THD.to(dtype), None, memory, out_THV)
    for _ in range(2):
        own.attend(heads, cache.layers[0])
    return out_THV.float()


def absorb_alone(*tensors: Tensor, invariant: bool, dependent: bool) -> None:
    """Call what `kernels.head_linear.absorb` calls, on tensors of a CPU."""
    q_THD, weight_HNL, out_THC = tensors
    if not invariant:
        heads.absorb(*tensors, dependent=dependent)
        return
    nope, latent = weight_HNL.shape[1:]
    parts = q_THD[..., :nope], weight_HNL.transpose(1, 2), out_THC[..., :latent]
    products.tiled(*parts, invariant=True, behind=q_THD.shape[2] - nope, dependent=dependent)


def check_roped(fp8: bool = False, **how: Any) -> list[str]:
    want = of_roped_queries(torch.float32, lambda model, batch: batch, fp8)
    with pytest.MonkeyPatch.context() as patch, emulated(consecutive=True, fences=False, **how) as launches:
        patch.setattr(decode_rows, "absorb_roped", absorb_alone)
        patch.setattr(decode_rows, "launches_dependently", lambda device: True)
        got = of_roped_queries(torch.bfloat16, planned, fp8)
    assert got[~LIVE].eq(0).all()
    assert float((got - want)[LIVE].norm() / want[LIVE].norm()) < (3e-2 if fp8 else 1e-2)
    return launches


@pytest.mark.parametrize(("seed", "fp8"), [(0, False), pytest.param(1, False, marks=pytest.mark.soak), (2, True)])
def test_attention_of_roped_queries_is_right_and_in_order(seed: int, fp8: bool) -> None:
    assert check_roped(fp8, seed=seed) == ["schedule_splits"] + 2 * ["absorb", "attend_narrow", "merge_tile"]


def planned_invariant(model: Model, batch: Batch) -> Batch:
    assert batch.decode is not None
    own, page_RP = model.layers[0].attention, batch.decode.page_RP
    sizes = len(LENGTHS), 1, own.heads.count, own.heads.latent, own.heads.rope, page_RP.shape[1]
    shape = DecodeShape(*sizes, invariant=True)
    tiling = hopper_tiling(shape, 12)
    assert tiling.path == "wide"
    buffer = torch.full((Workspace.bytes(shape, tiling, torch.bfloat16),), 255, dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    attention_launch.schedule(batch.decode.length_R, page_RP, workspace)
    return replace(batch, decode=replace(batch.decode, workspace=workspace))


def attend_and_merge(
    *tensors: Tensor, scale: float, first: int, workspace: Workspace, invariant: bool, dependent: bool
) -> None:
    """Call what `mla_decode` calls, on tensors of a CPU."""
    assert invariant
    attention_launch.attend(*tensors, workspace, scale=scale, first=first, dependent=dependent)
    attention_launch.merge(*tensors[-2:], workspace, dependent=dependent)


def up_invariant(
    x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor, *, invariant: bool, dependent: bool = False
) -> None:
    products.tiled(x_THN, weight_HNL.transpose(1, 2), out_THL, invariant=invariant, dependent=dependent)


def check_invariant(**how: Any) -> list[str]:
    want = of_roped_queries(torch.float32, lambda model, batch: batch, False)
    with pytest.MonkeyPatch.context() as patch, emulated(consecutive=True, fences=False, **how) as launches:
        patch.setattr(decode_rows, "absorb_roped", absorb_alone)
        patch.setattr(decode_rows, "mla_decode", attend_and_merge)
        patch.setattr(decode_rows, "head_linear", up_invariant)
        patch.setattr(decode_rows, "launches_dependently", lambda device: True)
        got = of_roped_queries(torch.bfloat16, planned_invariant, False, invariant=True)
    assert got[~LIVE].eq(0).all()
    assert float((got - want)[LIVE].norm() / want[LIVE].norm()) < 1e-2
    return launches


def test_attention_in_invariant_mode_is_right_and_in_order() -> None:
    """Also where a row has several pieces; the first product lets attention start before its own wait."""
    layer = ["tiled_linear", "attend_wide", "merge_strands", "tiled_linear"]
    assert check_invariant(seed=0) == ["schedule_splits"] + 2 * layer


@pytest.mark.parametrize("kernel", ["tiled_linear", "attend_wide", "merge_strands"])
def test_planted_faults_in_invariant_mode_are_found(kernel: str) -> None:
    with pytest.raises((Fault, Unordered)):
        check_invariant(seed=0, edit=lambda ptx: edited(ptx, kernel, r"griddepcontrol\.wait;", ""))


@pytest.mark.parametrize("kernel", ["attend_narrow", "merge_tile"])
def test_planted_faults_behind_roped_queries_are_found(kernel: str) -> None:
    with pytest.raises((Fault, Unordered)):
        check_roped(edit=lambda ptx: edited(ptx, kernel, r"griddepcontrol\.wait;", ""))


def edited(ptx: str, kernel: str, what: str, by: str) -> str:
    """The PTX of `kernel` with a planted fault; others as they are."""
    if not re.search(rf"\.entry {kernel}\(", ptx):
        return ptx
    assert re.search(what, ptx)
    return re.sub(what, by, ptx)


def routed(**how: Any) -> list[str]:
    """Norm, router and choice of experts, of two layers in the same memory."""
    tokens, hidden, experts, chosen, parts = 17, 64, 8, 3, 4
    torch.manual_seed(3)
    shapes = ((tokens, hidden), (hidden,), (experts, hidden))
    layers = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(2)]
    x, residual, normed = (torch.zeros(tokens, hidden, dtype=torch.bfloat16) for _ in range(3))
    logit_TPX = torch.full((tokens, parts, experts), torch.nan)
    id_TK, weight_TK = torch.zeros(tokens, chosen, dtype=torch.int64), torch.zeros(tokens, chosen)
    want_id, want_weight = id_TK.clone(), weight_TK.clone()
    rule = RoutingRule("softmax", 1, 1, False, 1.0)
    with emulated(consecutive=True, fences=False, **how) as launches:
        for x_TE, norm_E, weight_XE in layers:
            x.copy_(x_TE)
            want_TE = (residual + x).float()
            launch_add_rms_norm(x, residual, norm_E, normed, 1e-6, dependent=True)
            x_groups = normed.unflatten(1, (parts, -1))
            weight_groups = weight_XE.unflatten(1, (parts, -1)).transpose(0, 1)
            products.tiled(x_groups, weight_groups, logit_TPX, invariant=False, dependent=True)
            moe.route(logit_TPX, None, id_TK, weight_TK, rule, dependent=True)
            want_TE = (want_TE * want_TE.square().mean(1, keepdim=True).add(1e-6).rsqrt() * norm_E).bfloat16()
            reference.route(want_TE.float() @ weight_XE.float().T, None, want_id, want_weight, rule)
            assert torch.equal(id_TK, want_id)
            torch.testing.assert_close(weight_TK, want_weight, rtol=1e-2, atol=1e-3)
    return launches


def test_routing_is_right_and_in_order() -> None:
    assert routed() == 2 * ["rms_norm_kernel", "tiled_linear", "route"]


@pytest.mark.parametrize(
    ("kernel", "what", "by"),
    [
        ("rope_absorb", r"griddepcontrol\.wait", "griddepcontrol.launch_dependents; griddepcontrol.wait"),
        ("merge_tile", r"griddepcontrol\.wait;", ""),
        ("merge_tile", r"cp\.async\.cg", "cp.async.ca"),
        ("merge_tile", r"ld\.global\.cg", "ld.global"),
    ],
    ids=["starts attention too early", "does not wait", "copies through L1", "reads through L1"],
)
def test_planted_faults_are_found(kernel: str, what: str, by: str) -> None:
    with pytest.raises(Unordered):
        check(edit=lambda ptx: edited(ptx, kernel, what, by))
