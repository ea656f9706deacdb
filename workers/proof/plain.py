"""The logits of the plain forward pass, from the state that a step is proven on.

Shape legend: R rows, W width, T = R * W tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.models import deepseek, deepseek_v4
from workers.models.choices import Taken
from workers.models.deepseek_parts import PagedTokens
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens
from workers.models.model import Model
from workers.proof.step_fixture import StepFixture


def plain_logits(model: Model, token_RW: Tensor, fixture: StepFixture, taken: Taken) -> Tensor:
    """Logits after each of the tokens that the fixture's rows feed, fp32 [T, V]. Caches stay as they are. `taken`: has
    the choices that the pass takes, where it takes any. All ranks together."""
    start = [row.start for row in fixture.rows]
    cache, page_RP = fixture.whole_cache()
    rows, width = token_RW.shape
    if isinstance(model, CompressedModel):
        at = CompressedTokens(tuple(start), (width,) * rows, tuple(range(rows)), page_RP)
        return deepseek_v4.forward(model, token_RW.flatten(), at, model.caches_of(cache), taken)
    row_T = torch.arange(rows).repeat_interleave(width)
    position_T = (torch.tensor(start).unsqueeze(1) + torch.arange(width)).flatten()
    return deepseek.forward(model, token_RW.flatten(), PagedTokens(row_T, position_T, page_RP), cache, taken)
