"""Gathers pieces of cached context, which lie in pages all over the cache, one row's behind the other's.

Shape legend: B rows, P pages (of the cache, or of a row's page table), K = 64 entries per page, C cached features, S
gathered entries.
"""

from __future__ import annotations

from torch import Tensor

from kernels.gather_context import launch, reference


def gather_context(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, *, begin: int, latent: int = 0
) -> None:
    """out[cu[b] + i] = entry `begin` + i of row b, for every i < cu[b + 1] - cu[b].

    - `cache_PKC`: entry i of a row lies at [page_BP[b, i // 64], i % 64]; entries are equally spaced.
    - `page_BP`: int32. What it holds behind a row's entries does not matter.
    - `cu_B1`: int32 [B + 1], from 0 to S. A row without entries begins where the next one does.
    - `latent`: how many of an entry's features are its latent. Of FP8 entries (`kernels.latent_entry`) it must be said.
    - `out_SC`: dtype of the cache, or of the model whose entries are FP8. S as `cu_B1` ends, else entries are missing
      or arbitrary.
    """
    compute = launch.gather_context if cache_PKC.is_cuda else reference.gather_context
    compute(cache_PKC, page_BP, cu_B1, out_SC, begin, latent)
