"""Log-probabilities of prompts' tokens: the logits of a chunk are computed a piece at a time.

The logits of a chunk of thousands of tokens would take gigabytes. So pieces of `at_once` tokens go through the output
head, in memory that a piece gives back before the step samples, and of each only the log-probability of the token that
follows, its rank and the most probable ids leave the device.

Shape legend: T tokens of the stage, P tokens of a piece, V vocabulary.
"""

from __future__ import annotations

import torch

from kernels.runtime.ahead import distinct
from workers.memory.pinned import on_device
from workers.protocol.plan import StepPlan
from workers.step.logprobs import Taken
from workers.step.parts import StepParts
from workers.step.stage import Stage

LEAST_AT_ONCE = 64
"""Fewer would read the output head once more for hardly any work."""


def at_once(slots: int) -> int:
    """Tokens of a piece: as many as a step may end for anyway, where that is enough."""
    return max(slots, LEAST_AT_ONCE)


def score(parts: StepParts, plan: StepPlan, stage: Stage) -> Taken | None:
    """Score all tokens that the plan's prefill rows ask for, some of which do: how probable the token after each is.
    The result is on rank 0, None elsewhere; all ranks take part. The target's pass has run in `stage`."""
    tokens, taken = plan.layout.score_tokens(plan.prefill), None
    if parts.sampling is not None:
        most = max(row.score_top for row in plan.prefill)
        taken = parts.sampling.scorer.room({}, len(tokens), most, ranks=True)
    piece = min(at_once(parts.state.slots), stage.tokens)
    for begin in distinct(range(0, len(tokens), piece)):
        part = tokens[begin : begin + piece]
        with stage.scratch.scope():
            # Always as many, for which kernels are compiled: the last one is repeated.
            token_P = on_device(part + part[-1:] * (piece - len(part)), torch.int64, parts.device)
            logits_PV = parts.model.logits(stage.target_hidden(token_P), stage.scratch)
            if taken is not None and parts.sampling is not None:
                rows = range(len(part))
                parts.sampling.scorer.fill(taken, begin, logits_PV, stage.next_T[token_P], rows)
    return taken
