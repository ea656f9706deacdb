"""The host's hand on the slots' device state: newcomers and page grants of a plan."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import torch

from kernels.decode_state import SlotTensors, cache_slots
from kernels.page import NULL_PAGE, WHOLE, Shards
from workers.memory.pinned import on_device
from workers.protocol.plan import Admission, PageGrant
from workers.protocol.request import TOKEN_BYTES


class SlotState:
    """Device state of every slot, changed by plans here and by the steps themselves through `kernels.decode_state`."""

    def __init__(
        self,
        slots: int,
        drafts: int,
        pages_per_row: int,
        device: torch.device,
        *,
        tokens: bool = False,
        shards: Shards = WHOLE,
    ) -> None:
        """`tokens`: whether the tokens of every row are kept, for a drafter that reads them. `shards`: this rank's
        share of the pages, where it has not all of them."""
        self.slots, self.shards = slots, shards
        # Of slots whose tables nobody has filled by grants, any number.
        self._granted = [pages_per_row] * slots
        self.tensors = SlotTensors.allocate(slots, drafts, pages_per_row, device, tokens=tokens)

    def _live(self) -> list[torch.Tensor]:
        return [getattr(self.tensors, field.name) for field in fields(self.tensors)]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the device that `kept` takes."""
        return sum(tensor.nbytes for tensor in self._live())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all that is known of the slots back at the end of the block."""
        live = self._live()
        copies, granted = [tensor.clone() for tensor in live], [*self._granted]
        try:
            yield
        finally:
            for tensor, copy in zip(live, copies, strict=True):
                tensor.copy_(copy)
            self._granted = granted

    def clear(self) -> None:
        """Forget everything that is known of the slots, their page tables first of all."""
        for tensor in self._live():
            tensor.zero_()
        self._granted = [self.pages_per_row] * self.slots

    @property
    def pages_per_row(self) -> int:
        """Pages a row may hold."""
        return self.tensors.page_SP.shape[1]

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of every row are kept."""
        return self.tensors.token_SX.shape[1] > 0

    def most_granted(self, slots: Iterable[int]) -> int:
        """The most pages that any of these slots was granted: no row has entries beyond its own."""
        return max(self._granted[slot] for slot in slots)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Zero-fill the page-table rows of newly taken slots, so that no former tenant's page can be reached; and take
        in the tokens that newcomers have, where tokens are kept."""
        if admissions:
            page_SP = self.tensors.page_SP
            slot_A = on_device([admission.slot for admission in admissions], torch.int64, page_SP.device)
            page_SP.index_fill_(0, slot_A, NULL_PAGE)
        for admission in admissions:
            self._granted[admission.slot] = 0
            if admission.tokens and self.keeps_tokens:
                token_X = unpacked(admission.tokens)
                if page_SP.is_cuda:
                    token_X = token_X.pin_memory()
                self.tensors.token_SX[admission.slot, : len(token_X)].copy_(token_X, non_blocking=True)

    def grant(self, grants: Sequence[PageGrant]) -> None:
        """Append granted pages to the page tables."""
        for grant in grants:
            self._granted[grant.slot] = grant.first + len(grant.pages)
        slots = [grant.slot for grant in grants for _ in grant.pages]
        indices = [grant.first + offset for grant in grants for offset in range(len(grant.pages))]
        pages = [page for grant in grants for page in grant.pages]
        page_SP = self.tensors.page_SP
        # One copy for all three; the values are ids, exact in int64.
        grant_3G = on_device([slots, indices, pages], torch.int64, page_SP.device)
        page_SP[grant_3G[0], grant_3G[1]] = grant_3G[2].to(torch.int32)

    def cache_slots(self, slot_T: torch.Tensor, position_T: torch.Tensor, shards: Shards | None = None) -> torch.Tensor:
        """Flat cache index [T] of each (slot, position): page * 64 + offset; in the null page where none is granted, or
        where the page is not this rank's. `shards`: this rank's share in some layers, where that is another one."""
        return cache_slots(self.tensors.page_SP, slot_T, position_T, shards or self.shards)


def unpacked(packed: bytes) -> torch.Tensor:
    """Token ids as `workers.protocol.request.pack_tokens` packs them, int32 on the host; ids from 2^31 on come out
    negative."""
    ids = array("i", packed)
    assert ids.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    return torch.frombuffer(ids, dtype=torch.int32)
