"""Repeated launches for a layer are what the layer itself would launch, in every form of attention.

Kernels compute nothing here: what they and torch's operators are given is compared, addresses and numbers, on a CPU
that passes for a GPU. tests/workers/models/test_models_gpu.py compares results on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from paged import CPU, Paged
from random_model import V2_LITE_HEADS, random_model
from tiny_models import random_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from kernels import linear, mla_decode
from kernels.mla_prefill import launch as prefill_launch
from kernels.runtime import repeat
from kernels.runtime.repeat import Repeat
from kernels.sparse import workspace
from workers.memory.scratch import Scratch
from workers.models import model as models_model
from workers.models.attention import expanded, sparse_rows, sparse_workspaces

Launch = tuple[Any, ...]


def plainly(value: Any) -> Any:
    """Return what a device would see of an argument."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(map(plainly, value))
    if hasattr(value, "base"):
        return value.base.data_ptr(), tuple(value.shape), tuple(value.strides), value.padding
    return value


class Launched:
    """Stands for a compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name: str, log: list[Launch]) -> None:
        self.name, self.log = name, log

    def run(self, *args: Any) -> None:
        self.log.append((self.name, *map(plainly, args)))


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)
"""Left out: nobody asks for their results, and in bfloat16 a CPU takes long for them."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs operators that write: the function, then where and how each tensor lies."""

    def __init__(self, log: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            values = (*args, *(kwargs or {}).values())
            seen = [(x.data_ptr(), x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in values]
            self.log.append((str(func), *seen))
        if func.overloadpacket in PRODUCTS:
            return kwargs["out"] if kwargs else args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch, whether Triton is asked for it or it is repeated."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Launched:
        values = [*args, *(named.get(p.name, p.default) for p in kernel.params[len(args) :])]
        compiled = Launched(kernel.fn.__name__, launches)
        compiled.run(*(*grid, 1, 1)[:3], 0, "function", "metadata", None, None, None, *values)
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(repeat, "_RUN", run)
    monkeypatch.setattr(repeat, "_stream", lambda device: 0)
    monkeypatch.setattr(repeat, "_direct", lambda compiled: None)
    return launches


def comparing(patch: pytest.MonkeyPatch, log: list[Launch]) -> list[tuple[list[Launch], list[Launch]]]:
    """Launch every layer but the first twice from now on. Return the list that fills with what was repeated for it, and
    what it launches itself."""
    compared: list[tuple[list[Launch], list[Launch]]] = []
    plain = Repeat.__call__

    def twice(self: Repeat, index: int, call: Callable[[], None]) -> None:
        def asked() -> None:
            assert index == 0
            call()

        begin = len(log)
        plain(self, index, asked)
        middle = len(log)
        if index:
            call()
            compared.append((log[begin:middle], log[middle:]))

    patch.setattr(Repeat, "__call__", twice)
    return compared


SIZES = ((3, 1), (3, 4), (20, 1))
OVERRIDES: dict[str, dict[str, Any]] = {
    "query": {},
    "latent query": {"q_lora_rank": 64},
    "many heads": {"num_attention_heads": 32},
}
DEVICES = {"hopper": (torch.bfloat16, True), "bfloat16": (torch.bfloat16, False), "float32": (torch.float32, False)}
EVERY = enumerate(product(SIZES, OVERRIDES, DEVICES, (False, True)))


@pytest.mark.parametrize(
    ("rows", "width", "overrides", "dtype", "hopper", "invariant"),
    [
        pytest.param(
            *(*sizes, OVERRIDES[queries], *DEVICES[device], invariant),
            marks=() if number % 5 == 0 else pytest.mark.long,
            id=f"{sizes[0]}-{sizes[1]}-{queries}-{device}-{'invariant' if invariant else ''}",
        )
        for number, (sizes, queries, device, invariant) in EVERY
    ],
)
@torch.inference_mode()
def test_a_repeated_layer_launches_what_it_would_itself(
    rows: int,
    width: int,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    invariant: bool,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
    log: list[Launch],
) -> None:
    """Decode rows alone; beside chunks, short and long, with and without context; chunks alone. Context comes in two
    pieces, once in one of 14 entries."""
    monkeypatch.setattr(expanded, "CONTEXT_ENTRIES", 256)
    layers = 3
    model = random_model(V2_LITE_HEADS | {"num_hidden_layers": layers} | overrides, dtype, CPU, invariant=invariant)
    buffer = torch.zeros(1 << (29 if invariant else 27), dtype=torch.uint8)
    monkeypatch.setattr(models_model, "Scratch", lambda device: Scratch(device, buffer))
    for module in (linear, mla_decode, prefill_launch):
        monkeypatch.setattr(module, "is_hopper", lambda device: hopper)
    compared = comparing(monkeypatch, log)
    sequences = [random_tokens(80, row, 160) for row in range(rows)]
    sequences += [random_tokens(700, 1000, 160), random_tokens(300, 1001, 160)]
    long, other, some = rows, rows + 1, list(range(rows))
    paged = Paged(model, sequences)
    for decode, tokens, chunks in [
        ([], 1, [(row, 60) for row in some]),
        (some, width, [(long, 270)]),
        (some, width, [(long, 17), (other, 280)]),
        (some, width, []),
        ([], 1, [(long, 350)]),
    ]:
        step = paged.plan(decode, tokens, chunks)
        with monkeypatch.context() as patch, Operators(log):
            patch.setattr(Tensor, "is_cuda", True)
            paged.forward(step)
    assert len(compared) == 5 * (layers - 1)
    for repeated, own in compared:
        assert repeated == own
        assert repeated


@torch.inference_mode()
def test_a_repeated_layer_widens_its_own_cache(monkeypatch: pytest.MonkeyPatch, log: list[Launch]) -> None:
    """Attention is sparse: chunks whose context is widened are beside decode rows and chunks that attend to the FP8
    cache."""
    layers = 3
    indexing = {"n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 64}
    sizes = {"model_type": "deepseek_v32", "q_lora_rank": 64, "num_attention_heads": 64, "num_hidden_layers": layers}
    model = random_model(V2_LITE_HEADS | indexing | sizes, torch.bfloat16, CPU, fp8_cache=True)
    buffer = torch.zeros(1 << 29, dtype=torch.uint8)
    monkeypatch.setattr(models_model, "Scratch", lambda device: Scratch(device, buffer))
    for module in (linear, mla_decode, prefill_launch, sparse_workspaces, workspace):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(sparse_workspaces, "works_in_memory", lambda heads, device: True)
    monkeypatch.setattr(sparse_rows, "refuse_out_of_bounds", lambda fault_1: None)
    compared = comparing(monkeypatch, log)
    paged = Paged(model, [random_tokens(400, row, 160) for row in range(4)])
    for decode, chunks in [([], [(0, 70), (1, 3), (2, 100)]), ([0], [(1, 64), (2, 10), (3, 200)])]:
        with monkeypatch.context() as patch, Operators(log):
            patch.setattr(Tensor, "is_cuda", True)
            paged.forward(paged.plan(decode, 1, chunks))
    assert len(compared) == 2 * (layers - 1)
    caches = [cache.data_ptr() for cache in paged.cache.layers[0 : 2 * layers : 2]]
    for place, (repeated, own) in enumerate(compared):
        assert repeated == own
        (gathered,) = [launch for launch in own if launch[0] == "gather_context_kernel"]
        assert caches[1 + place % (layers - 1)] in gathered
        # A stretch each; decode rows have one more.
        attended = [name for name, *_ in own if name in ("attend_selected", "attend_selected_wide_fp8")]
        wide, narrow = "attend_selected", "attend_selected_wide_fp8"
        assert attended == ([wide, narrow, wide] if place < layers - 1 else [narrow, wide, narrow, wide])
