"""The choice of a model's drafter by the settings of its replica."""

from __future__ import annotations

from workers.config import EngineConfig
from workers.drafters.ngram import Ngram
from workers.models.model import Model


def choose_drafter(model: Model, config: EngineConfig) -> int:
    """Give `model`, which has the draft layer of its checkpoint if it is to have one, the drafter of these settings.
    Returns the most tokens that a decode row feeds then: 1 where there is none. ValueError where there has to be
    one, and for a width that takes more drafts than it makes."""
    if config.most_width > 1 and config.drafter == "ngram":
        model.drafter = Ngram()
    if config.most_width > 1 and config.drafter == "mtp" and model.drafter is None:
        raise ValueError(
            f"drafter = mtp, but the files in {config.folder} have no draft layer: give --drafter ngram, or auto"
        )
    if model.drafter is None:
        return 1
    if model.drafter.estimates:
        model.drafter.least_confidence = config.least_draft_confidence
    if (most := model.drafter.most_drafts) is None or config.most_width <= most + 1:
        return config.most_width
    if config.width != "auto":
        raise ValueError(
            f"width = {config.width}, but the draft layers of {config.folder} draft {most} tokens at a time: give "
            f"--width {most + 1} or less, or auto"
        )
    return most + 1
