"""The benchmark of decode steps builds its steps and runs them; what it times needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.bench_shapes import SMALL
from workers.memory.scratch import Scratch

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("width", [1, 3])
@torch.inference_mode()
def test_a_step_runs_and_moves_on(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench

    cpu = torch.device("cpu")
    model = bench.model_of(bench.SHAPES["v2-lite"][0] | SMALL, width, torch.float32, cpu)
    case = bench.Case(model, 2, width, 100, room=8)
    assert 6 <= bench.chosen_experts(case) <= 8
    case.rewind()
    output = case.step(Scratch(cpu)).run()
    accepted = output.decided_N[2 * width : 2 * width + 2]
    assert torch.equal(case.state.tensors.length_S[:2], 100 - width + 1 + accepted)
    assert int(output.decided_N[-1]) == 0
    case.rewind()
    assert case.state.tensors.length_S[:2].tolist() == [100 - width] * 2


@torch.inference_mode()
def test_a_slice_of_v3_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench
    import shapes

    values, form = bench.SHAPES["v3-slice"]
    small = SMALL | {"hidden_size": 256, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    small |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}
    model = bench.model_of(values | small, 1, torch.float32, torch.device("cpu"), form)
    attention, network = model.layers[1].attention, model.layers[1].feed_forward
    matrices = (attention.down_FE, attention.q_up_QA, attention.out_EF, *vars(network.mixture).values())
    assert [w.format is form for w in matrices if isinstance(w, shapes.Weight)] == [True, True, True, False, True, True]
    assert network.mixture.gate_up_XFE.dequantized(torch.float32).std() == pytest.approx(0.02, rel=0.1)
    case = bench.Case(model, 2, 1, 100, room=8)
    case.step(Scratch(torch.device("cpu"))).run()


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("shape", ["v32-slice", "glm52-slice"])
@torch.inference_mode()
def test_slices_with_indexers_select(shape: str, fp8_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is longer than what is attended to; and what the slices cannot do without counts their indexers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench
    import shapes

    values, form = bench.SHAPES[shape]
    small = SMALL | {"hidden_size": 256, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    small |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "num_hidden_layers": 5}
    small |= {"index_n_heads": 4, "index_topk": 64}
    model = bench.model_of(values | small, 2, torch.float32, torch.device("cpu"), form, fp8_cache=fp8_cache)
    layers = [layer.attention for layer in model.layers]
    full = [index for index, own in enumerate(layers) if own.indexer is not None]
    assert full == ([0, 1, 2, 3, 4] if shape == "v32-slice" else [0, 4])
    indexer = layers[0].indexer
    assert [weight.format is form for weight in (indexer.q_FA, indexer.both_XE)] == [True, False]
    case = bench.Case(model, 2, 2, 100, room=8)
    assert case.step(Scratch(torch.device("cpu"))).run().decided_N[-1] == 0
    near, far = (shapes.target_work(model, shapes.Tokens.decode(2, 2, context, 8)) for context in (64, 128))
    grown = far[shapes.ATTENTION].bytes - near[shapes.ATTENTION].bytes
    # Twice as many keys are scored, no more latents are read.
    assert grown == pytest.approx(len(full) * 2 * 64 * indexer.cache.entry_bytes)


@torch.inference_mode()
def test_a_slice_of_k2_has_experts_in_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench

    values, form = bench.SHAPES["k2-slice"]
    small = SMALL | {"hidden_size": 256, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    model = bench.model_of(values | small, 1, torch.float32, torch.device("cpu"), form)
    attention, network = model.layers[1].attention, model.layers[1].feed_forward
    mixture, shared = network.mixture, network.mixture.shared
    experts, others = (mixture.gate_up_XFE, mixture.down_XEI), (attention.out_EF, shared.gate_up_FE, shared.down_EI)
    assert {weight.format for weight in experts} == {form}
    assert form not in {weight.format for weight in others}
    assert mixture.gate_up_XFE.dequantized(torch.float32).std() == pytest.approx(0.02, rel=0.1)
    assert mixture.routing.shared_experts == 0
    case = bench.Case(model, 2, 1, 100, room=8)
    case.step(Scratch(torch.device("cpu"))).run()


def test_bytes_of_a_product_with_int4_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of gate and up of one of Kimi K2's experts are those that its matrix has."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench

    from kernels.moe import four_bit_tiles

    launch = (four_bit_tiles.product, (1,), (), {"AHEAD": 2, "GATE": True, "FEATURES": 2048, "K": 7168})
    assert bench.streamed_bytes(launch, 2.5) == 2.5 * 4096 * 7168 * (1 / 2 + 2 / 32)


@torch.inference_mode()
def test_paths_that_are_taken_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the check is what it was behind it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench

    takes = bench.ExecutionPaths.takes_small_batch
    model = bench.model_of(bench.SHAPES["v2-lite"][0] | SMALL, 1, torch.float32, torch.device("cpu"))
    case = bench.Case(model, 2, 1, 100, room=8)
    with bench.noted_paths() as noted:
        assert bench.chosen_experts(case) > 0
    assert noted
    assert not any(noted)
    assert bench.ExecutionPaths.takes_small_batch is takes
