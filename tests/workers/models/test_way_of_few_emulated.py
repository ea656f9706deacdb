"""A pass on the way of few tokens as it was compiled, run by the PTX emulator: its launches are dependent, and follow
each other on memory that holds poison."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_model import V2_LITE_HEADS, decode_step, random_model

import workers.models.attention.decode_rows as decode_rows
import workers.models.few_tokens as few_tokens
from kernels.few_experts import launch as experts
from kernels.head_linear import launch as heads
from kernels.linear import launch as products
from kernels.mla_decode import launch as attention
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling
from kernels.pending_norm import PendingNorm, launch_enter
from kernels.rms_norm import launch as norms
from tests.support.ptx import Unordered, emulated
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.batch import Batch
from workers.parallel.group import TensorParallel

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
SMALL = V2_LITE_HEADS | {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "qk_nope_head_dim": 64}
SHORT = 128
"""Tokens up to which attention takes a row alone in narrow blocks."""


def planned(own: LatentAttention, batch: Batch, scratch: Scratch) -> Batch:
    rows, layout = batch.decode, batch.layout
    assert rows is not None
    if own.heads.norm_L.dtype != torch.bfloat16:
        return batch
    heads, pages = own.heads, rows.page_RP.shape[1]
    shape = DecodeShape(layout.decode_rows, layout.width, heads.count, heads.latent, heads.rope, pages)
    tiling = hopper_tiling(shape, 3)
    assert tiling.path == ("narrow" if shape.queries <= 32 else "either")
    tiling = replace(tiling, short=min(tiling.short, SHORT))
    buffer = torch.full((Workspace.bytes(shape, tiling, torch.bfloat16),), 255, dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    attention.plan(rows.length_R, rows.page_RP, workspace, first=batch.first)
    return replace(batch, decode=replace(rows, workspace=workspace))


def normed(x: PendingNorm, weight: Any, out: Any, *, norm_A: Any = None, next: Any = None, dependent: bool) -> None:
    products.stream_linear(x.x_TE, weight, out, pending=x, norm=norm_A, next=next, dependent=dependent)


def to_residual(x: Any, weight: Any, residual: Any, norm: Any, out: PendingNorm, *, dependent: bool) -> None:
    products.stream_linear(x, weight, out.x_TE, residual_TF=residual, norm=norm, next=out, dependent=dependent)


def all_experts(
    x: Any, choice: Any, gate_up: Any, down: Any, residual: Any, norm: Any, out: Any, empty: Any, *, dependent: bool
) -> None:
    (tokens, chosen), (stored, _, intermediate) = choice.weight_TK.shape, down.shape
    act = empty(tokens * (chosen + stored - choice.experts), intermediate, dtype=down.dtype)
    experts.gate_up(x, choice, gate_up, act, dependent=dependent)
    experts.down(act, choice, down, out.x_TE, residual, norm, out.square_TP, dependent=dependent)


def head_linear(x: Any, weight: Any, out: Any, *, dependent: bool) -> None:
    products.stream_heads(x, weight.transpose(1, 2), out, dependent=dependent)


def in_bf16(launch: Callable[..., None], otherwise: Callable[..., None]) -> Callable[..., None]:
    """The model that is compared with is in fp32, and computes as it always does on a CPU."""
    return lambda x, *rest, **options: (launch if x.dtype == torch.bfloat16 else otherwise)(x, *rest, **options)


@pytest.fixture(autouse=True)
def launch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the way launches for tensors on a GPU, for tensors on a CPU."""
    replaced = {
        "normed_linear": normed,
        "linear_to_residual": to_residual,
        "gated_linear": products.stream_gate_up,
        "rms_norm": norms.rms_norm,
        "pending_norm": SimpleNamespace(enter=launch_enter),
        "few_experts": SimpleNamespace(router=experts.router, choose=experts.choose, experts=all_experts),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(few_tokens, name, function)
    replaced = {"rope_absorb": heads.rope_absorb, "merge_up": heads.merge_up, "head_linear": head_linear}
    for name, function in replaced.items():
        monkeypatch.setattr(decode_rows, name, in_bf16(function, getattr(decode_rows, name)))
    monkeypatch.setattr(decode_rows, "launches_dependently", lambda device: True)
    monkeypatch.setattr(LatentAttention, "plan", planned)


def check(lengths: list[int], width: int, heads: int = 2, **how: Any) -> list[str]:
    small = SMALL | {"num_attention_heads": heads}
    model, wide = random_model(small, torch.bfloat16, CPU), random_model(small, torch.float32, CPU)
    token_T, batch, cache = decode_step(model, lengths, width)
    _, _, wide_cache = decode_step(wide, lengths, width)
    poisoned = torch.full((1 << 20,), 255, dtype=torch.uint8)
    with emulated(consecutive=True, **how) as launches:
        way = few_tokens.FewTokens(TensorParallel(), dependent=True)
        got = model.segments.forward_on(way, token_T, None, batch, cache, Scratch(CPU, poisoned))
    want = wide.forward(token_T, batch, wide_cache)
    alive = torch.tensor(lengths).repeat_interleave(width) > 0
    error = ((got.float() - want).norm(dim=1) / want.norm(dim=1))[alive]
    assert float(error.max()) < 2e-2  # bf16 at every boundary of some twenty products
    return launches


@pytest.mark.parametrize(("lengths", "heads", "merging"), [([70], 2, 1), ([70, 0], 2, 1), ([70, 0], 9, 2)])
def test_a_pass_is_right_and_in_order(lengths: list[int], heads: int, merging: int) -> None:
    """The plan, the embedding, a dense layer, one of experts, and the final norm."""
    assert len(check(lengths, 1, heads)) == 1 + 2 + (4 + merging + 2) + (4 + merging + 4)


@pytest.mark.parametrize("length", [70, 150])
def test_a_row_of_several_tokens(length: int) -> None:
    """Attention of a row alone, short and long."""
    launches = check([length], 4, heads=9)
    assert [name for name in launches if name.startswith("attend")] == 2 * ["attend_narrow", "attend_wide"]


@pytest.mark.parametrize(
    ("kernels", "what", "by"),
    [
        ("gate_up", "mov.u32", "griddepcontrol.launch_dependents; mov.u32"),
        (r"\w+", "ld.global.cg", "ld.global"),
    ],
    ids=["too early", "through L1"],
)
def test_planted_faults_are_found(kernels: str, what: str, by: str) -> None:
    def edit(ptx: str) -> str:
        return ptx.replace(what, by) if re.search(rf"\.entry {kernels}\(", ptx) else ptx

    with pytest.raises(Unordered):
        check([70], 1, edit=edit)


@pytest.mark.parametrize(("kernel", "length"), [("attend_narrow", 70), ("attend_wide", 150)])
def test_attention_that_does_not_wait_is_found(kernel: str, length: int) -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if f".entry {kernel}(" in ptx else ptx

    with pytest.raises(Unordered):
        check([length], 4, heads=9, edit=edit)
