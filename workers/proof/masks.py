"""Masks that nobody asked for, which split steps are proven under."""

from __future__ import annotations

import random

from kernels.sampling import TokenMasks
from workers.step.masks import StepMasks


class RandomMasks:
    """Masks of the rows of a step: most allow a few ids, some nearly all, and some rows have none. They lie where those
    of requests do. Ranks that do not sample have none."""

    def __init__(self, masks: StepMasks | None, seed: int = 0) -> None:
        self._masks, self._random = masks, random.Random(seed)

    def draw(self, rows: int) -> None:
        """New masks for so many logits rows."""
        if self._masks is None:
            return
        self._masks.clear()
        for row in self._random.sample(range(rows), rows):
            share = self._random.choice((None, 0.0, 0.5, 1.0))
            if share is None:
                continue
            mask_B = self._masks.take(row)
            mask_B.fill(-1 if share else 0)
            if share < 1:
                for word in range(len(mask_B)):
                    mask_B[word] = self._random.getrandbits(31) if self._random.random() < share else 0
                mask_B[0] |= 1 << self._random.randrange(8)  # the last one's ids may all be none

    def in_place(self) -> TokenMasks | None:
        """The masks that were drawn, on their way to the device."""
        return None if self._masks is None else self._masks.upload()
