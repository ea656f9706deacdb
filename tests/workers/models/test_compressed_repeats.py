"""Attention of DeepSeek V4 on a CPU that passes for a GPU: what is repeated for a layer is what the layer itself would
launch, and the memory that it takes is what is reserved for it.

Kernels compute nothing here, as in test_repeated_launches.py; test_compressed_pass_gpu.py compares results on a real
GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import CPU
from test_compressed_pass import Steps
from test_deepseek_v4_reference import case, poisoned
from test_repeated_launches import Launch, Operators, comparing, log
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.compressed import attention_launch, wide
from kernels.runtime.repeat import Layers, Repeat
from workers.memory.scratch import Scratch
from workers.models import model as models_model
from workers.models.attention import compressed_rows
from workers.models.attention.compressed_rows import reserve
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.choices import Recorded
from workers.models.compressed_pass import CompressedPass
from workers.protocol.plan import BatchLayout

__all__ = ["log"]


class Box:
    """Stands for a descriptor of queries, which have fewer features than Hopper's kernel takes."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides, self.padding = base, base.shape, base.stride(), "zero"


Chunk = tuple[int, int, int]
"""Slot, first position and tokens of a chunk."""


def batch(decoding: list[int], width: int, chunks: list[Chunk]) -> Batch:
    """A step of decode rows, which end after so many tokens, in the first slots, and of chunks."""
    counts = tuple(count for _, _, count in chunks)
    layout = BatchLayout(width, len(decoding), counts, (True,) * len(chunks))
    positions = [torch.arange(end - width, end) for end in decoding]
    position_T = torch.cat([*positions, *(torch.arange(start, start + count) for _, start, count in chunks)])
    decode = prefill = None
    if decoding:
        page_RP = torch.ones(len(decoding), 4, dtype=torch.int32)
        length_R = torch.tensor(decoding, dtype=torch.int32)
        decode = DecodeBatch(length_R, page_RP, slot_R=torch.arange(len(decoding)))
    if chunks:
        page_NP = torch.ones(len(chunks), 4, dtype=torch.int32)
        slots, starts = tuple(slot for slot, _, _ in chunks), tuple(start for _, start, _ in chunks)
        prefill = PrefillBatch(starts, counts, page_NP, slots)
    return Batch(layout, position_T, torch.zeros_like(position_T), decode, prefill)


STEPS: list[tuple[list[int], int, list[Chunk]]] = [
    ([40, 9], 2, [(2, 30, 20)]),
    ([40], 1, [(1, 0, 3), (2, 64, 9)]),
    ([], 1, [(0, 0, 21)]),
    ([40, 9, 7], 3, []),
]


@pytest.mark.parametrize(
    ("kind", "hopper"), [("plain", False), ("published ratios", False), ("published ratios", True)]
)
@torch.inference_mode()
def test_a_repeated_layer_launches_what_it_would_itself(
    kind: str,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
    log: list[Launch],
) -> None:
    """Decode rows beside chunks, chunks alone, which attend in turns, and decode rows alone; with the portable kernel,
    and with Hopper's own."""
    model = case(kind).model
    if hopper:
        monkeypatch.setattr(attention_launch, "takes_hopper", lambda *_: True)
        monkeypatch.setattr(attention_launch, "is_hopper", lambda device: True)
        monkeypatch.setattr(wide, "queries_box", Box)
    buffer, cache = torch.zeros(1 << 25, dtype=torch.uint8), poisoned(model)
    monkeypatch.setattr(models_model, "Scratch", lambda device: Scratch(device, buffer))
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: 8)
    compared = comparing(monkeypatch, log)
    assert isinstance(model.segments, CompressedPass)
    layers = [layer.kind for layer in model.segments.layers]
    for step in (batch(*given) for given in STEPS):
        with monkeypatch.context() as patch, Operators(log):
            patch.setattr(Tensor, "is_cuda", True)
            model.forward(torch.zeros_like(step.position_T), step, cache)
    assert len(compared) == len(STEPS) * (len(layers) - len(set(layers))) > 0
    for repeated, own in compared:
        assert repeated == own
        attending = {"find_entries", "attend_entries"} if hopper else {"attend"}
        assert {"rope_store_kernel", *attending} <= {name for name, *_ in own}


