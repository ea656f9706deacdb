"""Launches of the small-batch path for tensors on a GPU, made for tensors on a CPU: for passes in the PTX emulator."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_model import V2_LITE_HEADS

import workers.models.attention.decode_rows as decode_rows
import workers.models.general as general
import workers.models.small_batch as small_batch
from kernels.few_experts import launch as experts
from kernels.head_linear import launch as heads
from kernels.linear import launch as products
from kernels.mla_decode import launch as attention
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling
from kernels.moe import launch as moe
from kernels.moe import schedule
from kernels.moe.pending import PendingExperts
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape
from kernels.pending_norm import PendingNorm, launch_enter
from kernels.rms_norm import launch_rms_norm
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.batch import Batch

CPU = torch.device("cpu")
SMALL = V2_LITE_HEADS | {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "qk_nope_head_dim": 64}
MULTIPROCESSORS = 2
SHORT = 128
"""Tokens up to which attention takes a row alone in narrow blocks."""


def planned(own: LatentAttention, batch: Batch, scratch: Scratch) -> Batch:
    rows, layout = batch.decode, batch.layout
    assert rows is not None
    if own.heads.norm_L.dtype != torch.bfloat16:
        return batch
    heads, pages = own.heads, rows.page_RP.shape[1]
    shape = DecodeShape(layout.decode_rows, layout.width, heads.count, heads.latent, heads.rope, pages)
    tiling = hopper_tiling(shape, 3, fp8=heads.fp8_cache)
    assert tiling.path == ("narrow" if shape.queries <= 32 else "either")
    tiling = replace(tiling, short=min(tiling.short, SHORT))
    buffer = torch.full((Workspace.bytes(shape, tiling, torch.bfloat16),), 255, dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    attention.schedule(rows.length_R, rows.page_RP, workspace, first=batch.first)
    return replace(batch, decode=replace(rows, workspace=workspace))


def normed(x: PendingNorm, weight: Any, out: Any, *, norm_A: Any = None, dependent: bool, **after: Any) -> None:
    products.stream_linear(x.x_TE, weight, out, pending=x, norm=norm_A, **after, dependent=dependent)


def to_residual(x: Any, weight: Any, residual: Any, norm: Any, out: PendingNorm, *, dependent: bool) -> None:
    products.stream_linear(x, weight, out.x_TE, residual_TF=residual, norm=norm, next=out, dependent=dependent)


def all_experts(
    x: Any, choice: Any, gate_up: Any, down: Any, residual: Any, norm: Any, out: Any, empty: Any, *, dependent: bool
) -> None:
    (tokens, chosen), (stored, _, intermediate) = choice.weight_TK.shape, down.shape
    act = empty(tokens * (chosen + stored - choice.experts), intermediate, dtype=down.dtype)
    experts.gate_up(x, choice, gate_up, act, dependent=dependent)
    experts.down(act, choice, down, out.x_TE, residual, norm, out.square_TP, dependent=dependent)


def int4_shape(x_TE: Any, id_TK: Any, down_XEI: Any, *, shared: int) -> ExpertsShape:
    (experts, hidden, intermediate), (tokens, chosen) = down_XEI.shape, id_TK.shape
    return ExpertsShape(tokens, chosen, experts, hidden, intermediate, shared=shared, hopper=MULTIPROCESSORS)


def int4_experts(
    x: Any, ids: Any, weight: Any, gate_up: Any, down: Any, shape: ExpertsShape, empty: Any, *, dependent: bool
) -> PendingExperts:
    tiling = schedule.tiling(shape, (stored(gate_up), stored(down)))
    memory = empty(schedule.Workspace.bytes(shape, tiling), dtype=torch.uint8)
    scratch = schedule.Workspace.over(memory, shape, tiling)
    call = moe.ExpertLaunches(x.x_TE, ids, weight, gate_up, down, x.x_TE, scratch, shape, tiling, dependent)
    return PendingExperts(x, ids, weight, gate_up, down, call)


def head_linear(x: Any, weight: Any, out: Any, *, dependent: bool) -> None:
    products.stream_heads(x, weight.transpose(1, 2), out, dependent=dependent)


def in_bf16(launch: Callable[..., None], otherwise: Callable[..., None]) -> Callable[..., None]:
    """The model that is compared with is in fp32, and computes as it always does on a CPU."""
    return lambda x, *rest, **options: (launch if x.dtype == torch.bfloat16 else otherwise)(x, *rest, **options)


def launch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch for tensors on a CPU what the path launches for tensors on a GPU."""
    replaced = {
        "normed_linear": normed,
        "linear_to_residual": to_residual,
        "gated_linear": products.stream_gate_up,
        "moe": SimpleNamespace(experts_shape=int4_shape, PendingExperts=SimpleNamespace(of=int4_experts)),
        "rms_norm": launch_rms_norm,
        "pending_norm": SimpleNamespace(enter=launch_enter),
        "few_experts": SimpleNamespace(router=experts.router, choose=experts.choose, experts=all_experts),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(small_batch, name, function)

    def choose_experts(*given: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:  # other paths choose as ever
            patch.setattr(general, "moe", SimpleNamespace(route=moe.route))
            return general.choose_experts(*given, **options)

    monkeypatch.setattr(small_batch, "choose_experts", choose_experts)
    replaced = {"rope_absorb": heads.rope_absorb, "merge_up": heads.merge_up, "head_linear": head_linear}
    for name, function in replaced.items():
        monkeypatch.setattr(decode_rows, name, in_bf16(function, getattr(decode_rows, name)))
    monkeypatch.setattr(decode_rows, "launches_dependently", lambda device: True)
    monkeypatch.setattr(LatentAttention, "plan", planned)
