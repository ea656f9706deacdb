"""Draft models in the two layouts in which EAGLE-3 is published: grouped-query attention, and latent attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    from workers.weights.kept import KeptWeights
    from workers.weights.source import DryRun, WeightSource

_LAYER: Final = "midlayer."
_OTHER_LAYER: Final = "layers.0."
"""Name of the layer in other checkpoints."""
_IGNORED: Final = (r"^t2d$", r"^d2t$", r"rotary_emb\.inv_freq$", r"^embed_tokens\.weight$")


@dataclass(frozen=True)
class Eagle3Config:
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
    if found := misfits(values, of_target, mesh, host_memory=host_memory):
        raise ConfigError("\n".join(f"the draft model in {folder} does not fit: {why}" for why in found))
    fields = Fields(values)
    _refuse_unsupported(fields)
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


def load_eagle3(
    config: Eagle3Config,
    model: Model,
    *,
    fp8_cache: bool = False,
    progress: Callable[[str], None] | None = None,
    kept: KeptWeights | None = None,
) -> Eagle3:
    """Load this rank's share of a draft model for `model`, on its device and in its dtype. Collective. Raises as
    `load_model` does, which also says what `kept` is."""
    from workers.weights.checkpoint import Checkpoint
    from workers.weights.kept import KeptSource
    from workers.weights.loading_progress import LoadingProgress
    from workers.weights.memory_check import check_memory
    from workers.weights.reader import CheckpointReader

    device, dtype = model.norm_E.device, model.norm_E.dtype
    with Checkpoint.open(config.folder) as checkpoint:
        _, dry_run = _counted(config, model, checkpoint, fp8_cache=fp8_cache)
        checkpoint.verify(dry_run.wanted, _IGNORED)
        target_id_D = _target_ids(config, model.config.vocab_size, checkpoint)
        mesh, stored = model.group.mesh, _stored(checkpoint)

        def build(source: WeightSource) -> Eagle3:
            return _build(config, source, model, checkpoint, target_id_D, fp8_cache=fp8_cache)

        shelf = None
        if kept is not None:
            shelf = kept.shelf("draft model", (config, checkpoint.identity(), dtype))
            if (held := shelf.adopt(lambda own: dry_run.census)) is not None:
                return build(KeptSource(held, mesh, dtype, device, stored, checkpoint.dtype_of))
        check_memory(dry_run.bytes, model.group, device)
        told = LoadingProgress(dry_run.bytes, progress)
        arena = None if shelf is None else shelf.arena(dry_run.census)
        with CheckpointReader(checkpoint, mesh, dtype, device, told, stored, arena=arena) as reader:
            reader.progress("draft model")
            drafter = build(reader)
            reader.settle()
        told.end()
        if shelf is not None and arena is not None:
            shelf.hand_over(arena)
        return drafter


def counted_eagle3(config: Eagle3Config, model: Model, *, fp8_cache: bool) -> tuple[Eagle3, DryRun]:
    """The draft model without memory, for a `model` that has none either, and the dry run that says what it wants. The
    files must be there."""
    from workers.weights.checkpoint import Checkpoint

    with Checkpoint.open(config.folder) as checkpoint:
        return _counted(config, model, checkpoint, fp8_cache=fp8_cache)


def _counted(config: Eagle3Config, model: Model, checkpoint: Checkpoint, *, fp8_cache: bool) -> tuple[Eagle3, DryRun]:
    from workers.weights.source import DryRun

    dry_run = DryRun(model.group.mesh, model.norm_E.dtype, _stored(checkpoint), checkpoint.dtype_of)
    return _build(config, dry_run, model, checkpoint, None, fp8_cache=fp8_cache), dry_run


def _stored(checkpoint: Checkpoint) -> Callable[[str], str]:
    """Return the function that maps a tensor's name to its name in these files."""
    layer = _LAYER if checkpoint.has_any(_LAYER) else _OTHER_LAYER
    return lambda name: name.replace(_LAYER, layer, 1)


def _build(
    config: Eagle3Config,
    source: WeightSource,
    model: Model,
    checkpoint: Checkpoint,
    target_id_D: torch.Tensor | None,
    *,
    fp8_cache: bool,
) -> Eagle3:
    from workers.drafters.attention import DraftAttention, DraftLatentAttention, GroupedAttention
    from workers.drafters.eagle3.drafter import Eagle3, Eagle3Sizes
    from workers.models.attention.latent import LatentAttention
    from workers.models.rope import rotation_table

    prefix, hidden = f"{_LAYER}self_attn.", model.config.hidden_size
    attention: DraftAttention
    if config.latent is None:
        roped = config.features
        attention = GroupedAttention(
            source, prefix, hidden=hidden, heads=config.heads, key_heads=config.key_heads, features=config.features
        )
    else:
        roped, invariant = config.latent.qk_rope_head_dim, model.paths.invariant
        own = LatentAttention(
            source, prefix, config.latent, invariant=invariant, fp8_cache=fp8_cache, inputs=2 * hidden
        )
        attention = DraftLatentAttention(own, model.group.sharing)
    sizes = Eagle3Sizes(
        intermediate=config.intermediate,
        draft_vocab=config.draft_vocab,
        eps=config.eps,
        aux_hidden_state_layers=config.aux_hidden_state_layers,
        norm_before_residual=config.norm_before_residual,
        aux_hidden_norms=config.aux_hidden_norms,
        norm_output=config.norm_output,
        own_embedding=checkpoint.has_any("embed_tokens."),
    )
    rotation_PO = rotation_table(config.rope, roped, model.max_positions, source.device)
    if target_id_D is not None:
        target_id_D = target_id_D.to(source.device)
    return Eagle3(source, model, sizes, attention, rotation_PO, target_id_D)


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
