"""The pass of DeepSeek V4 over the tokens of a step: the readable forward pass, run eagerly on a CPU.

It is one segment, because what stands between the layers is not captured yet. Everything that the host must know of the
rows, it reads from tensors.

Shape legend: T tokens, N tokens that are wanted, R rows, E hidden features, Z residual streams, W tokens of the step
that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from workers.cache.paged import PagedCache
from workers.cache.rings import NULL_SLOT
from workers.memory.scratch import Scratch
from workers.models import deepseek_v4
from workers.models.batch import Batch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.models.pass_buffers import PassTensors
from workers.models.step_pass import StepPass

if TYPE_CHECKING:
    from workers.models.layer_ops import LayerOps


@dataclass(frozen=True)
class HiddenStates:
    """What a pass leaves: final hidden states, [T, E]."""

    hidden_TE: Tensor


class CompressedPass(StepPass):
    """The pass over a model's layers. Its buffers are its result."""

    def __init__(self, model: CompressedModel) -> None:
        self._model = model

    @override
    def __len__(self) -> int:
        return 1

    @override
    def buffers(self, tokens: int, scratch: Scratch, ops: LayerOps[Any] | None = None) -> HiddenStates:
        return HiddenStates(scratch.empty(tokens, self._model.config.hidden_size, dtype=self._model.dtype))

    @override
    def over(self, buffers: Any) -> Any:
        raise NotImplementedError("no pass comes before a model's")

    @override
    def run(self, index: int, tensors: PassTensors, cache: PagedCache, scratch: Scratch) -> None:
        raise NotImplementedError("this pass has no segment that knows of no row: nothing captures it yet")

    @override
    def run_pass(
        self,
        tensors: PassTensors,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch,
        segment: Callable[[int], None],
        inner: Scratch,
    ) -> None:
        tokens, buffers = batch.layout.tokens, tensors.buffers
        assert isinstance(buffers, HiddenStates)
        aux_hidden = tuple((layer, own_TE[:tokens]) for layer, own_TE in tensors.aux_hidden)
        buffers.hidden_TE[:tokens] = self._hidden(tensors.token_T[:tokens], batch, cache, aux_hidden)

    @override
    def buffers_to_end(self, tokens: int, scratch: Scratch) -> HiddenStates:
        return self.buffers(tokens, scratch)

    @override
    def gather(self, buffers: HiddenStates, token_N: Tensor, buffers_N: HiddenStates) -> None:
        torch.index_select(buffers.hidden_TE, 0, token_N, out=buffers_N.hidden_TE)

    @override
    def end(self, buffers_N: HiddenStates, out_NE: Tensor, scratch: Scratch) -> None:
        out_NE.copy_(buffers_N.hidden_TE)

    @override
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
        out_TE = scratch.empty(len(token_T), self._model.config.hidden_size, dtype=self._model.dtype)
        return out_TE.copy_(self._hidden(token_T, batch, cache, aux_hidden))

    def _hidden(
        self, token_T: Tensor, batch: Batch, cache: PagedCache, aux_hidden: tuple[tuple[int, Tensor], ...]
    ) -> Tensor:
        """Final hidden states. `aux_hidden` gets the residual streams behind its layers: the mean of them, or one after
        the other where a layer is there as often as there are streams."""
        model, wanted_W = self._model, _wanted(batch)

        def keep(layers: int, h_TZE: Tensor) -> None:
            own = [own_TE for number, own_TE in aux_hidden if number == layers]
            for own_TE, h_TE in zip(own, [h_TZE.mean(1)] if len(own) == 1 else h_TZE.unbind(1), strict=False):
                own_TE.copy_(_spread(h_TE, wanted_W, len(token_T)))

        fed_T = token_T if wanted_W is None else token_T[wanted_W]
        h = deepseek_v4.streams(model, fed_T, rows_of(batch), model.caches_of(cache), keep)
        return _spread(deepseek_v4.hidden(model, h), wanted_W, len(token_T))


def _wanted(batch: Batch) -> Tensor | None:
    """int64: the tokens whose hidden states are wanted, those of prefill rows among them; None: all."""
    layout, decode = batch.layout, batch.decode
    if decode is None or decode.wanted_R is None:
        return None
    of_rows_RW = torch.arange(layout.width) < decode.wanted_R.unsqueeze(1)
    return torch.cat(
        [of_rows_RW.flatten(), torch.ones(layout.tokens - of_rows_RW.numel(), dtype=torch.bool)]
    ).nonzero()[:, 0]


def _spread(x_WE: Tensor, wanted_W: Tensor | None, tokens: int) -> Tensor:
    """What was computed of the wanted tokens among all, zeros for the others."""
    return x_WE if wanted_W is None else x_WE.new_zeros(tokens, x_WE.shape[1]).index_copy_(0, wanted_W, x_WE)


def rows_of(batch: Batch) -> CompressedTokens:
    """The rows of a batch with the tokens that are wanted, decode rows, then prefill rows. Rows of nobody have the null
    slot and the null page."""
    start: list[int] = []
    count: list[int] = []
    slot: list[int] = []
    tables = []
    if (decode := batch.decode) is not None:
        assert decode.slot_R is not None, "rows of such a model have slots"
        rows, width = len(decode.length_R), batch.layout.width
        start += batch.position_T[: rows * width : width].tolist()
        count += [width] * rows if decode.wanted_R is None else decode.wanted_R.tolist()
        slot += decode.slot_R.tolist()
        tables.append(decode.page_RP)
    if (prefill := batch.prefill) is not None:
        assert len(prefill.slot) == len(prefill.start), "rows of such a model have slots"
        start += prefill.start
        count += prefill.count
        slot += prefill.slot
        tables.append(prefill.page_NP)
    places = tuple(own + 1 + NULL_SLOT for own in slot)
    return CompressedTokens(tuple(start), tuple(count), places, torch.cat(tables), batch.first)
