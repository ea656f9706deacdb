"""Memory for the masks of a step, on the host and on the device.

One buffer holds an index for every logits row, then the masks of constrained rows alone. It is filled on the host and
copied in one piece, as far as it is used, so that a step pays for the masks that it has. Addresses stay: a captured
second half reads what lies there when it is replayed.

Shape legend: N logits rows, B integers of a mask, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.sampling import TokenMasks, mask_words

NO_MASK = -1


class StepMasks:
    """Masks of up to `rows` logits rows; 4 bytes for every 32 ids of each, twice: on the host, pinned, and on the
    device. On a CPU the two are one."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.rows, self.words = rows, mask_words(vocab)
        size = rows + rows * self.words
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.int32, device=device)
        self._host[:rows] = NO_MASK
        self._device[:rows] = NO_MASK
        self._index_N = self._host[:rows].numpy()
        self._used = 0
        self._host_NB = self._host[rows:].view(rows, self.words).numpy()
        self.masks = TokenMasks(self._device[:rows], self._device[rows:].view(rows, self.words))
        """Masks on the device."""

    def clear(self) -> None:
        """No row has a mask. The last `upload` must have happened: its step is over."""
        self._index_N.fill(NO_MASK)
        self._used = 0

    def take(self, logits_row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the buffer for the mask of this logits row, int32 [B]."""
        taken, self._used = self._used, self._used + 1
        self._index_N[logits_row] = taken
        mask_B: np.ndarray[Any, np.dtype[np.int32]] = self._host_NB[taken]
        return mask_B

    def give_back(self, logits_row: int) -> None:
        """The mask that was taken for this logits row is not wanted. Its memory is free again if it was taken last."""
        self._used -= int(self._index_N[logits_row]) == self._used - 1
        self._index_N[logits_row] = NO_MASK

    def upload(self) -> TokenMasks:
        """Copy what is used to the device, in one piece that nothing waits for."""
        if self._device is not self._host:
            used = self.rows + self._used * self.words
            self._device[:used].copy_(self._host[:used], non_blocking=True)
        return self.masks
