"""The interface between a layer's attention and the token-wise work before and after it.

Shape legend: T tokens, H heads of this rank, F = N + V features that a latent expands to (N non-rope features of a key,
V value features), L latent features, C cached features, P pages, K = 64 entries per page, S latents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernels.attention_sink import attention_sink


@dataclass(frozen=True)
class Heads:
    """Heads of one layer on this rank: their sizes, and the weights that lead from latents to keys and values."""

    count: int
    nope: int
    """Features of a query or a key that are not roped."""
    rope: int
    value: int
    latent: int
    scale: float
    """Factor on attention scores."""
    up_HFL: Tensor
    """For every head, the rows of W_UK, then those of W_UV."""
    norm_L: Tensor
    """Weights of the latent's norm."""
    invariant: bool
    """Whether all is computed in one way, whatever it is computed with."""
    fp8_cache: bool = False
    """Whether the cache has FP8 entries (`kernels.latent_entry`)."""
    norm_eps: float = 1e-6
    """Epsilon of the latent's norm."""
    sink_H: Tensor | None = None
    """fp32: logits of attention sinks, where there are such."""

    @cached_property
    def key_HNL(self) -> Tensor:
        """W_UK."""
        return self.up_HFL[:, : self.nope]

    @cached_property
    def value_HVL(self) -> Tensor:
        """W_UV."""
        return self.up_HFL[:, self.nope :]

    def add_sinks(self, out_THV: Tensor, lse_TH: Tensor) -> None:
        """Let the sinks of heads that have such take part in attention whose output, and whose log-sum-exp over all
        keys, these are: once for each output, behind the last merge of its parts."""
        assert self.sink_H is not None
        attention_sink(out_THV, lse_TH, self.sink_H)

    def tensors(self, cache_PKC: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that only this layer's `Backend.attend` reads or writes."""
        return cache_PKC, self.up_HFL, self.norm_L, *(() if self.sink_H is None else (self.sink_H,))


class Geometry:
    """Positions of a pass's prefill rows, for all layers. There is a class for each way in which they attend."""


class Backend(ABC):
    """Attention of some rows of a pass: views of their tokens, and memory. It is made once per pass, for all layers of
    one shape."""

    @abstractmethod
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        """Attention of these rows in one layer, into the output that this was made for. What is a layer's own comes
        from its `Heads` and its cache, so that what one layer launches can be launched again for the next
        (`kernels.runtime.repeat`)."""

    def reserve(self, heads: Heads) -> None:  # noqa: B027 (most have nothing of the kind)
        """Launch what `attend` may launch in sizes that no graph and no number of tokens fixes, up to those that this
        was made for, so that no step is the first to do it. Reads and writes memory of its own."""
