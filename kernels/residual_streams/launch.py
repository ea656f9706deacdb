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

from kernels.residual_streams.kernel import add_to_streams_kernel, read_streams_kernel
from kernels.residual_streams.memory import BLOCK, MIXED_BLOCK, StreamGates, StreamMemory
from kernels.residual_streams.tiles import add_to_many_streams_kernel, read_many_streams_kernel

FEWEST_TILED: Final = 64
"""Fewest tokens whose products with the gates' weights are those of tensor cores, in tiles of tokens."""
_MOST_EARLY: Final = 16
"""Most tokens whose programs ask for the weights of gates before they wait for the kernel before: of more, programs
that hold them so long leave no room for others."""
_TILE: Final = 64
"""Tokens of a tile."""
_TILE_BLOCK: Final = 32
"""Features of every stream that a tile has at a time."""
_TILE_BLOCKS: Final = 16
"""Such blocks of a program: its sums are a part, and the kernel behind adds up the parts of a token."""
_MIXED_TILE_BLOCKS: Final = 8
"""The same where streams are mixed."""
_TILE_REGISTERS: Final = 128
"""Most registers of a thread, so that two programs with tiles fit on a multiprocessor: one waits for memory while the
other computes."""
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
    def tiled(self) -> bool:
        """Whether tiles of tokens share the weights of gates."""
        many = len(self.x_TE) >= FEWEST_TILED and self.residual_TSE.dtype == torch.bfloat16
        return many and self.gates is not None and not self.invariant

    @property
    def parts(self) -> int:
        """Programs that add to a token's streams, and so parts of its sums."""
        mixed = self.memory.mix_TSS is not None
        features = MIXED_BLOCK if mixed else BLOCK
        if self.tiled:
            features = _TILE_BLOCK * (_MIXED_TILE_BLOCKS if mixed else _TILE_BLOCKS)
        return -(-self.residual_TSE.shape[2] // features)

    def check(self) -> None:
        """ValueError where tensors do not fit each other, or what kernels take for granted."""
        tokens, streams, features = self.residual_TSE.shape
        if self.x_TE.stride(1) != 1 or self.out_TE.stride(1) != 1 or not self.residual_TSE.is_contiguous():
            raise ValueError("features of tokens lie side by side, and the residual streams are contiguous")
        mixed, room = self.memory.mix_TSS is not None, self.memory.part_TPX
        made = 0 if self.gates is None else len(self.gates.base_M)
        steps = 0 if self.gates is None else self.gates.mixing_steps
        counts = ((2 + streams) * streams,) if steps else (0, streams, 2 * streams)
        parts = triton.cdiv(features, MIXED_BLOCK if mixed else BLOCK)
        if room.shape[:2] != (tokens, parts) or made not in counts or (steps and not mixed):
            raise ValueError(
                f"memory for {tuple(room.shape[:2])} parts and {made} gates do not fit {tokens} tokens of "
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
        tokens, constants = len(self.x_TE), {"X_STRIDE": self.x_TE.stride(0), "MIXED": mixed}
        if not self.tiled:
            add_to_streams_kernel[(tokens, self.parts)](
                *given,
                **self._constants(),
                **constants,
                EARLY=self.dependent and tokens <= _MOST_EARLY,
                BLOCK=MIXED_BLOCK if mixed else BLOCK,
                num_warps=4 if mixed or self.gates is None else 8,
            )
            return
        add_to_many_streams_kernel[(triton.cdiv(tokens, _TILE), self.parts)](
            *given,
            tokens,
            _MIXED_TILE_BLOCKS if mixed else _TILE_BLOCKS,
            **self._constants(fewest_lanes=16),
            **constants,
            TOKENS=_TILE,
            BLOCK=_TILE_BLOCK,
            num_warps=8,
            num_stages=1,
            maxnreg=_TILE_REGISTERS,
        )

    def read(self) -> None:
        """Read the streams."""
        gates, memory, tokens = self.gates, self.memory, len(self.x_TE)
        assert gates is not None
        out_TE, read_TE = self.out_TE, memory.read_TE
        made = self.residual_TSE, memory.open_TS, self._mix_TSS, gates.base_M, gates.scale_G, memory.part_TPX
        given = *made, self.weight_E, out_TE, out_TE if read_TE is None else read_TE
        numbers = self.eps, gates.eps, gates.norm_eps, gates.magnitude
        lanes, parts = triton.next_power_of_2(self.residual_TSE.shape[2]), self.parts
        constants = self._constants() | {
            "OUT_STRIDE": out_TE.stride(0),
            "PART_LANES": triton.next_power_of_2(parts),
            "STEPS": gates.mixing_steps,
            "KEEP": read_TE is not None,
            "BLOCK": lanes,
            # Not more: each warp of a program that makes one token's mixing matrix computes all of it.
            "num_warps": min(max(lanes // 1024, 1), 16),
        }
        if not self.tiled:
            read_streams_kernel[(tokens, 2 if gates.mixing_steps else 1)](*given, *numbers, **constants)
            return
        mixers = triton.cdiv(tokens, _MIXERS) if gates.mixing_steps else 0
        read_many_streams_kernel[(mixers + tokens,)](*given, tokens, *numbers, **constants, TOKENS=_MIXERS)

    @property
    def _mix_TSS(self) -> Tensor:
        """Where there are no mixing matrices nothing reads what stands for them."""
        return self.memory.open_TS if self.memory.mix_TSS is None else self.memory.mix_TSS

    def _constants(self, fewest_lanes: int = 1) -> dict[str, Any]:
        """Constants and options of every kernel."""
        made = 0 if self.gates is None else len(self.gates.base_M)
        return {
            "FEATURES": self.residual_TSE.shape[2],
            "STREAMS": self.residual_TSE.shape[1],
            "GATES": made,
            "LANES": max(triton.next_power_of_2(made), fewest_lanes),
            "PART": self.memory.part_TPX.stride(1),
            "PARTS": self.parts,
            "DEPENDENT": self.dependent,
            **({"launch_pdl": True} if self.dependent else {}),
        }


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
