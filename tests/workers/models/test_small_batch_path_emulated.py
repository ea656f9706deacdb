"""A pass on the small-batch path as it was compiled, run by the PTX emulator: its launches are dependent, and follow
each other on memory that holds poison."""

import re
from typing import Any

import pytest
import torch
from emulated_path import CPU, SMALL, launch_everything
from random_model import decode_step, random_model

import workers.models.small_batch as small_batch
from tests.support.ptx import Unordered, emulated
from workers.memory.scratch import Scratch
from workers.parallel.group import Group

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_everything(monkeypatch)


INT4 = {"hidden_size": 256, "moe_intermediate_size": 256}


def check(lengths: list[int], width: int, heads: int = 2, int4: bool = False, shared: int = 1, **how: Any) -> list[str]:
    small = SMALL | {"num_attention_heads": heads} | (INT4 | {"n_shared_experts": shared} if int4 else {})
    model, wide = (random_model(small, dtype, CPU, int4_experts=int4) for dtype in (torch.bfloat16, torch.float32))
    token_T, batch, cache = decode_step(model, lengths, width)
    _, _, wide_cache = decode_step(wide, lengths, width)
    poisoned = torch.full((1 << 20,), 255, dtype=torch.uint8)
    with emulated(consecutive=True, **how) as launches:
        ops = small_batch.SmallBatchOps(Group(), dependent=True)
        got = model.segments.forward(token_T, None, batch, cache, Scratch(CPU, poisoned), ops=ops)
    want = wide.forward(token_T, batch, wide_cache)
    alive = torch.tensor(lengths).repeat_interleave(width) > 0
    error = ((got.float() - want).norm(dim=1) / want.norm(dim=1))[alive]
    assert float(error.max()) < 2e-2  # bf16 at every boundary of some twenty products
    return launches


@pytest.mark.parametrize(("lengths", "heads", "merging"), [([70], 2, 1), ([70, 0], 2, 1), ([70, 0], 9, 2)])
def test_a_pass_is_right_and_in_order(lengths: list[int], heads: int, merging: int) -> None:
    """The plan, the embedding, a dense layer, one of experts, and the final norm."""
    assert len(check(lengths, 1, heads)) == 1 + 2 + (4 + merging + 2) + (4 + merging + 4)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("lengths", [[70], [70, 0, 3]])
def test_experts_in_int4(lengths: list[int], shared: int) -> None:
    """Launches behind attention are the router, the choice, for several tokens their order, the shared experts, the
    others."""
    launches = check(lengths, 1, int4=True, shared=shared)
    sorts = ["sort_few"] if len(lengths) > 1 else []
    own = ["stream_gate_up", "stream_linear"] if shared else []
    routed = ["route", *sorts, *own, "product", "product", "combine_pending"]
    assert launches[-2 - len(routed) : -1] == ["router", *routed]


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


def test_experts_in_int4_that_start_before_their_choice_are_found() -> None:
    def edit(ptx: str) -> str:
        early = "griddepcontrol.launch_dependents; mov.u32"
        return ptx.replace("mov.u32", early) if ".entry stream_gate_up(" in ptx else ptx

    with pytest.raises(Unordered):
        check([70], 1, int4=True, edit=edit)


@pytest.mark.parametrize(("kernel", "length"), [("attend_narrow", 70), ("attend_wide", 150)])
def test_attention_that_does_not_wait_is_found(kernel: str, length: int) -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if f".entry {kernel}(" in ptx else ptx

    with pytest.raises(Unordered):
        check([length], 4, heads=9, edit=edit)
