"""The small-batch path on the kernels it launches on Hopper, interpreted: from the embedding to the final norm. Run
with TRITON_INTERPRET=1, see test_small_batch_path_interpreted.py."""

from tests.support import bounds, gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()
bounds.check_bounds()

from collections.abc import Callable  # noqa: E402
from dataclasses import replace  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from random_model import V2_LITE_HEADS, decode_step, random_model  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.runtime.interpreter import GridExecutor  # noqa: E402

import workers.models.attention.decode_rows as decode_rows  # noqa: E402
import workers.models.small_batch as small_batch  # noqa: E402
from kernels import moe  # noqa: E402
from kernels.few_experts import launch as experts  # noqa: E402
from kernels.head_linear import launch as heads  # noqa: E402
from kernels.linear import launch as products  # noqa: E402
from kernels.mla_decode import launch as attention  # noqa: E402
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling  # noqa: E402
from kernels.moe import reference  # noqa: E402
from kernels.pending_norm import PendingNorm, launch_enter  # noqa: E402
from kernels.rms_norm import launch_rms_norm  # noqa: E402
from workers.cache.paged import PagedCache  # noqa: E402
from workers.families.registry import parse_config  # noqa: E402
from workers.memory.scratch import Scratch  # noqa: E402
from workers.models.attention.latent import LatentAttention  # noqa: E402
from workers.models.batch import Batch  # noqa: E402
from workers.models.model import Model  # noqa: E402
from workers.parallel.group import Group  # noqa: E402
from workers.parallel.mesh import Mesh  # noqa: E402

