"""The description that a family of models gives of itself. A new family is a file in `families` and a line in
`registry`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from workers.models.config import ModelConfig
from workers.models.fields import Fields

if TYPE_CHECKING:
    from workers.models.attention.latent import LatentAttention
    from workers.models.feed_forward import FeedForward
    from workers.models.layer import DecoderLayer
    from workers.models.model import Model
    from workers.parallel.group import Group
    from workers.weights.source import WeightSource

_SCALES: Final = (r"([._](activation|input)_scale|\.qscale_act)$", r"\.(k|v|kv)_scale$")
"""Activations are rounded, if at all, with scales of their own, and so are cached latents."""


class Family(ABC):
    """A kind of checkpoint: how its config.json is read, how its tensors are called, what its layers are made of.

    What a config.json says is wanted without torch, which takes seconds to import: a family imports what it builds
    layers of when it builds one.
    """

    fp8_cache = True
    """Whether its cache can be in FP8."""
    drafts = True
    """Whether a layer of its checkpoints that drafts is served; else it stays on the disk, declared or not."""

    why_undeclared = "which its config.json does not declare (num_nextn_predict_layers)"
    """Why a checkpoint's layers that draft may be left out, as a line at the start says it."""

    @abstractmethod
    def read(self, fields: Fields) -> ModelConfig:
        """Read the values of a config.json. Every value that would change the computation is either understood or
        refused with a `ConfigError` that names it."""

    def tensor(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that DeepSeek V3's checkpoints call `name`."""
        return name

    def dtypes(self, values: dict[str, Any]) -> Callable[[str], str | None]:
        """The dtype of a tensor of the checkpoint by its name, in safetensors' words, as far as the values of its
        config.json tell, for those who do not have the files yet. None: there is no such tensor."""
        from workers.weights.formats.registry import assumed_dtypes

        text = values.get("text_config")
        given = values.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
        return assumed_dtypes(given if isinstance(given, dict) else None)

    def undeclared(self, config: ModelConfig, has_any: Callable[[str], bool]) -> list[str]:
        """Return the prefixes of tensor names of draft layers that config.json does not declare. Only a layer with a
        projection of two hidden states is one; any other would be a layer that config.json has forgotten. `has_any`:
        whether any tensor's name begins so."""
        found: list[str] = []
        layer = config.num_layers
        while not config.draft_layers and has_any(self.tensor(f"model.layers.{layer}.eh_proj.weight")):
            found.append(self.tensor(f"model.layers.{layer}."))
            layer += 1
        return found

    def draft_prefixes(self, config: ModelConfig) -> list[str]:
        """Return how the names of the tensors of the layers that draft begin, by the checkpoint's names."""
        return [self.tensor(f"model.layers.{config.num_layers}.")]

    def ignored(self, config: ModelConfig) -> list[str]:
        """Patterns (`re.search`) of tensors that the checkpoint may have and the model does not read."""
        return [r"rotary_emb\.inv_freq$", *_SCALES]

    def model(
        self,
        source: WeightSource,
        config: ModelConfig,
        group: Group,
        *,
        max_positions: int,
        draft_layer: bool,
        invariant: bool,
        quantize_activations: bool = False,
        fp8_cache: bool = False,
    ) -> Model:
        """The whole model on one rank, and with `draft_layer` the drafter that its checkpoint has. `group`: by which
        it reaches the other ranks of the source's mesh. `quantize_activations`: see `ExecutionPaths`."""
        from workers.drafters.mtp import Mtp
        from workers.models.execution_paths import ExecutionPaths
        from workers.models.model import Model

        paths = ExecutionPaths(
            config, group, source.formats, invariant=invariant, quantize_activations=quantize_activations
        )
        layer = partial(self.layer, source, config, invariant=invariant, fp8_cache=fp8_cache)
        model = Model(source, config, paths, layer, max_positions)
        if draft_layer:
            source.progress("draft layer")
            model.drafter = Mtp(source, model, layer(config.num_layers))
        return model

    def layer(
        self, source: WeightSource, config: ModelConfig, index: int, *, invariant: bool, fp8_cache: bool
    ) -> DecoderLayer:
        """Layer `index` of the model, or the layer that drafts, whose index is `config.num_layers`. It gets its weights
        from `source`, by the names of DeepSeek V3's checkpoints."""
        from workers.models.layer import DecoderLayer

        prefix, hidden = f"model.layers.{index}.", config.hidden_size
        return DecoderLayer(
            config.rms_norm_eps,
            attention_norm_E=source.load(f"{prefix}input_layernorm.weight", hidden),
            attention=self.attention(source, config, index, invariant=invariant, fp8_cache=fp8_cache),
            feed_forward_norm_E=source.load(f"{prefix}post_attention_layernorm.weight", hidden),
            feed_forward=source.once(f"{prefix}mlp.", lambda own: self.feed_forward(own, config, index)),
        )

    def attention(
        self, source: WeightSource, config: ModelConfig, index: int, *, invariant: bool, fp8_cache: bool
    ) -> LatentAttention:
        """The attention of that layer."""
        from workers.models.attention.latent import LatentAttention
        from workers.models.attention.sparse import SparseAttention

        prefix = f"model.layers.{index}.self_attn."
        if config.indexing is None:
            return LatentAttention(source, prefix, config, invariant=invariant, fp8_cache=fp8_cache)
        shared = config.indexing.is_shared(index)
        return SparseAttention(source, prefix, config, shared=shared, invariant=invariant, fp8_cache=fp8_cache)

    def feed_forward(self, source: WeightSource, config: ModelConfig, index: int) -> FeedForward:
        """The feed-forward part of that layer."""
        from workers.models.feed_forward import feed_forward

        return feed_forward(source, f"model.layers.{index}.mlp.", config, index)
