"""The indexer of sparse attention (DeepSeek-V3.2, 2025, section 2.1): from a token's hidden state and its query's
latent to what scores the cached tokens, and to the key by which later tokens score it.

It holds the beginning of `deepseek_sparse.select`. A query t scores a token s with the sum over its heads of
weight * relu(q . k). Heads are few and small, so every rank
has all of them, and chooses the same tokens.

Shape legend: T tokens, E hidden features, A features of the query's latent, J heads of the indexer, I features of its
queries and keys, F = J I, X = I + J, O rope features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.index_rope import index_rope
from kernels.runtime.dependent import launches_dependently
from workers.cache.spec import CacheSpec, index_spec
from workers.memory.scratch import Scratch
from workers.models.config import Indexing
from workers.models.layer_ops import LayerOps, N
from workers.weights.part import Part, RopeRows
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


@dataclass(frozen=True)
class Indexed:
    """Output of `Indexer.project`: memory that all layers of a pass may share."""

    q_TJI: Tensor
    """Roped; codes where the cache has INT8 entries."""
    key_TI: Tensor
    """Normed and roped, for INT8 entries spread as well (`kernels.index_rope.hadamard`): what the cache is given."""
    weight_TJ: Tensor
    """fp32, the factors of scores and heads, and the scales of queries in INT8, in it."""

    @staticmethod
    def empty(indexing: Indexing, tokens: int, dtype: torch.dtype, scratch: Scratch, *, int8: bool) -> Indexed:
        """Memory for so many tokens, of a model in `dtype`. `int8`: whether the cache has INT8 entries."""
        heads, features = indexing.heads, indexing.features
        return Indexed(
            scratch.empty(tokens, heads, features, dtype=torch.int8 if int8 else dtype),
            scratch.empty(tokens, features, dtype=dtype),
            scratch.empty(tokens, heads, dtype=torch.float32),
        )

    def keys_alone(self) -> Indexed:
        """Return a view with no heads: nothing is scored."""
        return Indexed(self.q_TJI[:, :0], self.key_TI, self.weight_TJ[:, :0])

    def of(self, own: slice) -> Indexed:
        """Return the views of some tokens alone."""
        return Indexed(self.q_TJI[own], self.key_TI[own], self.weight_TJ[own])


class Indexer:
    """Indexer of one layer; `project` is token-wise."""

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        indexing: Indexing,
        *,
        hidden: int,
        query_latent: int,
        rope: int,
        int8: bool,
    ) -> None:
        """`prefix`: of its tensors' names. `query_latent`, `rope`: features of the query's latent, and of those of a
        query or key that are roped. `int8`: whether its cache has INT8 entries."""
        heads, features = indexing.heads, indexing.features
        rows = None
        if indexing.roped_last or not indexing.interleaved:
            rows = RopeRows(features, rope, first=True, stored_last=indexing.roped_last, paired=indexing.interleaved)
        self.q_FA = source.matrix(Part(f"{prefix}wq_b.weight", heads * features, query_latent, rope=rows))
        # One product for both. So few rows gain nothing by their format, and checkpoints in FP8 have the latter plain.
        weights = f"{prefix}weights_proj.weight"
        dtype = source.lossless(weights) if indexing.wide else source.dtype
        self.both_XE = Weight(source.empty(features + heads, hidden, dtype=dtype))
        source.fill(self.both_XE[:features], Part(f"{prefix}wk.weight", features, hidden, rope=rows))
        source.fill(self.both_XE[features:], Part(weights, heads, hidden))
        norms = [source.load(f"{prefix}k_norm.{what}", features, dtype=torch.float32) for what in ("weight", "bias")]
        if rows is not None:
            norms = [source.in_order(norm_I, rows) for norm_I in norms]
        self.norm_I, self.bias_I = norms
        self.norm_eps = indexing.key_norm_eps
        self.scale = (heads * features) ** -0.5
        """Factor of the scores of heads (1 / sqrt(I)) and of their sum (1 / sqrt(J))."""
        self.cache: CacheSpec = index_spec(features, source.dtype, int8=int8)
        """Spec of the index cache."""

    def project(self, ops: LayerOps[N], x: N, latent: N, rotation_TO: Tensor, out: Indexed, scratch: Scratch) -> None:
        """Token-wise: of the layer's input `x` and the query's `latent`, both normed, to what is scored; of an `out`
        without heads to the keys."""
        with scratch.scope():
            dtype, int8 = out.key_TI.dtype, out.q_TJI.dtype != out.key_TI.dtype
            heads, features = out.q_TJI.shape[1:]
            rows_XE = self.both_XE[: features + heads]
            both_TX = scratch.empty(len(out.key_TI), rows_XE.shape[0], dtype=torch.float32)
            ops.narrow_linear(x, rows_XE, both_TX, scratch)
            q_TJI = scratch.empty(*out.q_TJI.shape, dtype=dtype) if int8 else out.q_TJI
            if heads:
                ops.linear(latent, self.q_FA, q_TJI.flatten(1), scratch)
            index_rope(
                q_TJI,
                both_TX,
                self.norm_I,
                self.bias_I,
                rotation_TO,
                out.key_TI,
                out.weight_TJ,
                eps=self.norm_eps,
                factor=self.scale,
                code_TJI=out.q_TJI if int8 else None,
                dependent=ops.decode_alone and launches_dependently(rotation_TO.device),
            )
