"""What a CUDA graph does, on a CPU: the operators of a call, recorded once, run again on the same memory.

Nothing of the call's Python runs at a replay, so what it computed on the host, or kept from a former step, is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
