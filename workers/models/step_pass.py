"""What a step asks of a pass over its tokens, however the layers of the pass are made.

A pass is cut into segments, which know of no row, and attention between them; see `workers.models.segments`.

Shape legend: T tokens, padding included, N tokens that are wanted, E hidden features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.batch import Batch

if TYPE_CHECKING:
    from workers.models.layer import PassTensors
    from workers.models.layer_ops import LayerOps


class StepPass(ABC):
    """A pass over the tokens of a step: the model's, or a drafter's. `buffers` that one method returns are what the
    others take; only the pass looks inside."""

    short_chunks: Collection[int] = ()
    """Tokens of chunks so short that no other does as one for each of the kernels of their attention, where there are
    such."""

    @abstractmethod
    def __len__(self) -> int:
        """Segments of the pass."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Heads of its attention on this rank."""

    @abstractmethod
    def few(self, model: Any) -> StepPass:
        """A pass over the layers of `model`, a copy of its own that has a few of them."""

    @abstractmethod
    def buffers(self, tokens: int, scratch: Scratch, ops: LayerOps[Any] | None = None) -> Any:
        """Memory for passes of so many tokens on path `ops`; without one, on that for any pass."""

    @abstractmethod
    def over(self, buffers: Any) -> Any:
        """The same memory for this pass, of buffers for the pass before it in a step."""

    @abstractmethod
    def run(self, index: int, tensors: PassTensors, cache: PagedCache, scratch: Scratch) -> None:
        """Segment `index`."""

    @abstractmethod
    def run_pass(
        self,
        tensors: PassTensors,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch,
        segment: Callable[[int], None],
        inner: Scratch,
    ) -> None:
        """A whole pass, without the last segment where `tensors` have no output. `segment` runs a segment of these
        tensors by its index. What is handed on lies in `scratch`; memory on the way comes from `inner`."""

    @abstractmethod
    def buffers_to_end(self, tokens: int, scratch: Scratch) -> Any:
        """Memory for so many tokens that are wanted: what `end` reads."""

    @abstractmethod
    def gather(self, buffers: Any, token_N: Tensor, buffers_N: Any) -> None:
        """Copy the input of `end` for the tokens `token_N` (int64), in a pass that has run."""

    @abstractmethod
    def end(self, buffers_N: Any, out_NE: Tensor, scratch: Scratch) -> None:
        """The last segment for the tokens that `buffers_N` holds."""

    @abstractmethod
    def forward(
        self,
        token_T: Tensor,
        source_TE: Tensor | None,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch,
        aux_hidden: tuple[tuple[int, Tensor], ...] = (),
        ops: LayerOps[Any] | None = None,
    ) -> Tensor:
        """A whole pass in memory of `scratch`: final hidden states [T, E]. `source_TE`, `aux_hidden`: see
        `PassTensors`. `ops`: without it those of the fastest path."""
