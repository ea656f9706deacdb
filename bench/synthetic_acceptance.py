"""Drafts that are accepted with a probability that a benchmark chooses. Random weights accept no draft, and real ones
as many as they like.

A file holds the probability, as a float of 4 bytes; below 0 nothing is changed. Processes of replicas read it that
have `bench/replica_hooks` on their PYTHONPATH and the file's name in their environment. In them, before the drafts that
are accepted are counted, the target's token at every place becomes the draft there, or another token, as a number drawn
for the place says. So a draft is accepted with that probability where those before it do. It can be changed while
replicas run, graphs included: a kernel inside them reads it from the host's memory.

The drafts that steps make become random tokens meanwhile. A drafter's own would be accepted as often, and then the text
would repeat itself: the wider the steps, the fewer experts of a mixture would such text wake.

Shape legend: D decode rows, W width, X drafts that are verified; R drafted rows, S slots, K most drafts of a slot.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OFF = -1.0
PERIOD_S = 0.02
"""Seconds between two looks at the file."""


def write(file: Path, probability: float) -> None:
    """Set the probability with which drafts are accepted from now on; with `OFF` acceptance is as usual."""
    file.write_bytes(struct.pack("<f", probability))


@triton.jit
def _agree(
    target, draft, probability, count, rows, vocab, target_stride, draft_stride,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    row, place = i // DRAFTS, i % DRAFTS
    share = tl.load(probability, volatile=True)
    drawn = tl.load(count)
    tl.store(count, drawn + 1)
    inside = row < tl.where(share >= 0, rows, 0)
    drafted = tl.load(draft + row * draft_stride + place, mask=inside, other=-1)
    sampled = tl.load(target + row * target_stride + place, mask=inside, other=-1)
    valid = inside & (drafted >= 0) & (drafted < vocab)
    other = tl.where(sampled == drafted, (drafted + 1) % vocab, sampled)
    chosen = tl.where(tl.rand(drawn, i) < share, drafted, other)
    tl.store(target + row * target_stride + place, chosen, mask=valid)


@triton.jit(do_not_specialize=["drafts", "room", "vocab"], do_not_specialize_on_alignment=["slots"])
def _redraw(length, slots, draft, probability, drafts, room, vocab, LANES: tl.constexpr):
    """One program per row. Every rank draws the same, as it does so from a row's slot and length."""
    place = tl.arange(0, LANES)
    slot = tl.load(slots + tl.program_id(0))
    share = tl.load(probability, volatile=True)
    live = (slot >= 0) & (share >= 0)
    seed = tl.load(length + slot, mask=live, other=0)
    token = (tl.rand(seed, slot.to(tl.int32) * LANES + place) * vocab).to(tl.int64)
    tl.store(draft + slot * room + place, tl.minimum(token, vocab - 1), mask=live & (place < drafts))


