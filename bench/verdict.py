"""Verdict of a comparison of kernels: which results are wrong, and which of the right ones came first."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ERROR = 2**-7
"""Largest error, as a share of a vector's norm. The few roundings to bfloat16 on the way to a result add about 2**-10
each."""


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest error of a vector (last dimension), in norms of the wanted one; NaN when anything is not a number."""
    found, wanted = found.float(), wanted.float()
    norm = torch.linalg.vector_norm(wanted, dim=-1).clamp_min(1e-30)
    return float((torch.linalg.vector_norm(found - wanted, dim=-1) / norm).max())


def verdict(case: str, results: dict[str, tuple[float, float]]) -> str:
    """Return one line for what was tried in one case: name -> (time, `error`)."""
    right = {name: time for name, (time, error) in results.items() if error <= MOST_ERROR}
    parts = [f"WRONG: {name} (error {results[name][1]:.1e})" for name in results if name not in right]
    if right:
        best, *others = sorted(right, key=lambda name: right[name])
        parts.append(f"fastest: {best}")
        parts += [f"{name} takes {right[name] / right[best]:.2f}x its time" for name in others]
    return f"-> {case}: " + "; ".join(parts)
