"""A DeepSeek V4 on one rank: its weights, its rotations and the specs of its caches.

Shape legend: E hidden features, O rope features, P positions, Y vocabulary.
"""

from __future__ import annotations

from kernels.residual_streams import StreamGates
from workers.models.config import Compression, ModelConfig
from workers.models.deepseek_v4_weights import CompressedBlock, load_block
from workers.models.execution_paths import ExecutionPaths
from workers.models.head import load_head
from workers.models.model import Model
from workers.models.rope import rotation_table
from workers.models.streams import load_streams
from workers.weights.source import WeightSource


class CompressedModel(Model):
    """A whole model on this rank. Nothing serves it yet: `deepseek_v4.forward` is its forward pass."""

    def __init__(self, source: WeightSource, config: ModelConfig, paths: ExecutionPaths, max_positions: int) -> None:
        """`max_positions`: positions that a token may have."""
        # Its layers are no `DecoderLayer`, so nothing of what the base class makes of those is made.
        assert config.compression is not None
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
            self.blocks.append(load_block(source, config, index))
        device = source.device
        self.rotation_PO = rotation_table(config.rope, rope, max_positions, device)
        self.compressed_rotation_PO = rotation_table(self.compression.rope, rope, max_positions, device)
        """Rotations of layers that have compressed entries."""
        self.query_scale_P = None
        self.drafter = None
