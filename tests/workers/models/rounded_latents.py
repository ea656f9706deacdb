"""The oracle of models with an FP8 cache: the same model with a plain one, to which rounded latents are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from kernels import latent_entry
from tests.support.fp8_entries import encoded, read


@contextmanager
def latents_rounded() -> Iterator[list[int]]:
    """Round, within this context, what is written to a plain cache. Yields the numbers of tokens, layer by layer."""
    seen: list[int] = []

    def write(entry_TC: Tensor, features: int, slot_T: Tensor, cache_PKC: Tensor) -> None:
        rope = entry_TC.shape[1] - features
        entry_TC.copy_(read(encoded(entry_TC, features), features, rope, entry_TC.dtype))
        cache_PKC.view(-1, cache_PKC.shape[-1])[slot_T] = entry_TC
        seen.append(len(entry_TC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_entry, "write", write)
        yield seen
