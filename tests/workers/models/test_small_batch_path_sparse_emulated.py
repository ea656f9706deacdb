"""A pass of sparse attention on the small-batch path as it was compiled, run by the PTX emulator: all its launches but
those of torch are dependent, and follow each other on memory that holds poison."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_path import CPU, launch_everything
from random_model import decode_step, random_model
from torch import Tensor

import workers.models.small_batch as small_batch
from kernels.index_rope import launch_index_rope
from kernels.linear import launch as products
from kernels.sparse import attention_launch, launch
from tests.support.ptx import Unordered, emulated
from workers.memory.scratch import Scratch
from workers.models.attention import indexer, short_rows, sparse_rows, sparse_workspaces
from workers.models.choices import Recorded, Taken
from workers.models.model import Model
from workers.parallel.group import Group

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 64,
    "indexer_types": ["full", "shared"],
}
PRODUCTS = "stream_linear"
BEFORE_ATTENTION = ["index_rope", "rope_absorb", "write_keys", "score_pages"]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect launches in the bf16 model; the one that is compared with computes as it always does on a CPU."""
    launch_everything(monkeypatch)

    def kernel(module: Any, name: str, honest: Any, place: int) -> None:
        plain = getattr(module, name)

        def call(*tensors: Tensor, **options: Any) -> None:
            (honest if tensors[place].dtype == torch.bfloat16 else plain)(*tensors, **options)

        monkeypatch.setattr(module, name, call)

    def roped(*tensors: Any, eps: float, factor: float, code_TJI: Any, dependent: bool) -> None:
        launch_index_rope(*tensors, code_TJI, eps, factor, dependent=dependent)

    def attended(*tensors: Any, scale: float, workspace: Any, invariant: bool, dependent: bool) -> None:
        attention_launch.sparse_decode(*tensors, workspace, scale=scale, dependent=dependent)

    def multiplied(x: Tensor, weight: Tensor, out: Tensor, *, invariant: bool, dependent: bool) -> None:
        products.stream_heads(x, weight.transpose(1, 2), out, dependent=dependent)

    kernel(indexer, "index_rope", roped, 0)
    kernel(sparse_rows, "write_index_keys", launch.write_index_keys, 0)
    kernel(sparse_rows, "index_scores", launch.index_scores, 0)
    kernel(sparse_rows, "sparse_decode", attended, 0)
    kernel(sparse_rows, "head_linear", multiplied, 0)
    select = sparse_rows.select_positions

    def selected(*tensors: Any, dependent: bool) -> None:
        (launch.select_positions if tensors[-1] is not None else select)(*tensors, dependent=dependent)

    monkeypatch.setattr(sparse_rows, "select_positions", selected)
    kernel(short_rows, "write_index_keys", launch.write_index_keys, 0)
    for module in (indexer, short_rows, sparse_rows):
        monkeypatch.setattr(module, "launches_dependently", lambda device: True)

    def in_memory(heads: Any, device: torch.device) -> bool:
        return bool(heads.norm_L.dtype == torch.bfloat16)

    monkeypatch.setattr(sparse_workspaces, "works_in_memory", in_memory)


def models(fp8_cache: bool) -> tuple[Model, Model]:
    found = [random_model(SMALL, dtype, CPU, fp8_cache=fp8_cache) for dtype in (torch.bfloat16, torch.float32)]
    return found[0], found[1]


def check(lengths: list[int], width: int, fp8_cache: bool = False, *, dense: bool = False, **how: Any) -> list[str]:
    """`dense`: the pass attends densely. What it is compared with never does."""
    model, wide = models(fp8_cache)
    token_T, batch, cache = decode_step(model, lengths, width)
    _, _, wide_cache = decode_step(wide, lengths, width)
    buffer = torch.full((1 << 21,), 255, dtype=torch.uint8)
    poisoned = buffer[-buffer.data_ptr() % 256 :]  # a GPU's memory begins with a line
    recorded = Recorded()
    with emulated(consecutive=True, fences=False, **how) as launches:
        ops = small_batch.SmallBatchOps(Group(), dependent=True)
        ops.choices = recorded
        own = replace(batch, dense=dense)
        got = model.segments.forward(token_T, None, own, cache, Scratch(CPU, poisoned), ops=ops)
    taken = Taken(recorded, layers=0, selecting=1)
    with wide.paths.choosing(taken):
        want = wide.forward(token_T, batch, wide_cache)
    alive = torch.tensor(lengths).repeat_interleave(width) > 0
    error = ((got.float() - want).norm(dim=1) / want.norm(dim=1))[alive]
    # bf16 at every boundary of some twenty products. Of what scores alike another may be selected, more so in INT8.
    assert float(error.max()) < 3e-2
    assert taken.agreement > 0.9
    if not fp8_cache:  # keys of new tokens are there, and no other key has changed
        index, wide_index = (of.layers[1][1:].float() for of in (cache, wide_cache))
        torch.testing.assert_close(index, wide_index, atol=5e-2, rtol=5e-2)
    return launches


def test_a_pass_is_right_and_in_order() -> None:
    """The embedding, a dense layer with an indexer, one of experts that attends to what the first has selected, and the
    final norm: what the indexer adds are two products and its own kernels."""
    launches = check([130, 0], 1)
    selecting = launches.index("score_pages") + 1
    selection = launches[selecting : launches.index("attend")]
    assert 1 <= len(selection) <= 5
    assert selection[-1] == "list_positions"
    attention = ["attend", "merge", PRODUCTS]
    first = [PRODUCTS] * 2 + ["router", PRODUCTS, *BEFORE_ATTENTION, *selection, *attention]
    first += [PRODUCTS, "stream_gate_up", PRODUCTS]
    second = [PRODUCTS] * 2 + ["rope_absorb", *attention, PRODUCTS]
    assert launches[1 : 1 + len(first) + len(second)] == first + second


@pytest.mark.parametrize(("lengths", "width"), [([60, 0], 1), ([2, 64, 31], 2)])
def test_short_rows_are_dense(lengths: list[int], width: int) -> None:
    """Only the keys of an indexer are made: one product, norm and rope, and what writes them. The layer that attends to
    what others select has none."""
    launches = check(lengths, width, dense=True)
    keys = launches.index("index_rope")
    assert launches[keys + 1 : keys + 4] == ["write_keys", "rope_absorb", "attend_narrow"]
    assert launches.count("rope_absorb") == 2
    assert not {"score_pages", "list_positions", "attend"} & {*launches}
    assert (keys, launches.count("index_rope"), launches.count("write_keys")) == (5, 1, 1)


def test_short_rows_are_dense_on_fp8_caches() -> None:
    assert "score_pages" not in check([60, 0, 9], 1, fp8_cache=True, dense=True)


def test_rows_of_several_tokens_on_fp8_caches() -> None:
    assert "index_rope" in check([130, 0, 2], 2, fp8_cache=True)


def test_what_does_not_wait_is_found() -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if re.search(r"\.entry index_rope\(", ptx) else ptx

    with pytest.raises(Unordered):
        check([130], 1, edit=edit)
