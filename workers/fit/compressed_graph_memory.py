"""The parts of a rank's graph memory that DeepSeek V4 has otherwise, where there is no GPU to measure them on; see
`workers.fit.graph_memory`.

What segments hand on is exact, and attention takes what its portable kernel takes on a GPU. Hopper's own, of
many tokens, lists their entries once for all heads, not for each 32 of them. Of what layers need on their way experts
are counted, routed and shared ones, and the output's projection; the rest of it is estimated as that of other models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import moe
from workers.drafters.compressed_mtp import CompressedMtp
from workers.drafters.dspark import DsparkDrafter
from workers.memory.scratch import Scratch, bytes_of
from workers.models.attention.compressed_rows import reserve
from workers.models.compressed_kernels import rounded_bytes
from workers.models.compressed_layer import CompressedBuffers
from workers.models.config import CompressedLayer
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.drafter import Drafter
from workers.step.parts import StepParts
from workers.weights.weight import Weight


@dataclass(frozen=True)
class CompressedMemory:
    """Memory of the passes of such a model, on the meta device."""

    parts: StepParts
    model: CompressedModel

    def attention(self, tokens: int, width: int) -> int:
        """Bytes that attention of any layer takes for so many tokens of decode rows of this width, or of chunks (0)."""
        return self._attention(set(self.model.compression.layers), tokens, width)

    def _attention(self, kinds: set[CompressedLayer], tokens: int, width: int) -> int:
        scratch, model = Scratch(self.parts.device), self.model
        shape = tokens, self._heads, model.config.cache_width
        reserve(kinds, model.compression, shape, model.dtype, self.parts.state.pages_per_row, width, scratch)
        return scratch.peak

    def handed_on(self, tokens: int) -> int:
        """Bytes that the parts of a pass hand on to each other, for so many tokens."""
        scratch, model = Scratch(self.parts.device), self.model
        ops, dtype = model.paths.any, model.dtype
        CompressedBuffers.empty(model.config, self._heads, dtype, ops, tokens, scratch, ended=False)
        return scratch.peak

    def experts(self, tokens: int) -> int:
        """Bytes that the experts of a layer take, shared ones included."""
        config, block = self.model.config, self.model.blocks[0].experts
        assert config.routing is not None
        count, hidden, features = block.down_XEI.shape
        hidden, features = (-(-each // 16) * 16 for each in (hidden, features))  # whole tiles
        x_TE, down_XEI = (self._empty(shape) for shape in ((tokens, hidden), (count, hidden, features)))
        id_TK = torch.empty(tokens, config.routing.experts_per_token, dtype=torch.int64, device="meta")
        shared = 3 * tokens * block.shared.down_EI.shape[1] + tokens * hidden  # gate, up, their product, and the output
        return moe.workspace_bytes(moe.experts_shape(x_TE, id_TK, down_XEI)) + shared * self.model.dtype.itemsize

    def projected(self, tokens: int) -> int:
        """Most bytes that the output's projection in groups takes: for tokens rounded to FP8, and for its result."""
        features = self._heads * self.model.config.cache_width
        rows = self.model.blocks[0].attention.out_FD.shape[0]
        return rounded_bytes(tokens, features) + bytes_of((tokens, rows), self.model.dtype)

    @property
    def weights(self) -> list[Weight]:
        """The matrices outside of routed experts."""
        owners = [owner for block in self.model.blocks for owner in (block.attention, block.experts.shared)]
        return [weight for owner in owners for weight in vars(owner).values() if isinstance(weight, Weight)]

    def caught_up(self, tokens: int, beside: int) -> int:
        """Bytes that a drafter's pass over so many tokens of a step takes, where a layer takes `beside` on its way. The
        context of DSpark takes next to nothing."""
        if not isinstance(self._drafter, CompressedMtp):
            return 0
        streams, hidden = self.model.config.streams, self.model.config.hidden_size
        assert streams is not None
        out = bytes_of((tokens, (streams.count + 1) * hidden), self.model.dtype)
        return out + self._passed(tokens, beside)

    def drafts(self, rows: int) -> int:
        """Bytes that drafting for so many rows takes."""
        drafter, wide = self._drafter, torch.float32
        if isinstance(drafter, DsparkDrafter):
            block, logits = rows * drafter.sizes.block, rows * (self.parts.width - 1)
            return bytes_of((logits, self.model.config.vocab_size), wide) + self._passed(block, self.experts(block))
        if not isinstance(drafter, CompressedMtp):
            return 0
        logits = bytes_of((rows, self.model.config.vocab_size), wide)
        return logits + self.caught_up(rows, self.experts(rows))

    def _passed(self, tokens: int, beside: int) -> int:
        """Bytes of a pass over layers that draft."""
        return self.handed_on(tokens) + max(self._attention({CompressedLayer(0)}, tokens, 0), beside)

    @property
    def _drafter(self) -> Drafter | None:
        return None if self.parts.width == 1 else self.model.drafter

    @property
    def _heads(self) -> int:
        return len(self.model.blocks[0].attention.sink_H)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.model.dtype, device="meta")
