"""The choice of a model's drafter by the settings of its replica."""

from __future__ import annotations

from workers.config import EngineConfig
from workers.drafters.ngram import Ngram
from workers.models.model import Model


def choose_drafter(model: Model, config: EngineConfig) -> int:
    """Give `model`, which has the draft layer of its checkpoint if it is to have one, the drafter of these settings.
    Returns the most tokens that a decode row feeds then: 1 where there is none. ValueError where there has to be
    one."""
    if config.most_width > 1 and config.drafter == "ngram":
        model.drafter = Ngram()
    if config.most_width > 1 and config.drafter == "mtp" and model.drafter is None:
        raise ValueError(
            f"drafter = mtp, but the files in {config.folder} have no draft layer: give --drafter ngram, or auto"
        )
    return 1 if model.drafter is None else config.most_width
