"""Draft models as Mistral publishes them, for Mistral Small 4 and Mistral Large 3: EAGLE with layers of the model's
architecture, in Mistral's own layout (`params.json`, `consolidated*.safetensors`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from workers.drafters.draft_model import DraftModel
from workers.families.mistral import Mistral4
from workers.model_folder import PARAMS, config_values
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields
from workers.parallel.mesh import AxisName, Mesh

if TYPE_CHECKING:
    from workers.drafters.eagle import Eagle
    from workers.models.model import Model
    from workers.weights.checkpoint import Checkpoint
    from workers.weights.source import WeightSource

_FAMILY: Final = Mistral4()
_SAME: Final = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Sizes that are those of the model, in whose memory the layers run, with their names in a config.json."""
_SHARED: Final[dict[str, AxisName]] = {"intermediate_size": "experts", "moe_intermediate_size": "experts"}
"""Sizes that are the draft model's own, and that ranks divide among themselves, with the mesh axis of each."""


@dataclass(frozen=True)
class MistralEagle(DraftModel):
    """What such a folder says of its draft model."""

    folder: Path
    config: ModelConfig
    """Of its layers: as many as it has, dense or with experts."""

    @override
    def ignored(self) -> list[str]:
        return _FAMILY.ignored(self.config)

    @override
    def build(self, source: WeightSource, model: Model, checkpoint: Checkpoint, *, fp8_cache: bool) -> Eagle:
        from workers.drafters.eagle import Eagle

        invariant = model.paths.invariant
        layer = partial(_FAMILY.layer, source, self.config, invariant=invariant, fp8_cache=fp8_cache)
        return Eagle(source, model, self.config, layer)


def read_mistral_eagle(folder: Path, target: ModelConfig, mesh: Mesh) -> MistralEagle:
    """The params.json of the draft model in `folder`. `ConfigError` names what does not fit `target` or the ranks, or
    is not understood."""
    try:
        values = config_values(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / PARAMS} of the draft model: {error}") from None
    values.setdefault("vocab_size", target.vocab_size)
    try:
        config = _FAMILY.read(Fields(values))
    except ConfigError as error:
        raise ConfigError(f"the draft model in {folder} ({PARAMS}, by the names of a config.json): {error}") from None
    if found := _misfits(config, target, mesh):
        raise ConfigError("\n".join(f"the draft model in {folder} does not fit: {why}" for why in found))
    return MistralEagle(folder, config)


def _misfits(draft: ModelConfig, target: ModelConfig, mesh: Mesh) -> list[str]:
    """Why a draft model cannot draft, a line per cause."""
    found = []
    others = {
        "sparse attention": target.indexing is not None,
        "gates of attention's output": target.output_gate != "none",
        "several residual streams": target.streams is not None,
        "compressed attention": target.compression is not None,
    }
    for what in (what for what, there in others.items() if there):
        found.append(f"the model has {what}, and the draft model's layers have not")
    for name, called in _SAME.items():
        own, wanted = getattr(draft, name), getattr(target, name)
        if own != wanted:
            found.append(f"{called} = {own} of the draft model, but {wanted} of the model")
    if draft.query_scaling is not None and target.query_scaling is None:
        found.append("its queries are scaled by their position (llama_4_scaling), and the model's are not")
    for name, axis in _SHARED.items():
        count, ranks = getattr(draft, name), mesh.axis(axis).size
        if count % ranks:
            found.append(f"{name} = {count} of the draft model cannot be divided by {ranks} ranks (--tensor-parallel)")
    return found
