"""Several residual streams in place of one: a part of a layer reads a weighted sum of them, and each stream adds the
part's output times a weight of its own. Both weights are sigmoids of a small product of all streams.

That is hyper-connections (Zhu et al., 2024) in the form of Hy4 (Tencent, 2026), without mixing of the streams among
each other, or in that of DeepSeek V4 (2026): there a nearly doubly stochastic matrix mixes them before a part's output
is added (manifold-constrained hyper-connections, 2026, sections 2.2 and 4).

Shape legend: T tokens, S streams, E features of each, F = S E, M gates (S of what is read, behind them S of what is
added, and S S of the mixing where there is any; those of a model's end are S alone), P parts of their sums at most, X
= M + 1 rounded up to a multiple of four.
"""

from __future__ import annotations

from torch import Tensor

from kernels.residual_streams.launch import launch_add_to_streams
from kernels.residual_streams.memory import FEWEST_LONG, FEWEST_TILED, StreamGates, StreamMemory
from kernels.residual_streams.reference import add_to_streams_reference

__all__ = [
    "FEWEST_LONG",
    "FEWEST_TILED",
    "StreamGates",
    "StreamMemory",
    "add_to_streams",
    "add_to_streams_reference",
    "launch_add_to_streams",
]


def add_to_streams(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    *,
    eps: float,
    invariant: bool = False,
    dependent: bool = False,
) -> None:
    """residual[s] += open[s] x, in place and rounded to its dtype, of streams that were mixed before where the memory
    has a matrix; then m = weight · flat(residual) / rms, and

    - read[s] = sigmoid(m[s] scale[0] + base[s]) + gates.eps
    - open[s] = magnitude sigmoid(m[S + s] scale[1] + base[S + s]) + gates.eps, where there are so many gates
    - mix = softmax of the rows of m[2S:] scale[2] + base[2S:], plus gates.eps, where the streams are mixed; then
      columns, and `mixing_steps` - 1 times rows and columns, are divided by (their sums + gates.eps)
    - out = rms_norm(sum over s of read[s] residual[s], rounded to the residual's dtype), and that sum itself is left in
      the memory, where it has room for it

    Without `gates` nothing but the first happens. All is computed in fp32. A token's bits depend on no other token, and
    not on its place among them. With `invariant` they are the same in any call. Without it they are the same in all
    calls of fewer than `FEWEST_TILED` tokens, in all of fewer than `FEWEST_LONG`, and in all others: on a GPU these
    have sums in different orders, where the streams are in bf16.

    `residual_TSE` is contiguous, rows of `x_TE` and `out_TE` may be strided; `out_TE` may be `x_TE`. All three and
    `weight_E` may have any floating dtype, on a GPU up to fp32. `dependent`: programmatic dependent launch, of fewer
    than `FEWEST_LONG` tokens.
    """
    if x_TE.is_cuda:
        into = x_TE, residual_TSE, memory, gates, weight_E, out_TE
        launch_add_to_streams(*into, eps, invariant=invariant, dependent=dependent)
    else:
        add_to_streams_reference(x_TE, residual_TSE, memory, gates, weight_E, out_TE, eps)
