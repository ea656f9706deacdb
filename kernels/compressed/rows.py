"""Where the tokens of a call belong, and checks of tensors before a launch: kernels see only pointers.

Shape legend: as of `kernels.compressed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """Where the tokens of a call belong. Those of a row stand side by side, in the order of their positions, and no two
    rows have the same slot."""

    position_T: Tensor
    """int64; of tokens of nobody arbitrary."""
    row_T: Tensor
    """int32: each token's row, -1 of padding."""
    slot_R: Tensor
    """int64: slot of each row, -1 of padding."""
    page_RP: Tensor
    """int32 page tables, with contiguous rows; behind a row's last page arbitrary."""
    fault_1: Tensor
    """int64: counts tokens of which something is outside of what it points into."""
    width: int = 0
    """Tokens of each row where all are decode rows, which stand in turn; 0: chunks of any size."""

    def check(self, tokens: int) -> None:
        """ValueError where these are no rows of so many tokens."""
        contiguous("position_T", self.position_T, (tokens,), torch.int64)
        contiguous("row_T", self.row_T, (tokens,), torch.int32)
        contiguous("slot_R", self.slot_R, (len(self.page_RP),), torch.int64)
        contiguous("fault_1", self.fault_1, (1,), torch.int64)
        if self.page_RP.dim() != 2 or self.page_RP.dtype != torch.int32 or self.page_RP.stride(1) != 1:
            raise ValueError(f"page_RP must be int32 with contiguous rows, not {told(self.page_RP)}")
        if self.width and tokens != self.width * len(self.slot_R):
            raise ValueError(f"{len(self.slot_R)} decode rows of {self.width} tokens each are not {tokens} tokens")


def contiguous(name: str, tensor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> None:
    """ValueError where a tensor is not contiguous, of another shape, or of another dtype."""
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, {tuple(shape)} of {dtype}, not {told(tensor)}")


def rows_of_features(name: str, tensor: Tensor, shape: Iterable[int], dtypes: Iterable[torch.dtype] = ()) -> None:
    """ValueError where the last dimension of a tensor is not contiguous, its shape another, or its dtype none of some
    (of no `dtypes`: none that floats)."""
    wrong = tensor.dtype not in dtypes if dtypes else not tensor.is_floating_point()
    if tensor.shape != tuple(shape) or wrong or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be {tuple(shape)}, its features side by side, not {told(tensor)}")


def rotations(name: str, rotation: Tensor, tokens: int | None, features: int) -> None:
    """ValueError where these are no rotations of so many tokens, or of any number of positions (None)."""
    count = len(rotation) if tokens is None else tokens
    roped = rotation.shape[-1]
    if rotation.shape != (count, roped) or rotation.dtype != torch.float32 or rotation.stride(1) != 1:
        raise ValueError(f"{name} must be fp32 rotations of {count} tokens, not {told(rotation)}")
    if roped % 2 or features % 2 or roped > features:
        raise ValueError(f"{roped} roped features, which come in pairs, are not among {features}")


def room(name: str, length: int, needed: int, width: int) -> None:
    """ValueError where the ring of decode rows has no room for what the first token of a step needs and the step's."""
    if width and length < needed + width - 1:
        raise ValueError(
            f"{name} holds {length} tokens: rows of {width} tokens, which may be rejected, need {needed + width - 1}"
        )


def told(tensor: Tensor) -> str:
    """A tensor's shape, dtype and strides, for an error."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
