"""The kinds of draft models, by what lies in their folders."""

from __future__ import annotations

from workers.config import EngineConfig
from workers.drafters.draft_model import DraftModel
from workers.drafters.eagle3.checkpoint import read_eagle3
from workers.families.mistral_eagle import read_mistral_eagle
from workers.model_folder import CONFIG
from workers.models.config import ConfigError, ModelConfig
from workers.parallel.mesh import Mesh


def read_draft_model(config: EngineConfig, target: ModelConfig, mesh: Mesh) -> DraftModel | None:
    """The draft model of these settings, which says how it is built; None where no draft model is to draft.
    `ConfigError` names what does not fit `target`, the ranks or the settings, or is not understood.
    FileNotFoundError where its folder is none."""
    if (folder := config.draft_folder) is None:
        return None
    kind = "eagle3" if (folder / CONFIG).is_file() else "eagle"
    if config.drafter not in ("auto", kind):
        raise ConfigError(
            f"drafter = {config.drafter} (--drafter), but the draft model in {folder} is of another kind: give "
            f"--drafter {kind}, or auto"
        )
    if kind == "eagle":
        return read_mistral_eagle(folder, target, mesh)
    return read_eagle3(folder, target, mesh, host_memory=config.host_cache_bytes > 0)
