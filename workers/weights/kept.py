"""Weights that stay: a rank hands the memory of its weights to a weight keeper (`workers.memory.keeper_process`), and
the rank that takes its place maps that memory instead of loading.

What is kept has a fingerprint of all that decides its bytes, and a checksum, which is computed again before it is used.
Where anything differs, on any rank, all of them load anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

import kernels
from workers.memory.keeper import KeeperClient
from workers.memory.keeper_process import Message
from workers.memory.weight_memory import NoSharedMemory, WeightMemory
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.arena import Arena, Item, memory_of, new_memory, room
from workers.weights.checksum import checksum
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.wanted import Shape
from workers.weights.weight import Weight

_DAMAGED: Final = "their checksum is not that of the loaded ones"


def device_identity(device: torch.device) -> str:
    """What a device is called that is there today and tomorrow, however many others are visible."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class KeptWeights:
    """What the weight keeper of this rank's node has for it, and is given."""

    def __init__(
        self,
        keeper: Path | KeeperClient,
        group: Group,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        *,
        required: bool = False,
    ) -> None:
        """`keeper`: see `WeightKeeper.path`, or who talks to it. `progress` gets a line of what was adopted, refused or
        handed over. `required`: nothing may be loaded, as an engine serves with the weights that are kept, and they are
        not to be there twice."""
        self.client = keeper if isinstance(keeper, KeeperClient) else KeeperClient(keeper)
        self.required = required
        self.group, self.device = group, device
        self.tell = progress or (lambda line: None)
        self.fingerprints: list[str] = []
        """Those of all weights that were asked for so far."""
        self.shareable = True
        """Whether all weights so far are in memory that can be mapped by others."""
        self.damaged = False
        """Whether any that were kept are not as they were handed over."""

    def shelf(self, name: str, identity: Sequence[object]) -> Shelf:
        """The place of some weights, whose bytes are decided by what `identity` says of them, beside rank, device and
        versions."""
        world = self.group.mesh.world
        versions = kernels.__version__, torch.__version__
        parts = *versions, world.rank, world.size, device_identity(self.device), *identity
        fingerprint = blake2b("\n".join(map(repr, parts)).encode(), digest_size=16).hexdigest()
        self.fingerprints.append(fingerprint)
        return Shelf(self, f"rank {world.rank}, {name}", fingerprint)


@dataclass(frozen=True)
class Held:
    """Weights that are mapped, read-only."""

    arena: Arena
    own: frozenset[str]
    """See `WeightSource`."""


class Shelf:
    """The place of some weights of one rank at its weight keeper."""

    def __init__(self, weights: KeptWeights, slot: str, fingerprint: str) -> None:
        self._weights, self._client = weights, weights.client
        self._slot, self._fingerprint = slot, fingerprint

    def adopt(self, census_of: Callable[[frozenset[str]], Sequence[Item]]) -> Held | None:
        """What is kept here, mapped and verified. None where it is not as it was handed over, or is not there, here or
        on any other rank: then nothing is kept here any more. Collective. `census_of`: the tensors that the model will
        ask for, where these of its matrices are its `own`, see `WeightSource`."""
        begin = time.perf_counter()
        weights, memory, problem = self._weights, None, ""
        held: Held | None = None
        try:
            found = self._client.ask(self._slot, self._fingerprint, let_go=not weights.required)
            if found is not None:
                what, descriptors = found
                memory = memory_of(descriptors, what["size"], weights.device)
                own = frozenset(what["own"])
                problem = _problem(what, memory, census_of(own))
                weights.damaged |= problem == _DAMAGED
                held = Held(Arena(memory, _census(what)), own)
        except (OSError, RuntimeError) as error:  # whatever is wrong with it: the others wait for this rank's word
            problem, held = str(error), None
        good = torch.tensor([held is not None and not problem], dtype=torch.int64, device=weights.device)
        if bool(weights.group.minimum(good).item()):
            assert held is not None
            held.arena.memory.close_descriptors()
            size, seconds = held.arena.memory.size / 2**30, time.perf_counter() - begin
            weights.tell(f"{size:.2f} GiB of weights were kept: mapped and verified in {seconds:.2f} s")
            return held
        if weights.required:
            raise RuntimeError(f"the weights that serve cannot be used: {problem or 'they are not kept on every rank'}")
        if problem:
            weights.tell(f"kept weights are not used, all are loaded anew: {problem}")
        elif held is not None:
            weights.tell("kept weights are not used, all are loaded anew: another rank has none")
        if memory is not None:
            try:
                memory.unmap()
            except NoSharedMemory as error:
                weights.tell(f"kept weights stay mapped: {error}")
            self._forget()
        return None

    def arena(self, census: Sequence[Item]) -> Arena | None:
        """Memory to load into, which can be handed over; None, which is told, where it cannot be had."""
        try:
            return Arena(new_memory(room(census), self._weights.device), census)
        except NoSharedMemory as error:
            self._weights.tell(f"weights will not be kept for a restart: {error}")
            self._weights.shareable = False
            return None

    def hand_over(self, arena: Arena, own: frozenset[str] = frozenset()) -> None:
        """Hand in what was loaded. It is read-only from here on."""
        memory = arena.memory
        try:
            memory.seal()
        except (OSError, NoSharedMemory) as error:
            self._weights.tell(f"weights will not be kept for a restart: they cannot be made read-only: {error}")
            memory.close_descriptors()
            return
        what = {
            "fingerprint": self._fingerprint,
            "size": memory.size,
            "own": sorted(own),
            "checksum": checksum(memory.at(0, memory.size)),
            "census": arena.census,
        }
        try:
            self._client.keep(self._slot, what, memory.descriptors())
        except OSError as error:
            self._weights.tell(f"weights will not be kept for a restart: {error}")
        memory.close_descriptors()

    def _forget(self) -> None:
        try:
            self._client.forget(self._slot)
        except OSError as error:
            self._weights.tell(f"the weight keeper does not answer: {error}")


def _census(what: Message) -> list[Item]:
    return [Item(tuple(shape), dtype) for shape, dtype in what["census"]]


def _problem(what: dict[str, Any], memory: WeightMemory, wanted: Sequence[Item]) -> str:
    """Why kept weights cannot be used; empty if they can."""
    if _census(what) != list(wanted):
        return "the model wants other tensors"
    if checksum(memory.at(0, memory.size)) != what["checksum"]:
        return _DAMAGED
    return ""


class KeptSource(WeightSource):
    """Hands out weights that are in place: nothing is read, and nothing written."""

    def __init__(
        self,
        held: Held,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        stored: Callable[[str], str] = str,
        dtype_of: Callable[[str], str | None] | None = None,
        invariant: bool = False,
    ) -> None:
        """`held`: loaded with the same further arguments, see `WeightSource`."""
        super().__init__(mesh, dtype, device, stored, dtype_of, invariant, held.own, held.arena)

    @override
    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As it was filled."""
        return self.empty(*shape, dtype=dtype)

    @override
    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """It was."""

    @override
    def fill(self, into: Weight, part: Part) -> None:
        """It was, and its rows are in order."""

    @override
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """It was."""

    @override
    def progress(self, text: str) -> None:
        """Nothing takes time."""
