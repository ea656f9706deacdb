"""The execution path of a pass: which operations compute what is token-wise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from kernels import moe
from kernels.linear import MOST_STREAMED
from kernels.runtime.dependent import launches_dependently
from kernels.runtime.hopper import is_hopper
from workers.models.batch import Batch
from workers.models.choices import Choices
from workers.models.config import ModelConfig
from workers.models.general import DecodeOps, GeneralOps
from workers.models.invariant import DeterministicOps
from workers.models.layer_ops import LayerOps
from workers.models.small_batch import SmallBatchOps, unsupported
from workers.models.w8a8 import MIN_TOKENS_W8A8, MIN_TOKENS_W8A8_EXPERTS
from workers.parallel.group import Group
from workers.weights.formats import PLAIN
from workers.weights.formats.format import Format
from workers.weights.weight import Formats


class ExecutionPaths:
    """The execution paths of one model on one rank."""

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        formats: Formats | None = None,
        *,
        invariant: bool,
        quantize_activations: bool = False,
    ) -> None:
        """`formats`: without them all matrices are plain. `quantize_activations`: whether many tokens may be rounded to
        FP8 where weights are stored so; invariant mode never does."""
        self.invariant = invariant
        """Whether a token's bits are the same in any batch, at any width and on any number of ranks."""
        self._formats = formats or Formats()
        self.any: GeneralOps = (
            DeterministicOps(group)
            if invariant
            else GeneralOps(group, quantize_activations=quantize_activations, formats=self._formats)
        )
        """The path that any pass may take."""
        self.group = group
        """Group through which passes reach the other ranks."""
        self._config = config
        self._beside: list[Formats] = []
        self._quantize_activations = quantize_activations and not invariant
        self._decode, self._few = (
            DecodeOps(group, quantize_activations=quantize_activations, formats=self._formats),
            SmallBatchOps(group, dependent=True),
        )

    @property
    def decode(self) -> GeneralOps:
        """The path of passes of decode rows alone, whatever number of tokens they have."""
        return self.any if self.invariant else self._decode

    def beside(self, config: ModelConfig, formats: Formats) -> ExecutionPaths:
        """Return the paths of layers with these sizes and `formats`, of another checkpoint, that run in the same steps:
        the operations are the same ones, so what holds for those in a context holds for these layers."""
        paths = copy(self)
        paths._config, paths._formats = config, formats
        self._beside.append(formats)
        return paths

    def of(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> LayerOps[Any]:
        """The fastest path for a pass with these rows, of a model in `dtype`. In invariant mode there is one."""
        if self.invariant or batch.decode is None or batch.prefill is not None:
            return self.any
        return self._few if self.takes_small_batch(batch, dtype, device) else self._decode

    def quantizes_activations(self, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether some products of a pass of up to so many tokens may take activations that are rounded to FP8."""
        return (
            self._quantize_activations
            and tokens >= min(MIN_TOKENS_W8A8, MIN_TOKENS_W8A8_EXPERTS)
            and any(form.w8a8 or form.w4a8 for formats in (self._formats, *self._beside) for form in formats.all)
            and dtype == torch.bfloat16
            and is_hopper(device)
        )

    @contextmanager
    def without_w8a8(self) -> Iterator[None]:
        """Let no pass round activations to FP8 within this context: for those who compare passes that would round other
        numbers. What is dequantized then needs memory of the pass's scratch."""
        paths = (self.any, self._decode)
        before = [ops.quantize_activations for ops in paths]
        for ops in paths:
            ops.quantize_activations = False
        try:
            yield
        finally:
            for ops, quantize_activations in zip(paths, before, strict=True):
                ops.quantize_activations = quantize_activations

    @contextmanager
    def choosing(self, choices: Choices) -> Iterator[None]:
        """Let every pass within this context hand its choices of experts to `choices`."""
        paths: tuple[LayerOps[Any], ...] = (self.any, self._decode, self._few)
        for ops in paths:
            ops.choices = choices
        try:
            yield
        finally:
            for ops in paths:
                ops.choices = None

    def takes_small_batch(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a pass of decode rows alone takes the small-batch path."""
        return (
            dtype == torch.bfloat16
            and launches_dependently(device)
            and 0 < batch.layout.tokens <= min(MOST_STREAMED, *(each.most_few for each in (PLAIN, *self._formats.all)))
            and not unsupported(self._config, self.group.mesh)
            and all(self._takes_pending(format, batch.layout.tokens, device) for format in self._formats.all)
        )

    def _takes_pending(self, format: Format, tokens: int, device: torch.device) -> bool:
        """Whether so few tokens take the small-batch path in a model some of whose matrices are in this format: where
        it reads that in experts alone, if all experts are in it, and no others."""
        if not format.experts_alone:
            return True
        stored, config, routing = self._formats, self._config, self._config.routing
        if routing is None or stored.experts != {format} or format in stored.others:
            return False
        shape = moe.ExpertsShape(
            tokens,
            routing.experts_per_token,
            routing.experts,
            config.hidden_size,
            config.moe_intermediate_size // self.group.mesh.experts.size,
            hopper=moe.hopper_programs(device),
        )
        return moe.takes_pending(shape)
