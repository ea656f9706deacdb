"""A DeepSeek V4 on one rank: its weights, its rotations and the specs of its caches.

Shape legend: E hidden features, O rope features, P positions, Y vocabulary.
"""

from __future__ import annotations

import math
from copy import copy

import torch
from typing_extensions import override

from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamGates
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.cache.spec import CacheSpec, CompressedSpec
from workers.models.config import CompressedLayer, Compression, ModelConfig
from workers.models.deepseek_v4_parts import CompressorCaches, LayerCaches, Pages, Ring, state_tokens
from workers.models.deepseek_v4_weights import CompressedBlock, load_block
from workers.models.execution_paths import ExecutionPaths
from workers.models.head import load_head
from workers.models.model import Model
from workers.models.rope import rotation_table
from workers.models.streams import load_streams
from workers.weights.source import WeightSource


class CompressedModel(Model):
    """A whole model on this rank. Whoever builds it gives it its pass, `compressed_pass.CompressedPass`."""

    def __init__(self, source: WeightSource, config: ModelConfig, paths: ExecutionPaths, max_positions: int) -> None:
        """`max_positions`: positions that a token may have."""
        # Its layers are no `DecoderLayer`, so nothing of what the base class makes of those is made.
        assert config.compression is not None
        assert config.routing is not None
        self.config, self.paths, self.group, self.max_positions = config, paths, paths.group, max_positions
        self.compression: Compression = config.compression
        vocab, hidden, rope = config.vocab_size, config.hidden_size, config.qk_rope_head_dim
        source.progress("embedding and output head")
        self.embedding_YE = source.load("model.embed_tokens.weight", vocab, hidden)
        self.head_YE = load_head(source, "lm_head.weight", vocab, hidden)
        self.norm_E = source.load("model.norm.weight", hidden)
        end_streams = load_streams(source, "hc_head_", config, added=False)
        assert end_streams is not None
        self.streams: StreamGates = end_streams
        self.layers = []
        self.blocks: list[CompressedBlock] = []
        """Its layers."""
        for index in range(config.num_layers):
            source.progress(f"layer {index + 1} of {config.num_layers}")
            layer, hashed = self.compression.layers[index], index < config.routing.hash_layers
            self.blocks.append(load_block(source, config, f"layers.{index}.", layer, hashed=hashed))
        device = source.device
        self.rotation_PO = rotation_table(config.rope, rope, max_positions, device)
        self.compressed_rotation_PO = rotation_table(self.compression.rope, rope, max_positions, device)
        """Rotations of layers that have compressed entries."""
        self.query_scale_P = None
        self.drafter = None
        self.cache = [spec for layer in self.compression.layers for spec in self._paged(layer, source.dtype)]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its activations and of its entries."""
        return self.norm_E.dtype

    def _paged(self, layer: CompressedLayer, dtype: torch.dtype) -> list[CacheSpec]:
        """Cache specs of a layer: of its compressed entries, then of its indexer's keys, where it has such."""
        widths = [self.config.cache_width, self.compression.index_features][: compressors(layer)]
        return [CompressedSpec(width, layer.ratio, dtype) for width in widths]

    @override
    def rings(self, width: int) -> list[RingSpec]:
        """That of each layer's window, then those of the states of its compressors; then the drafter's. A ring has
        room for the tokens of a step, which may be rejected drafts, beside those that the first of them needs."""
        entry, found = self.config.cache_width, []
        for layer in self.compression.layers:
            window, needed = self.compression.window, state_tokens(layer)
            found.append(RingSpec(window + width - 1, entry, self.dtype, needed=window, kept=window - 1))
            for made in [entry, self.compression.index_features][: compressors(layer)]:
                features = 2 * made * (2 if layer.indexed else 1)  # means and logits, and of overlapping ones both
                found.append(RingSpec(needed + width - 1, features, torch.float32, needed, kept=needed - layer.ratio))
        return [*found, *(() if self.drafter is None else self.drafter.rings(width))]

    @override
    def shallow(self) -> CompressedModel:
        few = copy(self)
        few.segments = self.segments.few(few)
        return few

    @property
    @override
    def snapshot_tokens(self) -> int:
        return math.lcm(PAGE_TOKENS, *(layer.ratio for layer in self.compression.layers if layer.ratio))

    def caches_of(self, cache: PagedCache) -> list[LayerCaches]:
        """The caches of each layer, in the memory of `cache`."""
        paged, rings, found = iter(cache.layers), iter(cache.rings), []
        for layer in self.compression.layers:
            window = Ring(next(rings))
            of_compressors = [
                CompressorCaches(Pages(next(paged), layer.ratio), Ring(next(rings))) for _ in range(compressors(layer))
            ]
            found.append(LayerCaches(window, *of_compressors))
        return found


def compressors(layer: CompressedLayer) -> int:
    """Compressors of a layer: of entries, and of an indexer's keys."""
    return 0 if not layer.ratio else 2 if layer.indexed else 1