class Agreement:
    """Agreement of targets with drafts as the file has it, for the steps of this process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._probability, self._count = torch.full((1,), OFF), torch.zeros(1, dtype=torch.int64)
        self._following = False

    @staticmethod
    @cache
    def of(file: Path) -> Agreement:
        """Return the one of this process."""
        return Agreement(file)

    def _begin(self, device: torch.device) -> None:
        """Begin to follow the file, at the first step: a rank has chosen its device by then."""
        self._following = True
        with torch.inference_mode(False):  # the thread writes
            if device.type == "cuda":
                self._probability = self._probability.pin_memory()
            self._count = self._count.to(device)
        threading.Thread(target=self._follow, name="synthetic acceptance", daemon=True).start()

    def _follow(self) -> None:
        while True:
            content = self._file.read_bytes() if self._file.exists() else b""
            if len(content) == 4:
                self._probability[0] = struct.unpack("<f", content)[0]
            time.sleep(PERIOD_S)

    def before(self, plain: Callable[..., None]) -> Callable[..., None]:
        """`kernels.decode_state.accept_drafts` of targets that agree with drafts as often as the file says."""

        def accept(target_DW: Tensor, draft_DX: Tensor, *args: Any, **more: Any) -> None:
            if draft_DX.numel():
                self.agree(target_DW, draft_DX, args[1])
            plain(target_DW, draft_DX, *args, **more)

        return accept

    def behind(self, plain: Callable[..., None]) -> Callable[..., None]:
        """`StepParts.draft` of drafts that are random tokens, whoever makes them, while the file has a probability."""

        def draft(
            parts: Any, hidden_RE: Tensor | None, slot_R: Tensor, position_R: Tensor, length_R: Tensor, page_RP: Tensor,
            drafts: int, *more: Any, **named: Any,
        ) -> None:  # fmt: skip
            plain(parts, hidden_RE, slot_R, position_R, length_R, page_RP, drafts, *more, **named)
            if drafts:
                state = parts.state.tensors
                self.redraw(state.length_S, slot_R, state.draft_SK, drafts, parts.model.config.vocab_size)

        return draft

    def redraw(self, length_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, vocab: int) -> None:
        """Overwrite the first `drafts` drafts of the rows' slots, all int64; a slot of -1 has none."""
        if not self._following:
            self._begin(draft_SK.device)
        if draft_SK.is_cuda:
            self.launch_redraw(length_S, slot_R, draft_SK, drafts, vocab)
        else:
            self.reference_redraw(length_S, slot_R, draft_SK, drafts, vocab)

    def launch_redraw(self, length_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, vocab: int) -> None:
        """`redraw`, by the kernel."""
        room = draft_SK.shape[1]
        _redraw[(slot_R.shape[0],)](
            length_S,
            slot_R,
            draft_SK,
            self._probability,
            drafts,
            room,
            vocab,
            LANES=triton.next_power_of_2(room),
            num_warps=1,
        )

    def reference_redraw(self, length_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int, vocab: int) -> None:
        """`redraw`, in plain torch."""
        if self._probability.item() < 0:
            return
        generator = torch.Generator()
        for slot in slot_R[slot_R >= 0].tolist():
            generator.manual_seed(int(length_S[slot]) * draft_SK.shape[0] + slot)
            draft_SK[slot, :drafts] = torch.randint(0, vocab, (drafts,), generator=generator)

    def agree(self, target_DW: Tensor, draft_DX: Tensor, vocab: int) -> None:
        """Overwrite targets: int64 [D, W] and [D, W - 1], rows contiguous."""
        if not self._following:
            self._begin(target_DW.device)
        if target_DW.is_cuda:
            self.launch(target_DW, draft_DX, vocab)
        else:
            self.reference(target_DW, draft_DX, vocab)

    def launch(self, target_DW: Tensor, draft_DX: Tensor, vocab: int) -> None:
        """`agree`, by the kernel."""
        rows, drafts = draft_DX.shape
        _agree[(1,)](
            target_DW,
            draft_DX,
            self._probability,
            self._count,
            rows,
            vocab,
            target_DW.stride(0),
            draft_DX.stride(0),
            DRAFTS=drafts,
            BLOCK=triton.next_power_of_2(rows * drafts),
            num_warps=1,  # the count is read before it is stored
        )

    def reference(self, target_DW: Tensor, draft_DX: Tensor, vocab: int) -> None:
        """`agree`, in plain torch."""
        probability = self._probability.item()
        if probability < 0:
            return
        target_DX = target_DW[:, : draft_DX.shape[1]]
        other_DX = torch.where(target_DX == draft_DX, (draft_DX + 1) % vocab, target_DX)
        chosen_DX = torch.where(torch.rand(draft_DX.shape) < probability, draft_DX, other_DX)
        valid_DX = (draft_DX >= 0) & (draft_DX < vocab)
        target_DX.copy_(torch.where(valid_DX, chosen_DX, target_DX))