gluon.language.num_warps = lambda: 4
CPU = torch.device("cpu")
V3_ROUTING = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def plainly(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch` without the options only a GPU knows."""

    def run(*args: Any, dependent: bool = False, early: bool = False, **options: Any) -> Any:
        return launch(*args, **options)

    return run


def all_experts(x: Any, choice: Any, gate_up: Any, down: Any, residual: Any, norm: Any, out: Any, empty: Any) -> None:
    (tokens, chosen), (stored, _, intermediate) = choice.weight_TK.shape, down.shape
    act = empty(tokens * (chosen + stored - choice.experts), intermediate, dtype=down.dtype)
    experts.gate_up(x, choice, gate_up, act)
    experts.down(act, choice, down, out.x_TE, residual, norm, out.square_TP)


CHOSEN: list[torch.Tensor] = []
"""Experts that every token chose [T, X], for every layer with experts: first on the small-batch path, then on the
general one."""


def choose(logit: Any, bias: Any, length: Any, choice: Any, routing: Any) -> None:
    experts.choose(logit, bias, length, choice, routing)
    CHOSEN.append(choice.place_TX >= 0)


def route(logit: Any, bias: Any, ids: torch.Tensor, *rest: Any, shared: int, dependent: bool, **options: Any) -> None:
    reference.route(logit, bias, ids, *rest, shared=shared, **options)
    routed = ids[:, : ids.shape[1] - shared].clamp(min=0)
    CHOSEN.append(torch.zeros(logit.shape, dtype=torch.bool).scatter_(1, routed, True))


def plan(own: LatentAttention, batch: Batch, scratch: Scratch) -> Batch:
    rows = batch.decode
    assert rows is not None
    if own.heads.norm_L.dtype != torch.bfloat16:
        return batch
    shape = DecodeShape(
        batch.layout.decode_rows,
        batch.layout.width,
        own.heads.count,
        own.heads.latent,
        own.heads.rope,
        rows.page_RP.shape[1],
    )
    tiling = hopper_tiling(shape, 8)
    assert tiling.path == "narrow"
    buffer = torch.full((Workspace.bytes(shape, tiling, torch.bfloat16),), 255, dtype=torch.uint8)
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    attention.schedule(rows.length_R, rows.page_RP, workspace, first=batch.first)
    return replace(batch, decode=replace(rows, workspace=workspace))


def on_small_batch_path(model: Model, token_T: torch.Tensor, batch: Batch, cache: PagedCache) -> torch.Tensor:
    ops = small_batch.SmallBatchOps(Group(), dependent=True)
    return model.segments.forward(token_T, None, batch, cache, Scratch(CPU), ops=ops)


def in_bf16(launch: Callable[..., None], otherwise: Callable[..., None]) -> Callable[..., None]:
    """The model that is compared with is in fp32, and computes as it always does on a CPU."""
    return lambda x, *rest, **options: (launch if x.dtype == torch.bfloat16 else otherwise)(x, *rest, **options)


@pytest.fixture(autouse=True)
def launch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch for tensors on a CPU what the path launches for tensors on a GPU."""

    def normed(x: PendingNorm, weight: Any, out: Any, *, norm_A: Any = None, **after: Any) -> None:
        products.stream_linear(x.x_TE, weight, out, pending=x, norm=norm_A, **after)

    def to_residual(x: Any, weight: Any, residual: Any, norm: Any, out: PendingNorm) -> None:
        products.stream_linear(x, weight, out.x_TE, residual_TF=residual, norm=norm, next=out)

    replaced = {
        "normed_linear": normed,
        "linear_to_residual": to_residual,
        "gated_linear": products.stream_gate_up,
        "rms_norm": lambda x, weight, out, *, eps: launch_rms_norm(x, weight, out, eps),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(small_batch, name, plainly(function))
    replaced = {
        "rope_absorb": lambda *args, eps: heads.rope_absorb(*args, eps),
        "merge_up": heads.merge_up,
        "head_linear": lambda x, weight, out: products.stream_heads(x, weight.transpose(1, 2), out),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(decode_rows, name, in_bf16(plainly(function), getattr(decode_rows, name)))
    monkeypatch.setattr(small_batch, "pending_norm", SimpleNamespace(enter=plainly(launch_enter)))
    few = SimpleNamespace(
        router=plainly(experts.router),
        choose=plainly(choose),
        experts=plainly(all_experts),
        choosable=experts.choosable,
    )
    monkeypatch.setattr(small_batch, "few_experts", few)
    monkeypatch.setattr(moe, "route", route)
    CHOSEN.clear()
    attend = SimpleNamespace(attend=plainly(attention.attend), merge=plainly(attention.merge))
    monkeypatch.setattr(decode_rows, "launch", attend)
    monkeypatch.setattr(LatentAttention, "plan", plan)


@pytest.mark.parametrize(
    ("overrides", "lengths", "width", "launches"),
    [
        ({}, [70], 1, 2 + (5 + 2) + (5 + 4)),
        ({}, [70, 1], 2, 2 + (5 + 2) + (5 + 4)),
        ({}, [70, 1, 3], 2, 2 + (6 + 2) + (6 + 4)),
        (V3_ROUTING, [70], 1, 2 + (6 + 2) + (6 + 4)),
    ],
    ids=["one token", "two rows", "many tokens", "query latent"],
)
def test_launches_of_a_pass(
    overrides: dict[str, Any], lengths: list[int], width: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and final norm; in each layer attention, then a dense network or experts. The plan is not counted."""
    count = 0
    run = GridExecutor.__call__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *args, **options)

    model = random_model(V2_LITE_HEADS | overrides, torch.bfloat16, CPU)
    token_T, batch, cache = decode_step(model, lengths, width)
    planned = model.layers[0].attention.plan(batch, Scratch(CPU))
    monkeypatch.setattr(LatentAttention, "plan", lambda *_: planned)
    monkeypatch.setattr(GridExecutor, "__call__", counted)
    on_small_batch_path(model, token_T, batch, cache)
    assert count == launches


@pytest.mark.parametrize(
    ("overrides", "lengths", "width"),
    [
        ({}, [600], 1),
        ({}, [130, 0, 70, 1], 1),
        ({}, [100] * 16, 1),
        ({}, [64, 90, 0], 3),
        ({"n_shared_experts": 0}, [64, 90, 0], 1),
        (V3_ROUTING, [1], 1),
        (V3_ROUTING, [200, 65], 1),
        (V3_ROUTING, [150], 4),
        (V3_ROUTING, [64, 90, 0], 3),
    ],
)
def test_the_way_equals_that_of_many_in_fp32(lengths: list[int], width: int, overrides: dict[str, Any]) -> None:
    values = V2_LITE_HEADS | overrides
    model, wide = random_model(values, torch.bfloat16, CPU), random_model(values, torch.float32, CPU)
    assert small_batch.unsupported(parse_config(values), Mesh()) == ""
    token_T, batch, cache = decode_step(model, lengths, width)
    _, _, wide_cache = decode_step(wide, lengths, width)
    before = [layer.clone() for layer in cache.layers]
    got = on_small_batch_path(model, token_T, batch, cache)
    want = wide.forward(token_T, batch, wide_cache)
    alive = torch.tensor(lengths).repeat_interleave(width) > 0
    error = (got.float() - want).norm(dim=1) / want.norm(dim=1)
    # bf16 at every boundary of some twenty products; a wrong one is off by the whole. Rounding may turn over a choice
    # between experts that are nearly level, and with it a token.
    layers = len(CHOSEN) // 2
    same = torch.stack([(CHOSEN[i] == CHOSEN[layers + i]).all(1) for i in range(layers)]).all(0)
    assert int((alive & ~same).sum()) <= 1
    assert float(torch.where(alive & same, error, 0.0).max()) < 2e-2
    touched = torch.zeros(cache.layers[0].shape[0] * 64, dtype=torch.bool)
    touched[batch.cache_slot_T] = True
    for old, new, theirs in zip(before, cache.layers, wide_cache.layers, strict=True):
        assert torch.equal(old.flatten(0, 1)[~touched], new.flatten(0, 1)[~touched])
        live = batch.cache_slot_T[alive]
        torch.testing.assert_close(new.flatten(0, 1)[live].float(), theirs.flatten(0, 1)[live], rtol=2e-2, atol=5e-2)
