"""Description of a model: its sizes and choices, whatever its checkpoint calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.routing_rule import RoutingRule


class ConfigError(ValueError):
    """The checkpoint's config.json is unreadable, incomplete or asks for something that is not supported."""


@dataclass(frozen=True)
class Yarn:
    """Context extension by interpolating slow frequencies (Peng et al., "YaRN", 2023)."""

    factor: float
    original_positions: int
    """Context the model was trained on before the extension."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Rotations over the original context above which a frequency is kept, and below which it is interpolated."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    """Strengths of the two attention-temperature corrections; 0 means not given."""
    attention_factor: float | None = None
    """Scale of cosines and sines, when the config states it instead of leaving it to the formula."""
    truncate: bool = True
    """Round the bounds of the interpolated band to whole dimensions."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    interleaved: bool
    """Pairs are features (2i, 2i + 1) in the checkpoint's weights; else (i, i + half)."""
    yarn: Yarn | None = None


@dataclass(frozen=True)
class QueryScaling:
    """Queries at later positions are larger, so that attention over more tokens stays as sharp (Llama 4, 2025): the
    query at position p times 1 + beta ln(1 + floor(p / original_positions))."""

    beta: float
    original_positions: int


@dataclass(frozen=True)
class Routing:
    """The experts there are, and how tokens choose some."""

    experts: int
    experts_per_token: int
    shared_experts: int
    bias: bool
    """Whether the router has one."""
    rule: RoutingRule
    normed: bool = False
    """Whether the sum of a token's experts goes through a norm of its own before it is added to the residual stream."""
    limit: float = 0.0
    """Where above 0: what routed experts multiply is clamped, silu(min(gate, limit)) * clamp(up, -limit, limit). Shared
    experts' is not, unless `shared_limit`."""
    shared_limit: bool = False
    """Whether what shared experts multiply is clamped, too."""
    hash_layers: int = 0
    """The first layers, in which a token's experts are those that a table has for its id; the router weighs them."""

    def __post_init__(self) -> None:
        groups, top_groups = self.rule.groups, self.rule.top_groups
        if self.experts % groups:
            raise ConfigError(f"n_routed_experts = {self.experts} is not divisible by n_group = {groups}")
        if not 1 <= top_groups <= groups:
            raise ConfigError(f"topk_group = {top_groups} must lie between 1 and n_group = {groups}")
        size = self.experts // groups
        if groups > 1 and self.bias and size < 2:
            raise ConfigError(f"n_group = {groups} leaves {size} expert a group; groups are ranked by their two best")
        if not 1 <= self.experts_per_token <= size * top_groups:
            raise ConfigError(
                f"num_experts_per_tok = {self.experts_per_token} must lie between 1 and the {size * top_groups} "
                "experts of the chosen groups"
            )


@dataclass(frozen=True)
class Indexing:
    """Sparse attention's selection of the cached tokens that queries attend to (DeepSeek-V3.2, 2025, section 2.1): an
    indexer scores every token that they may see, and the best are attended to."""

    heads: int
    features: int
    """Features of each head's query, and of the one key of a token, of which qk_rope_head_dim are roped."""
    top_k: int
    """Most tokens that a query attends to."""
    interleaved: bool
    """Whether the roped features are in pairs (2i, 2i + 1) in the checkpoint's weights; else (i, i + half)."""
    shared: tuple[bool, ...]
    """For each of the model's layers, whether it has no indexer and attends to what the layer before it attends to."""
    roped_last: bool = False
    """Whether the roped features are the last ones in the checkpoint's weights; else the first. They are kept first."""
    wide: bool = False
    """Whether keys and heads' weights are computed in fp32 where the checkpoint has the latter's matrix so."""
    key_norm_eps: float = 1e-6
    """Epsilon of the norm of keys."""
    shared_by_drafts: bool = False
    """Whether the layer that drafts selects for a row's newest token alone, and all drafts behind it attend to that."""

    def is_shared(self, layer: int) -> bool:
        """Whether that layer has no indexer of its own; the layer that drafts has one."""
        return layer < len(self.shared) and self.shared[layer]


@dataclass(frozen=True)
class ResidualStreams:
    """Several residual streams in place of one (`kernels.residual_streams`)."""

    count: int
    magnitude: float
    """The most that a gate of what is added is, but for `eps`."""
    eps: float
    """Number that is added to every gate."""
    mixing_steps: int = 0
    """Where above 0: layers also mix the streams, by a matrix of each token that so many steps of Sinkhorn and Knopp
    have made nearly doubly stochastic (mHC, 2026). `eps` is then added to no gate of what is added."""


