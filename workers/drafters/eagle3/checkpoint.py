"""Draft models in the two layouts in which EAGLE-3 is published: grouped-query attention, and latent attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from workers.drafters.draft_model import DraftModel
from workers.drafters.eagle3.misfits import aux_hidden_state_layers_of, flattened, misfits
from workers.models.config import ConfigError, ModelConfig, Rope
from workers.models.fields import Fields, read_rope
from workers.parallel.mesh import Mesh
from workers.quantization import unsupported_quantization

if TYPE_CHECKING:
    import torch

    from workers.drafters.eagle3.drafter import Eagle3
    from workers.models.model import Model
    from workers.weights.checkpoint import Checkpoint
    from workers.weights.source import WeightSource

_LAYER: Final = "midlayer."
_OTHER_LAYER: Final = "layers.0."
"""Name of the layer in other checkpoints."""


@dataclass(frozen=True)
class Eagle3Config(DraftModel):
    """Values of a draft model's config.json."""

    folder: Path
    intermediate: int
    draft_vocab: int
    eps: float
    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool
    aux_hidden_norms: bool
    norm_output: bool
    rope: Rope
    heads: int
    key_heads: int
    features: int
    """Features of a head. With grouped-query attention only, like the key heads."""
    latent: ModelConfig | None
    """Sizes of latent attention, where it has that."""

    @override
    def ignored(self) -> list[str]:
        return [r"^t2d$", r"^d2t$", r"rotary_emb\.inv_freq$", r"^embed_tokens\.weight$"]

    @override
    def stored(self, checkpoint: Checkpoint) -> Callable[[str], str]:
        layer = _LAYER if checkpoint.has_any(_LAYER) else _OTHER_LAYER
        return lambda name: name.replace(_LAYER, layer, 1)

    @override
    def check(self, checkpoint: Checkpoint, model: Model) -> None:
        _target_ids(self, model.config.vocab_size, checkpoint)

    @override
    def build(self, source: WeightSource, model: Model, checkpoint: Checkpoint, *, fp8_cache: bool) -> Eagle3:
        from workers.drafters.attention import DraftAttention, DraftLatentAttention, GroupedAttention
        from workers.drafters.eagle3.drafter import Eagle3, Eagle3Sizes
        from workers.models.attention.latent import LatentAttention
        from workers.models.rope import rotation_table

        prefix, hidden, invariant = f"{_LAYER}self_attn.", model.config.hidden_size, model.paths.invariant
        attention: DraftAttention
        if self.latent is None:
            roped, sizes_of_heads = self.features, {"heads": self.heads, "key_heads": self.key_heads}
            attention = GroupedAttention(source, prefix, hidden=hidden, features=self.features, **sizes_of_heads)
        else:
            roped = self.latent.qk_rope_head_dim
            own = LatentAttention(
                source, prefix, self.latent, invariant=invariant, fp8_cache=fp8_cache, inputs=2 * hidden
            )
            attention = DraftLatentAttention(own, model.group.sharing)
        sizes = Eagle3Sizes(
            intermediate=self.intermediate,
            draft_vocab=self.draft_vocab,
            eps=self.eps,
            aux_hidden_state_layers=self.aux_hidden_state_layers,
            norm_before_residual=self.norm_before_residual,
            aux_hidden_norms=self.aux_hidden_norms,
            norm_output=self.norm_output,
            own_embedding=checkpoint.has_any("embed_tokens."),
        )
        rotation_PO = rotation_table(self.rope, roped, model.max_positions, source.device)
        target_id_D = None
        if (
            source.device.type != "meta"
            and (found := _target_ids(self, model.config.vocab_size, checkpoint)) is not None
        ):
            target_id_D = found.to(source.device)
        return Eagle3(source, model, sizes, attention, rotation_PO, target_id_D)