@pytest.mark.parametrize("kind", ["plain", "published ratios"])
@pytest.mark.parametrize(("step", "width"), [(STEPS[2], 0), (([40, 9], 2, []), 2)])
@torch.inference_mode()
def test_attention_takes_the_memory_that_is_reserved_for_it(
    step: tuple[list[int], int, list[Chunk]],
    width: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    log: list[Launch],
) -> None:
    """`latentserve fit` counts with that."""
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: 8)
    model, given, scratch = case(kind).model, batch(*step), Scratch(CPU)
    cache, segments = poisoned(model), model.segments
    assert isinstance(segments, CompressedPass)
    buffers = segments.buffers(len(given.position_T), scratch)
    (rows,) = segments._rows(given, cache, buffers, scratch)
    for layer, caches in zip(segments.layers, segments._caches(cache), strict=True):
        taken, reserved = Scratch(CPU), Scratch(CPU)
        with monkeypatch.context() as patch, Operators(log):
            patch.setattr(Tensor, "is_cuda", True)
            rows.attend(layer.attention, layer.inputs(buffers), caches, buffers.attended_THD, taken)
        sizes = tuple(buffers.q_THD.shape), buffers.q_THD.dtype
        reserve({layer.kind}, model.compression, *sizes, 4, width, reserved)
        assert taken.peak == reserved.peak > 0


def test_where_nothing_can_be_repeated_every_layer_launches_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with memory that is another one for every layer, and where somebody wants to know what was selected."""
    model, step, fixed = case("plain").model, batch(*STEPS[0]), Scratch(CPU, torch.empty(1 << 12, dtype=torch.uint8))
    cache, segments = poisoned(model), model.segments
    assert isinstance(segments, CompressedPass)
    buffers = segments.buffers(len(step.position_T), Scratch(CPU))
    assert segments._repeats(step, cache, buffers, fixed) is None
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", True)
        found = segments._repeats(step, cache, buffers, fixed)
        assert found is not None
        assert {kind: type(repeat) for kind, repeat in found.items()} == {
            layer.kind: Repeat for layer in segments.layers
        }
        assert segments._repeats(step, cache, buffers, Scratch(CPU)) is None
        with model.paths.choosing(Recorded()):
            assert segments._repeats(step, cache, buffers, fixed) is None


def test_a_cache_that_is_given_other_tensors_is_not_taken_for_the_former_one() -> None:
    """If a ring or pages had tensors that are unknown, a layer would be launched with those of the first."""
    rows, told = Steps(case("plain"), poisoned(case("plain").model)), []
    segments, cache = rows.case.model.segments, rows.cache
    assert isinstance(segments, CompressedPass)

    def known() -> list[set[int]]:
        found: dict[Any, Layers] = segments.own_tensors(cache)
        told.append(found)
        return [{id(tensor) for tensor in own} for layers in found.values() for own in layers.own]

    def missing(found: list[set[int]]) -> set[int]:
        return {id(tensor) for tensor in [*cache.layers, *cache.rings]} - set().union(*found)

    assert not missing(known())
    for tensors in (cache.layers, cache.rings):
        tensors[0] = tensors[0].clone()
        assert not missing(known())
    assert not missing(known())
    assert [one is told[-1] for one in told] == [False, False, True, True]


def test_a_cache_that_is_gone_leaves_no_memory_behind() -> None:
    model = case("plain").model
    segments, caches = model.segments, [poisoned(model) for _ in range(2)]
    assert isinstance(segments, CompressedPass)
    for cache in caches:
        segments.own_tensors(cache)
    kept, gone = (
        [StorageWeakRef(tensor.untyped_storage()) for tensor in [*cache.layers, *cache.rings]] for cache in caches
    )
    del caches[1], cache
    assert all(one.expired() for one in gone)
    assert not any(one.expired() for one in kept)