@dataclass(frozen=True)
class CompressedLayer:
    """What a layer of DeepSeek V4 attends to besides the newest tokens."""

    ratio: int
    """Tokens for which there is one compressed entry; 0: there are none."""
    indexed: bool = False
    """Whether an entry is also made of the tokens of the one before, and an indexer selects the entries that are
    attended to (compressed sparse attention); else all are (heavily compressed attention)."""


@dataclass(frozen=True)
class Compression:
    """Attention of DeepSeek V4 (2026): one entry of a token is key and value of all heads. A query attends to those of
    the newest tokens, and to entries that stand for several tokens each."""

    layers: tuple[CompressedLayer, ...]
    """Of each of the model's layers."""
    window: int
    """Newest tokens that a query attends to, its own included."""
    rope: Rope
    """Rope of layers that have compressed entries; the others have that of the model."""
    index_heads: int
    index_features: int
    """Features of each query of an indexer, and of its one key of an entry."""
    top_k: int
    """Most compressed entries that a query attends to where an indexer selects them."""
    output_groups: int
    """Groups of heads, of equal size, whose output is projected apart before it is brought together."""
    output_rank: int
    """Features of each group's projected output."""


@dataclass(frozen=True)
class Dspark:
    """Layers of DeepSeek V4 that draft a block of tokens at once (DSpark)."""

    stages: int
    """Layers, one behind the other."""
    block: int
    """Tokens of a block, the newest one of a row and noise tokens: as many as it drafts."""
    noise_token: int
    """Token that stands in a block for those that are to be drafted."""
    layers: tuple[int, ...]
    """Layers of the model, in order: the means of the streams behind them are what its context is made of."""
    markov_rank: int
    """Features between the two matrices by which a token adds to the logits of the next one."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one model. Counts are of the whole model, not of a rank's share."""

    model_type: str
    """Model type as in config.json; `workers.families.registry` knows its family."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Intermediate size of the dense layers."""
    moe_intermediate_size: int
    """Intermediate size of one expert; 0 where there are none."""
    num_layers: int
    num_dense_layers: int
    """The first layers, which have no experts."""
    draft_layers: int
    """Layers that draft which the config declares, those of multi-token prediction (0 or 1) or those of `dspark`; the
    checkpoint may lack them all the same."""
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    routing: Routing | None
    """Routing of the experts; None: all layers are dense."""
    rope: Rope
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    """End-of-sequence ids: of generation_config.json where that names some."""
    indexing: Indexing | None = None
    """Selection of sparse attention; None: every query attends to all tokens before it."""
    norm_gate_rank: int = 0
    """Features between the two matrices of a norm's gate (`workers.models.layer_ops.NormGate`): of each layer's first
    norm, and of the second one in layers of experts. 0: no norm has a gate."""
    output_gate: Literal["none", "query", "input"] = "none"
    """Whether each head's output is multiplied by the sigmoid of a gate, and what makes it. "query": the product that
    makes the queries makes the gates, too, and reads the query's latent twice, normed and as it is. "input": a product
    of its own, of the layer's input."""
    sinks: bool = False
    """Whether each head of the model's layers has a logit that takes part in the denominator of attention's softmax
    (`kernels.attention_sink`)."""
    streams: ResidualStreams | None = None
    """Residual streams of the model's layers; None: there is one, to which layers add what they compute."""
    latent_norm_eps: float = 1e-6
    """Epsilon of the norms of latents inside attention; few published models take it from rms_norm_eps."""
    wide_head: bool = False
    """Whether the output head multiplies in fp32 where it is stored so."""
    compression: Compression | None = None
    """Attention of DeepSeek V4, in place of multi-head latent attention; None: there is none. An entry then has
    `cache_width` features, the last `qk_rope_head_dim` of which are roped."""
    dspark: Dspark | None = None
    """What the layers that draft are, where they draft in blocks; None: they are of multi-token prediction."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by their position; None: there is none. With it queries have a latent, `q_lora_rank`."""

    @property
    def qk_head_dim(self) -> int:
        """Features of one head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Features cached per token and layer: the latent and the roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether a layer's feed-forward part has no experts."""
        return layer < self.num_dense_layers
