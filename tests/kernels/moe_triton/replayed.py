"""Experts from a graph that was captured for other tokens."""

from __future__ import annotations

from captured import capture, check_replays
from experts_case import Experts

from kernels.moe.schedule import ExpertTiling


def check_replayed(case: Experts, other: Experts, tiling: ExpertTiling, dependent: bool = False) -> None:
    """Capture a call of `case`, and replay it, many times and on poisoned memory, on the tokens of `other`, whose
    weights are the same."""
    workspace = case.workspace(tiling)
    graph = capture(case.call(tiling, workspace, dependent).run)
    case.inputs = other.inputs

    def refill() -> None:
        case.refill()
        case.poison(workspace, tiling)

    check_replays(graph, refill, [case.tensors["out"]])
    case.check()
