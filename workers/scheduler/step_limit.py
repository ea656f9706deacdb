"""How long a step may take before it counts as hung: many times what steps took when the replica proved them.

A limit that is the same for all models has to be that of the slowest steps of the largest one. So a kernel that never
ends would be noticed after a minute, where a step takes milliseconds. Here the limit is a multiple of the longest step
of its kind that was measured, longer where contexts are: the self-test's are short.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from workers.protocol.report import StepTime

LEAST_S: Final = 3.0
"""No step is given up sooner, as long as a process may be silent (`heartbeat_timeout_s`): what holds up a whole process
for a moment, the system or the driver, is not the step's."""
TIMES: Final = 20.0
"""A step may take so many times what is expected of it. It may be one without its graph, or beside an engine that
starts on the same GPU."""
DEEP: Final = 16_384
"""Tokens of context that are taken to cost a token as much as all else does. For DeepSeek V3 it is some 20,000; with
fewer the limit is longer than it need be."""


class StepLimit:
    """Seconds that steps may take, by what was measured at the start."""

    def __init__(self, measured: Iterable[StepTime]) -> None:
        """`measured`: steps of decode rows alone, and with tokens of prompts, in any order."""
        self._decode_s = self._mixed_s = 0.0
        """Of the longest step of either kind; 0 where none was measured."""
        for time in measured:
            if time.prompt_tokens:
                self._mixed_s = max(self._mixed_s, time.seconds)
            else:
                self._decode_s = max(self._decode_s, time.seconds)

    def seconds(self, deepest: int, *, prompts: bool) -> float | None:
        """Return the limit of a step whose row with the longest context has `deepest` tokens; None where nothing was
        measured. `prompts`: whether it feeds tokens of prompts."""
        longest = max(self._decode_s, self._mixed_s) if prompts else self._decode_s
        if not longest or (prompts and not self._mixed_s):
            return None
        return max(LEAST_S, TIMES * longest * (1 + deepest / DEEP))