def read_eagle3(folder: str | Path, target: ModelConfig, mesh: Mesh, *, host_memory: bool = False) -> Eagle3Config:
    """The config.json of the draft model in `folder`. `ConfigError` names what does not fit `target`, the ranks or
    `host_memory` (see `misfits`), or is not understood."""
    folder = Path(folder)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'} of the draft model: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{folder / 'config.json'} does not hold a JSON object")
    values = flattened(values)
    of_target = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.num_layers,
        "hc_mult": None if target.streams is None else target.streams.count,
    }
    fields = Fields(values)
    _refuse_unsupported(fields)
    if found := misfits(values, of_target, mesh, host_memory=host_memory):
        raise ConfigError("\n".join(f"the draft model in {folder} does not fit: {why}" for why in found))
    heads, latent = fields.count("num_attention_heads"), None
    is_latent = values.get("kv_lora_rank") is not None
    rope = read_rope(fields, interleaved=fields.flag("rope_interleave", True) if is_latent else False)
    if is_latent:
        latent = replace(
            target,
            num_heads=heads,
            q_lora_rank=fields.count("q_lora_rank") if values.get("q_lora_rank") is not None else None,
            kv_lora_rank=fields.count("kv_lora_rank"),
            qk_nope_head_dim=fields.count("qk_nope_head_dim"),
            qk_rope_head_dim=fields.count("qk_rope_head_dim"),
            v_head_dim=fields.count("v_head_dim"),
            rope=rope,
            indexing=None,
        )
    key_heads = fields.count("num_key_value_heads", heads)
    if heads % key_heads:
        raise ConfigError(f"num_attention_heads = {heads} is not divisible by num_key_value_heads = {key_heads}")
    return Eagle3Config(
        folder=folder,
        intermediate=fields.count("intermediate_size"),
        draft_vocab=fields.count("draft_vocab_size", fields.count("vocab_size")),
        eps=fields.number("rms_norm_eps", 1e-6),
        aux_hidden_state_layers=aux_hidden_state_layers_of(values, target.num_layers),
        norm_before_residual=fields.flag("norm_before_residual", False),
        aux_hidden_norms=fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False),
        norm_output=fields.flag("norm_output", False),
        rope=rope,
        heads=heads,
        key_heads=key_heads,
        features=fields.count("head_dim", target.hidden_size // heads),
        latent=latent,
    )


def _refuse_unsupported(fields: Fields) -> None:
    if (kind := fields.text("speculators_model_type", "eagle3")) != "eagle3":
        raise fields.unsupported("speculators_model_type", kind, ("eagle3",))
    for name in ("block_size", "markov_rank", "mask_token_id", "dflash_config"):  # DSpark, DFlash
        if (value := fields.values.get(name)) is not None:
            raise ConfigError(
                f"config.json: {name} = {value!r} is of a draft model that drafts a block at a time, which is served "
                "of DeepSeek V4 alone; EAGLE-3 draft models have none"
            )
    if said := unsupported_quantization(fields.values):
        raise ConfigError(f"config.json: {said}")
    for name in ("attention_bias", "mlp_bias", "bias", "norm_before_fc", "mla_use_nope"):
        if fields.flag(name, False):
            raise fields.unsupported(name, True, (False,))
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.unsupported("hidden_act", activation, ("silu",))
    if (scale := fields.number("logit_scale", 1.0)) != 1:
        raise fields.unsupported("logit_scale", scale, (1.0,))
    inner = fields.values.get("eagle_config")
    if isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False:
        raise fields.unsupported("eagle_config.use_aux_hidden_state", False, (True,))


def _target_ids(config: Eagle3Config, vocab: int, checkpoint: Checkpoint) -> torch.Tensor | None:
    """The model's id of each of the draft vocabulary's: its own plus the offset that `d2t` has."""
    import torch

    from workers.weights.checkpoint import WeightsError

    if "d2t" not in checkpoint.entries:
        if config.draft_vocab != vocab:
            raise WeightsError(f"{config.folder} has no tensor d2t, and its vocabulary is smaller than the model's")
        return None
    offset_D = checkpoint.read("d2t", (slice(0, None),))
    if offset_D.shape != (config.draft_vocab,) or offset_D.dtype not in (torch.int32, torch.int64):
        raise WeightsError(
            f"d2t in {config.folder} is {offset_D.dtype} {list(offset_D.shape)}; config.json wants integers, "
            f"[{config.draft_vocab}]"
        )
    id_D = torch.arange(config.draft_vocab) + offset_D
    if bool((id_D < 0).any() | (id_D >= vocab).any()) or len(set(id_D.tolist())) != config.draft_vocab:
        raise WeightsError(f"d2t in {config.folder} names ids twice, or outside the model's vocabulary of {vocab}")
    return id_D
