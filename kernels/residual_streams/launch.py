"""Launches the kernels of residual streams. Allocates nothing and waits for nothing, so it may be captured into a CUDA
graph.

Shape legend: see `kernels.residual_streams`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor

from kernels.residual_streams.kernel import Reading, add_to_streams_kernel, read_streams_kernel
from kernels.residual_streams.memory import StreamGates, StreamMemory, StreamPath
from kernels.residual_streams.tiles import add_to_many_streams_kernel, read_many_streams_kernel

_MOST_EARLY: Final = 16
"""Most tokens whose programs ask for the weights of gates before they wait for the kernel before, where each token has
programs of its own: of more, programs that hold them so long leave no room for others."""
_TILE: Final = 64
"""Tokens of a tile."""
_TILE_REGISTERS: Final = 128
"""Most registers of a thread where there are many tokens, so that two programs fit on a multiprocessor: one waits for
memory while the other computes."""
_TOGETHER: Final = (2, 3, 4)
"""Numbers of streams of which long parts of sums take the products at once, which waits for tensor cores a third as
often. With four streams and 8,192 tokens a call takes 390 us on an H200, and took 437 (`bench/token_wise.py --only
add_to_streams --tokens 8192`)."""
_MIXERS: Final = 32
"""Tokens whose mixing matrices a program makes."""


@dataclass(frozen=True)
class StreamLaunches:
    """The launches of a call: `add`, and where there are gates `read` behind it."""

    x_TE: Tensor
    residual_TSE: Tensor
    memory: StreamMemory
    gates: StreamGates | None
    weight_E: Tensor
    out_TE: Tensor
    eps: float
    invariant: bool
    dependent: bool

    @property
    def path(self) -> StreamPath:
        """How tokens share programs, and sums are cut into parts."""
        tiled = self.gates is not None and not self.invariant and self.residual_TSE.dtype == torch.bfloat16
        mixed = self.memory.mix_TSS is not None
        return StreamPath.of(len(self.x_TE), mixed) if tiled else StreamPath.alone(mixed)

    @property
    def parts(self) -> int:
        """Programs that add to a token's streams, and so parts of its sums."""
        return -(-self.residual_TSE.shape[2] // self.path.features)

    def check(self) -> None:
        """ValueError where tensors do not fit each other, or what kernels take for granted."""
        tokens, streams, features = self.residual_TSE.shape
        if self.x_TE.stride(1) != 1 or self.out_TE.stride(1) != 1 or not self.residual_TSE.is_contiguous():
            raise ValueError("features of tokens lie side by side, and the residual streams are contiguous")
        mixed, room = self.memory.mix_TSS is not None, self.memory.part_TPX
        made = 0 if self.gates is None else len(self.gates.base_M)
        steps = 0 if self.gates is None else self.gates.mixing_steps
        counts = ((2 + streams) * streams,) if steps else (0, streams, 2 * streams)
        fits = len(room) == tokens and room.shape[1] >= self.parts and room.shape[2] > made and room.is_contiguous()
        if not fits or made not in counts or (steps and not mixed):
            raise ValueError(
                f"memory for {tuple(room.shape)} parts of sums and {made} gates do not fit {tokens} tokens of "
                f"{streams} streams of {features} features"
            )
        read_TE = self.memory.read_TE
        if read_TE is not None and not (read_TE.is_contiguous() and read_TE.shape == (tokens, features)):
            raise ValueError(f"the sums of {tokens} tokens do not fit memory of {tuple(read_TE.shape)}")

    def add(self) -> None:
        """Add to the streams, and leave parts of the sums by which they are read."""
        memory, mixed = self.memory, self.memory.mix_TSS is not None
        weight_MF = memory.part_TPX if self.gates is None else self.gates.weight_MF
        given = self.x_TE, self.residual_TSE, memory.open_TS, self._mix_TSS, weight_MF, memory.part_TPX
        tokens, path, constants = len(self.x_TE), self.path, {"X_STRIDE": self.x_TE.stride(0), "MIXED": mixed}
        if not path.tiled:
            add_to_streams_kernel[(tokens, self.parts)](
                *given,
                **self._constants(),
                **self._launched,
                **constants,
                EARLY=self.dependent and tokens <= _MOST_EARLY,
                BLOCK=path.block,
                num_warps=4 if mixed or self.gates is None else 8,
            )
            return
        add_to_many_streams_kernel[(triton.cdiv(tokens, _TILE), self.parts)](
            *given,
            tokens,
            path.blocks,
            **self._constants(fewest_lanes=16),
            **self._launched,
            **constants,
            STREAM_LANES=triton.next_power_of_2(self.residual_TSE.shape[1]),
            EARLY=path.blocks == 1,
            TOGETHER=path.many and self.residual_TSE.shape[1] in _TOGETHER,
            TOKENS=_TILE,
            BLOCK=path.block,
            num_warps=8,
            num_stages=1,
            maxnreg=_TILE_REGISTERS if path.many else None,
        )

    def read(self) -> None:
        """Read the streams."""
        gates, memory, tokens = self.gates, self.memory, len(self.x_TE)
        assert gates is not None
        out_TE, read_TE = self.out_TE, memory.read_TE
        made = self.residual_TSE, memory.open_TS, self._mix_TSS, gates.base_M, gates.scale_G, memory.part_TPX
        given = *made, self.weight_E, out_TE, out_TE if read_TE is None else read_TE
        numbers = self.eps, gates.eps, gates.norm_eps, gates.magnitude
        sizes = Reading(
            out_stride=out_TE.stride(0),
            **{name.lower(): value for name, value in self._constants().items()},
            part_lanes=triton.next_power_of_2(self.parts),
            steps=gates.mixing_steps,
            keep=read_TE is not None,
            block=triton.next_power_of_2(self.residual_TSE.shape[2]),
        )
        # Not more: each warp of a program that makes one token's mixing matrix computes all of it.
        constants = {"SIZES": sizes, "num_warps": min(max(sizes.block // 1024, 1), 16)}
        if not self.path.many:
            grid = tokens, 2 if gates.mixing_steps else 1
            read_streams_kernel[grid](*given, *numbers, **constants, **self._launched)
            return
        mixers = triton.cdiv(tokens, _MIXERS) if gates.mixing_steps else 0
        read_many_streams_kernel[(mixers + tokens,)](*given, tokens, *numbers, **constants, TOKENS=_MIXERS)

    @property
    def _mix_TSS(self) -> Tensor:
        """Where there are no mixing matrices nothing reads what stands for them."""
        return self.memory.open_TS if self.memory.mix_TSS is None else self.memory.mix_TSS

    def _constants(self, fewest_lanes: int = 1) -> dict[str, Any]:
        """Constants of every kernel."""
        made = 0 if self.gates is None else len(self.gates.base_M)
        return {
            "FEATURES": self.residual_TSE.shape[2],
            "STREAMS": self.residual_TSE.shape[1],
            "GATES": made,
            "LANES": max(triton.next_power_of_2(made), fewest_lanes),
            "PART": self.memory.part_TPX.stride(1),
            "PARTS": self.parts,
        }

    @property
    def _launched(self) -> dict[str, Any]:
        """Options of a launch that may be dependent: that of many tokens reads some of what others wrote through L1."""
        dependent = self.dependent and not self.path.many
        return {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}


def launch_add_to_streams(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
    *,
    invariant: bool = False,
    dependent: bool = False,
) -> None:
    """`add_to_streams` as two Triton kernels: one adds and takes parts of the sums, the other reads."""
    launches = StreamLaunches(x_TE, residual_TSE, memory, gates, weight_E, out_TE, eps, invariant, dependent)
    if not len(x_TE):
        return
    launches.check()
    launches.add()
    if gates is not None:
        launches.read()
