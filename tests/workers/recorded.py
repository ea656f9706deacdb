"""Emulation of a CUDA graph on a CPU: the operators of a call, recorded once, run again on the same memory.

Nothing of the call's Python runs at a replay, so what it computed on the host, or kept from a former step, is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import deterministic_math
from kernels.linear import grouped_linear, linear
from kernels.moe import reference as moe_reference


def no_host_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose references look at no value on the host, as the kernels do not."""
    monkeypatch.setattr(moe_reference, "experts_grouped", moe_reference.experts_gathered)
    monkeypatch.setattr(moe_reference, "add_experts", add_experts_of_all)


def add_experts_of_all(
    x_TE: Tensor, id_TK: Tensor, weight_TK: Tensor, gate_up_XFE: Tensor, down_XEI: Tensor, sum_TGE: Tensor, limit: float
) -> None:
    """Add experts as the reference does; every expert computes every token. `limit`: see `kernels.moe.experts`."""
    tokens, compute = x_TE.shape[0], torch.promote_types(x_TE.dtype, torch.float32)
    part_TKGE = torch.zeros(*id_TK.shape, *sum_TGE.shape[1:], dtype=compute)
    for expert, (gate_up_FE, down_EI) in enumerate(zip(gate_up_XFE, down_XEI, strict=True)):
        gate_up_TF = torch.empty(tokens, gate_up_FE.shape[0], dtype=compute)
        linear(x_TE.to(compute), gate_up_FE.to(compute), gate_up_TF, invariant=True)
        gate_TI, up_TI = moe_reference.clamped(*gate_up_TF.chunk(2, dim=-1), limit)
        part_TGE = torch.empty(tokens, *sum_TGE.shape[1:], dtype=compute)
        grouped_linear((deterministic_math.silu(gate_TI) * up_TI).to(x_TE.dtype), down_EI, part_TGE)
        weighed_TKGE = part_TGE.unsqueeze(1) * weight_TK[..., None, None]
        part_TKGE = weighed_TKGE.where((id_TK == expert)[..., None, None], part_TKGE)
    for part_TGE in part_TKGE.unbind(1):
        sum_TGE += part_TGE


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators in their order, with the tensors they were given and those they returned."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        with self:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value went to the host while a call was recorded")
        result = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run the operators again; what one of them had allocated is the memory of its result again."""
        for func, args, kwargs, result in self._steps:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)
